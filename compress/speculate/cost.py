"""Predict what drafting brings: expected tokens a round, speed-up, the best length, also from bytes alone.

A round drafts g tokens, each at c times a plain step of the target, and checks them by one pass of g + 1 tokens at v(g)
times a plain step. With an acceptance alpha of each token it brings E = (1 - alpha^(g+1)) / (1 - alpha) tokens, and the
speed-up is S = E / (g c + v) (arXiv 2211.17192). Accepted tokens cluster, so that this is a few percent too much.

The acceptance of a reduced model follows from its divergence: alpha = 1 - 0.47 sqrt(KL), KL in nats a token between the
target's law and the draft's, fitted to 4, 3 and 2 bits below 4 and 8 (docs/speculation.md). Pinsker's inequality gives
0.71 as the most.
"""

from __future__ import annotations

import math
from collections.abc import Callable

FITTED_SLOPE = 0.47
# A further token of a check takes this share of a plain step where memory is the limit.
CHECK_SHARE = 0.03
MAX_LENGTH = 8


def acceptance_from_kl(kl: float) -> float:
    """Return the share of a draft's tokens that is accepted, from its divergence in nats a token."""
    return max(0.0, 1 - FITTED_SLOPE * math.sqrt(max(0.0, kl)))


def expected_tokens(alpha: float, length: int) -> float:
    """Return the tokens that a round of `length` drafted ones brings, each accepted with probability alpha."""
    return length + 1.0 if alpha >= 1 else (1 - alpha ** (length + 1)) / (1 - alpha)


def speedup(alpha: float, length: int, draft: float, check: float) -> float:
    """Return the tokens a second of drafting over those of plain steps.

    draft: seconds of a drafted token over those of a plain step; check: likewise, of a pass of length + 1 tokens.
    """
    return expected_tokens(alpha, length) / (length * draft + check)


def best_length(
    alpha: float, draft: float, check: Callable[[int], float] | None = None, most: int = MAX_LENGTH
) -> tuple[int, float]:
    """Return the length of drafts with the largest speed-up, and that speed-up; (0, 1.0) where none pays.

    check: relative seconds of a pass, by its number of tokens; None: 1 and 0.03 for each further token.
    """
    cost = check or (lambda tokens: 1 + CHECK_SHARE * (tokens - 1))
    gains = {length: speedup(alpha, length, draft, cost(length + 1)) for length in range(1, most + 1)}
    length = max(gains, key=gains.__getitem__)
    return (length, gains[length]) if gains[length] > 1 else (0, 1.0)


def draft_cost(draft_bits: float, target_bits: float, other: float = 0.05) -> float:
    """Return a drafted token's time over a plain step's where both are bound by the bytes that they read.

    bits: stored for each weight, as read by one pass. other: what else a token costs (cache, head, launches) over the
    time of reading the target's weights.
    """
    return (draft_bits + other * target_bits) / (target_bits * (1 + other))


def predict(
    draft_bits: float,
    target_bits: float,
    kl: float,
    other: float = 0.05,
    speeds: tuple[float, float] | None = None,
) -> tuple[int, float]:
    """Return the best length and its speed-up on a device, from stored bits and the draft's divergence.

    speeds: of the kernels of draft and target, as multiples of one reference (such as bfloat16) at the same shape; they
    take the place of the bytes where kernels are not bound by memory alone. ValueError for figures that are none.
    """
    if min(draft_bits, target_bits) <= 0 or other < 0 or (speeds is not None and min(speeds) <= 0):
        raise ValueError("bits and speeds are positive, what else a token costs is not negative")
    bits = (draft_bits, target_bits) if speeds is None else (1 / speeds[0], 1 / speeds[1])
    return best_length(acceptance_from_kl(kl), draft_cost(*bits, other))
