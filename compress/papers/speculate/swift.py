"""Drafts without sublayers that are searched for while a text is written (SWIFT, arXiv 2410.06916).

After each round one set of inner sublayers is tried: mostly at random, each `period`-th by Bayesian optimisation. Its
score is the share of the last `window` written tokens on which the model without the set agrees with the whole, by one
pass of all of them. The best set drafts. The search ends at a score of `enough`, or after `patience` trials without a
better set, or after `trials`; it goes on in later texts of the same model.

Where we differ: a trial reads the last `window` + `context` tokens without a cache, since caches may be compressed and
cannot be lent (the published code copies the whole cache for each). What is wanted is therefore what the whole model
writes with that context, by a pass that serves several trials. The search begins with blocks at even distances. When to
stop drafting is the loop's matter (compress/speculate/length.py), not a fixed confidence of 0.8 and 25 tokens. There
are no trees of drafts: each further row of a check costs time here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from compress.errors import RecipeError
from compress.papers.speculate.set_search import SetSearch
from compress.runtime.bypass import Sublayer
from compress.speculate.drafting import Reduction, Verified
from compress.speculate.session import Session
from compress.speculate.skipping import Skip, even_set, inner_sublayers, likeliest, matching_share

PART = "skip"
TRIALS_PER_TEXT = 4  # before newer tokens take the place of those that sets are judged by


@dataclass(frozen=True)
class Config:
    """How many sublayers are passed over, and how long better ones are looked for."""

    share: float = 0.45  # of the attentions and MLPs between the first and the last block
    window: int = 32  # written tokens that a set is judged by
    context: int = 32  # tokens before them that are read, too
    period: int = 25  # each such trial is chosen by what is known of earlier ones
    enough: float = 0.95
    patience: int = 300
    trials: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"share {self.share} is not between 0 and 1")
        for name in ("window", "period", "patience", "trials"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not positive")
        if self.context < 0:
            raise ValueError(f"context {self.context} is negative")


_searches: WeakKeyDictionary[Any, dict[Config, SetSearch]] = WeakKeyDictionary()


class Swift(Skip):
    """The model without the best set so far."""

    def __init__(self, config: Config, model: Any) -> None:
        known = inner_sublayers(model)
        count = round(config.share * len(known))
        if not 0 < count < len(known):
            raise RecipeError(f"swift: share {config.share} of {len(known)} inner sublayers is none, or all")
        searches = _searches.setdefault(model, {})
        if config not in searches:
            searches[config] = SetSearch(known, count, config.seed)
        self.config, self.search, self._first = config, searches[config], even_set(known, count)
        self.prompt_tokens = 0
        self._wanted: Tensor | None = None  # what the whole model writes for the last of these ids
        self._ids = torch.empty(1, 0, dtype=torch.int64)
        super().__init__(self.search.best or self._first)

    def begin(self, session: Session) -> None:
        """Take note of where the written tokens begin."""
        self.prompt_tokens = len(session.tokens)

    def observe(self, session: Session, verified: Verified) -> None:
        """Try a set, if enough tokens are written and the search has not ended."""
        if self.is_done or len(session.tokens) - self.prompt_tokens < self.config.window:
            return
        if self.search.tried % TRIALS_PER_TEXT == 0 or self._wanted is None:
            self._ids = session.ids[:, -(self.config.window + self.config.context + 1) :].clone()
            self._wanted = likeliest(session.model, self._ids, self.config.window)
        wanted = self._wanted
        step(
            self.search,
            self.config,
            self._first,
            lambda chosen: matching_share(session.model, self._ids, wanted, chosen),
        )
        self.sublayers = self.search.best

    @property
    def is_done(self) -> bool:
        """Return whether the search has ended."""
        return is_done(self.search, self.config)


def step(
    search: SetSearch, config: Config, first: frozenset[Sublayer], score: Callable[[frozenset[Sublayer]], float]
) -> None:
    """Make one trial."""
    if not search.tried:
        chosen = first
    else:
        chosen = search.expect() if search.tried % config.period == 0 else search.draw()
    search.observe(chosen, score(chosen))


def is_done(search: SetSearch, config: Config) -> bool:
    """Return whether a search has ended."""
    is_fruitless = search.fruitless >= config.patience or search.tried >= config.trials
    return is_fruitless or search.best_score >= config.enough


def build(config: Config, session: Session) -> Reduction:
    """Return the reduction; RecipeError for a model with too few blocks."""
    return Swift(config, session.model)


def search(
    known: tuple[Sublayer, ...], count: int, score: Callable[[frozenset[Sublayer]], float], seed: int
) -> frozenset[Sublayer]:
    """Return the best set of `count` sublayers that the search finds with a score that does not change."""
    config = Config(enough=1.0, patience=150, trials=400)
    found = SetSearch(known, count, seed)
    while not is_done(found, config):
        step(found, config, even_set(known, count), score)
    return found.best
