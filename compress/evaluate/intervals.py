"""Compute how sure a measured mean, share or difference is: standard errors, 95% intervals, and a paired test.

    means (KL over windows, NLL over items)   bootstrap-t (DiCiccio and Efron, "Bootstrap confidence intervals", 1996):
                                              KL is skewed, and an interval that is even on both sides misses it more
                                              often; with fewer than MIN_RESAMPLED values, or where nearly
                                              all are equal, so that resamples have no spread, Student's t
    shares (accuracy)                         Wilson's score interval, which has a width at 0 and 1, too
    paired differences of shares              Bonett and Price, "Adjusted Wald confidence interval for a difference of
                                              binomial proportions based on paired data" (2012)
    paired ratios of shares                   Bonett and Price, "Confidence intervals for a ratio of binomial
                                              proportions based on paired data" (2006): two Wilson intervals, narrowed;
                                              the bootstrap-t of the linearized ratio covers 51 to 96% there
    lost against gained items                 McNemar's exact test

Simulations in the tests hold that these intervals cover the truth in 92 to 98% of cases. A share near 0 or 1 of few
items takes few values, so that its coverage jumps with the true share; there it holds on the average over true shares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MIN_RESAMPLED = 8  # values; resampling fewer cannot give 95%
MAX_RESAMPLED = 1000  # values; the mean of more is as good as normal
RESAMPLINGS = 2000
NORMAL_QUANTILE = 1.959963984540054  # 97.5%


def mean_error(values: Sequence[float] | Tensor) -> tuple[float, float | None]:
    """Return the mean of values and its standard error, None for fewer than two."""
    given = torch.as_tensor(values, dtype=torch.float64)
    return float(given.mean()), float(given.std()) / math.sqrt(len(given)) if len(given) > 1 else None


def share_error(right: int, count: int) -> float:
    """Return the standard error of a share of which `right` of `count` were seen.

    Where none or all are right, which says little of a few items, that of the share with one more of each (Laplace).
    """
    if right in (0, count):
        return 1 / (count + 2)
    share = right / count
    return math.sqrt(share * (1 - share) / (count - 1))


def interval(values: Sequence[float] | Tensor) -> tuple[float, float] | None:
    """Return the 95% interval of the mean of values, which are independent of each other; None for a single one.

    The same values give the same interval.
    """
    given = torch.as_tensor(values, dtype=torch.float64)
    count = len(given)
    if count < 2:
        return None
    mean, error = float(given.mean()), float(given.std()) / math.sqrt(count)
    if not MIN_RESAMPLED <= count <= MAX_RESAMPLED:
        return _even(mean, error, count)
    generator = torch.Generator().manual_seed(0)
    drawn = given[torch.randint(count, (RESAMPLINGS, count), generator=generator)]
    if bool((drawn == drawn[:, :1]).all(1).any()):  # nearly all values are equal
        return _even(mean, error, count)
    away = (drawn.mean(1) - mean) / (drawn.std(1) / math.sqrt(count)).clamp_min(1e-12 * error + 1e-300)
    low, high = torch.quantile(away, torch.tensor([0.025, 0.975], dtype=away.dtype)).tolist()
    return mean - high * error, mean - low * error


def _even(mean: float, error: float, count: int) -> tuple[float, float]:
    """Return the interval that is even on both sides, by Student's t."""
    width = student(count - 1) * error
    return mean - width, mean + width


def student(degrees: int) -> float:
    """Return the 97.5% point of Student's t distribution."""
    degrees = min(degrees, 1000)  # beyond, it is that of the normal distribution but for 0.002
    low, high = 0.0, 64.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < 0.95 else (low, middle)
    return high


def _within(t: float, degrees: int) -> float:
    """Return the probability of |T| < t; Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    if degrees == 1:
        return 2 * angle / math.pi
    odd = degrees % 2
    term, total = (cosine, cosine) if odd else (1.0, 1.0)
    for k in range(3 if odd else 2, degrees - 1, 2):
        term *= (k - 1) / k * cosine * cosine
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def wilson(right: int, count: int, z: float = NORMAL_QUANTILE) -> tuple[float, float]:
    """Return the interval of a share of which `right` of `count` were seen; z: point of the normal distribution."""
    share, extra = right / count, z * z / count
    middle = (share + extra / 2) / (1 + extra)
    width = z * math.sqrt(share * (1 - share) / count + extra / (4 * count)) / (1 + extra)
    return (0.0 if right == 0 else max(0.0, middle - width)), (1.0 if right == count else min(1.0, middle + width))


def paired_shares(lost: int, gained: int, count: int) -> tuple[float, float]:
    """Return the 95% interval of the difference of two shares, (gained - lost) / count, of the same items."""
    p_lost, p_gained = (lost + 1) / (count + 2), (gained + 1) / (count + 2)
    difference = p_gained - p_lost
    width = NORMAL_QUANTILE * math.sqrt((p_lost + p_gained - difference * difference) / (count + 2))
    return max(-1.0, difference - width), min(1.0, difference + width)


def paired_ratio(right: int, base: int, both: int) -> tuple[float, float] | None:
    """Return the 95% interval of the ratio of two shares, right / base, of the same items; None for base 0.

    right, base: items that the one and the other has right; both: items that both have right.
    """
    if not base:
        return None
    count = right + base - both
    apart = math.sqrt((count - both + 2) / ((right + 1) * (base + 1)))
    alone = [math.sqrt((1 - (each + 1) / (count + 2)) / (each + 1)) for each in (right, base)]
    (low, high), (base_low, base_high) = (
        wilson(each, count, NORMAL_QUANTILE * apart / sum(alone)) for each in (right, base)
    )
    return low / base_high, high / base_low


def mcnemar(lost: int, gained: int) -> float:
    """Return the probability that two equal models differ in lost and gained items at least as far (two-sided)."""
    total = lost + gained
    tail = sum(math.comb(total, k) for k in range(min(lost, gained) + 1))
    return min(1.0, 2 * tail / 2**total)  # of integers: exact for any counts
