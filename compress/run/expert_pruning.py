"""Prune experts for tokens that can go without (`experts` of a recipe): measure block by block, decide at the end.

The routing of a block, and the change of its output by pruning, are measured with its original weights behind the
quantized prefix. None of that is pruned yet: the blocks to prune are chosen when all are measured. Measurements are
kept with the block's record, so that a resumed run decides the same. The method is in calib/expert_routing.py.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from compress.calib import expert_routing
from compress.errors import RecipeError, shown
from compress.model.blockwise import BlockInputs
from compress.recipe.schema import Recipe
from compress.types import ExpertPruning, LayerReport, Plan, Pruning

Records = Mapping[str, Mapping[str, Any]]  # experts module -> what `measure` says of it


def check(recipe: Recipe, plan: Plan) -> None:
    """Raise RecipeError where a recipe prunes experts that are not there."""
    if recipe.pruning is None or not plan.layers:
        return
    if not any(layer.spec.is_expert for layer in plan.layers):
        raise RecipeError(
            f"recipe {shown(recipe.name)} prunes experts, but quantizes none of this model; remove `experts` from it"
        )


def measure(block: nn.Module, where: str, batches: BlockInputs, config: ExpertPruning) -> dict[str, dict[str, Any]]:
    """Return experts module -> its routing, and how it would be pruned, as JSON values; {} without experts."""
    records = {}
    for name, stats in expert_routing.measure(block, where, batches, config).items():
        setting = expert_routing.setting(stats, config)
        records[name] = {**stats.facts(), "pruning": dataclasses.asdict(setting) if setting is not None else None}
    return records


def choose_prunings(records: Records, config: ExpertPruning, layers: Sequence[LayerReport]) -> dict[str, Pruning]:
    """Return experts module -> what it is pruned with: the least harmful of those with every linear in `layers`."""
    packed = _by_expert(layers, records)
    candidates = {
        name: (record["harm"], Pruning(**record["pruning"]) if record["pruning"] is not None else None)
        for name, record in records.items()
        if len(packed.get(name, {})) == len(record["counts"])
    }
    return expert_routing.thresholds(candidates, config)


def rows(records: Records, pruned: Mapping[str, Pruning], layers: Sequence[LayerReport]) -> dict[str, dict[str, Any]]:
    """Return for the report what the experts of each module got in tokens and bits, and what is dropped.

    bits: stored bits a weight of each packed expert; threshold and the others of `Pruning` are None where not pruned,
    dropped is the share of the (token, expert) pairs on the calibration text.
    """
    packed, by_module = _by_expert(layers, records), {}
    for name, record in records.items():
        setting = pruned.get(name)
        bits = {number: _bits(linears) for number, linears in sorted(packed.get(name, {}).items())}
        by_module[name] = {
            **{key: record[key] for key in ("tokens", "top_k", "counts", "share", "routing", "ratios", "harm")},
            "bits": [bits.get(number) for number in range(len(record["counts"]))],
            "threshold": setting.threshold if setting is not None else None,
            "protected": setting.protected if setting is not None else None,
            "taken": setting.taken if setting is not None else None,
            "dropped": record["dropped"] if setting is not None else 0.0,
        }
    return by_module


def _by_expert(layers: Sequence[LayerReport], modules: Collection[str]) -> dict[str, dict[int, list[LayerReport]]]:
    """Return experts module, of `modules` -> number of an expert -> its linears; of a module all are packed or none."""
    by_expert: dict[str, dict[int, list[LayerReport]]] = defaultdict(lambda: defaultdict(list))
    for layer in layers:
        parts = layer.name.rsplit(".", 2)
        if parts[0] in modules:
            by_expert[parts[0]][int(parts[1])].append(layer)
    return by_expert


def _bits(linears: Sequence[LayerReport]) -> float:
    return 8 * sum(layer.nbytes for layer in linears) / sum(layer.shape[0] * layer.shape[1] for layer in linears)
