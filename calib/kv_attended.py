"""Sum up how much attention reads of each cached token: p^2 over the queries of a KV head that read it as codes.

An error e of a token's value moves the output of a query with probability p by p e, so that the sum of p^2 weighs the
squared errors of tokens (compress/kv/codecs/components.py). Tokens less than `near` before a query are exact when it
reads them, and are left out. At most QUERIES_PER_SAMPLE queries of a sample are looked at, evenly spaced. Beside that,
attention with a bound on scores, through which gradients pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

QUERIES_PER_SAMPLE = 128
SCORES = 1 << 22  # computed at a time


def attention_by_key(
    query: Tensor, key: Tensor, mask: Tensor | None, scores: tuple[float | None, float | None], near: int
) -> Tensor:
    """query [B, H, n, width], key [B, h, n, width] after RoPE -> sums of p^2 [B, h, n] float32.

    mask: what attention was given, [B or 1, 1 or H, n, n], bool or added to scores; None: causal. scores: the factor of
    products (None: 1 / sqrt(width)) and the bound of scores (None: there is none). near: at most half of the tokens.
    """
    query, key = query.detach(), key.detach()
    heads, tokens = key.shape[1:3]
    near = min(near, tokens // 2)
    rows = torch.arange(near, tokens, -(-(tokens - near) // QUERIES_PER_SAMPLE), device=key.device)
    total = key.new_zeros(len(key), heads, tokens, dtype=torch.float32)
    for sample in range(len(key)):
        k = key[sample, :, None].float()
        for part in rows.split(max(1, SCORES // (query.shape[1] * tokens))):
            q = query[sample][:, part].float().unflatten(0, (heads, -1))
            p = _probabilities(q @ k.mT, None if mask is None else mask[sample % len(mask)], part, scores, q.shape[-1])
            is_coded = torch.arange(tokens, device=key.device) <= part[:, None] - near
            total[sample] += (p.square() * is_coded).sum((1, 2))
    return total


def _probabilities(
    products: Tensor, mask: Tensor | None, rows: Tensor, scores: tuple[float | None, float | None], width: int
) -> Tensor:
    """products [h, queries of a head, rows, tokens] -> probabilities alike; mask [1 or H, n, n]."""
    scaling, softcap = scores
    products = products * (width**-0.5 if scaling is None else scaling)
    if softcap is not None:
        products = (products / softcap).tanh() * softcap
    if mask is None:
        mask = torch.arange(products.shape[-1], device=rows.device) <= rows[:, None]
    else:
        mask = mask[:, rows]
        mask = mask if len(mask) == 1 else mask.unflatten(0, products.shape[:2])
    never = torch.finfo(torch.float32).min
    return (products.masked_fill(~mask, never) if mask.dtype == torch.bool else products + mask).softmax(-1)


def capped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float, **kwargs: Any
) -> Tensor:
    """Attend with logits bounded by softcap tanh(logits / softcap), differentiable."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = ((query @ key.mT) * scaling / softcap).tanh() * softcap
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return (scores.float().softmax(-1).to(value.dtype) @ value).transpose(1, 2).contiguous()
