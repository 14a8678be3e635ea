"""Drafts without sublayers that Bayesian optimisation finds beforehand (Draft & Verify, arXiv 2309.08168).

Sets of inner sublayers are tried one after the other, each where a Gaussian process expects the largest improvement
(set_search.py), and the best is kept. `compress draft --by draft_verify` does so on calibration text and stores the
set. As a draft of its own it searches on the prompt, once for each model.

Where we differ: the paper maximises tokens a second over sets of any size, by the package bayes_opt on numbers from 0
to 1 that are cut at 0.5. Times on a busy machine are too noisy for that. Here the size is given and what is maximised
is agreement with the whole model, by a process on sets. When to stop drafting is the loop's matter
(compress/speculate/length.py), not a threshold that moves by 0.01.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from compress.errors import RecipeError
from compress.papers.speculate.set_search import SetSearch
from compress.runtime.bypass import Sublayer
from compress.speculate.drafting import Reduction
from compress.speculate.session import Session
from compress.speculate.skipping import Skip, even_set, inner_sublayers, likeliest, matching_share

PART = "skip"
TRIALS = 200  # on calibration text


@dataclass(frozen=True)
class Config:
    """How many sublayers are passed over, and how they are looked for on a prompt."""

    share: float = 0.45  # of the attentions and MLPs between the first and the last block
    trials: int = 60
    tokens: int = 128  # of the prompt's end
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"share {self.share} is not between 0 and 1")
        if self.trials < 1 or self.tokens < 2:
            raise ValueError(f"trials {self.trials} is not positive, or tokens {self.tokens} are less than 2")


_found: WeakKeyDictionary[Any, dict[Config, frozenset[Sublayer]]] = WeakKeyDictionary()


class SearchedSkip(Skip):
    """The model without the set that was best on a prompt."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    def begin(self, session: Session) -> None:
        """Search on the prompt, unless an earlier prompt was searched."""
        found = _found.setdefault(session.model, {})
        if self.config not in found:
            found[self.config] = self._search(session)
        self.sublayers = found[self.config]

    def _search(self, session: Session) -> frozenset[Sublayer]:
        model, known = session.model, inner_sublayers(session.model)
        count = round(self.config.share * len(known))
        ids = session.ids[:, -self.config.tokens :]
        if not 0 < count < len(known):
            raise RecipeError(
                f"draft_verify: share {self.config.share} of {len(known)} inner sublayers is none, or all"
            )
        if ids.shape[1] < 2:
            return even_set(known, count)
        wanted = likeliest(model, ids, ids.shape[1] - 1)
        return optimise(
            known,
            count,
            lambda chosen: matching_share(model, ids, wanted, chosen),
            self.config.seed,
            self.config.trials,
        )


def optimise(
    known: tuple[Sublayer, ...],
    count: int,
    score: Callable[[frozenset[Sublayer]], float],
    seed: int,
    trials: int,
) -> frozenset[Sublayer]:
    """Return the best of so many sets; the first is spread evenly."""
    search, chosen = SetSearch(known, count, seed), even_set(known, count)
    for _ in range(trials):
        search.observe(chosen, score(chosen))
        chosen = search.expect()
    return search.best


def build(config: Config, session: Session) -> Reduction:
    """Return the reduction, which searches when it knows the prompt."""
    return SearchedSkip(config)


def search(
    known: tuple[Sublayer, ...], count: int, score: Callable[[frozenset[Sublayer]], float], seed: int
) -> frozenset[Sublayer]:
    """Return the best set of `count` sublayers that the search finds with a score that does not change."""
    return optimise(known, count, score, seed, TRIALS)
