"""Take some rows and columns of a packed weight, for tensor parallelism: exactly what decoding and slicing would give.

A format file may have

    cut(tensors, params, shape, rows, columns) -> (Params, stored tensors)

rows and columns are ranges of a weight [out, in], of step 1 and not empty. What is returned decodes to just these
weights, to the bit. It may have other parameters than the whole. ValueError says why a cut is not possible: what is
stored may be shared by weights on both sides of it.

Around the matrix may lie transforms, which can be cut along a side where they are diagonal: all others need every
input, or every output. Quantized inputs whose scale is that of the whole token cannot be cut along the inputs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from compress import formats
from compress.formats import lowrank, transforms
from compress.types import IN_SCALE, PackedWeight


def cut(weight: PackedWeight, rows: range, columns: range) -> PackedWeight:
    """Return some rows and columns of a weight; ValueError with the reason where that is not possible."""
    stored, shape = weight.stored, weight.shape
    if (len(rows), len(columns)) == shape:
        return weight
    format: Any = formats.get(stored.format)
    if not hasattr(format, "cut"):
        raise ValueError(f"format {stored.format} cannot be cut")
    if len(columns) < shape[1] and stored.activations is not None and stored.activations.scale == "token":
        raise ValueError("inputs are quantized with the scale of a whole token")
    matrix = {name: weight.tensors[name] for name in format.specs(stored.params, shape)}
    kept = _transforms(weight, "out", stored.ops.output, rows, shape[0])
    kept |= _transforms(weight, "in", stored.ops.input, columns, shape[1])
    params, tensors = format.cut(matrix, stored.params, shape, rows, columns)
    part = stored.lowrank
    if part is not None:
        part, factors = lowrank.cut_part(weight.tensors, part, shape, rows, columns)
        kept |= factors
    if stored.has_in_scale:
        kept[IN_SCALE] = weight.tensors[IN_SCALE]
    chosen = dataclasses.replace(stored, params=params, lowrank=part)
    size = (len(rows), len(columns))
    kept = {name: _own({**tensors, **kept}[name]) for name in formats.specs(chosen, size)}  # ValueError as `specs`
    return PackedWeight(chosen, kept, size)


def _own(tensor: Tensor) -> Tensor:
    """Return a tensor that does not keep a larger one in memory."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _transforms(weight: PackedWeight, side: str, names: tuple[str, ...], part: range, size: int) -> dict[str, Tensor]:
    """Return the stored tensors of the transforms `in` or `out` of a matrix, for the channels `part` of `size`."""
    stored = {f"{side}_{name}": weight.tensors.get(f"{side}_{name}") for name in names}
    if len(part) == size:
        return {key: tensor for key, tensor in stored.items() if tensor is not None}
    return {key: transforms.cut(key.removeprefix(f"{side}_"), tensor, part) for key, tensor in stored.items()}
