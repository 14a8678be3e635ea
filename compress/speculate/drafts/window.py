"""Drafts that read the first tokens of the cache and the newest ones (StreamingLLM, arXiv 2309.17453).

The simplest part of a cache: attention keeps to a few first tokens and a window, so that a drafted token costs the same
however long the text is. TriForce (arXiv 2404.11912) drafts with a second, small model like that; here it is the target
itself, whose cache the window is copied from. What lies between is not seen: see `retrieved`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from compress.speculate.draft_cache import SINK_TOKENS, DraftCache
from compress.speculate.drafting import Reduction
from compress.speculate.session import Session

PART = "cache"


@dataclass(frozen=True)
class Config:
    """What is read."""

    tokens: int = 256  # that are read, the first ones included; up to 64 more between two times that old ones are left

    def __post_init__(self) -> None:
        if self.tokens <= SINK_TOKENS:
            raise ValueError(f"tokens {self.tokens} is not above {SINK_TOKENS}, the first ones, which are always read")


class WindowReduction(Reduction):
    """A window of the target's cache."""

    def __init__(self, config: Config, session: Session) -> None:
        self.part = DraftCache(session, config.tokens - SINK_TOKENS)

    def reduce(self, session: Session) -> AbstractContextManager[Any]:
        """Return a context in which passes read the window."""
        return self.part.in_use(session)


def build(config: Config, session: Session) -> Reduction:
    """Return the reduction; RecipeError for a cache that cannot be read in parts."""
    return WindowReduction(config, session)
