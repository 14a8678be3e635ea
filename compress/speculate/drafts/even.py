"""Drafts without blocks at even distances, as in unified layer skipping (arXiv 2404.06954), which needs no text.

The first and the last block always run. The paper drops the blocks for good; here a draft passes over them and the
whole model checks. Which blocks matter is not asked: `sublayers` and the searches find better ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from compress.errors import RecipeError
from compress.speculate.drafting import Reduction
from compress.speculate.session import Session
from compress.speculate.skipping import Skip, even_set, inner_sublayers

PART = "skip"


@dataclass(frozen=True)
class Config:
    """How many blocks are passed over."""

    share: float = 0.25  # of the blocks between the first and the last

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"share {self.share} is not between 0 and 1")


def build(config: Config, session: Session) -> Reduction:
    """Return the reduction; RecipeError for a model with too few blocks."""
    known = inner_sublayers(session.model)
    blocks = sorted({block for block, _ in known})
    count = round(config.share * len(blocks))
    if not count:
        raise RecipeError(f"even: share {config.share} of {len(blocks)} inner blocks is none; raise it")
    return Skip(even_set(known, count * len(known) // len(blocks)))
