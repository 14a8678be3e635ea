"""Drafts that read half the bits of the cache: the upper of its two planes of integers (QuantSpec, arXiv 2502.10424).

For a compressed cache of the method `quantspec` (a codec of two planes). Attention of drafts reads 4 bits of each
number, that of the target 8; the newest tokens are exact for both. Drafted tokens are added to the exact ones and
taken away again; tokens are coded only once they are accepted, so that the cache is as if nothing had been drafted.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from compress.errors import RecipeError
from compress.kv.layer import KVCache
from compress.speculate.drafting import Reduction
from compress.speculate.session import Session

PART = "cache"


@dataclass(frozen=True)
class Config:
    """Nothing can be set: the planes are those of the cache."""


class UpperReduction(Reduction):
    """The upper planes of the target's cache."""

    def reduce(self, session: Session) -> AbstractContextManager[Any]:
        """Return a context in which attention reads the upper planes alone."""
        return session.cache.read_upper()


def build(config: Config, session: Session) -> Reduction:
    """Return the reduction; RecipeError for a cache without planes."""
    cache = session.cache
    planes = isinstance(cache, KVCache) and any(codec.upper is not None for codec in cache.codecs.values())
    if not planes:
        raise RecipeError("cache: upper needs a cache in two planes; set kv_cache.method: quantspec in the recipe")
    return UpperReduction()
