"""A small cache for drafts: a part of the tokens of the target's cache, copied, and the tokens that are drafted.

Attention of a draft reads the first tokens, which all queries look at (StreamingLLM, arXiv 2309.17453), the newest
ones and, if somebody chooses, some in between (TriForce, arXiv 2404.11912). They are copied into a plain cache of
transformers, so that whatever makes passes with one fast serves drafts; passes are given the positions of the tokens in
the text. What the target has verified replaces what the draft has written of the same tokens.

The target's cache may be a plain one or a compressed one, whose tokens are decoded as they are copied. Layers with a
sliding window are read whole: they are short. The target's cache is never written.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from compress.errors import RecipeError
from compress.kv.layer import CodedLayer
from compress.kv.settings import KINDS
from compress.speculate.session import Session

SINK_TOKENS = 4  # always read
SLACK_TOKENS = 64  # what the newest ones may grow by, before the oldest of them are left out


class DraftCache:
    """A cache with the tokens that drafts read, and the passes on it. It stands for `Session.passes` while drafting."""

    def __init__(self, session: Session, recent: int) -> None:
        """recent: newest tokens that are read. RecipeError for a model or a cache that drafts cannot read in parts."""
        if not session.passes.is_plain:
            raise RecipeError(
                "cache: passes of this model and prompt need more than tokens; draft without a part cache"
            )
        self.model, self.target, self.recent = session.model, session.cache, recent
        for index, layer in enumerate(self.target.layers):
            if not isinstance(layer, DynamicLayer | CodedLayer):
                kind = type(layer).__name__
                raise RecipeError(f"cache: layer {index} of the cache is a {kind}; draft without a part cache")
        self.cache: Any = DynamicCache()
        self.is_plain = True
        self.start = 0  # of the newest tokens that are held
        self.length = 0  # tokens of the text up to the last one that is held

    @contextmanager
    def in_use(self, session: Session) -> Iterator[None]:
        """Let the session's passes read this cache, after what the target has verified meanwhile."""
        self.catch_up()
        passes, session.passes = session.passes, self  # type: ignore[assignment]
        try:
            yield
        finally:
            session.passes = passes
            for layer in self.cache.layers:
                if layer.is_sliding:  # its tensors are the target's, which then could not write over what is cropped
                    layer.keys = layer.values = None

    def catch_up(self) -> None:
        """Take over the tokens that the target has verified."""
        length = self.target.get_seq_length()
        if not self.length or length - self.start > self.recent + SLACK_TOKENS:
            self.fill(max(SINK_TOKENS, length - self.recent), length)
        elif length > self.length:
            self.extend(length)

    def fill(self, start: int, length: int) -> None:
        """Hold the first of the target's tokens, and those from `start` up to a length."""
        self.start, self.length = start, length
        self.cache = DynamicCache()
        self.cache.layers = [self.fill_layer(layer) for layer in self.target.layers]

    def extend(self, length: int) -> None:
        """Add the target's tokens up to a length."""
        for index, (own, layer) in enumerate(zip(self.cache.layers, self.target.layers, strict=True)):
            if isinstance(own, DynamicSlidingWindowLayer):
                self.cache.layers[index] = copy_layer(layer)
            elif own.is_initialized:
                own.update(*read_span(layer, self.length, length))
        self.length = length

    def forward(self, tokens: Sequence[int]) -> Tensor:
        """Run new tokens, one behind the other; return logits float32 [tokens, vocab]."""
        return torch.cat([self.step(self.cache, token) for token in tokens])

    def step(self, cache: Any, token: int) -> Tensor:
        """Run one token on a cache, at its place in the text; return logits float32 [1, vocab]."""
        device = self.model.device
        ids, place = (torch.tensor([[number]], dtype=torch.int64, device=device) for number in (token, self.length))
        self.length += 1
        outputs = self.model(input_ids=ids, position_ids=place, past_key_values=cache, use_cache=True)
        logits: Tensor = outputs.logits[0].float()
        return logits

    def crop(self, count: int) -> None:
        """Take the last `count` tokens out of this cache; sliding windows are made anew by the next `catch_up`."""
        for layer in self.cache.layers:
            if not layer.is_sliding:
                layer.crop(-count)
        self.length -= count

    def fill_layer(self, layer: Any, chosen: tuple[Tensor, Tensor] | None = None) -> Any:
        """Return a layer with the tokens of one of the target's that are to be held, chosen ones among them."""
        if layer.is_sliding or not layer.is_initialized:
            return copy_layer(layer)
        parts = [read_span(layer, 0, SINK_TOKENS)]
        if chosen is not None:
            parts.append(chosen)
        if self.length > self.start:  # the text may be shorter than the first tokens
            parts.append(read_span(layer, self.start, self.length))
        made = DynamicLayer()
        made.update(*(torch.cat(each, 2) for each in zip(*parts, strict=True)))
        return made


def copy_layer(layer: Any) -> Any:
    """Return a layer with the same tensors, to which new tokens are added without the other's knowledge."""
    again = copy.copy(layer)
    if again.is_sliding:
        again.record_past = False
        again.keys, again.values = (x[:, :, -again.sliding_window + 1 :] for x in (layer.keys, layer.values))
    return again


def read_span(layer: Any, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return keys and values [B, h, n, width] of the tokens of a layer from start to stop, or to its end; decoded."""
    stop = min(stop, layer.get_seq_length())
    if isinstance(layer, CodedLayer):
        layer.commit()
        keys, values = (layer.stores[kind].read_span(start, stop) for kind in KINDS)
        return keys, values
    return layer.keys[:, :, start:stop], layer.values[:, :, start:stop]
