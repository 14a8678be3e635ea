"""Measure the bytes and the speed of a compressed cache, in the type that the model runs in.

Bytes are those of the tensors that the cache holds after a prompt, and their slope between half of it and all of it,
which leaves out windows that stay exact. Times are medians of steps taken in turn by all kinds of caches, so that a
busy machine slows all of them alike. A decode step of the whole model is timed with the cache decoded, with its codes
read (fused), and with transformers' growing cache and that of fixed size. The codecs' own work over all layers is timed
apart: encoding, decoding everything, and scores and sums from the stored codes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from compress.errors import RecipeError
from compress.evaluate.reader import Candidate, Reader, Say, fill
from compress.evaluate.speed import now
from compress.kv import generation
from compress.kv.layer import CodedLayer, KVCache
from compress.kv.settings import KINDS
from compress.kv.token_store import Store

TIMED_STEPS = 8  # decode steps with each cache
CODEC_REPEATS = 3


@dataclass(frozen=True)
class MeasuredCacheBytes:
    """Bytes of one sequence."""

    bytes_per_token: float  # of everything, static tensors included, at the context's length
    context: int  # [tokens]
    slope: float  # bytes that a token more takes; too large where half of the context is all exact
    exact_per_token: float  # of the uncompressed cache
    bits_per_element: float  # of the slope: the coded part, from the exact cache's slope and type
    parts: dict[str, int]  # Bytes of compress/kv/token_store.py
    static: int  # calibrated tensors, once for a model however many sequences there are


@dataclass(frozen=True)
class CacheSpeed:
    """The speed of a cache of one sequence; None for a way of reading that the codecs do not have."""

    encode_us: float  # a token, all layers
    read_ms: float | None  # all layers decoded once
    attend_ms: float | None  # fused: scores and sums of all layers for one query token
    exact_attend_ms: float  # the same products with uncompressed tensors
    decoded_rate: float | None  # tokens a second of the whole model, decoding keys and values in each step
    fused_rate: float | None  # the same, reading the stored codes
    growing_rate: float  # transformers' growing cache
    fixed_rate: float | None  # transformers' cache of fixed size, None where the model has none


@torch.no_grad()
def sizes(model: Any, tokens: Tensor, candidates: Sequence[Candidate], say: Say) -> list[MeasuredCacheBytes]:
    """Return the bytes of caches that have read tokens int64 [1, seq_len], of even length."""
    half = tokens.shape[1] // 2
    parts = (tokens[:, :half].to(model.device), tokens[:, half : 2 * half].to(model.device))
    exact = Reader(model).new_cache()
    whole = [_nbytes_after(model, part, exact) for part in parts][-1]
    nbytes = []
    for candidate in candidates:
        cache = candidate.cache(model.config)
        before, after = (_nbytes_after(model, part, cache) for part in parts)
        held = cache.nbytes()
        slope, exact_slope = (after - before) / half, whole / (2 * half)
        bits = 8 * model.dtype.itemsize * slope / exact_slope
        numbers = {key: value for key, value in held._asdict().items() if value}
        whole_bytes = (after + held.static) / (2 * half)
        nbytes.append(MeasuredCacheBytes(whole_bytes, 2 * half, slope, exact_slope, bits, numbers, held.static))
        say(1)
    return nbytes


@torch.no_grad()
def speeds(model: Any, tokens: Tensor, candidates: Sequence[Candidate], say: Say) -> list[CacheSpeed]:
    """Return the speed of caches that have read a prompt, tokens int64 [1, seq_len]."""
    tokens = tokens.to(model.device)
    rates = []
    for candidate in candidates:
        made: dict[str, Any] = {
            path: _filled_cache(model, tokens, replace(candidate, path=path)) for path in ("decode", "fused")
        }
        caches = {name: cache for name, cache in made.items() if cache is not None}
        plain: dict[str, Any] = {"dynamic": Reader(model).new_cache()}
        if getattr(model, "_can_compile_fullgraph", False):
            plain["static"] = StaticCache(config=model.config, max_cache_len=tokens.shape[1] + TIMED_STEPS + 2)
        for cache in plain.values():
            fill(model, tokens, cache)
        caches |= plain
        steps = _steps(model, tokens[:, -1:], caches)
        coded = caches.get("decode") or caches["fused"]
        parts = _parts(model, coded, "decode" in caches)
        rate = {name: 1 / seconds for name, seconds in steps.items()}
        rates.append(
            CacheSpeed(
                parts["encode"] * 1e6 / tokens.shape[1],
                parts["read"] * 1e3 if "read" in parts else None,
                parts["attend"] * 1e3 if "fused" in caches else None,
                parts["exact"] * 1e3,
                rate.get("decode"),
                rate.get("fused"),
                rate["dynamic"],
                rate.get("static"),
            )
        )
        say(1)
    return rates


def _nbytes_after(model: Any, tokens: Tensor, cache: Any) -> int:
    """Return the bytes in use after these tokens."""
    fill(model, tokens, cache)
    if isinstance(cache, KVCache):
        return cache.nbytes().total
    tensors = [t for layer in cache.layers for t in (getattr(layer, kind, None) for kind in KINDS) if t is not None]
    return sum(t.numel() * t.element_size() for t in tensors)


def _filled_cache(model: Any, tokens: Tensor, candidate: Candidate) -> KVCache | None:
    """Return a cache that holds the tokens; None where the codecs or the model cannot be read in this way."""
    if candidate.path == "fused" and not generation.can_read_codes(model):
        return None
    cache = candidate.cache(model.config)
    try:
        fill(model, tokens, cache)
    except (RecipeError, AttributeError, TypeError):
        return None
    return cache


def _steps(model: Any, token: Tensor, caches: dict[str, Any]) -> dict[str, float]:
    """Return the median seconds of a decode step with each cache, in turns; the first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in caches}
    for _ in range(TIMED_STEPS + 1):
        for name, cache in caches.items():
            step = partial(model, input_ids=token, past_key_values=cache, use_cache=True)
            times[name].append(_seconds_of(model.device, step))
    return {name: statistics.median(seconds[1:]) for name, seconds in times.items()}


def _parts(model: Any, cache: KVCache, reconstructs: bool) -> dict[str, float]:
    """Return the seconds of the codecs' own work over all coded layers."""
    stores = [layer.stores for layer in cache.layers if isinstance(layer, CodedLayer)]
    generator = torch.Generator().manual_seed(0)
    totals = dict.fromkeys(("encode", "attend", "exact", *(["read"] if reconstructs else [])), 0.0)
    for kinds in stores:
        keys, values = kinds["keys"], kinds["values"]
        spec = keys.codec.spec
        q = torch.randn(1, spec.heads, spec.queries, spec.width, generator=generator).to(model.device)
        dense = [
            torch.randn(1, s.codec.spec.heads, len(s), s.codec.spec.width, generator=generator).to(
                model.device, spec.dtype
            )
            for s in (keys, values)
        ]
        calls: dict[str, Callable[[], object]] = {
            "encode": lambda: [_encode(store, x, q) for store, x in zip((keys, values), dense, strict=True)],  # noqa: B023
            "attend": lambda: _attend(keys, values, q),  # noqa: B023
            "exact": lambda: (q.to(spec.dtype) @ dense[0].mT).float().softmax(-1).to(spec.dtype) @ dense[1],  # noqa: B023
            "read": lambda: (keys.read(), values.read()),  # noqa: B023
        }
        for name in totals:
            calls[name]()  # compiles
            totals[name] += statistics.median(_seconds_of(model.device, calls[name]) for _ in range(CODEC_REPEATS))
    return totals


def _encode(store: Store, x: Tensor, q: Tensor) -> Store:
    queries = q.flatten(1, 2)[:, :, None].expand(-1, -1, x.shape[2], -1) if store.codec.needs_queries else None
    fresh = Store(store.codec, store.policy, store.rope)
    fresh.append(x, queries=queries)
    return fresh


def _attend(keys: Store, values: Store, q: Tensor) -> Tensor:
    scores = q.new_empty(*q.shape[:3], len(keys))
    keys.scores(q, scores)
    return values.mix(scores.softmax(-1))


def _seconds_of(device: torch.device, call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = now(device)
    call()
    return now(device) - start
