"""Sum the attention that cached tokens are given by queries of the newest tokens, causally and in pieces."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from compress.kv.evict.select import Seen

PIECE = 1 << 22  # float32 probabilities held at a time


def column_mass(seen: Seen) -> Tensor:
    """Return the summed softmax attention of all queries of `seen`, float32 [h, H / h, n]."""
    total = seen.keys.new_zeros(*seen.grouped.shape[:2], seen.keys.shape[1], dtype=torch.float32)
    for p in probabilities(seen):
        total += p.sum(2)
    return total


def probabilities(seen: Seen) -> Iterator[Tensor]:
    """Yield softmax attention float32 [h, H / h, queries, n] of some queries after the others."""
    queries, keys = seen.grouped, seen.keys.float()
    heads, groups, rows, _ = queries.shape
    tokens = keys.shape[1]
    step = max(1, PIECE // (heads * groups * tokens))
    place = torch.arange(tokens, device=keys.device)
    for start in range(0, rows, step):
        part = queries[:, :, start : start + step] * seen.scaling
        logits = part @ keys[:, None].transpose(-1, -2)
        own = tokens - rows + start + torch.arange(part.shape[2], device=keys.device)
        yield logits.masked_fill_(place > own[:, None], -torch.inf).softmax(-1)


def variance(seen: Seen) -> float:
    """Return how uneven the attention of a layer is (D2O): by head the variance of `column_mass`, scaled to 0..1
    across the heads of the layer, then averaged.
    """
    by_head = column_mass(seen).mean(1).double().var(-1, correction=0)
    low, high = by_head.min(), by_head.max()
    return float(((by_head - low) / (high - low).clamp(min=1e-30)).mean())
