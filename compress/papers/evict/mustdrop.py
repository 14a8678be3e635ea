"""MustDrop, arXiv 2411.10803: image tokens are merged where neighbours are alike, then dropped where no text looks.

Two stages of the paper's three are here. Merging: behind the layer `merge_after`, runs of neighbouring image tokens
whose values are alike become one token, whose hidden state is their mean and whose place is that of the first.
Filtering: behind the layer `after`, image tokens leave that get little attention from the text both as a whole (mean
over the tokens of the question) and from each single token of it (the most that one gives); what one of the two needs
stays. `keep` is the share of image tokens behind both stages, the root of it behind the first.

    kv_cache: {method: kivi, bits: 4, evict: {method: mustdrop, keep: 0.25}}

Where we differ: the paper merges in the vision encoder, within windows of two dimensions and above a threshold of
similarity; here a cache merges in the decoder, along the order of the tokens, the most similar pairs first until the
share is reached, since `keep` says how much stays. Its set of key tokens, chosen by the encoder's attention, is not
known to a cache. `merge_after: -1` leaves the first stage out, `after: -1` the second.

What it does not do: the third stage, which drops image tokens again while decoding by the attention of the output. What
pruned.py refuses is refused here. The authors' code was not read; this follows the abstract.

Outside the core because no pretrained vision-language model was measured (docs/results/kv_vision.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from compress.kv.evict.select import Seen
from compress.papers.evict.vision_layers import VisionPrunedLayer, check_share

NEEDS = frozenset({"queries"})
PROMPT_ONLY = True
PRUNES = True
LAYER = VisionPrunedLayer
DEFAULTS: Mapping[str, Any] = {"heads": "shared"}


@dataclass(frozen=True)
class Config:
    merge_after: int = 0  # [layer] behind which neighbours are merged, from 0; -1: nowhere
    after: int = 1  # [layer] behind which image tokens are dropped by attention; -1: nowhere
    window: int = 8  # [tokens] newest of the prompt, at most, which are taken for the question

    def __post_init__(self) -> None:
        if min(self.merge_after, self.after) < -1 or max(self.merge_after, self.after) < 0:
            raise ValueError("after and merge_after must be layers from 0, or one of them -1")
        if self.merge_after == self.after:
            raise ValueError("merge_after and after must be different layers")
        if self.window < 1:
            raise ValueError("window must be 1 or more")


def check(budget: Any) -> None:
    """Raise ValueError, which begins with a field's name, for settings of a `Budget` that it has no use for."""
    check_share("mustdrop", budget)


def fractions(config: Config, keep: float, layers: int) -> dict[int, float]:
    """Return the share of the image tokens that stays behind each stage, by its layer. ValueError if there is none."""
    stages = sorted(index for index in (config.merge_after, config.after) if index >= 0)
    if stages[-1] >= layers - 1:
        raise ValueError(f"after must name a layer of the model, which has {layers}, and not the last one")
    return {index: keep ** ((number + 1) / len(stages)) for number, index in enumerate(stages)}


def score(config: Config, seen: Seen) -> Tensor:
    """Return what the question looks at float32 [h, n]: the larger of two kinds of attention, each by its mean.

    Mean over heads; as a whole, the mean over the newest queries; from each, the most that one of them gives.
    """
    assert seen.queries is not None
    newest = seen.newest(config.window)
    count = newest.queries.shape[1] if newest.queries is not None else 0
    whole = newest.mass.mean((0, 1))
    single = torch.zeros_like(whole)
    for last in range(count):
        tokens = seen.keys.shape[1] - last
        queries = seen.queries[:, : seen.queries.shape[1] - last]
        one = Seen(seen.keys[:, :tokens], seen.values[:, :tokens], queries[:, -1:], seen.scaling, seen.sink)
        single[:tokens] = torch.maximum(single[:tokens], one.mass.mean((0, 1)))
    both = torch.maximum(whole / whole.mean(), single / single.mean())
    return torch.nan_to_num(both).expand(len(seen.keys), -1)


def joins(config: Config, layer: int, values: Tensor, vision: Tensor, keep: int) -> Tensor | None:
    """Return the place that each token's hidden state joins, int64 [n], itself for those that stay; None: no merging.

    values [h, n, width]; vision bool [n]; keep: how many runs of image tokens there shall be. Runs end where text lies
    between.
    """
    if layer != config.merge_after:
        return None
    places = vision.nonzero()[:, 0]
    rows = functional.normalize(values[:, places].float().transpose(0, 1).flatten(1), dim=-1)
    alike = (rows[1:] * rows[:-1]).sum(-1)
    alike[places[1:] != places[:-1] + 1] = -torch.inf
    links = alike.argsort(descending=True, stable=True)[: max(0, len(places) - keep)]
    begins = torch.ones(len(places), dtype=torch.bool, device=places.device)
    begins[links[alike[links] > -torch.inf] + 1] = False
    joined = torch.arange(len(vision), device=places.device)
    joined[places] = places[begins][begins.cumsum(0) - 1]
    return joined
