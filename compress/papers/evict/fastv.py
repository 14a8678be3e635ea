"""FastV, arXiv 2403.06764: behind an early layer, image tokens that get little attention leave the prompt's pass.

Attention to image tokens is low and concentrated from the third layer on. So behind the layer `after` (in the paper
two layers are computed in full) the image tokens are ranked by the attention that the prompt's last token gives them
there, mean over heads, and the best share `keep` of them stays (in the paper half). The others go through no later
layer: the prompt is computed faster, and later layers cache less. Text stays as a whole.

    kv_cache: {method: kivi, bits: 4, evict: {method: fastv, keep: 0.5, after: 1}}

Where we differ: nothing is masked in place of being dropped, as in the authors' measurements of quality; positions stay
those of the prompt. `window` tokens can score in place of the last one.

What it does not do: layers up to `after` cache all tokens; what was dropped does not come back. Only the first forward
pass drops tokens. What pruned.py refuses is refused here: losses over a prompt, hidden states of all tokens.

Outside the core because no pretrained vision-language model was measured (docs/results/kv_vision.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.kv.evict.select import Seen
from compress.papers.evict.vision_layers import VisionPrunedLayer, check_share

NEEDS = frozenset({"queries"})
PROMPT_ONLY = True
PRUNES = True
LAYER = VisionPrunedLayer
DEFAULTS: Mapping[str, Any] = {"heads": "shared"}


@dataclass(frozen=True)
class Config:
    after: int = 1  # [layer] behind which image tokens are dropped, from 0
    window: int = 1  # [tokens] newest of the prompt, whose attention is averaged; 1: the paper's

    def __post_init__(self) -> None:
        if self.after < 0 or self.window < 1:
            raise ValueError("after must be 0 or more and window 1 or more")


def check(budget: Any) -> None:
    """Raise ValueError, which begins with a field's name, for settings of a `Budget` that it has no use for."""
    check_share("fastv", budget)


def keeps_all(config: Config) -> bool:
    """Return True: of a prompt of text alone, as bytes are counted, all tokens stay."""
    return True


def fractions(config: Config, keep: float, layers: int) -> dict[int, float]:
    """Return the share of the image tokens that stays behind a layer, by its number. ValueError if there is none."""
    if config.after >= layers - 1:
        raise ValueError(f"after must name a layer of the model, which has {layers}, and not the last one")
    return {config.after: keep}


def forgets(config: Config, layer: int) -> bool:
    """Return False: the cache of each layer keeps what it was given."""
    return False


def score(config: Config, seen: Seen) -> Tensor:
    """Return the attention of the newest queries float32 [h, n], mean over query heads: the same for each KV head."""
    assert seen.queries is not None
    mass = seen.newest(config.window).mass / min(config.window, seen.queries.shape[1])
    return torch.nan_to_num(mass.mean((0, 1)).expand(len(seen.keys), -1))


def joins(config: Config, layer: int, values: Tensor, vision: Tensor, keep: int) -> Tensor | None:
    """Return None: nothing is merged."""
    return None
