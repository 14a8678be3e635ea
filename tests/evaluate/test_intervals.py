"""Intervals cover the truth as often as they say, and the paired test is exact."""

from __future__ import annotations

import math
import random

import pytest
import torch

from compress.evaluate import intervals

RUNS = 1500  # of each simulation: the standard error of a coverage near 95% is 0.6%


def covered(hits: list[bool]) -> bool:
    return 0.92 <= sum(hits) / len(hits) <= 0.98


def within(bounds: tuple[float, float] | None, truth: float) -> bool:
    return bounds is not None and bounds[0] <= truth <= bounds[1]


@pytest.mark.parametrize(
    ("count", "spread"), [(2, 0.2), (5, 0.35), (8, 0.2), (8, 0.5), (16, 0.5), (32, 0.35), (64, 0.2)]
)
def test_means_over_windows(count: int, spread: float) -> None:
    """Means of KL: positive, skewed. spread: of the logarithm of a window's KL; 0.2 to 0.5 is what windows have."""
    generator, runs = torch.Generator().manual_seed(count), RUNS if count < 8 else RUNS // 3
    drawn = torch.exp(spread * torch.randn(runs, count, dtype=torch.float64, generator=generator))
    assert covered([within(intervals.interval(row), math.exp(spread**2 / 2)) for row in drawn])


@pytest.mark.parametrize("others", [0, 1, 3, 6])
def test_means_of_nearly_equal_values(others: int) -> None:
    """Differences of a figure that few items change: resamples without any of them have no spread."""
    values = [0.0] * (100 - others) + [-0.5] * others
    mean, error = intervals.mean_error(values)
    width = 1.9842 * (error or 0)  # Student's t with 99 degrees
    assert intervals.interval(values) == pytest.approx((mean - width, mean + width), abs=1e-4)


@pytest.mark.parametrize(
    ("count", "low", "high"), [(10, 0.2, 0.8), (10, 0, 0.2), (20, 0.9, 1), (32, 0, 0.1), (200, 0, 1)]
)
def test_shares(count: int, low: float, high: float) -> None:
    """Accuracies, also of few items and near 0 and 1: on the average over true shares (see the module)."""
    draw = random.Random(count)
    hits = []
    for _ in range(2 * RUNS):
        truth = draw.uniform(low, high)
        hits.append(within(intervals.wilson(sum(draw.random() < truth for _ in range(count)), count), truth))
    assert covered(hits)


@pytest.mark.parametrize("count", [20, 200])
@pytest.mark.parametrize(("most_lost", "most_gained"), [(0.5, 0.1), (0.2, 0.2), (0.3, 0.0)])
def test_paired_differences_of_shares(count: int, most_lost: float, most_gained: float) -> None:
    draw = random.Random(count)
    hits = []
    for _ in range(2 * RUNS):
        lost, gained = draw.uniform(0, most_lost), draw.uniform(0, most_gained)
        drawn = [draw.random() for _ in range(count)]
        bounds = intervals.paired_shares(
            sum(x < lost for x in drawn), sum(lost <= x < lost + gained for x in drawn), count
        )
        hits.append(within(bounds, gained - lost))
    assert covered(hits)


@pytest.mark.parametrize("count", [50, 200])
@pytest.mark.parametrize(("base", "kept", "gained"), [(0.5, 0.9, 0.05), (0.3, 0.6, 0.02), (0.8, 0.97, 0.3)])
def test_paired_ratios_of_shares(count: int, base: float, kept: float, gained: float) -> None:
    """base: share that the original has right; kept, gained: shares of these, and of the others, right in the model."""
    draw, hits = random.Random(count), []
    truth = (base * kept + (1 - base) * gained) / base
    for _ in range(RUNS):
        before = [draw.random() < base for _ in range(count)]
        after = [draw.random() < (kept if right else gained) for right in before]
        both = sum(a and b for a, b in zip(before, after, strict=True))
        hits.append(within(intervals.paired_ratio(sum(after), sum(before), both), truth))
    assert covered(hits)
    assert intervals.paired_ratio(3, 0, 0) is None


def test_standard_errors() -> None:
    """The standard error is the deviation of means between samples."""
    drawn = torch.rand(4000, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    errors = [intervals.mean_error(row)[1] or 0 for row in drawn]
    assert sum(errors) / len(errors) == pytest.approx(float(drawn.mean(1).std()), rel=0.03)
    assert intervals.mean_error([2.0]) == (2.0, None) and intervals.interval([2.0]) is None


def test_points_of_students_distribution() -> None:
    for degrees, point in ((1, 12.7062), (2, 4.3027), (3, 3.1824), (10, 2.2281), (29, 2.0452), (10**6, 1.9623)):
        assert intervals.student(degrees) == pytest.approx(point, abs=1e-4)


def test_mcnemar_by_counting_all_signs() -> None:
    for lost, gained in ((0, 0), (1, 0), (5, 0), (3, 9), (6, 6)):
        total = lost + gained
        far = abs(lost - gained)
        signs = [abs(2 * bin(bits).count("1") - total) >= far for bits in range(2**total)]
        assert intervals.mcnemar(lost, gained) == pytest.approx(sum(signs) / len(signs))
    assert 0 < intervals.mcnemar(900, 1100) < 1e-5
    assert intervals.mcnemar(4, 11) == intervals.mcnemar(11, 4)


@pytest.mark.parametrize("count", [1, 10, 100])
def test_the_error_of_a_share_is_never_0(count: int) -> None:
    for right in range(0, count + 1, max(1, count // 10)):
        seen = [1.0] * right + [0.0] * (count - right)
        _, expected = intervals.mean_error(seen if 0 < right < count else [*seen, 0.0, 1.0])
        assert intervals.share_error(right, count) == pytest.approx(expected)
