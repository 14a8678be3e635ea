"""Measure what options do to whole experts: the output of a block's experts with one at an option, and their routing.

Measured as the options are quantized, where the units of an allocation are experts (MC-MoE, calib/expert_routing.py):
damages "expert", the sum over the calibration tokens of ||F(x) - F_changed(x)||_2, and "expert_squares", that of its
square; scores "share" and "routing". They are kept in the block's record.

Units beside them have the damages, too, so that the table is whole, but of another kind: expert_squares is the sum over
tokens of ||dW x||^2, the change of the unit's own output, and expert the bound sqrt(tokens * expert_squares) of the sum
of its norms. Sums over both kinds say nothing; the allocator of experts gives these units one option.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from compress import formats
from compress.allocate import table
from compress.allocate.prepare_options import Options
from compress.allocate.table import UnitLinears
from compress.calib import expert_routing
from compress.model.blockwise import BlockInputs
from compress.run import sizes
from compress.types import PackedWeight

NORMS, SQUARES = "expert", "expert_squares"
SCORES = ("share", "routing")


def measure(
    opened: Options, index: int, block: nn.Module, batches: BlockInputs, packed: Mapping[str, PackedWeight]
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return experts module -> unit -> scores, and damages by option; packed: "<linear>@<option>" -> weight.

    The block has its original weights. The changed ones of a pass take as much memory as its statistics did.
    """
    groups = [g for g in _expert_units(opened) if g.members[0].is_expert and g.members[0].block == index]
    if not groups:
        return {}
    name = opened.prepared.skeleton.block_prefix(index).rstrip(".")
    scores = expert_routing.scores(expert_routing.measure(block, name, batches))
    measured: dict[str, dict[str, dict[str, Any]]] = {}
    for group in groups:
        expert = group.members[0].name.rpartition(".")[0]
        zeros = {key: [0.0] * len(opened.names) for key in (NORMS, SQUARES)}
        measured.setdefault(_module(group), {})[group.name] = {**scores[expert], **zeros}
    tried = {f"{group.name}@{option}": (group, option) for group in groups for option in _quantizing(opened, group)}
    nbytes = {key: sum(m.numel * m.dtype.itemsize for m in group.members) for key, (group, _) in tried.items()}
    for keys in sizes.split_passes(nbytes, opened.prepared.arrangement.statistics_nbytes):
        changes = {
            key: {
                member.name: formats.decode(packed[f"{member.name}@{tried[key][1]}"], member.dtype)
                for member in tried[key][0].members
            }
            for key in keys
        }
        for key, damage in expert_routing.output_changes(block, name, batches, changes).items():
            group, option = tried[key]
            row = measured[_module(group)][group.name]
            row[NORMS][option], row[SQUARES][option] = damage.norms, damage.squares
    return measured


def damages_and_scores(
    opened: Options, records: Mapping[str, Mapping[str, Any]], tokens: int
) -> tuple[dict[str, dict[str, list[float]]], dict[str, dict[str, float]]]:
    """Return damages (name -> unit -> by option) and scores (name -> unit -> score) of units of experts.

    records: of all blocks, linear or experts module -> what was measured. tokens: of the calibration text.
    """
    groups = _expert_units(opened)
    if not groups:
        return {}, {}
    damages: dict[str, dict[str, list[float]]] = {NORMS: {}, SQUARES: {}}
    scores: dict[str, dict[str, float]] = {name: {} for name in SCORES}
    for group in groups:
        if group.members[0].is_expert:
            row = records[_module(group)][group.name]
            for name in SCORES:
                scores[name][group.name] = row[name]
        else:
            row = _dense_damages(opened, group, records, tokens)
        for name, by_unit in damages.items():
            by_unit[group.name] = row[name]
    return damages, scores


def _expert_units(opened: Options) -> list[UnitLinears]:
    """Return the units where each expert is one; none where the allocation has other units."""
    return table.open_groups(opened) if opened.allocation.units == "expert" else []


def _quantizing(opened: Options, group: UnitLinears) -> list[int]:
    """Return the numbers of the options at which all members of a unit are quantized."""
    by_member = [opened.levels[member.name] for member in group.members]
    return [i for i in range(len(opened.names)) if all(str(i) in levels for levels in by_member)]


def _dense_damages(
    opened: Options, group: UnitLinears, records: Mapping[str, Mapping[str, Any]], tokens: int
) -> dict[str, list[float]]:
    """Return the damages of a unit that is no expert, by option."""
    squares = [0.0] * len(opened.names)
    for option in _quantizing(opened, group):
        squares[option] = tokens * sum(records[member.name][str(option)]["hessian"] for member in group.members)
    return {NORMS: [math.sqrt(tokens * square) for square in squares], SQUARES: squares}


def _module(group: UnitLinears) -> str:
    """Return the experts module of a unit of experts."""
    return group.members[0].name.rsplit(".", 2)[0]
