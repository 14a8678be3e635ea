"""Find values that are far above those of their like, such as the error of one layer among the same layer of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

SUSPECT = 4.0  # times the median of their like

Name = TypeVar("Name")


def far_above(values: Mapping[Name, float], times: float = SUSPECT) -> dict[Name, float]:
    """Return those values that are more than `times` the median, as multiples of it; none where the median is 0."""
    middle = median(values)
    return {name: value / middle for name, value in values.items() if middle > 0 and value > times * middle}


def median(values: Mapping[Name, float]) -> float:
    """Return the median, the upper one of two; 0 without values."""
    ordered = sorted(values.values())
    return ordered[len(ordered) // 2] if ordered else 0.0
