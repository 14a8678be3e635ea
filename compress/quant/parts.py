"""Quantize a weight as a sum of parts, so that it contains cheaper versions of itself: its levels.

The first part is what the method makes of the weight in the bits of the lowest level, bit for bit. Each further one is
made of what those before it leave, W - (P1 + P2 + ...), by the same method with the bits between two levels: its scales
are searched anew, its column loop feeds errors back through the whole Hessian, and the codes of earlier parts stay as
they are. So every level is as good as its method makes it from the one below. Residual quantization is old; stored as
planes of one checkpoint it is in QuantSpec (arXiv 2502.10424, for caches) and Any-Precision LLM (arXiv 2402.10517,
which splits the entries of a codebook instead).

A single scale for all levels (MatQuant, arXiv 2502.06786) is smaller and loses more: the best range of 2 bits is about
1.5 standard deviations, that of 8 bits 4, and what the lowest level cuts off no further bits of it can reach.

Later blocks are calibrated behind the lowest level of earlier ones, so that this level is what it is alone. A target
that makes up for errors of earlier blocks (target correction) is that of the lowest level only: the others make up for
what is not theirs.

A last level of 16 bits (32 of float32) is the original weight: it is stored as it is, so that nothing is left to round.

Not done: parts of different methods; choosing the codes of a part for what later ones will add.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from compress import formats, plugins
from compress.formats import dense, levels, nested
from compress.types import LayerPlan, PackedWeight, Quantized, Scheme, Stored

PART_COPIES = 2  # float32 copies of a weight beside which its further parts are made


def schemes(scheme: Scheme) -> tuple[Scheme, ...]:
    """Return the schemes that the parts of a weight are quantized by; of a weight that is not nested its own.

    A low-rank part is that of the lowest level, and stays in the others.
    """
    if not scheme.nested:
        return (scheme,)
    first, *others = scheme.part_configs
    whole = dataclasses.replace(scheme, config=first, nested=False)
    return (whole, *(dataclasses.replace(whole, config=config, lowrank=None) for config in others))


def lowest_bpw(layer: LayerPlan) -> float:
    """Return the stored bits per weight of the lowest level of a nested weight, of any other its own."""
    if not layer.scheme.nested:
        return layer.bpw
    lowest = levels.at_level(layer.stored, layer.scheme.levels[0])
    return 8 * formats.nbytes(lowest, layer.spec.shape) / layer.spec.numel


def lowest(weight: PackedWeight) -> PackedWeight:
    """Return the lowest level of a nested weight, any other as it is."""
    return levels.view(weight, levels.levels(weight.stored)[0]) if weight.format == "nested" else weight


def plan(scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype) -> Stored:
    """Return how the matrix of a weight [out, in] of a type is stored, without what is around or beside it.

    Raises ValueError for a setting that cannot be for this weight.
    """
    method = plugins.load("quant", scheme.method)
    parts = [Stored(method.FORMAT, method.plan_params(config, shape)) for config in scheme.part_configs]
    if scheme.has_original:
        bits = 8 * dtype.itemsize
        if bits != scheme.levels[-1]:
            raise ValueError(f"nested: the original weight is the last level and has {bits} bits")
        parts.append(original_stored(dtype))
    return Stored("nested", nested.params_for(parts, scheme.levels)) if scheme.nested else parts[0]


def original_stored(dtype: torch.dtype) -> Stored:
    """Return how a weight of a type is stored that stays as it is."""
    return Stored("dense", dense.Params(str(dtype).removeprefix("torch.")))


def workspace(scheme: Scheme, shape: tuple[int, int]) -> int:
    """Return the bytes that a scheme's method needs beside the stored weight and the Hessian.

    Further parts are made beside what is left of the weight, and the weight that they are compared with.
    """
    method = plugins.load("quant", scheme.method)
    first, *others = (method.workspace(config, shape) for config in scheme.part_configs)
    beside = PART_COPIES * 4 * shape[0] * shape[1]
    return max(first, *(need + beside for need in others)) if others else first


def add(
    scheme: Scheme,
    first: Quantized,
    weight: Tensor,
    original: Tensor,
    quantize_part: Callable[[int, Tensor], Quantized],
) -> Quantized:
    """Return a nested weight [out, in] whose first part is made; a low-rank part beside it stays beside the sum.

    weight: in the basis that is rounded; original: as the model has it, in its type.
    quantize_part: makes the part of a number, from 1, of what is left of the weight, float32.
    """
    lowrank, notes = first.weight.stored.lowrank, dict.fromkeys(first.notes)
    rest = weight.float() - formats.decode(first.weight, torch.float32)
    bare = Stored(first.weight.format, first.weight.params)
    names = formats.specs(bare, first.weight.shape)
    parts = [PackedWeight(bare, {name: first.weight.tensors[name] for name in names}, first.weight.shape)]
    for number in range(1, len(scheme.part_configs)):
        made = quantize_part(number, rest)
        parts.append(made.weight)
        notes |= dict.fromkeys(made.notes)
        if number < len(scheme.part_configs) - 1:
            rest -= formats.decode_stored(made.weight, torch.float32)
    if scheme.has_original:
        kept = original_stored(original.dtype)
        parts.append(PackedWeight(kept, dense.pack(original, kept.params), first.weight.shape))
    joined = nested.join(parts, scheme.levels)
    beside = {name: tensor for name, tensor in first.weight.tensors.items() if name not in names}
    stored = dataclasses.replace(joined.stored, lowrank=lowrank)
    return Quantized(PackedWeight(stored, {**joined.tensors, **beside}, joined.shape), tuple(notes))
