"""Assemble the table that allocators choose from, keep it as sensitivity.json, and turn targets into bytes of it.

Linears are grouped into units that get one option together: those that an engine fuses or that share a stored tensor.
Tables outside of the blocks (token embeddings, output head, or one for both) are units with options of their own
(`allocate.tables` of a recipe), numbered behind those of linears. Their damage is the KL of the whole model with this
table alone at the option, in nats a token, whatever the damages of linears are measured by. The recipe allows only
estimators in that unit (compress/recipe/allocation.py).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from compress.allocate import prepare_options
from compress.allocate.problem import Choice, Problem, Unit, UnitEntry
from compress.allocate.variants import FIXED, TABLE
from compress.errors import BudgetError, CheckpointError
from compress.model import sublayers
from compress.model.skeleton import Skeleton
from compress.process_memory import show
from compress.recipe.schema import Target, Units
from compress.run.outside_plan import TableOptions
from compress.storage.checkpoint import read_json, write_text
from compress.types import LinearSpec

TABLE_KL: Final = "table_kl"  # name of the damage of tables; they have it under the names of all others, too


@dataclass(frozen=True)
class SensitivityTable:
    """Units with their entries, and what else the model stores."""

    units: tuple[Unit, ...]
    options: tuple[str, ...]  # names, as the recipe lists them; those of tables last
    fixed_nbytes: int  # of linears that rules decide
    fixed_numel: int
    other_nbytes: int  # of all tensors that are neither units nor decided by rules
    source_nbytes: int  # of the whole model as it is
    tokens: int  # of the calibration
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # seconds, token-forwards, notes of measuring

    @property
    def numel(self) -> int:
        """Return the number of weights of all units, tables among them, and of those that rules decide."""
        return sum(unit.numel for unit in self.units) + self.fixed_numel

    def room(self, target: Target) -> int:
        """Return the bytes that a target leaves for the units, tables among them."""
        if target.unit == "bpw":
            return int(target.value * self.numel / 8) - self.fixed_nbytes
        return target.nbytes - self.other_nbytes - self.fixed_nbytes

    def problem_within(self, room: int) -> Problem:
        """Return the allocation of so many bytes of units, at most of what the largest entries take."""
        return Problem(self.units, min(room, Problem(self.units, 0).most))

    def problem(self, target: Target) -> Problem:
        """Return the allocation of a target's bytes; BudgetError for one that no choice reaches."""
        problem = self.problem_within(self.room(target))
        if problem.budget < problem.least:
            least = problem.least + self.fixed_nbytes
            raise BudgetError(
                f"the target {target.text} is below the least that the options allow: {8 * least / self.numel:.3f} bpw "
                f"for {self.counted_weights}, {show(least + self.other_nbytes)} in all; raise it, or offer smaller "
                "options"
            )
        return problem

    @property
    def counted_weights(self) -> str:
        """What the bits of a target are those of, in words."""
        return "linears and tables" if any(unit.is_table for unit in self.units) else "the linears"

    def bpw(self, choice: Choice) -> float:
        """Return the stored bits a quantized weight of a choice."""
        return 8 * (Problem(self.units, 0).nbytes(choice) + self.fixed_nbytes) / self.numel

    def nbytes(self, choice: Choice) -> int:
        """Return the bytes of the whole model with a choice."""
        return Problem(self.units, 0).nbytes(choice) + self.fixed_nbytes + self.other_nbytes

    @property
    def most_nbytes(self) -> int:
        """Return the bytes of the whole model with every unit at its largest entry."""
        return Problem(self.units, 0).most + self.fixed_nbytes + self.other_nbytes

    def option_numbers(self, choice: Choice) -> dict[str, int]:
        """Return linear or table -> number of its option."""
        numbers = {name: number for number, name in enumerate(self.options)}
        return {
            member: numbers[unit.entries[i].option]
            for unit, i in zip(self.units, choice, strict=True)
            for member in unit.members
        }

    def uniform(self, option: str) -> Choice | None:
        """Return the choice of one option for all linears, with every table at its largest entry.

        None if some linear has no such entry.
        """
        choice: list[int] = []
        for unit in self.units:
            places = [i for i, entry in enumerate(unit.entries) if entry.option == option]
            if not (places or unit.is_table):
                return None
            choice.append(len(unit.entries) - 1 if unit.is_table else places[0])
        return tuple(choice)


class UnitLinears(NamedTuple):
    """The linears of a unit of an allocation."""

    name: str  # model.layers.0.self_attn.{q_proj,k_proj,v_proj}
    members: tuple[LinearSpec, ...]


def group_linears(skeleton: Skeleton, specs: Sequence[LinearSpec], units: Units) -> list[UnitLinears]:
    """Return the linears in groups, in model order.

    fused: linears of one module that read the same input (q, k, v; gate, up), and all experts of a module. expert: the
    same, but each expert by itself, its inputs and its output together. linear: each by itself. sublayer: attention, or
    the MLP with its experts (compress/model/sublayers.py). block: all of a block.
    Linears that are made of the same stored tensor are always together (but for experts, which share theirs).
    """

    def read_together(spec: LinearSpec) -> str:
        return f"{_module_above(spec.name)} {spec.input_key}"

    of_sublayers = sublayers.sublayers(skeleton, list(specs)) if units == "sublayer" else {}
    keys: dict[Units, Callable[[LinearSpec], str]] = {
        "linear": lambda spec: spec.name,
        "fused": lambda spec: _module_above(spec.name, 2) if spec.is_expert else read_together(spec),
        "expert": lambda spec: _module_above(spec.name) if spec.is_expert else read_together(spec),
        "sublayer": lambda spec: of_sublayers[spec.name],
        "block": lambda spec: str(spec.block),
    }
    by_key: dict[str, list[LinearSpec]] = {}
    shared: dict[str, str] = {}  # stored tensor -> the key of the first linear that is made of it
    for spec in specs:
        key = keys[units](spec)
        if not spec.is_expert:
            for stored in skeleton.weight_sources(spec):
                key = shared.setdefault(stored.name, key)
        by_key.setdefault(key, []).append(spec)
    return [UnitLinears(_common_name([spec.name for spec in members]), tuple(members)) for members in by_key.values()]


def _module_above(name: str, steps: int = 1) -> str:
    """Return the name of the module that holds a linear, or of one further up."""
    return name.rsplit(".", steps)[0]


def _common_name(names: Sequence[str]) -> str:
    """Return one name for all: their common path, and what differs in braces where that stays short."""
    if len(names) == 1:
        return names[0]
    parts = [name.split(".") for name in names]
    common = 0
    while all(len(part) > common and part[common] == parts[0][common] for part in parts):
        common += 1
    path = ".".join(parts[0][:common])
    leaves = list(dict.fromkeys(part[-1] for part in parts))
    depth = {len(part) - common for part in parts}
    return f"{path}.{{{','.join(leaves)}}}" if depth == {1} else path


def open_groups(opened: prepare_options.Options) -> list[UnitLinears]:
    """Group the linears that an allocation decides on, those without a fixed option, into units."""
    plans = [plan for plan in opened.levels.values() if FIXED not in plan]
    specs = [next(iter(by_option.values())).spec for by_option in plans]
    return group_linears(opened.prepared.skeleton, specs, opened.allocation.units)


def assemble(
    opened: prepare_options.Options,
    damages: Mapping[str, Mapping[str, Sequence[float]]],
    scores: Mapping[str, Mapping[str, float]],
    tokens: int,
    facts: Mapping[str, Any],
) -> SensitivityTable:
    """Make the table of a model at every option, with the planned bytes, which are exact.

    damages: estimator -> unit -> by option (of tables, their own). scores: name -> unit -> score.
    """
    made = []
    for group in open_groups(opened):
        numel = sum(member.numel for member in group.members)
        entries = []
        for option in prepare_options.options_of(opened, group.members):
            nbytes = prepare_options.nbytes(opened, group.members, option)
            damage = {name: units[group.name][option] for name, units in damages.items() if group.name in units}
            entries.append(
                UnitEntry(opened.names[option], nbytes, 8 * nbytes / numel, damage, option in opened.base_options)
            )
        entries.sort(key=lambda entry: entry.nbytes)
        first, names = group.members[0], tuple(member.name for member in group.members)
        known = {name: units[group.name] for name, units in scores.items() if group.name in units}
        made.append(Unit(group.name, names, first.block, numel, tuple(entries), first.is_expert, known))
    estimators = [name for name in damages if name != TABLE_KL]
    made += _table_units(opened, damages.get(TABLE_KL, {}), estimators)
    plan, counted = opened.prepared.plan, {name for table in opened.tables for name in table.sources}
    fixed = [by_option[FIXED] for by_option in opened.levels.values() if FIXED in by_option]
    return SensitivityTable(
        tuple(made),
        (*opened.names, *opened.table_names),
        sum(layer.nbytes for layer in fixed),
        sum(layer.spec.numel for layer in fixed),
        sum(nbytes for name, nbytes in plan.kept_nbytes.items() if name not in counted)
        + sum(table.nbytes for table in plan.tables),
        opened.prepared.skeleton.checkpoint.nbytes,
        tokens,
        facts,
    )


def _table_units(
    opened: prepare_options.Options, kls: Mapping[str, Sequence[float]], estimators: Iterable[str]
) -> list[Unit]:
    """Return a unit for each open table; kls: table -> by option of tables, {} where nothing is measured."""
    estimators, block = [*estimators, TABLE_KL], len(opened.prepared.skeleton.blocks)
    made = []
    for table in opened.tables:
        entries = []
        for number, nbytes in table_sizes(opened, table).items():
            damage = dict.fromkeys(estimators, kls[table.spec.name][number]) if table.spec.name in kls else {}
            entries.append(UnitEntry(opened.table_names[number], nbytes, 8 * nbytes / table.spec.numel, damage))
        entries.sort(key=lambda entry: entry.nbytes)
        name = table.spec.name
        made.append(Unit(name, (name,), block, table.spec.numel, tuple(entries), is_table=True))
    return made


def table_sizes(opened: prepare_options.Options, table: TableOptions) -> dict[int, int]:
    """Return number of an option of tables -> exact bytes of this table, at those that it can have."""
    offered = {number: layer.nbytes for number, layer in table.layers.items()}
    kept = [number for number, option in enumerate(opened.allocation.tables) if option is None]
    return offered | dict.fromkeys(kept, sum(table.sources.values()))


def save(table: SensitivityTable, folder: Path) -> None:
    """Write the table as sensitivity.json."""
    write_text(folder / TABLE, json.dumps(dataclasses.asdict(table), indent=1) + "\n")


def load(folder: Path) -> SensitivityTable:
    """Read the table in a folder; CheckpointError if it is damaged."""
    values = read_json(folder / TABLE)
    try:
        units = tuple(
            Unit(
                **{
                    **unit,
                    "members": tuple(unit["members"]),
                    "entries": tuple(UnitEntry(**entry) for entry in unit["entries"]),
                }
            )
            for unit in values.pop("units")
        )
        return SensitivityTable(units, tuple(values.pop("options")), **values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder / TABLE} is not a table of this version; remove it to measure anew") from error
