"""Where a text ends: the stopping criteria of transformers, asked behind every single token.

Those that every call has, the most tokens and the tokens that end a text, are looked at without a tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from compress.speculate.session import Session


class Stopping:
    """The criteria of one call of generate."""

    def __init__(self, criteria: Any) -> None:
        self.max_length: int | None = criteria.max_length
        self.end_tokens: frozenset[int] = frozenset(
            token
            for each in criteria
            if type(each) is EosTokenCriteria
            for token in each.eos_token_id.flatten().tolist()
        )
        self._others = [each for each in criteria if type(each) not in (EosTokenCriteria, MaxLengthCriteria)]

    def room(self, session: Session) -> int:
        """Return how many tokens may follow at most."""
        return 1 << 30 if self.max_length is None else self.max_length - len(session.tokens)

    def holds(self, session: Session, scores: Any) -> bool:
        """Return whether the text ends with the newest token; scores: as transformers gives them to criteria."""
        if session.tokens[-1] in self.end_tokens or self.room(session) <= 0:
            return True
        return any(bool(torch.as_tensor(each(session.ids, scores)).all()) for each in self._others)
