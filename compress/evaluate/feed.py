"""Feed tokens to a model for what they leave in a cache, without their logits, which at 8,192 tokens take gigabytes."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

LAST = "logits_to_keep"  # the argument of forward passes that says of how many last tokens logits are asked


def fed(model: Any, tokens: Tensor, cache: Any) -> Tensor:
    """Feed tokens int64 [B, n] through a cache; return the logits [B, 1, vocabulary] of the last of them."""
    given = {LAST: 1} if LAST in inspect.signature(model.forward).parameters else {}
    return model(input_ids=tokens, past_key_values=cache, use_cache=True, **given).logits[:, -1:]
