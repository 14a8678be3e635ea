"""Vision tokens forgotten after the prompt: every k-th one stays, or the first, the last, or those of most attention.

An image is hundreds of tokens of a prompt, and much of it says the same. `keep` is the share of the vision tokens that
stays in each layer; text stays as a whole. Which tokens stand for images is known from the placeholder ids of the
model's configuration. `choose: every` (evenly spaced), `first` and `last` do not look at the prompt; `attention` keeps
those to which the layer's `window` newest queries, the question, look most, as SnapKV (arXiv 2404.14469) does with
text; `merge: true` of the common settings adds forgotten tokens to the most similar ones that stay (D2O, 2406.13035).

The prompt itself is computed in full: this saves memory and the time of later steps. FastV (fastv.py) and MustDrop
(mustdrop.py) drop vision tokens within the prompt's pass. This is the baseline they are compared with.

What it does not do: pool neighbours into new tokens; models whose first layer has no full attention, whose prompts are
not seen as a whole.

Outside the core because no pretrained vision-language model was measured (docs/results/kv_vision.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from compress.kv.evict.select import Seen
from compress.papers.evict.vision_layers import VisionLayer, check_share, kept_vision

NEEDS = frozenset({"queries"})
PROMPT_ONLY = True
LAYER = VisionLayer
DEFAULTS: Mapping[str, Any] = {"heads": "shared"}


@dataclass(frozen=True)
class Config:
    choose: Literal["attention", "every", "first", "last"] = "attention"  # which vision tokens stay
    window: int = 1  # [tokens] newest of the prompt, whose attention is read

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError("window must be 1 or more")


def check(budget: Any) -> None:
    """Raise ValueError, which begins with a field's name, for settings of a `Budget` that it has no use for."""
    check_share("vision", budget, merges=True)


def keeps_all(config: Config) -> bool:
    """Return True: of a prompt of text alone, as bytes are counted, all tokens stay."""
    return True


def places(config: Config, count: int, keep: float) -> Tensor | None:
    """Return scores [count] of the vision tokens by their places alone; None: attention decides."""
    index = torch.arange(count, dtype=torch.float32)
    if config.choose == "attention":
        return None
    if config.choose == "every":
        kept = kept_vision(count, keep)
        chosen = ((torch.arange(kept) + 0.5) * count / max(1, kept)).long()
        return torch.zeros(count).index_fill_(0, chosen, 1.0)
    return count - index if config.choose == "first" else index + 1


def score(config: Config, seen: Seen) -> Tensor:
    """Return the attention of the newest queries float32 [h, n], mean over query heads: the same for each KV head."""
    assert seen.queries is not None
    return seen.newest(config.window).mass.mean((0, 1)).expand(len(seen.keys), -1)
