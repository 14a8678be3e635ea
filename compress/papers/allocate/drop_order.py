"""Drop order: the smallest entry for units by a simple rule, the largest for all others; rivals of a search.

Two rules. `angular`: units that turn the residual stream least go first, by the mean over tokens of the angle between
what they read and what they leave ("The unreasonable ineffectiveness of the deeper layers", arXiv 2403.17887, and
ShortGPT, arXiv 2403.03853, of whole blocks; here of each unit of a block, in turn). `even`: units at even distances go
(unified layer skipping, arXiv 2404.06954), attentions and MLPs apart.

Made for `units: sublayer` with the options {method: drop} and {keep: true}. A knapsack on `kl_one_at_a_time` is the
third simple rule, and better than both: docs/results/sparsity.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from compress.allocate.problem import Allocated, ChoiceEvaluator, Problem

if TYPE_CHECKING:
    from compress.allocate.sensitivity import Measurements


@dataclass(frozen=True)
class Config:
    score: Literal["angular", "even"] = "angular"  # units that turn the residual stream least go (angular), or those
    # at even distances


def _measure_angles(store: Measurements) -> None:
    from compress.papers.allocate import block_scores

    block_scores.measure_angles(store)


METRICS = {"angular": _measure_angles}  # what compress/allocate/metrics.py does not measure


def needs(config: Config) -> frozenset[str]:
    """Return the score of the units."""
    return frozenset({config.score} - {"even"})


def allocate(problem: Problem, config: Config, evaluator: ChoiceEvaluator | None = None) -> Allocated:
    problem.check()
    units = problem.units
    largest = [max(range(len(unit.entries)), key=lambda i, u=unit: u.entries[i].nbytes) for unit in units]  # type: ignore[misc]
    for count in range(len(units) + 1):
        chosen = list(largest)
        for unit in _order(problem, config, count):
            sizes = [entry.nbytes for entry in units[unit].entries]
            chosen[unit] = sizes.index(min(sizes))
        if problem.nbytes(tuple(chosen)) <= problem.budget:
            return Allocated(tuple(chosen), facts={"dropped": float(count)})
    raise AssertionError("the smallest entries fit: check() has seen it")


def _order(problem: Problem, config: Config, count: int) -> list[int]:
    """Return the units that go when so many do."""
    if config.score == "even":
        by_kind = sorted(range(len(problem.units)), key=lambda i: (problem.units[i].kind, problem.units[i].block))
        return [by_kind[int((i + 0.5) * len(by_kind) / count)] for i in range(count)]
    scores = [unit.scores[config.score] for unit in problem.units]
    return sorted(range(len(scores)), key=lambda i: (scores[i], i))[:count]
