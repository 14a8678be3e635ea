"""AdaQuant's integer program: which layers go below the base, by what each alone does to the loss (arXiv 2006.10518).

All units start at the base, their largest option. Of each unit the change of the loss is measured with that unit alone
at a lower option; changes add up, and the 0/1 program picks the units to lower so that enough memory is saved and the
sum is least. A change below 1e-6 counts as 1e-6: noise makes some negative, and lowering is never free.

The loss is the divergence from the original model. `low` names one option, as published; without it every smaller one
is offered, as the released code does for more than one precision.

Not done: saved cycles instead of bytes; the normalization of the same paper. Its layer-wise calibration and tuning of
biases are compress/papers/tune/adaquant.py. The knapsack on `kl_one_at_a_time` differs in its base alone (all others as
they are; 0.64 to 0.69 of the KL of uniform models). This one was not measured beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from compress.allocate.problem import FROM_BASE, Allocated, ChoiceEvaluator, Problem, Unit, option_named
from compress.allocate.solver import SolverLimits, solve

LEAST = 1e-6  # nats a token


@dataclass(frozen=True)
class Config(SolverLimits):
    low: str | None = None  # name of the option that layers below the base may get; null: any smaller one


def needs(config: Config) -> frozenset[str]:
    """Return the loss with each unit changed alone, all others at the base."""
    return frozenset({FROM_BASE})


def allocate(problem: Problem, config: Config, evaluator: ChoiceEvaluator | None = None) -> Allocated:
    problem.check()
    low = option_named(problem.units, "low", config.low, 0) if config.low is not None else None
    damages = [_changes(unit, low) for unit in problem.units]
    return solve(problem, damages, "milp", limits=config).to_allocated()


def _changes(unit: Unit, low: str | None) -> list[float]:
    """Return the change of the loss of each entry against the base, whose own is 0; inf for those not offered."""
    base = max(range(len(unit.entries)), key=lambda i: (unit.entries[i].nbytes, i))
    loss = [entry.damage[FROM_BASE] for entry in unit.entries]
    changes = [max(value - loss[base], LEAST) for value in loss]
    if low is not None:
        changes = [c if e.option == low else math.inf for c, e in zip(changes, unit.entries, strict=True)]
    changes[base] = 0.0
    return changes
