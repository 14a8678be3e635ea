"""Plan what becomes of draft heads, and measure the inputs of their linears behind the quantized model.

Heads are never left out. Without a section `draft_heads` in the recipe the linears of their blocks get 8 bits: by gptq
where calibration text is read anyway and transformers can run the head, else by rtn. What joins a head to the model,
norms, and copies of embeddings and output head stay as they are.

Inputs are those of the head behind the quantized model on the calibration text: each head gets the hidden states that
the output head reads, and the embeddings of the text. Experts that tokens are routed to are quantized without: their
Hessians would be as many as those of a whole block, in one pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from fnmatch import fnmatchcase

from compress.model import draft_heads
from compress.model.skeleton import Skeleton
from compress.recipe.blocks import drafts_default
from compress.recipe.schema import KEEP, Recipe
from compress.run import sizes
from compress.run.outside_plan import PlanWeight
from compress.types import LayerPlan, LayerReport, Plan

OTHER_BASIS = "a transform of the whole model puts its hidden states in another basis, in which the heads cannot draft"
KEPT_WHOLE = "kept by the recipe"


def add(plan: Plan, recipe: Recipe, skeleton: Skeleton, plan_weight: PlanWeight) -> Plan:
    """Return the plan with what becomes of draft heads, in numbers and in words; plan_weight: plans one linear."""
    tensors = skeleton.draft_tensors
    if not tensors:
        return plan
    found_matrices, kept = draft_heads.matrices(skeleton)
    copies = draft_heads.copies(skeleton)
    kept |= {name.removesuffix(".weight"): f"a copy of {original}" for name, original in copies.items()}
    numel = draft_heads.count_numbers(stored for name, stored in tensors.items() if name not in copies)
    plan = dataclasses.replace(plan, numel=plan.numel + numel, written_numel=plan.written_numel + numel)
    layers, why = _layers(plan, recipe, skeleton, plan_weight, found_matrices)
    quantized = {layer.spec.name for layer in layers}
    kept |= {name: why or KEPT_WHOLE for name in found_matrices if name not in quantized}
    replaced = {found_matrices[name].stored.name for name in quantized}
    stored = {name: nbytes for name, nbytes in plan.kept_nbytes.items() if name not in replaced}
    lines = (*plan.messages, _say(skeleton, layers, stored, copies, why))
    return dataclasses.replace(
        plan, draft_layers=tuple(layers), kept_reasons={**plan.kept_reasons, **kept}, kept_nbytes=stored, messages=lines
    )


def _layers(
    plan: Plan,
    recipe: Recipe,
    skeleton: Skeleton,
    plan_weight: PlanWeight,
    found_matrices: dict[str, draft_heads.Matrix],
) -> tuple[list[LayerPlan], str]:
    """Return how the linears of heads are stored, and why none is, or why their inputs are not measured."""
    if not plan.layers or (recipe.draft_heads is not None and recipe.draft_heads.method == KEEP):
        return [], ""
    if skeleton.edits is not None:
        return [], OTHER_BASIS
    unfit = draft_heads.can_open(skeleton) if found_matrices else None
    reads_text = unfit is None and any(map(sizes.needs_text, plan.packed))
    scheme = recipe.draft_heads or drafts_default(reads_text)
    specs = draft_heads.specs(found_matrices, skeleton.dtype)
    layers = [plan_weight(spec, scheme) for spec in specs if not _is_ignored(recipe, spec.name)]
    return _whole_stacks(layers, found_matrices), unfit or ""


def _whole_stacks(layers: list[LayerPlan], found_matrices: dict[str, draft_heads.Matrix]) -> list[LayerPlan]:
    """Return the layers without experts of a tensor some of whose parts stay as they are: it could not be left out."""
    planned = {layer.spec.name for layer in layers}
    partly = {matrix.stored.name for name, matrix in found_matrices.items() if name not in planned}
    return [layer for layer in layers if found_matrices[layer.spec.name].stored.name not in partly]


def _is_ignored(recipe: Recipe, name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in recipe.ignore)


def _say(skeleton: Skeleton, layers: list[LayerPlan], kept: dict[str, int], copies: dict[str, str], why: str) -> str:
    """Say in a line what becomes of the heads of a checkpoint."""
    tensors = skeleton.draft_tensors
    heads = draft_heads.count_heads(skeleton)
    what = f"{heads} draft head{'s' if heads > 1 else ''} ({sum(x.nbytes for x in tensors.values()):,} bytes)"
    plain = sum(nbytes for name, nbytes in kept.items() if name in tensors)
    parts = [f"{plain:,} bytes are kept as they are"]
    if layers:
        bits = 8 * sum(layer.nbytes for layer in layers) / sum(layer.spec.numel for layer in layers)
        parts = [f"{len(layers)} linears to {bits:.2f} bits, {layers[0].scheme.method}", *parts]
    if layers and why:
        parts.append(f"rounded without data, {why}")
    elif why:
        parts.append(why)
    if copies:
        nbytes = sum(tensors[name].nbytes for name in copies)
        parts.append(f"{nbytes:,} of them copies of {', '.join(sorted(set(copies.values())))}")
    return f"{what}: {'; '.join(parts)}"


def shapes(plan: Plan, rows: Iterable[LayerReport]) -> dict[str, tuple[int, int]]:
    """Return the shapes of the packed linears of heads among the rows of a report."""
    names = {layer.spec.name for layer in plan.draft_layers}
    return {row.name: row.shape for row in rows if row.name in names}
