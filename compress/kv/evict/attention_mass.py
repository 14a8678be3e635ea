"""Sum the attention that cached tokens are given by queries of the newest tokens, causally and in pieces."""

from __future__ import annotations

import torch
from torch import Tensor

PIECE = 1 << 22  # float32 probabilities held at a time


def column_mass(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the summed softmax attention of all queries, float32 [h, H / h, n]; keys that follow a query are not read.

    queries: float32 [h, H / h, m, width], scaled, of the newest m tokens; keys: float32 [h, n, width].
    """
    heads, groups, rows, _ = queries.shape
    tokens = keys.shape[1]
    step = max(1, min(rows, PIECE // (heads * groups * tokens)))
    follows = torch.ones(step, step, dtype=torch.bool, device=keys.device).triu(1)
    total = keys.new_zeros(heads, groups, tokens)
    for first in range(0, rows, step):
        part = queries[:, :, first : first + step]
        count = part.shape[2]
        last = tokens - rows + first + count
        logits = part.flatten(1, 2) @ keys[:, :last].mT
        logits = logits.unflatten(1, (groups, count))
        logits[..., last - count :].masked_fill_(follows[:count, :count], -torch.inf)
        total[..., :last] += logits.softmax(-1).sum(2)
    return total


def variance(mass: Tensor) -> float:
    """Return how uneven the attention of a layer is (D2O): by head the variance of `mass` float32 [h, H / h, n], what
    tokens are given, scaled to 0..1 across the heads of the layer, then averaged.
    """
    by_head = mass.mean(1).double().var(-1, correction=0)
    low, high = by_head.min(), by_head.max()
    return float(((by_head - low) / (high - low).clamp(min=1e-30)).mean())
