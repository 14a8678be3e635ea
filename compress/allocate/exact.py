"""Solve an allocation as a 0/1 program with scipy's HiGHS: exact to a relative gap, with side constraints.

One variable for each entry of each unit; of a unit exactly one is 1. HiGHS keeps its rows to a tolerance only, so its
answer is checked in integers; where the bytes overstep the budget it is asked again with that much less.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from compress.allocate.hull import EntryTable, Floats, Ints
from compress.errors import needs

LARGEST = 1e4  # of the row of bytes; HiGHS allows it 1e-6
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
class Limits:
    """The settings of the 0/1 solver's end. Only where it stops for time does the answer depend on the machine."""

    seconds: float = 60.0  # [seconds] that the solver may take, in all
    gap: float = 1e-6  # [fraction] between the solution and its bound, of the damage above that of all best entries

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"seconds {self.seconds} is not positive")
        if not 0 <= self.gap < 1:
            raise ValueError(f"gap {self.gap} is not in [0, 1)")


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
        return min(1.0, LARGEST / max(self.room, 1))


def program(table: EntryTable, budget: int, known: float, sides: Sequence[LinearSide], limits: Limits) -> ProgramAnswer:
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


def _milp(table: EntryTable, variables: Variables, sides: Sequence[LinearSide], room: int, limits: Limits) -> Any:
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
