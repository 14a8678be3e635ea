"""Drafts with the fewer bits that a nested checkpoint's weights contain (QuantSpec, arXiv 2502.10424; ML-SpecQD).

The target's own file holds the draft: 4 bits within 8, or 2 within 4. The draft reads and extends the target's cache,
as in QuantSpec, whose weights are a second set of 4 bits. It does not touch the cache's bits (part "cache").
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from compress.errors import RecipeError
from compress.runtime import levels
from compress.speculate.cost import acceptance_from_kl
from compress.speculate.drafting import Reduction
from compress.speculate.session import Session

PART = "level"
# In nats a token below 8 bits, by level (docs/speculation.md): what is expected before anything was accepted.
NOMINAL_KL = {2: 0.0684, 3: 0.0133, 4: 0.0032}


@dataclass(frozen=True)
class Config:
    """The level: nominal bits."""

    level: int = 0  # 0: the lowest that the checkpoint has

    def __post_init__(self) -> None:
        if self.level < 0:
            raise ValueError(f"level {self.level} is no number of bits")


class LevelReduction(Reduction):
    """A level of the model's weights."""

    def __init__(self, level: int) -> None:
        self.level = level
        divergence = NOMINAL_KL.get(level)
        self.prior = None if divergence is None else acceptance_from_kl(divergence)

    def reduced(self, session: Session) -> AbstractContextManager[Any]:
        """Return a context in which the model computes with the level."""
        return levels.at_level(session.model, self.level)


def build(config: Config, session: Session) -> Reduction:
    """Return the reduction; RecipeError for a model that has no such level."""
    known: tuple[int, ...] = getattr(session.model, "levels", ())
    if len(known) < 2:
        raise RecipeError("level: the checkpoint has no levels; quantize it with `nested: true`, or draft by ngram")
    level = config.level or known[0]
    if level not in known[:-1]:
        raise RecipeError(f"level: {level} is none of the levels {', '.join(map(str, known[:-1]))} below the whole")
    return LevelReduction(level)
