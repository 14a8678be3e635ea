"""Measure the bytes and the damage of every option of a cache on a loaded model.

Bytes are of the type that the model runs in, for one sequence, static tensors included. They are measured at two
lengths that are as far from a whole flush as the context is, and carried on along that line; between the two, tokens
come as many at a time as are whole flushes of all codecs, much as in a long generation. A layer that evicts takes what
it would take with the tokens that stay alone, those of the prompt at once (compress/kv/evict/select.py).

Errors are those of evaluate/cache_layers.py, with one tensor kind coded and everything else exact. Divergences are
those of evaluate/cache_scores.py, with one kind coded by one option in all layers, shared out by the errors: as many
passes as there are kinds and options, whatever the number of layers, and their sum for a uniform choice is what was
measured.

What tokens that are forgotten cost is measured beside that, without codes (compress/evaluate/cache_layers.py). Codes
of tokens that are forgotten do no harm, so the sum is more than what both cost together, the more the less stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compress.allocate.cache_options import CacheOption, eviction_keeping, evictions, settings_at
from compress.allocate.cache_units import CacheCosts, LayerCosts, TensorCosts
from compress.calib.kv import calibrate
from compress.errors import CalibrationError
from compress.evaluate.cache_layers import attentions, eviction_costs, output_errors
from compress.evaluate.cache_scores import compare, exact_tokens, policies
from compress.evaluate.reader import Candidate, Say, fill, readable
from compress.kv import generation
from compress.kv.cache import coded_layers
from compress.kv.evict import select
from compress.kv.layer import CodedLayer, KVCache
from compress.kv.settings import KINDS, CacheSettings, reading_layers
from compress.kv.token_store import Bytes


@dataclass(frozen=True)
class OptionSizes:
    """Bytes at the context; by layer and kind, and of everything."""

    units: dict[tuple[int, str], int]
    total: int
    elements: dict[tuple[int, str], int]  # numbers of the context
    before_rope: frozenset[int] = frozenset()  # layers that store keys before the rotary embedding


@dataclass(frozen=True)
class OfferedCache:
    """A recipe's cache, the options of its layers and the context that they are for."""

    settings: CacheSettings
    options: Sequence[CacheOption]
    context: int  # [tokens]

    def tokens_kept(self, model: Any, keep: float | None, sizes: OptionSizes) -> dict[int, int]:
        """Return how many tokens of the prompt stay in each layer that is coded, with this share of an option."""
        changed = replace(self.settings, evict=eviction_keeping(self.settings, keep))
        counts = select.by_layer(model.config, changed, self.context)
        return {layer: counts[layer] for layer, _ in sizes.units}


def calibrate_options(
    model: Any, settings: CacheSettings, options: Sequence[CacheOption], samples: Tensor
) -> list[Candidate]:
    """Return the settings at each option for all keys and values, calibrated on samples int64 [n, seq_len] if need be.

    No cache forgets tokens; options that differ in their tokens alone share one. The model has the hooks of
    compress/kv/hooks.py.
    """
    caches: list[Candidate] = []
    for number, option in enumerate(options):
        if same := [i for i in range(number) if options[i].settings == option.settings]:
            caches.append(caches[same[0]])
            continue
        changed = replace(settings_at(settings, option), evict=None)
        codings = coded_layers(model.config, changed)
        static = calibrate(model, codings, samples)[0]
        caches.append(readable(model, Candidate(option.name, changed, static)))
    return caches


@torch.no_grad()
def measure_sizes(
    model: Any, tokens: Tensor, candidates: Sequence[Candidate], context: int, first: int = 1
) -> list[OptionSizes]:
    """Return the bytes of each at the context, read as generation reads it; tokens int64 [1, seq_len].

    first: tokens that come at once, before the others. Raises CalibrationError where the tokens are too few to tell.
    """
    if generation.can_read_codes(model):
        generation.switch(model)
        candidates = [replace(candidate, path="fused") for candidate in candidates]
    return [_measure_size(model, tokens.to(model.device), candidate, context, first) for candidate in candidates]


def _measure_size(model: Any, tokens: Tensor, candidate: Candidate, context: int, first: int) -> OptionSizes:
    cache = candidate.cache(model.config)
    first = first if first <= context <= tokens.shape[1] else 1
    fill(model, tokens[:, :first], cache)
    period = math.lcm(*(store.flush for _, layer in _coded_layers(cache) for store in layer.stores.values()))
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
        if cache.path == "fused" and any(layer.stores["keys"].keeps_halves for _, layer in _coded_layers(cache)):
            cache.rope.halves(0, len(cache.rope), keep=True)  # as with more tokens than these
        total_bytes = cache.nbytes()  # stores what is pending
        units = {(i, k): layer.stores[k].nbytes() for i, layer in _coded_layers(cache) for k in KINDS}
        numbers.append((units, total_bytes))
    (units, total), (more, most) = numbers
    steps = max(0, (context - after) // period)

    def extend(first: Bytes, last: Bytes) -> int:
        return last.total + steps * (last.total - first.total) + last.static

    elements = {
        (i, k): layer.stores[k].codec.spec.heads * layer.stores[k].codec.spec.width * context
        for i, layer in _coded_layers(cache)
        for k in KINDS
    }
    at_context = {key: extend(units[key], nbytes) for key, nbytes in more.items()}
    before_rope = frozenset(i for i, layer in _coded_layers(cache) if layer.stores["keys"].codec.rope == "pre")
    return OptionSizes(at_context, extend(total, most), elements, before_rope)


def _coded_layers(cache: KVCache) -> list[tuple[int, CodedLayer]]:
    """Return index and cache of the layers that are not skipped."""
    chosen = reading_layers(cache.codings)
    return [
        (index, layer) for index, layer in enumerate(cache.layers) if isinstance(layer, CodedLayer) and index in chosen
    ]


def measure_option_sizes(
    model: Any, tokens: Tensor, caches: Sequence[Candidate], offered: OfferedCache
) -> list[OptionSizes]:
    """Return the bytes of each option at the context; tokens int64 [1, seq_len], caches: of the options, all tokens."""
    alike = {id(candidate): candidate for candidate in caches}
    whole = dict(zip(alike, measure_sizes(model, tokens, list(alike.values()), offered.context), strict=True))
    known: dict[tuple[int, int], OptionSizes] = {}
    prompt = select.prompt_of(offered.context)

    def of_kept(candidate: Candidate, kept: int) -> OptionSizes:
        if (id(candidate), kept) not in known:
            stored = kept + offered.context - prompt
            known[id(candidate), kept] = measure_sizes(model, tokens, [candidate], stored, kept)[0]
        return known[id(candidate), kept]

    by_option = []
    for candidate, option in zip(caches, offered.options, strict=True):
        every = whole[id(candidate)]
        counts, units = offered.tokens_kept(model, option.keep, every), dict(every.units)
        for layer, kind in every.units:
            if (kept := counts[layer]) < prompt:
                places = select.places(kept, layer in every.before_rope) if kind == "keys" else 0
                units[layer, kind] = of_kept(candidate, kept).units[layer, kind] + places
        saved = sum(every.units.values()) - sum(units.values())
        by_option.append(replace(every, units=units, total=every.total - saved))
    return by_option


def measure_codes(
    model: Any, windows: Tensor, candidates: Sequence[Candidate], sizes: Sequence[OptionSizes], say: Say, batch: int = 1
) -> CacheCosts:
    """Return the costs of each tensor kind of each coded layer, but for those of tokens that are forgotten.

    windows int64 [windows, seq_len], longer than what stays exact.
    """
    distinct = list({id(candidate): candidate for candidate in candidates}.values())
    numbers_of = [next(i for i, each in enumerate(distinct) if each is candidate) for candidate in candidates]
    alone = [replace(candidate, only=kind) for candidate in distinct for kind in KINDS]
    errors = output_errors(model, windows, [lambda c=c: c.cache(model.config) for c in alone])  # type: ignore[misc]
    positions = compare(model, windows, alone, batch, say)
    start = min(windows.shape[1] // 2, max(exact_tokens(c.codings(model.config)) for c in candidates))
    kls = positions[:, 2, :, start:].mean((1, 2))
    rows = {layer: row for row, layer in enumerate(attentions(model))}
    units = []
    for layer, kind in sizes[0].units:
        numbers = [len(KINDS) * i + KINDS.index(kind) for i in numbers_of]
        of_layer = tuple(float(errors[n].mean[rows[layer]]) for n in numbers)
        shares = tuple(
            float(kls[n].clamp(min=0)) * error / max(float(errors[n].mean.sum()), 1e-30)
            for n, error in zip(numbers, of_layer, strict=True)
        )
        nbytes = tuple(size.units[layer, kind] for size in sizes)
        units.append(TensorCosts(layer, kind, sizes[0].elements[layer, kind], nbytes, of_layer, shares))
    fixed = max(size.total - sum(size.units.values()) for size in sizes)
    return CacheCosts(tuple(units), fixed, positions[0, 2, :, start:].numel(), windows.shape[1])


def measure_evictions(
    model: Any, windows: Tensor, offered: OfferedCache, sizes: Sequence[OptionSizes], say: Say, batch: int = 1
) -> tuple[LayerCosts, ...]:
    """Return what forgetting tokens costs in each layer, by option; none where the settings do not evict.

    windows int64 [windows, seq_len]; `say` gets their number for each of their ways to evict.
    """
    if offered.settings.evict is None:
        return ()
    ways = evictions(offered.settings, offered.options)
    scores = eviction_costs(model, windows, offered.settings, list(ways.values()), say, batch)
    by_keep = dict(zip(ways, scores, strict=True))
    counts = {option.keep: offered.tokens_kept(model, option.keep, sizes[0]) for option in offered.options}
    later = offered.context - select.prompt_of(offered.context)
    by_layer = []
    for layer in sorted({layer for layer, _ in sizes[0].units}):
        each = [by_keep.get(option.keep) for option in offered.options]
        by_layer.append(
            LayerCosts(
                layer,
                tuple(0.0 if score is None else score.errors.get(layer, 0.0) for score in each),
                tuple(0.0 if score is None else score.kls.get(layer, 0.0) for score in each),
                tuple((counts[option.keep][layer] + later) / offered.context for option in offered.options),
                max((score.tokens for score in scores), default=0),
            )
        )
    return tuple(by_layer)
