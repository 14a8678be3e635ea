"""Decide which data types of the grid format a target can hold, and find the linears that engines multiply as one.

Engines fuse linears that read the same input (q, k, v; gate, up) into one matrix with one tensor scale: of unequal ones
they take one for all, and the weights are wrong. So fused linears need the same data type, and equal tensor scales.
Static scales of inputs are taken from all experts of a layer together, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from compress.errors import ExportError
from compress.export.convert import Export
from compress.export.weights import ExportWeight, StoredWeight
from compress.quant import grid_types
from compress.runtime.expert_layouts import PROJECTIONS
from compress.types import IN_SCALE, Activations

FORMAT = "grid"
_FP8 = (Activations(dtype="fp8"), Activations(dtype="fp8", scale="tensor"))
INPUTS: dict[str, tuple[Activations, ...]] = {  # data type -> the inputs that engines multiply it with
    "nvfp4": (Activations(bits=4, scale="tensor", dtype="nvfp4"),),
    "mxfp4": (Activations(bits=4, dtype="mxfp4"), Activations(dtype="fp8-block")),
    "mxfp8": (Activations(dtype="mxfp8"),),
    "fp8": _FP8,
    "fp8-channel": _FP8,
    "fp8-block": (Activations(dtype="fp8-block"),),
}


def type_of(weight: ExportWeight) -> str | None:
    """Return the name of a weight's data type, None for a weight that is stored otherwise."""
    if weight.stored.format != FORMAT:
        return None
    return next((name for name, params in grid_types.TYPES.items() if params == weight.stored.params), None)


def refusal(weight: ExportWeight, types: Collection[str]) -> str | None:
    """Return why a weight in the grid format is none of these data types as an `nn.Linear` of its own.

    Its inputs may be quantized as engines do it beside its type.
    """
    if weight.roles:
        return "tables are plain numbers there"
    kind, columns = type_of(weight), weight.shape[1]
    if kind is None or kind not in types:
        what = f"of the type {kind}" if kind else f"stored as {weight.stored.params}"
        return f"it is {what}, which no engine multiplies there; set type to one of {', '.join(types)}"
    if (reason := weight.not_alone()) is not None:
        return reason
    inputs = weight.stored.activations
    if inputs is not None and inputs not in INPUTS[kind]:
        known = " or ".join(f"{{bits: {each.bits}, scale: {each.scale}, dtype: {each.dtype}}}" for each in INPUTS[kind])
        return f"engines quantize inputs otherwise beside {kind}; set activations: {known}, or null"
    size = weight.stored.params.block_columns
    if weight.stored.params.block_rows == 1 and size > 0 and columns % size:
        return f"its {columns} inputs are no whole blocks of {size}; give it the type fp8-channel, or keep it"
    if weight.is_turned:
        return "the class of the model holds it as [inputs, outputs], which is no linear there; keep it"
    if weight.is_fused:
        return "published checkpoints of this architecture hold all experts of a block in one tensor; keep experts"
    return None


def fused_linears(export: Export) -> Iterator[list[StoredWeight]]:
    """Yield the linears that read the same input in one module, where there are several: packed ones, in order."""
    first_readers = export.source.first_readers()
    groups: dict[tuple[str, str], list[StoredWeight]] = {}
    for weight in export.held:
        parent, _, last = weight.module.rpartition(".")
        source = first_readers.get(weight.module, weight.module)
        if weight.is_expert:
            source = "" if last in PROJECTIONS[:-1] else last
        groups.setdefault((parent, source), []).append(weight)
    yield from (group for group in groups.values() if len(group) > 1)


def check_fused(export: Export) -> None:
    """Raise ExportError for linears that engines fuse and that have unequal types or tensor scales."""
    for first, *others in fused_linears(export):
        if type_of(first) is None and all(type_of(other) is None for other in others):
            continue
        for other in others:
            if other.stored != first.stored:
                raise ExportError(
                    f"{first.name} and {other.name} read the same input, and engines need one format for both; give "
                    "them one option (allocate.units: fused), or one rule"
                )
            if tensor_scale(other) != tensor_scale(first):
                raise ExportError(
                    f"{first.name} and {other.name} read the same input, and engines take one tensor scale for both, "
                    "but theirs differ; quantize again with a method that shares it, such as grid_gptq"
                )


def in_scales(export: Export) -> dict[str, Tensor]:
    """Return the static scale of the inputs of each weight that has one, float32 [1], by its name.

    Fused linears, and experts of a layer that read the same kind of input, have the largest of all of them.
    """
    readers = {weight.name: weight.name for weight in export.held}
    for group in fused_linears(export):
        readers |= {weight.name: group[0].name for weight in group}
    for weight in [weight for weight in export.held if weight.is_expert]:
        experts, _, last = weight.module.rsplit(".", 2)
        readers[weight.name] = f"{experts} {'' if last in PROJECTIONS[:-1] else last}"
    scales: dict[str, Tensor] = {}
    largest: dict[str, Tensor] = {}
    for weight in export.held:
        if (stored := (weight.tensors or {}).get(IN_SCALE)) is not None:
            scales[weight.name] = scale = stored.read().float()
            reader = readers[weight.name]
            largest[reader] = torch.maximum(largest.get(reader, scale), scale)
    return {name: largest[readers[name]] for name in scales}


def tensor_scale(weight: StoredWeight) -> float | None:
    """Return the factor of all scales, None without one, or of a weight that is not quantized yet."""
    stored = (weight.tensors or {}).get("tensor_scale")
    return None if stored is None else float(stored.read())
