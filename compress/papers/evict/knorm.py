"""Norms of keys, arXiv 2406.11430: keep the tokens whose keys are short. A baseline.

Keys of small Euclidean norm are those that attention tends to look at. Neither queries nor attention are needed.

Where we differ: the score is the inverse of the norm, which orders tokens as its negative does and is positive, so that
it can be multiplied. Sinks and newest tokens stay, which kvpress's does not see to.

Outside the core because at half of the tokens it has ten times the KL of SnapKV (docs/results/kv_eviction.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from compress.kv.evict.layer import EvictingLayer
from compress.kv.evict.select import Seen

NEEDS = frozenset[str]()
LAYER = EvictingLayer


@dataclass(frozen=True)
class Config:
    """Has no settings."""


def score(config: Config, seen: Seen) -> Tensor:
    """Return 1 / ||key||, float32 [h, n]."""
    return 1 / seen.keys.float().norm(dim=-1).clamp(min=1e-6)
