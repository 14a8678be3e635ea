"""Sum up the outcomes of a task: accuracy with its interval, and the paired comparison with the original.

`summary` takes the outcomes of one model, or of two whose items are joined by name, from wherever they come: answers.py
makes them of our tasks, and another tool's per-item results do as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compress.evaluate.items import Outcome


@dataclass(frozen=True)
class Paired:
    """What a model does with the items of a task beside what the original does with them."""

    base_accuracy: float
    difference: float  # of accuracies, model - base
    difference_low: float  # 95% interval
    difference_high: float
    lost: int  # items that the original has right and the model wrong
    gained: int  # the other way round
    p_value: float  # exact McNemar test of lost against gained: how likely chance alone is at least as far apart
    flips: float  # share of items whose correctness changes
    all_flips: float  # share of items whose answer changes
    base_nll: float | None
    nll_difference: float | None  # nats a token of the right answer, model - base
    nll_low: float | None  # 95% interval
    nll_high: float | None
    base_kl: float | None


@dataclass(frozen=True)
class TaskScore:
    """Figures of one task."""

    task: str
    way: str  # as `compress.evaluate.items.Way`, or the name of the tool that it comes from
    items: int
    accuracy: float
    accuracy_low: float  # 95% interval (Wilson)
    accuracy_high: float
    accuracy_by_bytes: float | None  # of the choice by log-likelihood per byte
    tokens_right: float | None  # share of the answers' tokens that are the likeliest ones
    nll: float | None  # nats a token of the right answers
    nll_se: float | None  # standard error over items
    kl: float | None  # KL(law || model), nats a token, where the law is known
    kl_se: float | None
    paired: Paired | None  # None without a base


def summary(task: str, way: str, outcomes: Sequence[Outcome], base: Sequence[Outcome] | None = None) -> TaskScore:
    """Return the figures of a task; base: the original's outcomes of the same items, in any order."""
    raise NotImplementedError
