"""Search for the best set of sublayers to pass over: at random, or where a Gaussian process expects an improvement.

The process is one over subsets of a fixed size: covariance exp(-d / r) of scores, with d the number of places in which
two sets differ over twice their size, and r what makes the scores seen likeliest, of a few. The next set is the one
with the largest expected improvement among neighbours of the best one, by one exchange, and random ones.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from compress.runtime.bypass import Sublayer

RANGES = (0.1, 0.3, 1.0, 3.0)
NOISE = 0.01  # variance of a score, in units of the variance of all (Draft & Verify's alpha)
POOL = 256  # sets that are compared before one is tried
MOST_SEEN = 256  # newest scores, which the process knows


class SetSearch:
    """Sets of `count` of the known sublayers, and the best that was tried."""

    def __init__(self, known: Sequence[Sublayer], count: int, seed: int = 0) -> None:
        """ValueError if there are not more than `count` sublayers."""
        if not 0 < count < len(known):
            raise ValueError(f"count {count} is not between 1 and {len(known) - 1}")
        self.known, self.count = tuple(known), count
        self.best: frozenset[Sublayer] = frozenset()
        self.best_score, self.tried, self.fruitless = -math.inf, 0, 0
        self._generator = torch.Generator().manual_seed(seed)
        self._seen: deque[tuple[Tensor, float]] = deque(maxlen=MOST_SEEN)

    def draw(self) -> frozenset[Sublayer]:
        """Return a set at random."""
        return self._set_of(self._draw())

    def expect(self) -> frozenset[Sublayer]:
        """Return the set with the largest expected improvement; one at random while little is known."""
        if len(self._seen) < 2:
            return self.draw()
        pool = torch.stack([*self._exchanges(), *(self._draw() for _ in range(POOL // 2))])
        return self._set_of(pool[int(self._improvements(pool).argmax())])

    def observe(self, chosen: Iterable[Sublayer], score: float) -> None:
        """Take note of the score of a set of any size; the larger, the better."""
        chosen = frozenset(chosen)
        self.tried += 1
        self._seen.append((torch.tensor([each in chosen for each in self.known]), score))
        if score > self.best_score:
            self.best, self.best_score, self.fruitless = chosen, score, 0
        else:
            self.fruitless += 1

    def _draw(self) -> Tensor:
        chosen = torch.zeros(len(self.known), dtype=torch.bool)
        chosen[torch.randperm(len(self.known), generator=self._generator)[: self.count]] = True
        return chosen

    def _exchanges(self) -> list[Tensor]:
        """Return sets that differ from the best one by an exchange."""
        best = torch.tensor([each in self.best for each in self.known])
        inside, outside = best.nonzero()[:, 0], (~best).nonzero()[:, 0]
        result = []
        for _ in range(POOL // 2):
            changed = best.clone()
            changed[inside[self._integer(len(inside))]] = False
            changed[outside[self._integer(len(outside))]] = True
            result.append(changed)
        return result

    def _integer(self, most: int) -> int:
        return int(torch.randint(most, (), generator=self._generator))

    def _set_of(self, chosen: Tensor) -> frozenset[Sublayer]:
        return frozenset(each for each, is_chosen in zip(self.known, chosen.tolist(), strict=True) if is_chosen)

    def _improvements(self, pool: Tensor) -> Tensor:
        """Return the expected improvement of sets bool [n, sublayers] over the best score, float64 [n]."""
        sets = torch.stack([each for each, _ in self._seen])
        scores = torch.tensor([each for _, each in self._seen]).double()
        mean, deviation = scores.mean(), scores.std().clamp_min(1e-9)
        y = (scores - mean) / deviation
        own, others = self._distances(sets, sets), self._distances(pool, sets)
        noise = NOISE * torch.eye(len(sets), dtype=torch.float64)
        factors = [torch.linalg.cholesky((-own / r).exp() + noise) for r in RANGES]
        best = max(range(len(RANGES)), key=lambda i: _likelihood(factors[i], y))
        factor, covariance = factors[best], (-others / RANGES[best]).exp()
        expected = covariance @ torch.cholesky_solve(y[:, None], factor)[:, 0]
        known = torch.linalg.solve_triangular(factor, covariance.T, upper=False).square().sum(0)
        spread = (1 - known).clamp_min(1e-12).sqrt()
        z = (expected - (self.best_score - mean) / deviation) / spread
        density = (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
        return spread * (z * torch.special.ndtr(z) + density)

    def _distances(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.cdist(a.double(), b.double(), p=1) / (2 * self.count)


def _likelihood(factor: Tensor, y: Tensor) -> float:
    """Return the log likelihood of y, up to a constant, from the Cholesky factor of its covariance."""
    white = torch.linalg.solve_triangular(factor, y[:, None], upper=False)
    return float(-white.square().sum() / 2 - factor.diagonal().log().sum())
