"""Find out how a cache is read where it is scored, and where `generate` uses it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from compress.errors import RecipeError
from compress.evaluate.cache_scores import Candidate
from compress.kv import fused, generation
from compress.kv.fused import CacheReads


@dataclass(frozen=True)
class Readings:
    """How one cache is read."""

    scored: CacheReads  # in chunks of text, where it is scored
    generated: CacheReads  # token by token, in `generate`

    @property
    def text(self) -> str:
        """Return this in words."""
        if self.scored == self.generated:
            return f"scored and used by generate: {self.scored.text}"
        return f"scored: {self.scored.text}; used by generate: {self.generated.text}"

    def plain(self) -> dict[str, Any]:
        """Return this as JSON values."""
        return asdict(self)


@torch.no_grad()
def readings(model: Any, candidate: Candidate) -> Readings:
    """Return how a candidate is read, found with a token that goes through the model; it has the hooks of caches."""
    scored = _read(model, candidate)
    if candidate.path == "fused" or not generation.can_read_codes(model):
        return Readings(scored, scored)
    try:
        return Readings(scored, _read(model, replace(candidate, path="fused")))
    except (RecipeError, AttributeError, TypeError):  # as `generate` finds out
        return Readings(scored, scored)


def _read(model: Any, candidate: Candidate) -> CacheReads:
    cache = candidate.cache(model.config)
    tokens = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model(input_ids=tokens, past_key_values=cache, use_cache=True)
    return fused.reads_of_cache(cache, model.device)
