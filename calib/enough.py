"""Choose how many tokens of calibration are enough for a recipe that leaves it open.

What is measured of an input of n channels is its Hessian, n x n numbers, so that the tokens that it takes grow with n.
docs/results/calibration.md has the KL against tokens that the least number comes from, on two models; the other numbers
below are choices. A method that needs more than a Hessian does says so by `tokens_factor` of its settings: one that
trains what it has rounded, or learns rotations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

TOKENS_PER_CHANNEL = 4  # the channels are those of the widest input of a linear
FEW_BITS = 2.5  # a linear of fewer stored bits a weight takes FEW_BITS_FACTOR times the tokens
FEW_BITS_FACTOR = 2
LEAST_TOKENS = 16_384
MOST_TOKENS = 131_072  # more than that is asked for by hand
MOST_OF_EXPERTS = 262_144  # an expert sees a share of the tokens
STEP = 4096  # the number is rounded up to a multiple of it
SEQ_LEN = 512  # tokens of a sample, that attention weighs tokens by
CACHE_SEQ_LEN = 2048  # tokens of a sample that a cache is calibrated on, which is made for long texts


@dataclass(frozen=True)
class Need:
    """What a linear, or another part of a recipe, asks of calibration text."""

    width: int = 0  # channels of its input; 0: of no linear
    bits: float = 16.0  # stored for a weight
    factor: float = 1.0  # times as many tokens as a Hessian takes
    reason: str = ""  # what has that factor
    share: float = 1.0  # of the tokens that reach it: below 1 for an expert


@dataclass(frozen=True)
class Choice:
    """The tokens that are enough, and for what: the most demanding part of a recipe, in words."""

    tokens: int
    reason: str


def choose(needs: Iterable[Need]) -> Choice:
    """Return the tokens that are enough for all of the needs, at least LEAST_TOKENS."""
    most = max(dict.fromkeys(needs), key=lambda need: (_tokens(need), need.width), default=Need())
    return Choice(_tokens(most), _words(most))


def _tokens(need: Need) -> int:
    factor = need.factor * (FEW_BITS_FACTOR if need.bits < FEW_BITS else 1)
    seen = min(MOST_TOKENS, max(LEAST_TOKENS, TOKENS_PER_CHANNEL * need.width) * factor)
    tokens = -(-int(seen / need.share) // STEP) * STEP
    return min(tokens, MOST_TOKENS if need.share == 1 else MOST_OF_EXPERTS)


def _words(need: Need) -> str:
    said = [f"inputs of {need.width:,} channels"] if need.width else []
    said += [f"{need.bits:.2g} bits a weight"] if need.bits < FEW_BITS else []
    said += [need.reason] if need.factor > 1 else []
    said += [f"experts that see {need.share:.1%} of the tokens"] if need.share < 1 else []
    return " and ".join(said or ["any linear"])
