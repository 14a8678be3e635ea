"""Drafts that read the parts of the cache which the newest token asks for (TriForce, arXiv 2404.11912).

The cache is divided into chunks of 8 tokens. A query is compared with the mean of the keys of each chunk, and the
chunks that it finds most similar are read, beside the first tokens and the newest ones. Their keys and values are
copied, for each KV head its own, and serve all drafted tokens of a round; the target then checks these against the
whole cache.

Differences from TriForce: the first token that is drafted in a round chooses, before it attends; there, the last one
before generation does. Query heads that share a KV head choose by the mean of their softmax over chunks. The model that
drafts for the draft is left out: n-grams can take its place. Chunks that were generated can be chosen, too. SpecPV
(arXiv 2512.02337) checks drafts of another model by such a part, and by the whole cache only now and then: its text is
no longer that of the target. Here every token is checked by the whole.

It does not choose for layers with a sliding window, which are read whole, nor for models whose layers share keys.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from compress.errors import RecipeError
from compress.kv.buffer import Buffer
from compress.kv.layer import CodedLayer
from compress.kv.settings import KINDS
from compress.kv.sparse.layer import decode_gathered, gather, picker, take
from compress.kv.token_store import Store
from compress.speculate.draft_cache import SINK_TOKENS, DraftCache, copy_layer, read_span
from compress.speculate.drafting import Reduction
from compress.speculate.session import Session

PART = "cache"
NAME = "compress_choosing"  # the attention function that chooses
CHUNK = 8  # tokens: what is chosen together
RECENT = 64  # tokens: the newest, always read
STEP = 4096  # tokens at a time: bounds what is decoded

_pass = threading.local()  # the cache that a running pass chooses for


@dataclass(frozen=True)
class Config:
    """What is read."""

    tokens: int = 512  # that are read, the first and the newest ones included

    def __post_init__(self) -> None:
        if self.tokens < SINK_TOKENS + RECENT + 2 * CHUNK:
            raise ValueError(f"tokens {self.tokens} is not {SINK_TOKENS + RECENT + 2 * CHUNK} or more")


class RetrievedCache(DraftCache):
    """A draft cache whose tokens are chosen anew in each round."""

    def __init__(self, session: Session, config: Config) -> None:
        """RecipeError for a model or a cache whose tokens cannot be chosen."""
        super().__init__(session, config.tokens - SINK_TOKENS)
        self.settings = self.model.config.get_text_config(decoder=True)
        if not all(layer.is_initialized for layer in self.target.layers):
            raise RecipeError("cache: layers of this model share keys; draft with cache=window")
        if self.settings._attn_implementation not in ALL_ATTENTION_FUNCTIONS:
            raise RecipeError(
                "cache: attention of this model cannot be replaced; load it with sdpa, or use cache=window"
            )
        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        self.count = (config.tokens - SINK_TOKENS - RECENT - CHUNK) // CHUNK  # chunks that are chosen
        self.means = [Buffer() for _ in self.target.layers]  # of the keys of chunks [B, h, chunks, width]
        self.is_due = False  # tokens are to be chosen by the next pass

    def catch_up(self) -> None:
        """Take over what the target has verified; where the text is longer than what is read, choose anew."""
        length = self.target.get_seq_length()
        self.is_due = length > self.recent + SINK_TOKENS
        if not self.is_due:
            super().catch_up()
            return
        chunks = (length - RECENT - SINK_TOKENS) // CHUNK
        self.start, self.length = SINK_TOKENS + CHUNK * chunks, length
        self._average(chunks)

    def forward(self, tokens: Sequence[int]) -> Tensor:
        """Run new tokens, the first of which chooses if that is due; return logits float32 [tokens, vocab]."""
        if not self.is_due:
            return super().forward(tokens)
        self.is_due = False
        self.cache = DynamicCache()
        self.cache.layers = [
            copy_layer(layer) if layer.is_sliding else _ChoosingLayer(self, index)
            for index, layer in enumerate(self.target.layers)
        ]
        own, self.settings._attn_implementation = self.settings._attn_implementation, NAME
        _pass.choosing = self.cache.layers, ALL_ATTENTION_FUNCTIONS[own]
        try:
            logits = self.step(self.cache, tokens[0])
        finally:
            self.settings._attn_implementation = own
            del _pass.choosing
        self.cache.layers = [
            layer.finish() if isinstance(layer, _ChoosingLayer) else layer for layer in self.cache.layers
        ]
        return torch.cat([logits, super().forward(tokens[1:])]) if len(tokens) > 1 else logits

    def choose(self, index: int, query: Tensor) -> Tensor:
        """Return the chunks that a scaled query [B, H, 1, width] reads of a layer, int64 [B, h, count], in order."""
        means = self.means[index].view().float()
        return chunks_of(query[:, :, 0], means, min(self.count, means.shape[2]))

    def _average(self, chunks: int) -> None:
        """Make the means of chunks that have none yet."""
        for means, layer in zip(self.means, self.target.layers, strict=True):
            for start in range(means.length, 0 if layer.is_sliding else chunks, STEP // CHUNK):
                first, last = (SINK_TOKENS + CHUNK * number for number in (start, min(start + STEP // CHUNK, chunks)))
                keys = read_span(layer, first, last)[0]
                means.append(keys.unflatten(2, (-1, CHUNK)).float().mean(3).to(keys.dtype))


class _ChoosingLayer(DynamicLayer):
    """A layer of the target's cache, on a pass of one token that chooses what is read of it."""

    def __init__(self, part: RetrievedCache, index: int) -> None:
        super().__init__()
        self.part, self.index = part, index
        self.new: tuple[Tensor, Tensor] | None = None
        self.made: Any = None

    def get_seq_length(self) -> int:
        return 0  # nothing but the new token is returned by `update`

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.new = key_states, value_states
        return key_states, value_states

    def choose(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Choose by a scaled query [B, H, 1, width]; return keys and values of what is read, and of the new token."""
        places = CHUNK * self.part.choose(self.index, query)[..., None] + torch.arange(CHUNK, device=query.device)
        layer = self.part.target.layers[self.index]
        self.made = self.part.fill_layer(layer, gather_tokens(layer, SINK_TOKENS + places.flatten(-2)))
        assert self.new is not None
        keys, values = self.made.update(*self.new)
        return keys, values

    def finish(self) -> Any:
        """Return the layer of the draft cache. Where no attention has asked (it was skipped) any tokens serve."""
        if self.made is None:
            first = self.part.target.layers[self.index]
            shape = list(read_span(first, 0, 1)[0].shape)
            assert self.new is not None, "the pass has stored its token"
            query = self.new[0].new_zeros(shape[0], shape[1], 1, shape[3])
            self.choose(query)
        return self.made


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Any]:
    """Attend as the model does, to what the layer chooses; query [B, H, 1, width]."""
    layers, attend = _pass.choosing
    layer = layers[module.layer_idx]
    if isinstance(layer, _ChoosingLayer):
        scaling = kwargs.get("scaling")
        key, value = layer.choose(query.float() * (query.shape[-1] ** -0.5 if scaling is None else scaling))
        mask = None
    output: tuple[Tensor, Any] = attend(module, query, key, value, mask, **kwargs)
    return output


def chunks_of(query: Tensor, means: Tensor, count: int) -> Tensor:
    """Scaled query [B, H, width], means [B, h, chunks, width] -> the best chunks, int64 [B, h, count], in order."""
    scores = (query.unflatten(1, (means.shape[1], -1)) @ means.mT).softmax(-1).mean(2)
    return scores.topk(count, -1).indices.sort(-1).values


def gather_tokens(layer: Any, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values [B, h, k, width] of tokens of a layer, places int64 [B, h, k]; decoded."""
    if not isinstance(layer, CodedLayer):
        return take(layer.keys, places), take(layer.values, places)
    keys, values = (_gather_decoded(layer.stores[kind], places) for kind in KINDS)
    return keys, values


def _gather_decoded(store: Store, places: Tensor) -> Tensor:
    """Decode tokens, by their own rows where all of them are coded and the codec can; else decode everything."""
    picked, first = picker(store.codec), store.sink.length
    if picked is None or int(places.min()) < first or int(places.max()) >= first + store.coded:
        return take(store.read_span(0, len(store)), places)
    places = places - first
    return decode_gathered(picked, gather(store, places), places).to(store.codec.spec.dtype)


class RetrievedReduction(Reduction):
    """Chosen tokens of the target's cache."""

    def __init__(self, config: Config, session: Session) -> None:
        self.part = RetrievedCache(session, config)

    def reduce(self, session: Session) -> AbstractContextManager[Any]:
        """Return a context in which passes read chosen tokens."""
        return self.part.in_use(session)


def build(config: Config, session: Session) -> Reduction:
    """Return the reduction; RecipeError for a cache or a model whose tokens cannot be chosen."""
    return RetrievedReduction(config, session)
