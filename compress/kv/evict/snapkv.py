"""SnapKV, arXiv 2404.14469: keep the tokens that the newest queries attend to.

The softmax attention of the last `window` queries is averaged over these, and smoothed along the tokens by an average
over `pool` neighbours, so that what stays is in runs. The window itself stays. Query heads of a KV head are averaged.

Where we differ: the paper pools with a maximum or an average; here it is the average, as in kvpress. While decoding,
the window is that of the newest tokens at each eviction.

What it does not do: it knows the question only if the question is in the window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from compress.kv.evict.layer import EvictingLayer
from compress.kv.evict.select import Seen

NEEDS = frozenset({"queries"})
LAYER = EvictingLayer


@dataclass(frozen=True)
class Config:
    window: int = 64  # [tokens] newest, whose queries choose; they stay
    pool: int = 5  # [tokens] averaged around each; odd

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError("window must be 1 or more")
        if self.pool < 1 or self.pool % 2 == 0:
            raise ValueError(f"pool {self.pool} is not an odd number of tokens")


def keeps(config: Config, kept: int) -> int:
    """Return how many newest tokens stay, whatever a head keeps."""
    return config.window


def score(config: Config, seen: Seen) -> Tensor:
    """Return pooled attention of the window float32 [h, n]; 0 within the window, which stays anyway."""
    assert seen.queries is not None
    tokens = seen.keys.shape[1]
    window = min(config.window, seen.queries.shape[1], tokens)
    mass = seen.newest(window).mass[..., : tokens - window] / window
    scores = mass.new_zeros(mass.shape[0], tokens)
    if tokens > window:
        pooled = functional.avg_pool1d(mass, config.pool, stride=1, padding=config.pool // 2)
        scores[:, : tokens - window] = pooled.mean(1)
    return torch.nan_to_num(scores)
