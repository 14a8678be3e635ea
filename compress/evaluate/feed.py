"""Feed tokens to a model for what they leave in a cache, without their logits, which at 8,192 tokens take gigabytes."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from compress.kv.hooks import drops_cache

LAST = "logits_to_keep"  # the argument of forward passes that says of how many last tokens logits are asked


def fed(model: Any, text: Tensor, cache: Any, start: int = 0) -> Tensor:
    """Feed text int64 [B, n] from token `start` on through a cache; return the last logits [B, 1, vocab]."""
    given = {LAST: 1} if LAST in inspect.signature(model.forward).parameters else {}
    tokens = text[:, _first_token(model, text, start, cache) :]
    return model(input_ids=tokens, past_key_values=cache, use_cache=True, **given).logits[:, -1:]


def read_on(model: Any, text: Tensor, start: int, cache: Any) -> Tensor:
    """Feed text int64 [B, n] from token `start` on through a cache; return the logits of these tokens."""
    tokens = text[:, _first_token(model, text, start, cache) :]
    logits = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits
    return logits[:, max(0, logits.shape[1] - (text.shape[1] - start)) :]


def _first_token(model: Any, text: Tensor, start: int, cache: Any) -> int:
    """Return `start`; 0 with the cache emptied where `generate` reads the whole text anew at this length."""
    if not drops_cache(model, text, start, cache):
        return start
    cache.reset()
    return 0
