"""Drafts without a given set of attentions and MLPs, such as `compress draft` finds for a checkpoint.

`sublayers=3:7-9:12a:15m` passes over blocks 3, 7, 8 and 9, the attention of block 12 and the MLP of block 15. An early
exit behind block 11 of 30 is `sublayers=12-29`.
"""

from __future__ import annotations

from dataclasses import dataclass

from compress.errors import RecipeError
from compress.runtime.bypass import sublayers_of
from compress.speculate.drafting import Reduction
from compress.speculate.session import Session
from compress.speculate.skipping import Skip, read_set, write_set

PART = "skip"


@dataclass(frozen=True)
class Config:
    """The set."""

    skipped: str | int = ""  # a single block is a number

    def __post_init__(self) -> None:
        try:
            read_set(str(self.skipped))
        except ValueError as error:
            raise ValueError(f"skipped: {error}") from error


def build(config: Config, session: Session) -> Reduction:
    """Return the reduction; RecipeError for sublayers that the model does not have."""
    chosen = read_set(str(config.skipped))
    if missing := chosen.difference(sublayers_of(session.model)):
        raise RecipeError(f"sublayers: the model has no {write_set(missing)}; count its blocks from 0")
    return Skip(chosen)
