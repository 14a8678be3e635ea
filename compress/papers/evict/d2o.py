"""D2O, arXiv 2406.13035: keep the tokens that all queries of the prompt attend to most, and merge what is evicted.

The score is the attention that a token was given by all queries of the prompt, summed. Half of what stays are such
tokens, the other half are the newest. Layers of even attention keep more (`layers: variance`, the default of this
method), and evicted keys and values are added to similar ones that stay (`merge: true`, its default, too).

Where we differ: tokens are chosen and merged in each head by itself, and the mean of all layers is `keep`, also where
the first two layers and the last one keep all.

What it does not do: it works on the prompt, not while decoding. Merged keys are of different positions.

Outside the core because at half of the tokens it has a KL of 0.0427 on SmolLM2-135M at 2,048 tokens, where SnapKV has
0.0243, and breaks on the bundled model with 0.58 (docs/results/kv_eviction.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.kv.evict.layer import EvictingLayer
from compress.kv.evict.select import Seen

NEEDS = frozenset({"queries"})
LAYER = EvictingLayer
PROMPT_ONLY = True
DEFAULTS: Mapping[str, Any] = {"layers": "variance", "merge": True}


@dataclass(frozen=True)
class Config:
    newest: float = 0.5  # of the tokens that stay, the fraction that is the newest ones

    def __post_init__(self) -> None:
        if not 0 <= self.newest <= 1:
            raise ValueError(f"newest {self.newest} is not between 0 and 1")


def keeps(config: Config, kept: int) -> int:
    """Return how many newest tokens stay where a head keeps so many."""
    return int(kept * config.newest)


def score(config: Config, seen: Seen) -> Tensor:
    """Return the attention that each token was given by all queries, float32 [h, n], mean over query heads."""
    return torch.nan_to_num(seen.mass.mean(1))
