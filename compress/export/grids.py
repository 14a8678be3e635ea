"""Decide which data types of the grid format a target can hold, and find the linears that engines multiply as one.

Engines fuse linears that read the same input (q, k, v; gate, up) into one matrix with one tensor scale: of unequal ones
they take one for all, and the weights are wrong. So fused linears need the same data type, and equal tensor scales.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from compress.errors import ExportError
from compress.export.convert import Export
from compress.export.weights import ExportWeight, StoredWeight
from compress.model import meta_pass
from compress.quant import grid_types
from compress.runtime.expert_layouts import PROJECTIONS

FORMAT = "grid"


def type_of(weight: ExportWeight) -> str | None:
    """Return the name of a weight's data type, None for a weight that is stored otherwise."""
    if weight.stored.format != FORMAT:
        return None
    return next((name for name, params in grid_types.TYPES.items() if params == weight.stored.params), None)


def refusal(weight: ExportWeight, types: Collection[str]) -> str | None:
    """Return why a weight in the grid format is none of these data types as an `nn.Linear` of its own."""
    if weight.roles:
        return "tables are plain numbers there"
    kind, columns = type_of(weight), weight.shape[1]
    if kind not in types:
        what = f"of the type {kind}" if kind else f"stored as {weight.stored.params}"
        return f"it is {what}, which no engine multiplies there; set type to one of {', '.join(types)}"
    if (reason := weight.not_alone()) is not None:
        return reason
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
    skeleton = export.source.skeleton
    first_readers = meta_pass.flow(skeleton.config, skeleton.dtype).shared
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


def tensor_scale(weight: StoredWeight) -> float | None:
    """Return the factor of all scales, None without one, or of a weight that is not quantized yet."""
    stored = (weight.tensors or {}).get("tensor_scale")
    return None if stored is None else float(stored.read().to(torch.float32))
