"""Knapsack: least summed damage within the bytes, by measured or estimated damage of each unit and option.

Takes any of the estimators, from cheap ones by statistics to the KL of the whole model with one unit changed at a time,
and adds damages up; hull greedy, or the exact 0/1 program (allocate/solver.py).

Errors of a layer's output are not comparable between blocks: a given error weighs more in one block than in another.
`scale` names a second estimator that knows: the damages of each block are multiplied so that their sum over the block's
units and options is that of the second one. With `scale: noise`, the slope of the KL in the size of random noise on the
weights (the linearity theorem, arXiv 2411.17525), one factor a block is what is asked of it, and options within a block
are still told apart by what they do to real inputs.

Damages that depend on each other do not add up: at two bits a unit does more harm among others at two bits than alone.
`rounds` measures them again around what was chosen (allocate/rounds.py), and keeps the best choice.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from compress.allocate import rounds
from compress.allocate.problem import (
    AUTO,
    JOINT,
    Allocated,
    BlockScale,
    Estimator,
    Problem,
    ShareEvaluator,
)
from compress.allocate.solver import Solver, SolverLimits, damages_of, solve


@dataclass(frozen=True)
class Config(SolverLimits):
    estimator: Estimator = AUTO  # measured or estimated damage of each unit at each option, which is added up; auto:
    # the best that fits into the time
    scale: BlockScale = "none"  # damage to which the sum of each block is scaled; none: not scaled
    solver: Solver = "hull"  # hull: greedy on convex hulls; milp: a 0/1 program, exact to `gap`
    rounds: int = 0  # [rounds] of measuring damages again around the choice, each at a backward and two forward passes

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounds < 0:
            raise ValueError(f"rounds {self.rounds} is negative")
        if self.scale == self.estimator:
            raise ValueError(f"scale {self.scale!r} is the estimator itself")


def needs(config: Config) -> frozenset[str]:
    """Return the damages that must be in the table."""
    return frozenset({config.estimator, config.scale, *([JOINT] if config.rounds else [])} - {"none"})


def allocate(problem: Problem, config: Config, evaluator: ShareEvaluator | None = None) -> Allocated:
    problem.check()
    damages = damages_of(problem, config.estimator)
    if config.scale != "none":
        damages = _scale_to(problem, damages, damages_of(problem, config.scale))

    def solve_damages(known: list[list[float]]) -> Allocated:
        return solve(problem, known, config.solver, limits=config).to_allocated()

    if not config.rounds:
        return solve_damages(damages)
    assert evaluator is not None, "needs() asks for an evaluator"
    return rounds.improve(problem, damages, config.rounds, solve_damages, evaluator)


def _scale_to(problem: Problem, damages: list[list[float]], scales: list[list[float]]) -> list[list[float]]:
    """Multiply the damages by one factor a block, after which a block's sum is that of `scales`; 0 stays 0."""
    have, want = defaultdict[int, float](float), defaultdict[int, float](float)
    for unit, losses, scale in zip(problem.units, damages, scales, strict=True):
        have[unit.block] += sum(losses)
        want[unit.block] += sum(scale)
    factor = {block: want[block] / have[block] if have[block] > 0 else 1.0 for block in have}
    return [[loss * factor[unit.block] for loss in losses] for unit, losses in zip(problem.units, damages, strict=True)]
