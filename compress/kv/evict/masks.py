"""Make the mask of a layer that stores fewer tokens than it has seen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compress.errors import CompressError


def joined(given: Any, starts: Tensor, stored: int, tokens: int, queries: int) -> Tensor | None:
    """Return the mask of `tokens` new queries over `stored` tokens and themselves; None where nothing is masked.

    given: the model's own mask, bool or additive [B or 1, 1 or H, tokens, any length], whose last columns are those of
    the new tokens; None: it has none, and the new tokens are causal. starts: int64 [B, h or 1], first stored columns
    without a token. queries: query heads of the model. -> [B or 1, 1 or H, tokens, stored + tokens], of the kind of
    `given`. CompressError for a mask of another form.
    """
    if given is not None and not (isinstance(given, Tensor) and given.dim() == 4):
        raise CompressError(
            "kv_cache.evict: the mask of this attention function has another form; set attention to sdpa or eager"
        )
    is_open = not bool(starts.any())
    if tokens == 1 and is_open and given is None:
        return None
    device = starts.device if given is None else given.device
    own = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()[None, None]
    own = own if given is None else given[..., -tokens:]
    past = torch.arange(stored, device=device) >= starts.to(device)[..., None]  # B, h or 1, stored
    if past.shape[1] > 1:
        past = past.repeat_interleave(queries // past.shape[1], 1)
    if own.dtype != torch.bool:
        past = torch.zeros_like(past, dtype=own.dtype).masked_fill_(~past, torch.finfo(own.dtype).min)
    shape = torch.broadcast_shapes(past.shape[:2], own.shape[:2])
    past = past[:, :, None].expand(*shape, tokens, stored)
    return torch.cat((past, own.expand(*shape, tokens, tokens)), -1)
