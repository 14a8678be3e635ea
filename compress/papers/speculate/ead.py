"""EAD, entropy adaptive decoding (arXiv 2502.06833): the small model writes while it is sure, else the large one.

LOSSY, unlike drafts: nobody checks what the small model writes. Here the small model is a low level of a nested
checkpoint and the large one the whole of its weights, on one cache, so that a change costs nothing: there is no second
model, and no text to catch up with. What a level has written stays in the cache for the other.

The entropy of each law is taken in bits, before temperature and other processors. Its mean over the last laws, `tokens`
of them, decides about the next one: above `threshold` the large model, else the small one. After a change as many
tokens are written before the next, so that the mean is of one model. Generation begins with the large model.

Differences from the paper: one cache for both models; the shortest stay is as long as the mean (the paper's was not at
hand). It can be named among drafts, `ead=1.5`; it drafts nothing, and n-grams beside it are checked by whichever model
writes. Statistics say how many tokens the low level wrote.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from compress.errors import RecipeError
from compress.speculate.drafting import Draft, Verified
from compress.speculate.session import Session

PART = "draft"


@dataclass(frozen=True)
class Config:
    """When the small model writes."""

    threshold: float = 1.0  # [bits] of entropy, up to which the small model writes
    tokens: int = 5  # whose mean entropy counts; also the fewest between two changes
    low: int = 0  # level that is the small model; 0: the lowest that the checkpoint has

    def __post_init__(self) -> None:
        if self.threshold < 0:
            raise ValueError(f"threshold {self.threshold:g} is below 0")
        if self.tokens < 1:
            raise ValueError(f"tokens {self.tokens} is not 1 or more")


class EntropyAdaptive(Draft):
    """Sets the level of the model, and drafts nothing."""

    def __init__(self, config: Config, level: int, before: int | None) -> None:
        self.config, self.level, self._before = config, level, before
        self.is_low = False
        self.lows = list[bool]()  # for each judged token whether the low level gave its law
        self._stay = 0  # tokens since the last change
        self._entropies: deque[float] = deque(maxlen=config.tokens)

    def situation(self, session: Session) -> Hashable:
        """Return None: nothing is drafted."""
        return None

    def observe(self, session: Session, verified: Verified) -> None:
        """Take note of the entropies of what was written, and choose the level of the next pass."""
        entropies = entropy(verified.logits[: verified.accepted + 1]).tolist()
        self._entropies += entropies
        self.lows += [self.is_low] * len(entropies)
        self._stay += len(entropies)
        wants_low = sum(self._entropies) / len(self._entropies) <= self.config.threshold
        if wants_low != self.is_low and self._stay >= self.config.tokens:
            self.is_low, self._stay = wants_low, 0
            session.model.set_level(self.level if wants_low else self._before)

    def end(self, session: Session) -> None:
        """Set the level that the model had, and say how often the low level wrote."""
        session.model.set_level(self._before)
        session.statistics.notes.append(f"{sum(self.lows)} of {len(self.lows)} tokens by level {self.level} (ead)")


def entropy(logits: Tensor) -> Tensor:
    """Return the entropies in bits, float32 [n], of laws with logits [n, vocab]."""
    logs = logits.float().log_softmax(-1)
    return -torch.where(logs.isfinite(), logs.exp() * logs, 0.0).sum(-1) / log(2)


def build(config: Config, session: Session) -> Draft:
    """Return what sets the level; RecipeError for a model that has no such level."""
    known: tuple[int, ...] = getattr(session.model, "levels", ())
    level = config.low or (known[0] if known else 0)
    if len(known) < 2 or level not in known[:-1]:
        has = f"has the levels {', '.join(map(str, known))}" if known else "has no levels"
        raise RecipeError(
            f"ead: the checkpoint {has}; quantize it with `nested: true`, and name a level below the whole"
        )
    return EntropyAdaptive(config, level, session.model.level)
