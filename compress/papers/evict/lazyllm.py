"""LazyLLM, arXiv 2407.14057: drop tokens within the prompt's forward pass, so that later layers do not compute them.

After some layers the tokens are scored by the attention that the newest tokens of the prompt give them there, mean over
all query heads. The worst leave: their hidden states do not go through the later layers, whose caches hold no keys and
values of them. So the prompt is computed faster, and the later the layer, the fewer tokens it caches.

`after` names the layers behind which tokens are dropped. The fraction that stays falls by the same factor at each, so
that `keep` is the mean over the layers of what they cache. With `revive: true`, dropped hidden states are kept. Each
later step of one token scores anew what the layer caches, and those of the best tokens that the next layers lack are
computed there, from where they were left, before they are attended to.

Where we differ: the last token alone scores in the paper (`window: 1`); here the 64 newest do, as in SnapKV, which
loses less (docs/results/kv_eviction.md). The paper gives a percentile for each layer; here `keep` sets all. A later
token attends to all that a layer caches, the paper's to the tokens of highest score alone. The first `sink` tokens and
the newest `recent` stay always (in the paper the last one). Outside the core because at half of the tokens it has 15
times the KL of SnapKV, and at three quarters 2.5 times.

What it does not do: logits of the prompt are those of the tokens that reach the end, and only the last is what the
model means; losses over a prompt and hidden states of all tokens are refused. Without `revive`, the default, what was
dropped stays dropped (the paper's static pruning): a later question finds only what the newest tokens of the prompt
looked at. With it, the hidden states of dropped tokens are memory beside the cache, a batch is of one sequence, and
tokens cannot be taken back. Only the first forward pass drops tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.kv.evict.select import Seen
from compress.papers.evict.pruned import PrunedLayer

NEEDS = frozenset({"queries"})
PROMPT_ONLY = True
PRUNES = True  # within the forward pass: pruned.py
LAYER = PrunedLayer
DEFAULTS: Mapping[str, Any] = {"heads": "shared"}
_FIXED: Mapping[str, Any] = {"heads": "shared", "critical": False, "layers": "equal", "merge": False}


@dataclass(frozen=True)
class Config:
    after: tuple[int, ...] = ()  # [layers] behind which tokens are dropped, from 0, -2 is the last but one; empty: at a
    # quarter, a half and three quarters of the layers
    window: int = 64  # [tokens] newest of the prompt, whose attention is averaged; 1: the paper's
    revive: bool = False  # later steps may compute dropped tokens in the layers that lack them; their hidden states are
    # kept

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError("window must be 1 or more")


def check(budget: Any) -> None:
    """Raise ValueError, which begins with a field's name, for settings of a `Budget` that it has no use for."""
    if budget.tokens is not None:
        raise ValueError("tokens is not possible with lazyllm, whose layers keep fractions; set keep")
    if budget.keep_by_layer:
        raise ValueError(
            "keep_by_layer is not possible with lazyllm, whose layers have what earlier ones left; set keep"
        )
    for name, only in _FIXED.items():
        if getattr(budget, name) != only:
            raise ValueError(f"{name} is not possible with lazyllm, which drops whole tokens; remove it")


def fractions(config: Config, keep: float, layers: int) -> dict[int, float]:
    """Return the fraction of the prompt that stays behind each layer of `after`, by its number.

    Layers up to and with the first cache all tokens; the mean over all layers is `keep`. ValueError, which begins with
    a field's name, where that cannot be.
    """
    after = sorted({index % layers if -layers <= index < layers else -1 for index in config.after})
    if not config.after:
        after = sorted({-(-layers * quarter // 4) - 1 for quarter in (1, 2, 3)} - {layers - 1})
    if not after or after[0] < 0 or after[-1] == layers - 1:
        raise ValueError(f"after must name layers of the model, which has {layers}, and not the last one")
    ends = [*after, layers - 1]
    sizes = [after[0] + 1, *(b - a for a, b in zip(ends, ends[1:], strict=False))]

    def mean(factor: float) -> float:
        return sum(size * factor**stage for stage, size in enumerate(sizes)) / layers

    if keep <= mean(0):
        raise ValueError(
            f"keep {keep} is too little: layers up to {after[0]} cache all tokens, {mean(0):.3g} of all that is "
            "cached; set after to earlier layers, or keep more"
        )
    low, high = 0.0, 1.0
    for _ in range(60 if keep < 1 else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if mean(middle) < keep else (low, middle)
    return {index: high ** (stage + 1) for stage, index in enumerate(after)}


def score(config: Config, seen: Seen) -> Tensor:
    """Return the attention of the newest queries float32 [h, n], mean over query heads: the same for each KV head.

    A token that came after a query has none of its attention.
    """
    assert seen.queries is not None
    mass = seen.newest(config.window).mass / min(config.window, seen.queries.shape[1])
    return torch.nan_to_num(mass.mean((0, 1)).expand(len(seen.keys), -1))
