"""Uniform: one option for all units, the largest that fits; what every allocation is compared with.

`fill: order` gives what is left of the budget to units in a fixed order, one step up each, then again from the start:
linears outside experts first, and of those the blocks nearest to either end of the model. That is the order of
exllamav3's conversion without measurements, except that it puts attention before the MLP; without `fill` the rest is
unspent.

Not done: any look at what an option does to the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from compress.allocate.problem import Allocated, ChoiceEvaluator, Problem, entries_at, option_named, rank_options
from compress.errors import BudgetError


@dataclass(frozen=True)
class Config:
    option: str | None = None  # name of the option of all units; null: the largest that fits
    fill: Literal["none", "order"] = "none"  # bytes that are left over: unused (none), or for the first and the last
    # blocks (order)


def needs(config: Config) -> frozenset[str]:
    """Ask for no measurements."""
    return frozenset()


def allocate(problem: Problem, config: Config, evaluator: ChoiceEvaluator | None = None) -> Allocated:
    """Take the same option for every unit; where a unit is not offered it, the largest of its own below."""
    problem.check()
    if config.option is not None:
        option = option_named(problem.units, "option", config.option, 0)
        chosen = entries_at(problem.units, option)
        if (nbytes := problem.nbytes(tuple(chosen))) > problem.budget:
            raise BudgetError(
                f"{option} everywhere takes {nbytes} bytes, more than the budget of {problem.budget}; raise the "
                "target, or leave allocate.option out"
            )
    else:
        option, chosen = _largest(problem)
    if config.fill == "order":
        _fill(problem, chosen)
    left = problem.budget - problem.nbytes(tuple(chosen))
    return Allocated(tuple(chosen), facts={"option": option, "unspent": float(left)})


def _largest(problem: Problem) -> tuple[str, list[int]]:
    """Return the largest option whose bytes are within the budget, and its choice."""
    for option in reversed(rank_options(problem.units)):
        chosen = entries_at(problem.units, option)
        if problem.nbytes(tuple(chosen)) <= problem.budget:
            return option, chosen
    sizes = [[entry.nbytes for entry in unit.entries] for unit in problem.units]
    return "smallest", [row.index(min(row)) for row in sizes]  # which is not the same option for all


def _fill(problem: Problem, chosen: list[int]) -> None:
    """Step to each unit's next larger entry, in order, while the steps fit."""
    last = max(unit.block for unit in problem.units)
    order = sorted(
        range(len(problem.units)),
        key=lambda i: (problem.units[i].is_expert, min(problem.units[i].block, last - problem.units[i].block), i),
    )
    room, is_done = problem.budget - problem.nbytes(tuple(chosen)), False
    while not is_done:
        is_done = True
        for i in order:
            entries = problem.units[i].entries
            larger = [(e.nbytes, index) for index, e in enumerate(entries) if e.nbytes > entries[chosen[i]].nbytes]
            if larger and min(larger)[0] - entries[chosen[i]].nbytes <= room:
                nbytes, index = min(larger)
                room -= nbytes - entries[chosen[i]].nbytes
                chosen[i], is_done = index, False
