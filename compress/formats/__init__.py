"""Store and decode codes: one file a format, looked up by its file name.

A format file has
- `Params`: a frozen dataclass, the static integers and names that config.json stores;
- `specs(params, shape) -> {tensor name: (shape, dtype)}`: what is stored for a weight [out_features, in_features];
  nothing at all for a weight of zeros;
- `decode(tensors, params, shape, dtype) -> Tensor [out_features, in_features]`;
- `pack(...)`: the encoder, called by the methods that write the format, beside its decoder;
- `check(tensors, params, shape)`, only where a stored integer selects something and can say more than there is, such as
  an order of columns or a number of bits: ValueError, which begins with the tensor's name. Where every pattern of bits
  decodes to a weight, there is nothing to check;
- `decode_rows(tensors, params, shape, rows, dtype) -> Tensor [n, in_features]` and, but for estimated parameters,
  `join_rows(parts, params) -> tensors`, only where rows lie apart: a table of embeddings needs them.
  `has_rows(params) -> bool` beside them says for which parameters they do, if not for all;
- `ESTIMATED = True`, only where parameters count what a weight takes, so that those of a plan, and its bytes, are what
  is usual;
- `is_unpacked(params) -> bool`, only where some parameters are those of storage alone: a model all of whose packed
  weights are stored so is decoded when it is loaded;
- `ROW_FACTORS`, names of stored tensors, only where the weight is a product with them: of one number, or of one for
  each row, and one or more behind the last;
- `fixed_tensors(params) -> names` of stored tensors that training leaves as they are, only where there are any;
- `levels(params) -> numbers` and `at_level(params, level) -> (format, Params)`, only where some of the stored tensors
  are a cheaper version of the weight (formats/levels.py); `whole(params) -> (format, Params) | None` beside them, only
  where some of the stored tensors are the whole weight;
- `cut(tensors, params, shape, rows, columns) -> (Params, tensors)`, for tensor parallelism: exactly what decoding and
  slicing would give. rows and columns are ranges of a weight [out, in], of step 1 and not empty. What is returned may
  have other parameters than the whole. ValueError says why a cut is not possible: what is stored may be shared by
  weights on both sides of it.

Transforms around the stored matrix (compress/formats/transforms.py) and a low-rank part beside it (formats/lowrank.py)
are no business of a format: the functions here add them to what `Stored` (compress/types) says.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from compress import plugins
from compress.errors import CheckpointError, RecipeError, shown
from compress.formats import lowrank, transforms
from compress.numerics import checks
from compress.types import IN_SCALE, IN_THRESHOLD, Activations, PackedWeight, Stored

Shape = tuple[int, int]
Spec = tuple[tuple[int, ...], torch.dtype]  # of a stored tensor


class Format(Protocol):
    """The contract of a format file."""

    Params: type

    def specs(self, params: Any, shape: Shape) -> dict[str, Spec]: ...

    def decode(self, tensors: Mapping[str, Tensor], params: Any, shape: Shape, dtype: torch.dtype) -> Tensor: ...


def get(name: str) -> Format:
    """Return the format's module; CheckpointError for an unknown name, usually of a newer checkpoint."""
    try:
        return cast(Format, plugins.load("formats", plugins.current("formats", name)))
    except RecipeError as error:
        raise CheckpointError(
            f"format {shown(name)} is unknown to this version of compress; upgrade compress"
        ) from error


def specs(stored: Stored, shape: Shape) -> dict[str, Spec]:
    """Return all tensors stored for a weight [out, in]: of the format, transforms, activations, low rank.

    Raises ValueError for a shape that a transform or the low-rank part cannot have.
    """
    return {
        **get(stored.format).specs(stored.params, shape),
        **transforms.specs(stored.ops, shape),
        **({IN_SCALE: ((1,), torch.float32)} if stored.has_in_scale else {}),
        **(lowrank.part_specs(stored.lowrank, shape) if stored.lowrank is not None else {}),
        **_threshold_specs(stored, shape),
    }


def _threshold_specs(stored: Stored, shape: Shape) -> dict[str, Spec]:
    if stored.sparsity is None:
        return {}
    if stored.has_rest_part and stored.lowrank is None:
        raise ValueError("a low-rank part for inputs that are not read is missing")
    return {IN_THRESHOLD: ((stored.sparsity.thresholds(shape[1]),), torch.float32)}


def fixed_tensors(stored: Stored) -> tuple[str, ...]:
    """Return the names of stored tensors that training leaves as they are, beside codes."""
    own = getattr(get(stored.format), "fixed_tensors", lambda _: ())
    scale = (IN_SCALE,) if stored.has_in_scale else ()
    return (*own(stored.params), *scale, *((IN_THRESHOLD,) if stored.sparsity is not None else ()))


def check(weight: PackedWeight, where: str) -> None:
    """Check the tensors of a weight that come from a file; nothing may compute with them before.

    Names, shapes and types must be those of `specs`, floating numbers finite, a static scale of activations above 0,
    and what selects something within what there is (`check` of the format). Values on meta are not looked at. Raises
    CheckpointError, which begins with `where`, the weight's name.
    """
    try:
        expected = specs(weight.stored, weight.shape)
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}; download or write the checkpoint again") from error
    try:
        checks.check_specs(weight.tensors, expected)
        if any(tensor.is_meta for tensor in weight.tensors.values()):
            return
        for name, tensor in weight.tensors.items():
            if tensor.is_floating_point():
                checks.finite(name, tensor)
        if weight.stored.has_in_scale:
            checks.positive(IN_SCALE, weight.tensors[IN_SCALE])
        if weight.stored.sparsity is not None and (weight.tensors[IN_THRESHOLD] < 0).any():
            raise ValueError(f"{IN_THRESHOLD} has a negative number")
        check_values = getattr(get(weight.format), "check", None)
        if check_values is not None:
            check_values(weight.tensors, weight.params, weight.shape)
    except ValueError as error:
        raise CheckpointError(f"{where}.{error}; download or write the checkpoint again") from error


def nbytes(stored: Stored, shape: Shape) -> int:
    """Return the stored bytes of a weight [out, in], exact; ValueError as `specs`."""
    return sum(math.prod(size) * dtype.itemsize for size, dtype in specs(stored, shape).values())


def is_estimated(stored: Stored) -> bool:
    """Return whether the bytes of a weight that is not packed yet may be others than those that are planned."""
    return bool(getattr(get(stored.format), "ESTIMATED", False)) or stored.has_rest_part


def is_unpacked(stored: Stored) -> bool:
    """Return whether a weight is meant to be decoded once, when it is loaded."""
    format: Any = get(stored.format)
    is_bare = not stored.ops and stored.activations is None and stored.lowrank is None and stored.sparsity is None
    return is_bare and hasattr(format, "is_unpacked") and bool(format.is_unpacked(stored.params))


def decode(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Return the dequantized weight [out, in], with its low-rank part and the transforms around both multiplied in.

    It reads all inputs, and shares no memory with the stored tensors.
    """
    weight = read_all(weight)
    stored = weight.stored
    if not stored.ops and stored.lowrank is None:
        return decode_stored(weight, dtype)
    matrix = decode_stored(weight, torch.float32)
    if stored.lowrank is not None:
        a, b = lowrank.part_factors(weight.tensors, stored.lowrank, weight.shape, torch.float32)
        matrix = torch.addmm(matrix, b.T, a)
    return (transforms.effective(matrix, stored.ops, weight.tensors) if stored.ops else matrix).to(dtype)


def read_all(weight: PackedWeight) -> PackedWeight:
    """Return a weight without what leaves inputs unread; a low-rank part that is for these goes, too."""
    stored = weight.stored
    if stored.sparsity is None:
        return weight
    kept = None if stored.has_rest_part else stored.lowrank
    dense = dataclasses.replace(stored, sparsity=None, lowrank=kept)
    return PackedWeight(dense, {name: weight.tensors[name] for name in specs(dense, weight.shape)}, weight.shape)


def has_rows(stored: Stored) -> bool:
    """Return whether single rows of a weight can be decoded.

    Its format must be able to, and nothing may be beside the matrix, nor around it that rows have in common.
    """
    format: Any = get(stored.format)
    is_plain = stored.activations is None and stored.lowrank is None and stored.sparsity is None
    lies_alone = not stored.ops.output and is_plain
    has_own = hasattr(format, "decode_rows") and (not hasattr(format, "has_rows") or format.has_rows(stored.params))
    return lies_alone and bool(has_own)


def decode_rows(weight: PackedWeight, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows [n] int64 of the stored matrix, [n, in], without the transforms around it; `has_rows` must hold."""
    format: Any = get(weight.format)
    return cast(Tensor, format.decode_rows(weight.tensors, weight.params, weight.shape, rows, dtype))


def join_rows(parts: Sequence[PackedWeight]) -> dict[str, Tensor]:
    """Return the tensors of a weight from those of its rows, in order.

    Of several parts `has_rows` must hold, and nothing may be around the matrix.
    """
    format: Any = get(parts[0].format)
    return parts[0].tensors if len(parts) == 1 else format.join_rows([each.tensors for each in parts], parts[0].params)


def decode_stored(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Return the matrix in the format itself [out, in], with nothing around or beside it."""
    return get(weight.format).decode(weight.tensors, weight.params, weight.shape, dtype)


def cut(weight: PackedWeight, rows: range, columns: range) -> PackedWeight:
    """Return some rows and columns of a weight; ValueError with the reason where that is not possible.

    Around the matrix may lie transforms, which can be cut along a side where they are diagonal: all others need every
    input, or every output. Quantized inputs whose scale is that of the whole token cannot be cut along the inputs. What
    is returned reads all inputs.
    """
    weight = read_all(weight)
    stored, shape = weight.stored, weight.shape
    if (len(rows), len(columns)) == shape:
        return weight
    format: Any = get(stored.format)
    if not hasattr(format, "cut"):
        raise ValueError(f"format {stored.format} cannot be cut")
    if len(columns) < shape[1] and stored.activations is not None:
        _check_input_cut(stored.activations, columns, shape[1])
    matrix = {name: weight.tensors[name] for name in format.specs(stored.params, shape)}
    tensors = _cut_transforms(weight, "out", stored.ops.output, rows, shape[0])
    tensors |= _cut_transforms(weight, "in", stored.ops.input, columns, shape[1])
    params, of_format = format.cut(matrix, stored.params, shape, rows, columns)
    tensors = {**of_format, **tensors}
    factors_stored = stored.lowrank
    if factors_stored is not None:
        factors_stored, factors = lowrank.cut_part(weight.tensors, factors_stored, shape, rows, columns)
        tensors |= factors
    if stored.has_in_scale:
        tensors[IN_SCALE] = weight.tensors[IN_SCALE]
    chosen = dataclasses.replace(stored, params=params, lowrank=factors_stored)
    size = (len(rows), len(columns))
    tensors = {name: _detach_storage(tensors[name]) for name in specs(chosen, size)}  # ValueError as `specs`
    return PackedWeight(chosen, tensors, size)


def _check_input_cut(activations: Activations, columns: range, whole: int) -> None:
    """Raise ValueError where some of `whole` columns are quantized otherwise than they are among all."""
    if activations.has_token_scale or activations.is_coded:
        raise ValueError("inputs are quantized with the scale of a whole token")
    for at in (columns.start, columns.stop):
        if activations.block and at % activations.block and at != whole:
            raise ValueError(f"column {at} lies within a block of {activations.block} quantized inputs")


def _detach_storage(tensor: Tensor) -> Tensor:
    """Return a tensor that does not keep a larger one in memory."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _cut_transforms(
    weight: PackedWeight, side: str, names: tuple[str, ...], channels: range, size: int
) -> dict[str, Tensor]:
    """Return the stored tensors of the transforms `in` or `out` of a matrix, for some `channels` of `size`."""
    stored = {f"{side}_{name}": weight.tensors.get(f"{side}_{name}") for name in names}
    if len(channels) == size:
        return {key: tensor for key, tensor in stored.items() if tensor is not None}
    return {key: transforms.cut(key.removeprefix(f"{side}_"), tensor, channels) for key, tensor in stored.items()}
