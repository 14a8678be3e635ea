"""Cache layers that forget vision tokens alone: after the prompt (vision.py) or in its pass (fastv.py, mustdrop.py).

The first layer is told of each forward pass of the whole model, and finds the vision tokens among its ids for all of
them. A prompt without an image keeps all tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import CompressError, RecipeError
from compress.kv.cache import CODED
from compress.kv.evict import select
from compress.kv.evict.layer import UNSEEN, EvictingLayer, Judged
from compress.kv.evict.placing import KeptTokens, align_rows
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


@dataclass(frozen=True)
class HeldPrompt:
    """What a layer was given of the prompt and has not stored yet."""

    new: tuple[Tensor, Tensor]  # keys and values [B, h, n, width]
    queries: Tensor | None  # [B, H, n, width]
    columns: Tensor  # int64 [B, n]: of these tokens in the prompt
    firsts: Tensor  # int64 [B]: the first of these places that holds a token


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
    """A layer of a cache whose prompt loses vision tokens from layer to layer, or has some of them merged.

    A layer that the method's `forgets` names is stored when the last one that drops tokens has done so, without them.
    """

    def _begin(self) -> None:
        super()._begin()
        self.vision: Tensor | None = None  # bool [B, n], of the whole prompt
        self.is_holding = False  # what it is given next is held
        self.held: HeldPrompt | None = None  # until no later layer drops tokens

    def enter(self, model: nn.Module, kwargs: Mapping[str, Any]) -> list[Any]:
        if not self.seen:
            vision = vision_tokens(model, kwargs)
            for layer in self.cache.layers:
                if isinstance(layer, VisionPrunedLayer):
                    layer.vision = vision
        return super().enter(model, kwargs)

    def _store_prompt(self, new: tuple[Tensor, Tensor], queries: Tensor | None) -> None:
        self.is_holding = self.plugin.forgets(self.eviction.config, self.index)
        super()._store_prompt(new, queries)
        if self.index == max(self.pruning.stays):
            for layer in self._layers():
                assert isinstance(layer, VisionPrunedLayer)
                layer._store_held()

    def _append(self, new: tuple[Tensor, Tensor], queries: Tensor | None) -> None:
        if not self.is_holding:
            super()._append(new, queries)
            return
        columns, batch, device = self.pruning.columns, len(new[0]), new[0].device
        columns = torch.arange(new[0].shape[2]).expand(batch, -1) if columns is None else columns
        columns = columns.to(device)
        firsts = self._firsts(batch, columns.device) if self.pruning.pads is None else self.pruning.pads
        self.held, self.is_holding = HeldPrompt(new, queries, columns, firsts), False

    def _store_held(self) -> None:
        """Store what is held of the prompt's tokens, those that are left in the end alone."""
        if self.held is None:
            return
        held, left, pads = self.held, self.pruning.columns, self.pruning.pads
        self.held = None
        if left is None:
            super()._append(held.new, held.queries)
            return
        assert pads is not None, "it comes with the columns"
        rows = []
        for columns, first, own, filled in zip(held.columns, held.firsts.tolist(), left, pads.tolist(), strict=True):
            stays = torch.isin(columns[first:], own[filled:].to(columns.device)).nonzero()[:, 0] + first
            rows.append([stays] * held.new[0].shape[1])
        if self.stores["keys"].codec.rope == "pre":
            self.rope.place(held.columns.gather(1, align_rows(rows)[0][:, 0]), self.seen)
        self._place(held.new, KeptTokens(rows, self.sink, False), held.queries)

    @property
    def stored_tokens(self) -> int:
        return super().stored_tokens + (0 if self.held is None else self.held.columns.shape[1])

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
