"""How many tokens are drafted: the number with the largest expected gain by measured times and acceptance, or none.

Acceptance is counted for each place of a draft by itself, newest rounds first, and drawn towards what is known
beforehand (cost.py) while little was counted. Where even the best length would lose, plain steps are made, and a draft
is tried now and then, ever more seldom.
"""

from __future__ import annotations

from collections.abc import Callable

from compress.speculate.cost import MAX_LENGTH

MEMORY = 1 - 1 / 48  # weight of what was counted, after each further token
PRIOR_ACCEPTANCE, PRIOR_TOKENS = 0.8, 4.0  # what is assumed of a draft of which nothing is known, and its weight
NEIGHBOUR_TOKENS = 3.0  # weight of all places together in the acceptance of one
FIRST_LENGTH = 3  # drafted while times are not known
FIRST_WAIT, MAX_WAIT = 16, 256  # plain steps before a draft that did not pay is tried again
PROBE_ROUNDS = 2  # drafts that are then tried
FADED = 0.1  # weight of what was counted before
# Times and acceptance are too uncertain to say of a smaller gain that it is one.
LEAST_GAIN = 1.03


class PlaceAcceptance:
    """Shares of drafted tokens that were accepted, by place."""

    def __init__(self, prior: float = PRIOR_ACCEPTANCE) -> None:
        self.prior = prior
        self._hits, self._tries = [0.0] * MAX_LENGTH, [0.0] * MAX_LENGTH

    def add(self, drafted: int, accepted: int) -> None:
        """Take note of a round; tokens behind a rejected one say nothing."""
        for place in range(min(accepted + 1, drafted, MAX_LENGTH)):
            self._hits[place] = self._hits[place] * MEMORY + (place < accepted)
            self._tries[place] = self._tries[place] * MEMORY + 1

    def fade(self) -> None:
        """Let what was counted weigh little beside what comes."""
        self._hits, self._tries = ([each * FADED for each in counts] for counts in (self._hits, self._tries))

    def expect_tokens(self, most: int) -> list[float]:
        """Return the expected tokens of a round, by its drafted tokens from none to `most`."""
        hits, tries = sum(self._hits), sum(self._tries)
        overall = (hits + self.prior * PRIOR_TOKENS) / (tries + PRIOR_TOKENS)
        total, reach, result = 1.0, 1.0, [1.0]
        for place in range(most):
            known = place if place < MAX_LENGTH else MAX_LENGTH - 1
            own = self._hits[known] + overall * NEIGHBOUR_TOKENS
            reach *= own / (self._tries[known] + NEIGHBOUR_TOKENS)
            total += reach
            result.append(total)
        return result


class LengthPolicy:
    """Lengths of one draft."""

    def __init__(self, prior: float | None = None, fixed: int | None = None) -> None:
        """fixed: a length that is drafted always."""
        self.acceptance = PlaceAcceptance(PRIOR_ACCEPTANCE if prior is None else prior)
        self.fixed = fixed
        self.threshold = 0.0  # of the product of a draft's probabilities, below which a further token does not pay
        self._wait, self._waited, self._probes = FIRST_WAIT, 0, 0

    def choose(self, step: float, draft: Callable[[int], float], check: Callable[[int], float], most: int) -> int:
        """Return how many tokens to draft, up to `most`; 0: a plain step.

        step: seconds of a plain step, 0 while it is not known; draft: of a drafted token, likewise, by how many are
        drafted; check: of a pass, by its number of tokens.
        """
        self.threshold = 0.0
        if self.fixed is not None:
            return min(self.fixed, most)
        if not step:
            return 0
        if not draft(1):
            return min(FIRST_LENGTH, most)
        lengths, expected = range(1, most + 1), self.acceptance.expect_tokens(most)
        costs = [(n * draft(n) + check(n + 1)) / step for n in lengths]
        gains = [expected[n] / cost for n, cost in zip(lengths, costs, strict=True)]
        best = max(range(most), key=gains.__getitem__)
        if gains[best] < LEAST_GAIN:
            is_hopeless = max((n + 1) / cost for n, cost in zip(lengths, costs, strict=True)) < LEAST_GAIN
            return best + 1 if self._is_probe(is_hopeless) else 0
        self._wait, self._waited = FIRST_WAIT, 0
        further = draft(best + 1) + (check(best + 2) - check(2)) / max(1, best)
        self.threshold = min(0.9, gains[best] * further / step)
        return best + 1

    def observe(self, drafted: int, accepted: int) -> None:
        """Take note of a round with this draft."""
        self.acceptance.add(drafted, accepted)

    def _is_probe(self, is_hopeless: bool) -> bool:
        """Return whether a draft that does not pay by what is known is to be tried.

        is_hopeless: it would not pay if every token was accepted. Then only its times may change.
        """
        if self._probes:
            self._probes -= 1
            return True
        self._waited += 1
        if self._waited < (MAX_WAIT if is_hopeless else self._wait):
            return False
        self._wait, self._waited, self._probes = min(2 * self._wait, MAX_WAIT), 0, PROBE_ROUNDS - 1
        self.acceptance.fade()
        return True
