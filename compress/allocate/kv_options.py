"""What allocations of a cache's bits are made from: bytes and damages of every option, for keys and values by layer.

Errors are those of evaluate/cache_error.py, with one tensor kind coded and everything else exact. Divergences are those
of evaluate/cache_scores.py, with one kind coded by one option in all layers, shared out by the errors: as many passes
as there are kinds and options, whatever the number of layers, and their sum for a uniform choice is what was measured.

Bytes are of the type that the model runs in, for one sequence of `context` tokens, static tensors included. They are
measured at two lengths that are as far from a whole flush as the context is, and carried on along that line; between
the two, tokens come as many at a time as are whole flushes of all codecs, much as in a long generation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compress import plugins
from compress.allocate.kv_budget import Measured, Option
from compress.calib.kv import calibrate
from compress.errors import CalibrationError
from compress.evaluate.cache_error import attentions, output_errors
from compress.evaluate.cache_scores import Candidate, Say, compare, exact_tokens, policies, readable
from compress.kv import generation
from compress.kv.cache import CodedLayer, KVCache, coded_layers
from compress.kv.settings import EXACT, KINDS, CacheSettings
from compress.kv.token_store import Bytes


@dataclass(frozen=True)
class Costs:
    """Of a recipe's cache at a context length."""

    units: tuple[Measured, ...]
    fixed_nbytes: int  # of what no option changes: layers that stay exact, rotary rows
    tokens: int  # that divergences were taken over


@dataclass(frozen=True)
class _Sizes:
    """Bytes at the context; by layer and kind, and of everything."""

    units: dict[tuple[int, str], int]
    total: int
    elements: dict[tuple[int, str], int]  # numbers of one token


def offered(model: Any, settings: CacheSettings, options: Sequence[Option], samples: Tensor) -> list[Candidate]:
    """Return the settings with each option for all keys and values, calibrated on samples int64 [n, seq_len].

    The model has the hooks of compress/kv/hooks.py.
    """
    found = []
    for option in options:
        changed = _over(settings, option)
        codings = coded_layers(model.config, changed)
        methods = {coding.method for layer in codings for coding in layer.values()}
        needs = any(plugins.load("kv", method).NEEDS for method in methods)
        static = calibrate(model, codings, samples)[0] if needs else {}
        found.append(readable(model, Candidate(option.name, changed, static)))
    return found


def measure(
    model: Any, windows: Tensor, candidates: Sequence[Candidate], sizes: Sequence[_Sizes], say: Say, batch: int = 1
) -> Costs:
    """Of each tensor kind of each coded layer. windows int64 [windows, seq_len], longer than what stays exact."""
    alone = [replace(candidate, only=kind) for candidate in candidates for kind in KINDS]
    errors = output_errors(model, windows, [lambda c=c: c.cache(model.config) for c in alone])  # type: ignore[misc]
    positions = compare(model, windows, alone, batch, say)
    start = min(windows.shape[1] // 2, max(exact_tokens(c.codings(model.config)) for c in candidates))
    kls = positions[:, 2, :, start:].mean((1, 2))
    places = {index: place for place, index in enumerate(attentions(model))}
    found = []
    for layer, kind in sizes[0].units:
        numbers = [len(KINDS) * i + KINDS.index(kind) for i in range(len(candidates))]
        own = tuple(float(errors[n].mean[places[layer]]) for n in numbers)
        shares = tuple(
            float(kls[n].clamp(min=0)) * error / max(float(errors[n].mean.sum()), 1e-30)
            for n, error in zip(numbers, own, strict=True)
        )
        nbytes = tuple(size.units[layer, kind] for size in sizes)
        found.append(Measured(layer, kind, sizes[0].elements[layer, kind], nbytes, own, shares))
    fixed = max(size.total - sum(size.units.values()) for size in sizes)
    return Costs(tuple(found), fixed, positions[0, 2, :, start:].numel())


@torch.no_grad()
def sized(model: Any, tokens: Tensor, candidates: Sequence[Candidate], context: int) -> list[_Sizes]:
    """Bytes of each at the context, read as generation reads it; tokens int64 [1, seq_len].

    CalibrationError where they are too few to tell.
    """
    if generation.can_read_codes(model):
        generation.switch(model)
        candidates = [replace(candidate, path="fused") for candidate in candidates]
    return [_sized(model, tokens.to(model.device), candidate, context) for candidate in candidates]


def _sized(model: Any, tokens: Tensor, candidate: Candidate, context: int) -> _Sizes:
    cache = candidate.cache(model.config)
    model(input_ids=tokens[:, :1], past_key_values=cache, use_cache=True)
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
    at = 1
    for stop in (max(1, before), after):
        for start in range(at, stop, period):
            chunk = tokens[:, start : min(start + period, stop)]
            model(input_ids=chunk, past_key_values=cache, use_cache=True)
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
    return _Sizes(carried_units, carried(total, most), elements)


def _over(settings: CacheSettings, option: Option) -> CacheSettings:
    """Return the settings with the option for both kinds of all layers."""
    rules = []
    for rule in settings.layers:
        kinds = {kind: {**rule.settings.get(kind, {}), **option.settings} for kind in KINDS}
        rules.append(replace(rule, settings={**rule.settings, **option.settings, **kinds}))
    keys, values = (settings.of(kind).over(option.settings) for kind in KINDS)
    return replace(settings, keys=keys, values=values, layers=tuple(rules))


def _coded(cache: KVCache) -> list[tuple[int, CodedLayer]]:
    """Layers that are not skipped."""
    return [
        (index, layer)
        for index, layer in enumerate(cache.layers)
        if isinstance(layer, CodedLayer) and any(coding.method != EXACT for coding in cache.codings[index].values())
    ]
