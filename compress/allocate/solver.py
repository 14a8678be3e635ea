"""Choose one entry for each unit: least total damage within a budget of bytes.

Two solvers of the multiple-choice knapsack: greedy on convex hulls (hull.py, any number of units, with a certificate of
how far from the best it can be) and a 0/1 program (exact.py, exact to a gap, with side constraints). A dynamic program
over the budget is left out: with a budget in buckets rounding costs up wastes half a bucket a unit (21-43% more damage
on 200 units in 2000 buckets, where the greedy is within 0.05%), and an exact one needs as many states as bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from compress.allocate import exact, hull
from compress.allocate.exact import Limits, LinearSide
from compress.allocate.hull import EntryTable, Ints
from compress.allocate.problem import AUTO, BEST_FIRST, Allocated, Choice, Problem
from compress.errors import BudgetError, NumericalError

__all__ = ["Damages", "Limits", "LinearSide", "Solution", "Solver", "damages_of", "solve"]

Damages = Sequence[Sequence[float]]  # of each unit, of each entry; inf: the entry may not be taken
Solver = Literal["hull", "milp"]


@dataclass(frozen=True)
class Solution:
    """A choice with its damage and a bound of the least damage."""

    choice: Choice
    damage: float
    bound: float  # no choice within the budget that keeps the constraints has less damage
    notes: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """Return how far above the bound the damage is, as a fraction of the damage."""
        return (self.damage - self.bound) / self.damage if self.damage > 0 else 0.0

    def allocated(self) -> Allocated:
        """Return the choice as the answer of an allocator."""
        return Allocated(self.choice, self.notes, facts={"damage": self.damage, "bound": self.bound})


def damages_of(problem: Problem, estimator: str) -> list[list[float]]:
    """Return the damages of all units and entries by one estimator; auto: by the best one that the table has."""
    if estimator == AUTO:
        known = problem.units[0].entries[0].damage if problem.units else {}
        estimator = next((name for name in BEST_FIRST if name in known), AUTO)
    return [[entry.damage[estimator] for entry in unit.entries] for unit in problem.units]


def solve(
    problem: Problem,
    damages: Damages,
    solver: Solver = "hull",
    constraints: Sequence[LinearSide] = (),
    limits: Limits | None = None,
) -> Solution:
    """Find the choice of least damage within the budget, exactly or nearly so; no upgrade that fits is left.

    Constraints need "milp". Where the 0/1 solver finds nothing in its time the greedy's choice is returned, with a
    note; with constraints that is an error. Damage may be negative. Raises BudgetError where
    there is no such choice.
    """
    if constraints and solver != "milp":
        raise ValueError(f"solver {solver!r} keeps no constraints; use 'milp'")
    table = _table(problem, damages)
    pareto = table.undominated()
    least = int(pareto.nbytes[:, 0].sum())
    if least > problem.budget:
        raise BudgetError(
            f"the smallest allowed options take {least} bytes, more than the budget of {problem.budget}; raise the "
            "target, or offer smaller options"
        )
    at, bound = hull.greedy(pareto, problem.budget)
    if solver == "hull":
        return _solution(pareto, at, bound)
    known = pareto.loss(at)
    answer = exact.program(table if constraints else pareto, problem.budget, known, constraints, limits or Limits())
    bound = max(bound, answer.bound)
    notes = (answer.note,) if answer.note else ()
    if constraints:
        if answer.at is None:
            raise BudgetError(_nothing(problem, answer))
        return _solution(table, _polished(table, answer.at, problem.budget, constraints), bound, notes)
    if answer.at is None:
        return _solution(pareto, at, bound, (f"{answer.note}; the greedy's choice is taken",))
    found = hull.upgraded(pareto, answer.at, problem.budget)
    return _solution(pareto, found if pareto.loss(found) < known else at, bound, notes)


def _nothing(problem: Problem, answer: exact.ProgramAnswer) -> str:
    if answer.is_impossible:
        what = f"no choice within the budget of {problem.budget} bytes keeps the constraints"
        return f"{what}; raise the target, or ask for fewer units at large options"
    return f"{answer.note}; allow it more time or a larger gap, or raise the target"


def _table(problem: Problem, damages: Damages) -> EntryTable:
    """Sort allowed entries by their bytes, then damage, then index. Raises NumericalError for nan."""
    width = max((len(unit.entries) for unit in problem.units), default=1)
    shape = len(problem.units), width
    nbytes, damage = np.zeros(shape, np.int64), np.full(shape, np.inf)
    for row, (unit, losses) in enumerate(zip(problem.units, damages, strict=True)):
        count = len(unit.entries)
        nbytes[row, :count] = [entry.nbytes for entry in unit.entries]
        damage[row, :count] = losses
        if not np.isfinite(damage[row]).any():
            raise ValueError(f"{unit.name} has no entry of finite damage")
    if (bad := np.isnan(damage) | (damage == -np.inf)).any():
        row, column = np.argwhere(bad)[0]
        unit = problem.units[row]
        raise NumericalError(f"{unit.name}: the damage of {unit.entries[column].option} is {damage[row, column]}")
    index = np.broadcast_to(np.arange(width), shape)
    order = np.lexsort((index, damage, nbytes, ~np.isfinite(damage)), axis=1)
    return EntryTable(*(np.take_along_axis(array, order, 1) for array in (nbytes, damage, index)))


def _solution(table: EntryTable, at: Ints, bound: float, notes: tuple[str, ...] = ()) -> Solution:
    damage = math.fsum(table.damage[table.rows, at])
    return Solution(tuple(table.index[table.rows, at].tolist()), damage, min(bound, damage), notes)


def _polished(table: EntryTable, at: Ints, budget: int, sides: Sequence[LinearSide]) -> Ints:
    """Make single upgrades that fit and keep the sides, best first: the 0/1 solver stops a gap before the best."""
    at = at.copy()
    counted: dict[tuple[int, int], list[int]] = {}
    for number, side in enumerate(sides):
        for pair in side.indices:
            counted.setdefault(pair, []).append(number)

    def sides_of(unit: int, column: int) -> list[int]:
        return counted.get((unit, int(table.index[unit, column])), [])

    taken = np.zeros(len(sides))
    for unit, column in enumerate(at):
        taken[sides_of(unit, column)] += 1
    low, high = np.array([side.low for side in sides]), np.array([side.high for side in sides])
    while True:
        room, before = budget - table.cost(at), at.copy()
        found = hull.offers(table, at, room)
        for unit, column, takes in zip(found.unit, found.to, found.nbytes.tolist(), strict=True):
            after = taken.copy()
            after[sides_of(unit, at[unit])] -= 1
            after[sides_of(unit, column)] += 1
            if at[unit] == before[unit] and takes <= room and ((after >= low) & (after <= high)).all():
                at[unit], taken = column, after
                room -= takes
        if (at == before).all():
            return at
