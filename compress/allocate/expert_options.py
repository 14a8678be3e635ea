"""Measure what options do to whole experts: the output of a block's experts with one at an option, and their routing.

Measured as the options are quantized, where the units of an allocation are experts (MC-MoE, calib/expert_routing.py):
damages "expert", the sum over the calibration tokens of ||F(x) - F_changed(x)||_2, and "expert_squares", that of its
square; scores "share" and "routing". They are kept in the block's record, and written for the table at the end.

Units beside them have the damages, too, so that the table is whole, but of another kind: expert_squares is the sum over
tokens of ||dW x||^2, the change of the unit's own output, and expert the bound sqrt(tokens * expert_squares) of the sum
of its norms. Sums over both kinds say nothing; the allocator of experts gives these units one option.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from compress import formats
from compress.allocate import table
from compress.allocate.table import LinearGroup
from compress.allocate.variants import FIXED, Database
from compress.calib import expert_routing
from compress.model.blockwise import BlockInputs
from compress.run import memory_plan
from compress.storage.checkpoint import write_text
from compress.types import PackedWeight

if TYPE_CHECKING:
    from compress.allocate.prepare_options import Options

FILE = "measured-experts.json"  # read by compress/allocate/sensitivity.py
NORMS, SQUARES = "expert", "expert_squares"
SCORES = ("share", "routing")


class ExpertDamage:
    """The damage that options do to experts, block by block; `groups`: the units."""

    def __init__(self, opened: Options, database: Database) -> None:
        self.opened, self.database = opened, database
        self.skeleton = opened.prepared.skeleton
        specs = [next(iter(x.values())).spec for x in opened.levels.values() if FIXED not in x]
        by_expert = opened.allocation.units == "expert"
        self.groups = table.group_linears(self.skeleton, specs, "expert") if by_expert else []

    def measure(
        self, index: int, block: nn.Module, batches: BlockInputs, packed: Mapping[str, PackedWeight]
    ) -> dict[str, dict[str, dict[str, Any]]]:
        """Return experts module -> unit -> scores, and damages by option; packed: "<linear>@<option>" -> weight.

        The block has its original weights. The changed ones of a pass take as much memory as its statistics did.
        """
        groups = [group for group in self.groups if group.members[0].is_expert and group.members[0].block == index]
        if not groups:
            return {}
        name = self.skeleton.block_prefix(index).rstrip(".")
        scores = expert_routing.scores(expert_routing.measure(block, name, batches))
        measured: dict[str, dict[str, dict[str, Any]]] = {}
        for group in groups:
            expert = group.members[0].name.rpartition(".")[0]
            row: dict[str, Any] = {
                **scores[expert],
                **{key: [0.0] * len(self.opened.names) for key in (NORMS, SQUARES)},
            }
            measured.setdefault(_module(group), {})[group.name] = row
        tried = {f"{group.name}@{option}": (group, option) for group in groups for option in self._options(group)}
        sizes = {key: sum(m.numel * m.dtype.itemsize for m in group.members) for key, (group, _) in tried.items()}
        for keys in memory_plan.split(sizes, self.opened.prepared.arrangement.statistics_nbytes):
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

    def keep(self, index: int, measured: Mapping[str, Any], tokens: int) -> None:
        """Write what the table takes, with the last block and before its record; tokens: of the calibration text."""
        if not self.groups or index + 1 < len(self.skeleton.blocks):
            return
        damages: dict[str, dict[str, list[float]]] = {NORMS: {}, SQUARES: {}}
        scores: dict[str, dict[str, float]] = {name: {} for name in SCORES}
        records = [*(self.database.measured(i) for i in range(index)), measured]
        for group in self.groups:
            record = records[group.members[0].block]
            if group.members[0].is_expert:
                row = record[_module(group)][group.name]
                for name in SCORES:
                    scores[name][group.name] = row[name]
            else:
                row = self._beside(group, record, tokens)
            for name, by_unit in damages.items():
                by_unit[group.name] = row[name]
        content = {"complete": True, "damages": damages, "scores": scores}
        write_text(self.database.folder / FILE, json.dumps(content, indent=1) + "\n")

    def _options(self, group: LinearGroup) -> list[int]:
        """Return the numbers of the options at which all members of a unit are quantized."""
        by_member = [self.opened.levels[member.name] for member in group.members]
        return [i for i in range(len(self.opened.names)) if all(str(i) in levels for levels in by_member)]

    def _beside(self, group: LinearGroup, record: Mapping[str, Any], tokens: int) -> dict[str, list[float]]:
        """Return the damages of a unit that is no expert, by option."""
        squares = [0.0] * len(self.opened.names)
        for option in self._options(group):
            squares[option] = tokens * sum(record[member.name][str(option)]["hessian"] for member in group.members)
        return {NORMS: [math.sqrt(tokens * square) for square in squares], SQUARES: squares}


def _module(group: LinearGroup) -> str:
    """Return the experts module of a unit of experts."""
    return group.members[0].name.rsplit(".", 2)[0]
