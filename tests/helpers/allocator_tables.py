"""Tables of units made here, on which allocators decide."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from compress.allocate.problem import FROM_BASE, KL_ONE_AT_A_TIME, Allocated, Choice, Problem, Unit, UnitEntry

ESTIMATORS = (
    "hessian",
    "output",
    "weight",
    "fisher",
    "gradient",
    KL_ONE_AT_A_TIME,
    FROM_BASE,
    "noise",
    "expert",
)
BITS = (2, 3, 4, 8)


def model(
    blocks: int = 4,
    kinds: Sequence[int] = (1, 4, 3),
    is_expert: bool = False,
    seed: int = 0,
    bits: Sequence[int] = BITS,
) -> tuple[Unit, ...]:
    """Per block one unit of each size in `kinds` (thousands of weights) with every estimator and score at random."""
    rng = np.random.default_rng(seed)
    units = []
    for block in range(blocks):
        for part, size in enumerate(kinds):
            alphas = {name: float(rng.lognormal(0, 1.5)) for name in ESTIMATORS}
            alphas["expert_squares"] = alphas[KL_ONE_AT_A_TIME] * alphas["expert"]
            entries = tuple(
                UnitEntry(f"bits={b}", size * 125 * b + 16, b, {k: a * size * 4.0**-b for k, a in alphas.items()})
                for b in bits
            )
            scores = {name: float(rng.random()) for name in ("lim", "zd", "share", "routing")}
            name = f"model.layers.{block}.experts.{part}" if is_expert else f"model.layers.{block}.part{part}"
            units.append(Unit(name, (name,), block, size * 1000, entries, is_expert, scores))
    return tuple(units)


def with_values(units: Sequence[Unit], key: str, values: Sequence[Any], of: Callable[[Any], Any] = lambda v: v) -> Any:
    """Units with a score each, or a damage for each entry, of their own."""
    found = []
    for unit, value in zip(units, values, strict=True):
        if isinstance(value, Sequence):
            pairs = zip(unit.entries, value, strict=True)
            entries = tuple(dataclasses.replace(e, damage={**e.damage, key: of(v)}) for e, v in pairs)
            found.append(dataclasses.replace(unit, entries=entries))
        else:
            found.append(dataclasses.replace(unit, scores={**unit.scores, key: of(value)}))
    return tuple(found)


def problem(units: tuple[Unit, ...], bpw: float) -> Problem:
    return Problem(units, int(bpw * sum(unit.numel for unit in units) / 8))


def run(method: ModuleType, given: Problem, **settings: Any) -> Allocated:
    found: Allocated = method.allocate(given, method.Config(**settings), None)
    assert given.nbytes(found.choice) <= given.budget
    return found


def bits(given: Problem, choice: Choice) -> list[float]:
    return [unit.entries[i].bits for unit, i in zip(given.units, choice, strict=True)]


def best(given: Problem, damage: Callable[[Unit, UnitEntry], float]) -> float:
    """Least damage of all choices."""
    losses = [[(entry.nbytes, damage(unit, entry)) for entry in unit.entries] for unit in given.units]
    sums = ((sum(b for b, _ in c), sum(d for _, d in c)) for c in itertools.product(*losses))
    return min(d for b, d in sums if b <= given.budget)
