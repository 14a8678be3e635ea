"""Say what a compressed cache takes, bytes a token at a stated context, before or after it is calibrated.

Keys and values drawn at random fill the stores of one layer of each kind, at two lengths a whole flush of all codecs
apart, and the line through these is carried on to the context. What is calibrated counts once for a model, whatever the
number of sequences; divided by the tokens of one sequence it is part of the bytes a token. Layers that stay as
transformers has them are left out. A layer that evicts is filled with the tokens that stay at that context
(compress/kv/evict/kept_tokens.py), and with what it remembers of their places.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compress.kv.cache import make_cache
from compress.kv.evict import kept_tokens
from compress.kv.layer import CodedLayer, KVCache
from compress.kv.settings import KINDS, CacheSettings
from compress.kv.token_store import Bytes
from compress.model.cache_pass import CachedHeads, cached_layers
from compress.model.positions import max_positions

CONTEXT = 8192  # tokens, or as many as the model has positions


@dataclass(frozen=True)
class CacheBytes:
    """The bytes of one sequence's coded layers."""

    context: int  # [tokens]
    bytes_per_token: float  # static included
    exact_bytes_per_token: float  # of the uncompressed cache
    static: int  # bytes of calibrated tensors, once for a model

    def plain(self) -> dict[str, Any]:
        """Return this as JSON values."""
        return asdict(self)


@torch.no_grad()
def at_context(
    config: Any, settings: CacheSettings, static: Mapping[str, Tensor], dtype: torch.dtype, context: int | None = None
) -> CacheBytes:
    """Return the bytes of a cache of a model of this configuration; static: what its codecs were calibrated to."""
    context = context or min(CONTEXT, max_positions(config.get_text_config()) or CONTEXT)
    heads = cached_layers(config).by_layer
    stored, forgets = _stored(config, settings, context), settings.evict is not None
    settings = replace(settings, evict=None)
    cache = make_cache(config, settings, static, "fused")
    coded = [index for index, layer in enumerate(cache.layers) if isinstance(layer, CodedLayer) and index in heads]
    alike = Counter(repr((cache.codings[index], heads[index], stored[index])) for index in coded)
    total = exact = static_nbytes = rotary = 0
    for index in coded:
        if not (count := alike.pop(repr((cache.codings[index], heads[index], stored[index])), 0)):
            continue  # its like was measured
        one = make_cache(config, settings, static, "fused")
        size = _layer(one, index, heads[index], dtype, stored[index])
        if forgets and stored[index] < context:
            later = context - kept_tokens.prompt_of(context)
            size += Bytes(state=kept_tokens.places(stored[index] - later, bool(len(one.rope))))
        if len(one.rope):  # keys before the rotary embedding, whose rows and positions all layers share
            rotary = max(rotary, heads[index].rotary * dtype.itemsize + 4)
        total, static_nbytes = total + count * size.total, static_nbytes + count * size.static
        exact += count * sum(math.prod(shape) for shape in (heads[index].keys, heads[index].values)) * dtype.itemsize
    return CacheBytes(context, rotary + (total + static_nbytes) / context, exact, static_nbytes)


def _stored(config: Any, settings: CacheSettings, context: int) -> list[int]:
    """Return how many tokens each layer of a model stores at a context."""
    later = context - kept_tokens.prompt_of(context)
    return [later + kept for kept in kept_tokens.by_layer(config, settings, context)]


def _layer(cache: KVCache, index: int, heads: CachedHeads, dtype: torch.dtype, context: int) -> Bytes:
    """Return the bytes of one layer at the context, total carried on; without rotary rows."""
    layer = cache.layers[index]
    assert isinstance(layer, CodedLayer), "the caller has asked"
    generator = torch.Generator().manual_seed(0)

    def feed(tokens: int) -> None:
        states = [
            torch.randn(1, h, tokens, width, generator=generator).to(dtype) for h, width in (heads.keys, heads.values)
        ]
        if heads.rotary:
            angles = torch.rand(1, tokens, heads.rotary // 2, generator=generator).repeat(1, 1, 2)
            layer.turns = angles.cos().to(dtype), angles.sin().to(dtype)
        layer.update(*states)
        queries = cache.queries // heads.keys[0] * heads.keys[0]
        layer.commit(torch.randn(1, queries, tokens, heads.keys[1], generator=generator).to(dtype))

    feed(1)
    period = math.lcm(*(store.flush for store in layer.stores.values()))
    least = max(layer.cache.codings[index][kind].policy.residual_length for kind in KINDS)
    before = least + layer.stores["keys"].policy.sink + period
    before += (context - before) % period
    if context <= before:
        feed(context - 1)
        return layer.nbytes()
    feed(before - 1)
    first = layer.nbytes()
    feed(period)
    last = layer.nbytes()
    steps = (context - before) // period
    carried = first.total + steps * (last.total - first.total)
    return Bytes(codes=carried, static=last.static)
