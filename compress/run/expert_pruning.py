"""Experts that tokens can go without (`experts` of a recipe): measured with each block, decided when all are done.

What a block's router does, and what pruning would do to the block's output, is measured with its original weights
behind the quantized prefix, none of which is pruned: which blocks are pruned shows only at the end. It is kept with the
block's record, so that a resumed run measures nothing twice and decides the same. The method is in
calib/expert_routing.py.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from compress.calib import expert_routing
from compress.errors import RecipeError
from compress.model.blockwise import BlockInputs
from compress.recipe.schema import Recipe
from compress.runtime.experts import PROJECTIONS
from compress.types import ExpertPruning, LayerReport, Plan, Pruning

Records = Mapping[str, Mapping[str, Any]]  # experts module -> what `measure` says of it


def check(recipe: Recipe, plan: Plan) -> None:
    """Raise RecipeError where a recipe prunes experts that are not there."""
    if recipe.pruning is None or not plan.layers:
        return
    if not any(layer.spec.is_expert for layer in plan.layers):
        raise RecipeError(
            f"recipe {recipe.name!r} prunes experts, but quantizes none of this model; remove `experts` from it"
        )


def measure(block: nn.Module, where: str, batches: BlockInputs, config: ExpertPruning) -> dict[str, dict[str, Any]]:
    """Experts module of a block -> its routing, and how it would be pruned, as JSON values; {} without experts."""
    found = {}
    for name, stats in expert_routing.measure(block, where, batches, config).items():
        setting = expert_routing.setting(stats, config)
        found[name] = {**stats.facts(), "pruning": dataclasses.asdict(setting) if setting is not None else None}
    return found


def chosen(records: Records, config: ExpertPruning, layers: Sequence[LayerReport]) -> dict[str, Pruning]:
    """Experts module -> what it is pruned with: the least harmful of those of which `layers` hold every linear."""
    packed = _by_expert(layers)
    found = {
        name: (record["harm"], Pruning(**record["pruning"]) if record["pruning"] is not None else None)
        for name, record in records.items()
        if len(packed.get(name, {})) == len(record["counts"])
    }
    return expert_routing.thresholds(found, config)


def rows(records: Records, pruned: Mapping[str, Pruning], layers: Sequence[LayerReport]) -> dict[str, dict[str, Any]]:
    """For the report: of each module what its experts got in tokens and bits, and what is dropped, if it is pruned.

    bits: stored bits a weight of each packed expert; threshold and the others of `Pruning` are None where not pruned,
    dropped is the share of the (token, expert) pairs on the calibration text.
    """
    packed, found = _by_expert(layers), {}
    for name, record in records.items():
        setting = pruned.get(name)
        bits = {number: _bits(linears) for number, linears in sorted(packed.get(name, {}).items())}
        found[name] = {
            **{key: record[key] for key in ("tokens", "top_k", "counts", "share", "routing", "ratios", "harm")},
            "bits": [bits.get(number) for number in range(len(record["counts"]))],
            "threshold": setting.threshold if setting is not None else None,
            "protected": setting.protected if setting is not None else None,
            "taken": setting.taken if setting is not None else None,
            "dropped": record["dropped"] if setting is not None else 0.0,
        }
    return found


def _by_expert(layers: Sequence[LayerReport]) -> dict[str, dict[int, list[LayerReport]]]:
    """Experts module -> number of an expert -> its linears, all three of them."""
    found: dict[str, dict[int, list[LayerReport]]] = defaultdict(lambda: defaultdict(list))
    for layer in layers:
        parts = layer.name.rsplit(".", 2)
        if len(parts) == 3 and parts[1].isdigit() and parts[2] in PROJECTIONS:
            found[parts[0]][int(parts[1])].append(layer)
    return {
        name: {number: linears for number, linears in experts.items() if len(linears) == len(PROJECTIONS)}
        for name, experts in found.items()
    }


def _bits(linears: Sequence[LayerReport]) -> float:
    return 8 * sum(layer.nbytes for layer in linears) / sum(layer.shape[0] * layer.shape[1] for layer in linears)
