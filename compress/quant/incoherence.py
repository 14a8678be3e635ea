"""Incoherence: give a method the weight and its statistics in a random rotated basis (QuIP#, arXiv 2402.04396).

Signs and a Hadamard transform on both sides spread outliers over all entries, which are then nearly Gaussian. At run
time the same operations go around the stored matrix (compress/formats/transforms.py); the method knows nothing of them.
Input signs are drawn for each shared input, so that its rotated Hessian is made once for all the linears that read it.
Output signs are drawn for each linear. All draws depend on the job's seed and names alone, not on any order.
"""

from __future__ import annotations

import dataclasses
import hashlib

import torch
from torch import Tensor

from compress.formats import transforms
from compress.numerics import hadamard
from compress.numerics.hadamard import CHUNK
from compress.types import LayerPlan, LinearSpec, PackedWeight, Stats, WeightTransforms

OPS = WeightTransforms(input=("signs", "hadamard"), output=("hadamard", "signs"))
BUFFERS = 8  # float32 temporaries of CHUNK numbers that a rotation has at a time, an upper bound


def derived_seed(seed: int, purpose: str, name: str) -> int:
    """Return a seed of its own for each purpose and name, 63 bits."""
    digest = hashlib.sha256(f"{seed} {purpose} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def draw(spec: LinearSpec, seed: int, around: WeightTransforms = OPS) -> dict[str, Tensor]:
    """Draw the stored tensors of the operations around this linear, on the CPU."""
    sides = {
        "out_signs": ("output", spec.name, spec.shape[0], around.output),
        "in_signs": ("input", spec.input_key, spec.shape[1], around.input),
    }
    return {
        key: _signs(size, derived_seed(seed, f"{side} signs", name))
        for key, (side, name, size, names) in sides.items()
        if "signs" in names
    }


def rotated_stats(stats: Stats, layer: LayerPlan, seed: int) -> Stats:
    """Return the statistics of the layer's shared input in its rotated basis: the same for all its readers."""
    return Stats(
        transforms.rotate_hessian(stats.hessian, layer.stored.ops, draw_on_device(layer, seed, stats.hessian)),
        stats.count,
    )


def rotated_weight(weight: Tensor, layer: LayerPlan, seed: int) -> Tensor:
    """Return weight [out, in] in the rotated basis, float32, as the layer's method is given it."""
    return transforms.rotate(weight, layer.stored.ops, draw_on_device(layer, seed, weight))


def rotated_gradients(gradients: Tensor, layer: LayerPlan, seed: int) -> Tensor:
    """Return gradients [n, out] at the layer's outputs as those at the rows of its rotated weight."""
    return transforms.transpose_output(gradients, layer.stored.ops, draw_on_device(layer, seed, gradients))


def wrap(packed: PackedWeight, layer: LayerPlan, seed: int) -> PackedWeight:
    """Return the packed rotated weight with the operations that turn it back."""
    added = draw_on_device(layer, seed, next(iter(packed.tensors.values())))
    stored = dataclasses.replace(packed.stored, ops=layer.stored.ops)
    return PackedWeight(stored, {**packed.tensors, **added}, packed.shape)


def notes(layer: LayerPlan) -> tuple[str, ...]:
    """Return what the report should say of the operations."""
    sides = zip(layer.spec.shape, (layer.stored.ops.output, layer.stored.ops.input), strict=True)
    sizes = dict.fromkeys(size for size, names in sides if "hadamard" in names)
    odd = {size: hadamard.order(size).K for size in sizes if hadamard.order(size).kind == "hartley"}
    return tuple(
        f"no Hadamard matrix of size {n} is known here: a Hartley matrix of {K} is used" for n, K in odd.items()
    )


def workspace(layer: LayerPlan, has_statistics: bool) -> int:
    """Return the bytes needed beside those of the method: rotated weight, rotated Hessian."""
    if not layer.stored.ops:
        return 0
    rows, columns = layer.spec.shape
    return 4 * (rows * columns + (columns * columns if has_statistics else 0))


def turning(layer: LayerPlan, has_statistics: bool) -> int:
    """Return the bytes of temporaries while these are made, before the method begins."""
    return 4 * BUFFERS * min(CHUNK, workspace(layer, has_statistics) // 4)


def draw_on_device(layer: LayerPlan, seed: int, like: Tensor) -> dict[str, Tensor]:
    """Draw the stored tensors of the layer's operations, on the device of `like`."""
    return {key: tensor.to(like.device) for key, tensor in draw(layer.spec, seed, layer.stored.ops).items()}


def _signs(size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return transforms.pack_signs(torch.randint(2, (size,), generator=generator))
