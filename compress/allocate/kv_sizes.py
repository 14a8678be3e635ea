"""Measure the bytes of a cache at a context length, in all and for the keys and values of each layer.

Bytes are of the type that the model runs in, for one sequence, static tensors included. They are measured at two
lengths that are as far from a whole flush as the context is, and carried on along that line; between the two, tokens
come as many at a time as are whole flushes of all codecs, much as in a long generation. A layer that evicts takes what
it would take with the tokens that stay alone, those of the prompt at once (compress/allocate/kv_tokens.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compress.errors import CalibrationError
from compress.evaluate.cache_scores import policies
from compress.evaluate.reader import Candidate, fill
from compress.kv import generation
from compress.kv.cache import CodedLayer, KVCache
from compress.kv.settings import KINDS, reading_layers
from compress.kv.token_store import Bytes


@dataclass(frozen=True)
class CacheSizes:
    """Bytes at the context; by layer and kind, and of everything."""

    units: dict[tuple[int, str], int]
    total: int
    elements: dict[tuple[int, str], int]  # numbers of the context
    before_rope: frozenset[int] = frozenset()  # layers that store keys before the rotary embedding


@torch.no_grad()
def sized(
    model: Any, tokens: Tensor, candidates: Sequence[Candidate], context: int, first: int = 1
) -> list[CacheSizes]:
    """Return the bytes of each at the context, read as generation reads it; tokens int64 [1, seq_len].

    first: tokens that come at once, before the others. Raises CalibrationError where the tokens are too few to tell.
    """
    if generation.can_read_codes(model):
        generation.switch(model)
        candidates = [replace(candidate, path="fused") for candidate in candidates]
    return [_sized(model, tokens.to(model.device), candidate, context, first) for candidate in candidates]


def _sized(model: Any, tokens: Tensor, candidate: Candidate, context: int, first: int) -> CacheSizes:
    cache = candidate.cache(model.config)
    first = first if first <= context <= tokens.shape[1] else 1
    fill(model, tokens[:, :first], cache)
    period = math.lcm(*(store.flush for _, layer in _coded(cache) for store in layer.stores.values()))
    longest = tokens.shape[1]
    after = context if context <= longest else longest - (longest - context) % period
    before = after - period
    least = max(policy.sink + policy.residual_length for policy in policies(cache.codings)) + period
    if context > longest and before < least:
        raise CalibrationError(
            f"kv_cache: {longest} tokens are too few to measure a cache that codes none before the {least}th; raise "
            "calibration.seq_len"
        )
    numbers = []
    at = first
    for stop in (max(1, before), after):
        for start in range(at, stop, period):
            fill(model, tokens[:, start : min(start + period, stop)], cache)
        at = max(at, stop)
        if cache.path == "fused" and any(layer.stores["keys"].keeps_halves for _, layer in _coded(cache)):
            cache.rope.halves(0, len(cache.rope), keep=True)  # as with more tokens than these
        held = cache.nbytes()  # stores what is pending
        units = {(i, k): layer.stores[k].nbytes() for i, layer in _coded(cache) for k in KINDS}
        numbers.append((units, held))
    (units, total), (more, most) = numbers
    steps = max(0, (context - after) // period)

    def carried(first: Bytes, last: Bytes) -> int:
        return last.total + steps * (last.total - first.total) + last.static

    elements = {
        (i, k): layer.stores[k].codec.spec.heads * layer.stores[k].codec.spec.width * context
        for i, layer in _coded(cache)
        for k in KINDS
    }
    carried_units = {key: carried(units[key], nbytes) for key, nbytes in more.items()}
    before_rope = frozenset(i for i, layer in _coded(cache) if layer.stores["keys"].codec.rope == "pre")
    return CacheSizes(carried_units, carried(total, most), elements, before_rope)


def _coded(cache: KVCache) -> list[tuple[int, CodedLayer]]:
    """Return index and cache of the layers that are not skipped."""
    chosen = reading_layers(cache.codings)
    return [
        (index, layer) for index, layer in enumerate(cache.layers) if isinstance(layer, CodedLayer) and index in chosen
    ]
