"""MustDrop, arXiv 2411.10803: image tokens are merged where neighbours are alike, then dropped where no text looks.

The paper's three stages. Merging: behind the layer `merge_after`, runs of neighbouring image tokens whose values are
alike become one token, whose hidden state is their mean and whose place is that of the first. Filtering: behind each
layer of `after`, image tokens leave that get little attention from the text both as a whole (mean over the tokens of
the question) and from each single token of it (the most that one gives); what one of the two needs stays. Decoding:
what left at the last of these layers is of no use for the output, so that behind the prompt the caches of all layers
from the first to the last of them forget it as well. `keep` is the share of image tokens behind all stages; each of
them leaves an equal share of those that it is given.

    kv_cache: {method: kivi, bits: 4, evict: {method: mustdrop, keep: 0.25, after: [2, 6, 10, 14]}}

Layers [2, 6, 10, 14] of 32 are the paper's.

Where we differ, compared with the authors' code: the paper merges in the vision encoder, windows of 3 x 3 tokens whose
mean similarity is above 0.8; here a cache merges in the decoder, along the order of the tokens, the most similar pairs
first until the share is reached, since `keep` says how much stays. Its filter has two thresholds, which are here one
share, and goes by all text behind the image, here by the `window` newest tokens of the prompt. Its set of key tokens,
the 8% to which the encoder's class token looks most, always stays there; a cache does not know it. It numbers the
tokens that are left anew, here they keep their positions. `merge_after: -1` leaves the first stage out, `after: -1` the
others.

What it does not do: count image tokens in `plan`, which takes a prompt for text alone. What pruned.py refuses is
refused here. Up to the last filter, layers that will forget tokens hold exact keys and values of the prompt.

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
    after: int | tuple[int, ...] = 1  # [layers] behind which image tokens are dropped by attention; -1: nowhere
    window: int = 8  # [tokens] newest of the prompt, at most, which are taken for the question

    def __post_init__(self) -> None:
        if self.merge_after < -1:
            raise ValueError(f"merge_after {self.merge_after} is no layer; layers count from 0, and -1 is none")
        if min(self.filters, default=0) < 0 or self.after == ():
            raise ValueError("after must name layers from 0, or be -1 for none")
        if self.merge_after < 0 and not self.filters:
            raise ValueError("after and merge_after are both -1, so that nothing would be dropped; name a layer")
        if self.filters and self.merge_after >= self.filters[0]:
            raise ValueError("after must name layers behind merge_after, which merges first")
        if self.window < 1:
            raise ValueError("window must be 1 or more")

    @property
    def filters(self) -> tuple[int, ...]:
        """Return the layers of `after`, ascending."""
        if self.after == -1:
            return ()
        return (self.after,) if isinstance(self.after, int) else tuple(sorted(set(self.after)))


def check(budget: Any) -> None:
    """Raise ValueError, which begins with a field's name, for settings of a `Budget` that it has no use for."""
    check_share("mustdrop", budget)


def keeps_all(config: Config) -> bool:
    """Return True: of a prompt of text alone, as bytes are counted, all tokens stay."""
    return True


def fractions(config: Config, keep: float, layers: int) -> dict[int, float]:
    """Return the share of the image tokens that stays behind each stage, by its layer. ValueError if there is none."""
    stages = [index for index in (config.merge_after, *config.filters) if index >= 0]
    if stages[-1] >= layers - 1:
        name = "after" if config.filters else "merge_after"
        raise ValueError(f"{name} must name a layer of the model, which has {layers}, and not the last one")
    return {index: keep ** ((number + 1) / len(stages)) for number, index in enumerate(stages)}


def forgets(config: Config, layer: int) -> bool:
    """Return whether the cache of a layer is to forget, behind the prompt, what left in any layer: the third stage."""
    return bool(config.filters) and config.filters[0] <= layer <= config.filters[-1]


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
