"""Sum up the outcomes of a task: accuracy with its interval, and the paired comparison with the original.

`summary` takes the outcomes of one model, or of two whose items are joined by name, from wherever they come: answers.py
makes them of our tasks, and another tool's per-item results do as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from compress.evaluate import intervals
from compress.evaluate.items import Outcome, Task


@dataclass(frozen=True)
class Paired:
    """What a model does with the items of a task beside what the original does with them."""

    base_accuracy: float
    difference: float  # of accuracies, model - base
    difference_low: float  # 95% interval
    difference_high: float
    ratio: float | None  # of accuracies, model / base; None where the base has none right
    ratio_low: float | None  # 95% interval
    ratio_high: float | None
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
    figures: Mapping[str, Mapping[str, float | None]]  # name -> base, difference, low and high of its 95% interval


@dataclass(frozen=True)
class Group:
    """Figures of the items of a task that share a fact, such as the depth of what is asked."""

    value: Any  # of the fact
    items: int
    accuracy: float
    base_accuracy: float
    nll: float | None  # nats a token of the right answers
    base_nll: float | None


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
    figures: Mapping[str, float] = field(default_factory=dict)  # means of what else a task says: token F1, ROUGE-L
    by: str = ""  # the fact that `groups` go by; "" without them
    groups: tuple[Group, ...] = ()  # values ascending


def summary(task: str, way: str, outcomes: Sequence[Outcome], base: Sequence[Outcome] | None = None) -> TaskScore:
    """Return the figures of a task; base: the original's outcomes of the same items, in any order.

    ValueError for outcomes that do not belong together, or none.
    """
    names = [outcome.name for outcome in outcomes]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"task {task}: {len(names)} outcomes of {len(set(names))} items")
    right = sum(outcome.right for outcome in outcomes)
    low, high = intervals.wilson(right, len(names))
    nll, kl = (intervals.mean_error(known) if known else (None, None) for known in (_nll(outcomes), _kl(outcomes)))
    return TaskScore(
        task=task,
        way=way,
        items=len(names),
        accuracy=right / len(names),
        accuracy_low=low,
        accuracy_high=high,
        accuracy_by_bytes=_mean([o.right_by_bytes for o in outcomes]),
        tokens_right=_mean([o.tokens_right for o in outcomes]),
        nll=nll[0],
        nll_se=nll[1],
        kl=kl[0],
        kl_se=kl[1],
        paired=None if base is None else _compare_pairs(task, outcomes, base),
        figures={name: intervals.mean_error([o.figures[name] for o in outcomes])[0] for name in outcomes[0].figures},
    )


def of_task(task: Task, outcomes: Sequence[Outcome], base: Sequence[Outcome] | None = None) -> TaskScore:
    """Return the figures of a task as `summary` does, and with a base those for each value of the fact `task.by`."""
    score = summary(task.name, task.way, outcomes, base)
    return score if base is None else replace(score, by=task.by, groups=groups(task, outcomes, base))


def groups(task: Task, outcomes: Sequence[Outcome], base: Sequence[Outcome]) -> tuple[Group, ...]:
    """Return the figures of a model and of the original for each value of the fact `task.by`; none without one."""
    if not task.by:
        return ()
    values = {item.name: item.facts[task.by] for item in task.items}
    rows = []
    for value in sorted(set(values.values())):
        own, theirs = ([each for each in of if values[each.name] == value] for of in (outcomes, base))
        right, base_right = (sum(each.right for each in of) / len(own) for of in (own, theirs))
        rows.append(Group(value, len(own), right, base_right, _mean(_nll(own)), _mean(_nll(theirs))))
    return tuple(rows)


def _compare_pairs(task: str, outcomes: Sequence[Outcome], base: Sequence[Outcome]) -> Paired:
    by_name = {outcome.name: outcome for outcome in base}
    if by_name.keys() != {outcome.name for outcome in outcomes} or len(by_name) < len(base):
        raise ValueError(f"task {task}: the outcomes of the two models are not of the same items")
    pairs = [(by_name[outcome.name], outcome) for outcome in outcomes]
    lost = sum(before.right and not after.right for before, after in pairs)
    gained = sum(after.right and not before.right for before, after in pairs)
    right = sum(before.right for before, _ in pairs)
    low, high = intervals.paired_shares(lost, gained, len(pairs))
    ratio_low, ratio_high = intervals.paired_ratio(right - lost + gained, right, right - lost) or (None, None)
    more = [b.nll - a.nll for a, b in pairs if a.nll is not None and b.nll is not None]
    bounds = intervals.interval(more) if more else None
    base_nll, base_kl = _nll(base), _kl(base)
    return Paired(
        base_accuracy=right / len(pairs),
        difference=(gained - lost) / len(pairs),
        difference_low=low,
        difference_high=high,
        ratio=(right - lost + gained) / right if right else None,
        ratio_low=ratio_low,
        ratio_high=ratio_high,
        lost=lost,
        gained=gained,
        p_value=intervals.mcnemar(lost, gained),
        flips=(lost + gained) / len(pairs),
        all_flips=sum(before.chosen != after.chosen for before, after in pairs) / len(pairs),
        base_nll=_mean(base_nll),
        nll_difference=_mean(more),
        nll_low=bounds[0] if bounds else None,
        nll_high=bounds[1] if bounds else None,
        base_kl=_mean(base_kl),
        figures={name: _figure([(b.figures[name], a.figures[name]) for b, a in pairs]) for name in pairs[0][1].figures},
    )


def _figure(pairs: Sequence[tuple[float, float]]) -> dict[str, float | None]:
    """Return the mean of the base and the difference, model - base, with its 95% interval."""
    differences = [after - before for before, after in pairs]
    low, high = intervals.interval(differences) or (None, None)
    return {
        "base": intervals.mean_error([before for before, _ in pairs])[0],
        "difference": intervals.mean_error(differences)[0],
        "low": low,
        "high": high,
    }


def _nll(outcomes: Sequence[Outcome]) -> list[float]:
    return [outcome.nll for outcome in outcomes if outcome.nll is not None]


def _kl(outcomes: Sequence[Outcome]) -> list[float]:
    return [outcome.kl for outcome in outcomes if outcome.kl is not None]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
