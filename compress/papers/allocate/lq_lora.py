"""LQ-LoRA's integer program: least squared weight error within the bytes (arXiv 2311.12023).

One 0/1 variable for each matrix and storage option, one option a matrix; the sum of ||W - Q_c(W)||_F^2 is minimized,
or of ||sqrt(F) * (W - Q_c(W))||_F^2 with the diagonal F of the empirical Fisher information.

Differences from the released code: HiGHS instead of Gurobi, stopped after 60 seconds as there; the options are those of
the recipe instead of 432 settings of one codebook; costs are divided by the cost of the greedy's choice, where the code
scales their norm to 1000, which says the same to the solver and does not depend on options that no one would take.

A low-rank part that is taken off a weight before its error is measured is that of the option: {bits: 3, lowrank: {rank:
8}}. Plain weight errors compare badly between matrices: large ones dominate, whatever goes through them. KL
of the knapsack on `weight` is 1.00 to 1.07 of that of uniform models of the same bytes, on `fisher` 0.72 to 0.78, on
`kl_one_at_a_time` 0.64 to 0.69 (bundled model, docs/results/allocation.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from compress.allocate.problem import Allocated, ChoiceEvaluator, Problem
from compress.allocate.solver import SolverLimits, damages_of, solve


@dataclass(frozen=True)
class Config(SolverLimits):
    estimator: Literal["weight", "fisher"] = "weight"  # damage that is added up: squared weight error, or that weighted
    # by the Fisher information


def needs(config: Config) -> frozenset[str]:
    """Return the damage that must be in the table."""
    return frozenset({config.estimator})


def allocate(problem: Problem, config: Config, evaluator: ChoiceEvaluator | None = None) -> Allocated:
    problem.check()
    damages = damages_of(problem, config.estimator)
    return solve(problem, damages, "milp", limits=config).to_allocated()
