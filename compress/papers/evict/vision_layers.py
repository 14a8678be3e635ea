"""Cache layers that forget vision tokens alone: after the prompt (vision.py) or in its pass (fastv.py, mustdrop.py).

The first layer is told of each forward pass of the whole model, and finds the vision tokens among its ids for all of
them. A prompt without an image keeps all tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import CompressError, RecipeError
from compress.kv.cache import CODED
from compress.kv.evict import select
from compress.kv.evict.layer import UNSEEN, EvictingLayer, Judged
from compress.kv.layer import MakeLayer
from compress.kv.settings import CacheSettings
from compress.papers.evict.pruned import PrunedLayer

CONFIG_FIELDS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")


def placeholder_ids(config: Any) -> list[int]:
    """Return the ids that stand where states of images and videos go, ascending; none for a model of text alone."""
    return sorted({x for name in CONFIG_FIELDS if isinstance(x := getattr(config, name, None), int)})


def vision_tokens(model: Any, kwargs: Mapping[str, Any]) -> Tensor:
    """Return which tokens of a forward pass stand for images, bool [B, n].

    CompressError where the model has no such tokens, or its ids are not among the arguments.
    """
    ids = placeholder_ids(model.config)
    if not ids:
        raise CompressError(
            "kv_cache.evict: the configuration of this model names no tokens that stand for images (image_token_id); "
            "choose another method, such as snapkv"
        )
    given = kwargs.get("input_ids")
    if not isinstance(given, Tensor):
        raise CompressError(
            "kv_cache.evict: vision tokens are found by their ids, which this forward pass was not given; pass "
            "input_ids=... by name"
        )
    return torch.isin(given, given.new_tensor(ids))


def check_share(method: str, budget: Any, merges: bool = False) -> None:
    """Raise ValueError, which begins with a field's name, unless a `Budget` says just a share of vision tokens.

    merges: forgotten tokens may be added to others.
    """
    if budget.tokens is not None or budget.keep_by_layer:
        name = "tokens" if budget.tokens is not None else "keep_by_layer"
        raise ValueError(f"{name} is not possible with {method}, which keeps a share of the vision tokens; set keep")
    fixed: dict[str, Any] = {"heads": "shared", "critical": False, "layers": "equal", "merge": merges and budget.merge}
    for name, only in fixed.items():
        if getattr(budget, name) != only:
            raise ValueError(f"{name} is not possible with {method}, which drops whole tokens of images; remove it")


def kept_vision(count: int, keep: float) -> int:
    """Return how many of so many vision tokens stay: a share, at least one of any."""
    return min(count, max(1, int(keep * count + 1e-9)))


class VisionLayer(EvictingLayer):
    """A layer that forgets vision tokens after the prompt."""

    def _begin(self) -> None:
        super()._begin()
        self.vision: Tensor | None = None  # bool [B, n]: which tokens of the prompt stand for images
        self.is_told = False

    @classmethod
    def of_cache(cls, config: Any, settings: CacheSettings, types: Collection[str]) -> MakeLayer:
        """Return what makes the layers. RecipeError where the first one would not see whole passes."""
        if settings.evict is not None and settings.evict.budget.keep is None:
            raise RecipeError("kv_cache.evict: keep_by_layer is not possible with vision; set keep")
        if next(iter(types)) != CODED:
            raise RecipeError(
                "kv_cache.evict: vision tokens are found by a first layer with full attention, which this model has "
                "not; choose another method, such as snapkv"
            )
        return super().of_cache(config, settings, types)

    def enter(self, model: nn.Module, kwargs: Mapping[str, Any]) -> list[Any]:
        if not self.seen:
            vision = vision_tokens(model, kwargs)
            for layer in self.cache.layers:
                if isinstance(layer, VisionLayer):
                    layer.vision, layer.is_told = vision, True
        return super().enter(model, kwargs)

    def _judge(self, row: int, first: int, keys: Tensor, values: Tensor, queries: Tensor | None) -> Judged:
        """Score the tokens [h, n, width] of one sequence: those of text above all others."""
        if not self.is_told:
            raise CompressError(UNSEEN)
        judged = super()._judge(row, first, keys, values, queries)
        scores = torch.full_like(judged.scores, torch.inf)
        if self.vision is not None:
            vision = self.vision[row, first:].to(scores.device)
            fixed = self.plugin.places(self.eviction.config, int(vision.sum()), self.eviction.budget.keep)
            scores[:, vision] = judged.scores[:, vision] if fixed is None else fixed.to(scores)
        judged.scores = scores
        return judged

    def _survivors(self, judged: Judged, tokens: int, variances: dict[int, float] | None = None) -> list[Tensor]:
        heads, stored_tokens = judged.scores.shape
        count = int(judged.scores[0].isfinite().sum())
        assert self.eviction.budget.keep is not None, "the method's `check` leaves nothing else"
        kept = stored_tokens - count + (kept_vision(count, self.eviction.budget.keep) if count else 0)
        return select.best(judged.scores[:1], [kept]) * heads


class VisionPrunedLayer(PrunedLayer):
    """A layer of a cache whose prompt loses vision tokens from layer to layer, or has some of them merged."""

    def _begin(self) -> None:
        super()._begin()
        self.vision: Tensor | None = None  # bool [B, n], of the whole prompt

    def enter(self, model: nn.Module, kwargs: Mapping[str, Any]) -> list[Any]:
        if not self.seen:
            vision = vision_tokens(model, kwargs)
            for layer in self.cache.layers:
                if isinstance(layer, VisionPrunedLayer):
                    layer.vision = vision
        return super().enter(model, kwargs)

    def _choose(self, new: tuple[Tensor, Tensor], queries: Tensor, fraction: float) -> None:
        self.joined: list[Tensor | None] = []
        super()._choose(new, queries, fraction)
        firsts = new[0].shape[2] - torch.tensor([0 if x is None else len(x) for x in self.joined])
        if self.pruning.moves is not None and any(x is not None for x in self.joined):
            joins = torch.arange(new[0].shape[2], device=new[0].device).repeat(len(new[0]), 1)
            for row, (first, own) in enumerate(zip(firsts.tolist(), self.joined, strict=True)):
                if own is not None:
                    joins[row, first:] = own + first
            self.pruning.joins = joins

    def _stay(self, row: int, pads: int, parts: tuple[Tensor, Tensor, Tensor], fraction: float) -> Tensor:
        keys, values, _ = parts
        every = torch.arange(keys.shape[1], device=keys.device)
        self.joined.append(None)
        if self.vision is None:
            return every
        whole = self.vision[row].to(keys.device)
        columns = self.pruning.columns
        here = whole if columns is None else whole[columns[row]]
        vision = here[len(here) - keys.shape[1] :]
        if not bool(vision.any()):
            return every
        kept = kept_vision(int(whole.sum()), fraction)
        joined = self.plugin.joins(self.eviction.config, self.index, values, vision, kept)
        if joined is not None:
            self.joined[-1] = joined
            return every[joined == every]
        scores = self._scores(*parts)
        scores[:, ~vision] = torch.inf
        return select.best(scores, [int((~vision).sum()) + min(kept, int(vision.sum()))])[0]
