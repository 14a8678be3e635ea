"""Choose one entry for each unit: least total damage within a budget of bytes.

Two solvers of the multiple-choice knapsack: greedy on convex hulls (hull.py, any number of units, with a certificate of
how far from the best it can be) and a 0/1 program with scipy's HiGHS (exact to a relative gap, with side constraints).
The program has one variable for each entry of each unit; of a unit exactly one is 1. HiGHS keeps its rows to a
tolerance only, so its answer is checked in integers; where the bytes overstep the budget it is asked again with that
much less.

A dynamic program over the budget is left out: with a budget in buckets rounding costs up wastes half a bucket a unit
(21-43% more damage on 200 units in 2000 buckets, where the greedy is within 0.05%), and an exact one needs as many
states as bytes.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from compress.allocate import hull
from compress.allocate.hull import EntryTable, Floats, Ints
from compress.allocate.problem import AUTO, BEST_FIRST, Allocated, Choice, Problem
from compress.errors import BudgetError, NumericalError, needs

Damages = Sequence[Sequence[float]]  # of each unit, of each entry; inf: the entry may not be taken
Solver = Literal["hull", "milp"]

LARGEST_COEFFICIENT = 1e4  # the row of bytes is scaled to it; HiGHS allows it 1e-6
OBJECTIVE = 1000.0  # what the damage of the known choice is scaled to; HiGHS's absolute gap is 1e-6
STEEPEST = 1e9  # the largest coefficient of the objective
ATTEMPTS = 3


@dataclass(frozen=True)
class LinearSide:
    """A constraint: of these (unit, index of an entry) pairs at least `low` and at most `high` are taken."""

    indices: tuple[tuple[int, int], ...]
    low: float = 0
    high: float = math.inf


@dataclass(frozen=True)
class SolverLimits:
    """The settings of the 0/1 solver's end. Only where it stops for time does the answer depend on the machine."""

    seconds: float = 60.0  # [seconds] that the solver may take, in all
    gap: float = 1e-6  # [fraction] between the solution and its bound, of the damage above that of all best entries

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"seconds {self.seconds} is not positive")
        if not 0 <= self.gap < 1:
            raise ValueError(f"gap {self.gap} is not in [0, 1)")


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

    def to_allocated(self) -> Allocated:
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
    limits: SolverLimits | None = None,
) -> Solution:
    """Find the choice of least damage within the budget, exactly or nearly so; no upgrade that fits is left.

    Constraints need "milp". Where the 0/1 solver finds nothing in its time the greedy's choice is returned, with a
    note; with constraints that is an error. Damage may be negative. Raises BudgetError where
    there is no such choice.
    """
    if constraints and solver != "milp":
        raise ValueError(f"solver {solver!r} keeps no constraints; use 'milp'")
    table = _table(problem, damages)
    pareto = table.drop_dominated()
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
    answer = _program(table if constraints else pareto, problem.budget, known, constraints, limits or SolverLimits())
    bound = max(bound, answer.bound)
    notes = (answer.note,) if answer.note else ()
    if constraints:
        if answer.at is None:
            raise BudgetError(_nothing(problem, answer))
        return _solution(table, _polish(table, answer.at, problem.budget, constraints), bound, notes)
    if answer.at is None:
        return _solution(pareto, at, bound, (f"{answer.note}; the greedy's choice is taken",))
    columns = hull.upgrade(pareto, answer.at, problem.budget)
    return _solution(pareto, columns if pareto.loss(columns) < known else at, bound, notes)


def _nothing(problem: Problem, answer: ProgramAnswer) -> str:
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


def _polish(table: EntryTable, at: Ints, budget: int, sides: Sequence[LinearSide]) -> Ints:
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
        upgrades = hull.offers(table, at, room)
        for unit, column, takes in zip(upgrades.unit, upgrades.to, upgrades.nbytes.tolist(), strict=True):
            after = taken.copy()
            after[sides_of(unit, at[unit])] -= 1
            after[sides_of(unit, column)] += 1
            if at[unit] == before[unit] and takes <= room and ((after >= low) & (after <= high)).all():
                at[unit], taken = column, after
                room -= takes
        if (at == before).all():
            return at


# ---------------------------------------------------------------- the 0/1 program


@dataclass(frozen=True)
class ProgramAnswer:
    """The outcome of a 0/1 program."""

    at: Ints | None  # columns [units]; None: none was found
    bound: float = -math.inf  # of the damage of any choice
    note: str = ""
    is_impossible: bool = False  # no choice keeps the sides and the budget


@dataclass(frozen=True)
class Variables:
    """The variables of a program, one for each entry that may be taken."""

    unit: Ints
    column: Ints
    cost: Floats  # scaled damage above that of the unit's best entry
    nbytes: Ints  # above the unit's smallest, in units of their greatest common divisor
    room: int  # what they may take together, in the same units
    scale: float
    floor: float  # damage of all best entries

    @property
    def factor(self) -> float:
        """Return the factor of the row of bytes."""
        return min(1.0, LARGEST_COEFFICIENT / max(self.room, 1))


def _program(
    table: EntryTable, budget: int, known: float, sides: Sequence[LinearSide], limits: SolverLimits
) -> ProgramAnswer:
    """Find the choice of least damage within the budget that keeps the sides.

    known: damage of some choice within the budget, whether it keeps the sides or not.
    """
    variables = _variables(table, budget, known, pruned=not sides)
    bound, note, room = -math.inf, "", variables.room
    for attempt in range(ATTEMPTS):
        result = _milp(table, variables, sides, room, limits)
        if attempt == 0 and result.mip_dual_bound is not None:  # later ones are of smaller budgets
            bound = result.mip_dual_bound / variables.scale + variables.floor
        if result.x is None:
            return ProgramAnswer(None, bound, _first_line(result.message), result.status == 2 and attempt == 0)
        if result.status == 1:
            note = f"the 0/1 solver stopped after {limits.seconds:g} s, {result.mip_gap:.3%} above its bound"
        taken = result.x > 0.5
        excess = int(variables.nbytes[taken].sum()) - variables.room
        if excess <= 0:
            at = np.zeros(len(table.rows), np.int64)
            at[variables.unit[taken]] = variables.column[taken]
            return ProgramAnswer(at, bound, note)
        room -= excess
    return ProgramAnswer(None, bound, f"the 0/1 solver overstepped the budget {ATTEMPTS} times")


def _first_line(message: str) -> str:
    return f"the 0/1 solver found nothing: {message.partition(chr(10))[0].rstrip('.')}"


def _variables(table: EntryTable, budget: int, known: float, pruned: bool) -> Variables:
    """Make the variables; pruned: without the entries that alone cost more than the known choice."""
    best = table.damage.min(1)
    excess = table.damage - best[:, None]
    usable = np.isfinite(table.damage)
    over = known - float(best.sum())
    if pruned:
        usable &= excess <= max(over, 0.0) * (1 + 1e-9) + 1e-12 * best[:, None]
    unit, column = np.nonzero(usable)
    cost = excess[unit, column]
    worst = float(cost.max(initial=0.0))
    scale = min(OBJECTIVE / over if over > 0 else math.inf, STEEPEST / worst if worst > 0 else 1.0)
    smallest = np.where(usable, table.nbytes, np.iinfo(np.int64).max).min(1)
    nbytes = table.nbytes[unit, column] - smallest[unit]
    divisor = max(1, int(np.gcd.reduce(nbytes)))
    room = (budget - int(smallest.sum())) // divisor
    return Variables(unit, column, cost * scale, nbytes // divisor, room, scale, float(best.sum()))


def _milp(table: EntryTable, variables: Variables, sides: Sequence[LinearSide], room: int, limits: SolverLimits) -> Any:
    """Return HiGHS's result."""
    with needs("scipy", "an exact allocation"):
        from scipy.optimize import LinearConstraint, milp
        from scipy.sparse import csr_array

    units, count = len(table.rows), len(variables.unit)
    one = csr_array((np.ones(count), (variables.unit, np.arange(count))), shape=(units, count))
    nbytes = csr_array(variables.nbytes[None] * variables.factor)
    constraints = [LinearConstraint(one, 1, 1), LinearConstraint(nbytes, -np.inf, room * variables.factor)]
    if sides:
        number = np.full(table.damage.shape, -1)  # of the variable of a unit's own entry
        number[variables.unit, table.index[variables.unit, variables.column]] = np.arange(count)
        pairs = [(row, number[pair]) for row, side in enumerate(sides) for pair in side.indices if number[pair] >= 0]
        row, variable = np.array(pairs, np.int64).reshape(-1, 2).T
        matrix = csr_array((np.ones(len(row)), (row, variable)), shape=(len(sides), count))
        constraints.append(LinearConstraint(matrix, [s.low for s in sides], [s.high for s in sides]))
    options = {"time_limit": limits.seconds, "mip_rel_gap": limits.gap}
    with _quiet():
        return milp(variables.cost, integrality=np.ones(count), bounds=(0, 1), constraints=constraints, options=options)


@contextmanager
def _quiet() -> Iterator[None]:
    """Send to stderr what C code prints: HiGHS writes a line now and then at its own will, and stdout may be JSON."""
    if os.name != "posix":
        yield
        return
    flush, stdout = ctypes.CDLL(None).fflush, os.dup(1)
    flush(None)
    os.dup2(2, 1)
    try:
        yield
    finally:
        flush(None)
        os.dup2(stdout, 1)
        os.close(stdout)
