"""The table that allocators choose from, as sensitivity.json, and what a target means in bytes of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.allocate.problem import Choice, Entry, Problem, Unit
from compress.allocate.variants import TABLE
from compress.errors import BudgetError, CheckpointError
from compress.process_memory import UNITS, show
from compress.recipe.schema import Target
from compress.storage.checkpoint import read_json, write_text


@dataclass(frozen=True)
class Table:
    """Units with their entries, and what else the model stores. `samples` and `tokens`: of the calibration."""

    units: tuple[Unit, ...]
    options: tuple[str, ...]  # names, as the recipe lists them
    fixed_nbytes: int  # of linears that rules decide
    fixed_numel: int
    other_nbytes: int  # of all tensors that are not packed
    source_nbytes: int  # of the whole model as it is
    tokens: int
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # seconds, token-forwards, notes of measuring

    @property
    def numel(self) -> int:
        """Quantized weights, those that rules decide included."""
        return sum(unit.numel for unit in self.units) + self.fixed_numel

    def problem(self, target: Target) -> Problem:
        """Raises BudgetError for a target that no choice reaches, or that is above the model's own size."""
        if target.unit == "bpw":
            total = int(target.value * self.numel / 8)
        else:
            total = int(target.value * UNITS[target.unit.upper()]) - self.other_nbytes
        dense = self.source_nbytes - self.other_nbytes
        if total > dense:
            raise BudgetError(
                f"the target {target.text} is more than the linears take as they are ({show(dense)}, "
                f"{8 * dense / self.numel:.2f} bits a weight); lower it"
            )
        problem = Problem(self.units, total - self.fixed_nbytes)
        if problem.budget < problem.least:
            least = problem.least + self.fixed_nbytes
            raise BudgetError(
                f"the target {target.text} is below the least that the options allow: {8 * least / self.numel:.3f} bpw "
                f"for the linears, {show(least + self.other_nbytes)} in all; raise it, or offer smaller options"
            )
        return problem

    def bpw(self, choice: Choice) -> float:
        """Stored bits a quantized weight of a choice."""
        return 8 * (Problem(self.units, 0).nbytes(choice) + self.fixed_nbytes) / self.numel

    def nbytes(self, choice: Choice) -> int:
        """Of the whole model."""
        return Problem(self.units, 0).nbytes(choice) + self.fixed_nbytes + self.other_nbytes

    def levels(self, choice: Choice) -> dict[str, int]:
        """Linear -> number of its option."""
        numbers = {name: number for number, name in enumerate(self.options)}
        return {
            member: numbers[unit.entries[i].option]
            for unit, i in zip(self.units, choice, strict=True)
            for member in unit.members
        }

    def uniform(self, option: str) -> Choice | None:
        """Every unit at one option; None if some unit has no such entry."""
        found = [next((i for i, e in enumerate(unit.entries) if e.option == option), None) for unit in self.units]
        return tuple(i for i in found if i is not None) if None not in found else None


def save(table: Table, folder: Path) -> None:
    write_text(folder / TABLE, json.dumps(dataclasses.asdict(table), indent=1) + "\n")


def load(folder: Path) -> Table:
    """The table in a folder; CheckpointError if it is damaged."""
    values = read_json(folder / TABLE)
    try:
        units = tuple(
            Unit(
                **{
                    **unit,
                    "members": tuple(unit["members"]),
                    "entries": tuple(Entry(**entry) for entry in unit["entries"]),
                }
            )
            for unit in values.pop("units")
        )
        return Table(units, tuple(values.pop("options")), **values)
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / TABLE} is not a table of this version; remove it to measure anew") from error
