"""Budgets beside bytes: a share of the units that are not dropped, or of the time that a token takes.

`75% units` leaves three quarters of the units, whatever their sizes. `70% time` leaves linears that take 70% of the
original's time at one token, measured on this machine (compress/allocate/times.py). An allocator sees the cost of an
entry in the place of its bytes; all else, and the search, stays the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from compress.allocate.problem import Problem, Unit
from compress.allocate.table import SensitivityTable
from compress.errors import BudgetError
from compress.recipe.schema import Target


@dataclasses.dataclass(frozen=True)
class Costs:
    """What every entry of a table costs, and the original."""

    entries: Sequence[Sequence[int]]  # of each unit, in the order of its entries
    original: int


def count_units(units: Sequence[Unit]) -> Costs:
    """Return 1 for a unit of which something is stored, 0 for one that is dropped."""
    return Costs([[int(entry.nbytes > 0) for entry in unit.entries] for unit in units], len(units))


def problem(table: SensitivityTable, target: Target, costs: Costs) -> tuple[SensitivityTable, Problem]:
    """Return the table with entries in the order of their costs, and the allocation of a target's share of them.

    Raises BudgetError for a target that no choice reaches.
    """
    units, priced = list[Unit](), list[Unit]()
    for unit, row in zip(table.units, costs.entries, strict=True):
        order = sorted(range(len(row)), key=lambda i: (row[i], unit.entries[i].nbytes))
        entries = tuple(unit.entries[i] for i in order)
        units.append(dataclasses.replace(unit, entries=entries))
        prices = tuple(dataclasses.replace(unit.entries[i], nbytes=row[i]) for i in order)
        priced.append(dataclasses.replace(unit, entries=prices))
    made = Problem(tuple(priced), int(target.value / 100 * costs.original + 1e-9))
    if made.budget < made.least:
        least = 100 * made.least / max(1, costs.original)
        raise BudgetError(f"the target {target.text} is below the least that the options allow, {least:.1f}%; raise it")
    made = dataclasses.replace(made, budget=min(made.budget, made.most))
    return dataclasses.replace(table, units=tuple(units)), made
