"""Measure the damage of every option of a cache, for keys and values by layer.

Errors are those of evaluate/cache_layers.py, with one tensor kind coded and everything else exact. Divergences are
those of evaluate/cache_scores.py, with one kind coded by one option in all layers, shared out by the errors: as many
passes as there are kinds and options, whatever the number of layers, and their sum for a uniform choice is what was
measured.
What tokens that are forgotten cost is measured beside that (compress/allocate/kv_tokens.py); here all tokens stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from compress import plugins
from compress.allocate import kv_tokens
from compress.allocate.kv_budget import CacheCosts, CacheOption, TensorCosts
from compress.allocate.kv_sizes import CacheSizes
from compress.calib.kv import calibrate
from compress.errors import RecipeError, shown
from compress.evaluate.cache_layers import attentions, output_errors
from compress.evaluate.cache_scores import compare, exact_tokens
from compress.evaluate.reader import Candidate, Say, readable
from compress.kv.cache import coded_layers
from compress.kv.generation import check_length
from compress.kv.settings import KINDS, CacheSettings, reading_layers
from compress.run import kv_cache


def check(config: Any, settings: CacheSettings, options: Sequence[CacheOption], context: int) -> int:
    """Return the number of the model's layers.

    Raises CompressError where the model has fewer positions than the context, RecipeError for a cache or an option that
    does not fit the model, and where no layer is left to choose for.
    """
    check_length(config, context)
    kv_tokens.check(settings)
    layers = kv_cache.check(config, settings)
    if not reading_layers(layers):
        raise RecipeError("kv_cache: skip_layers leaves no layer to code; name fewer, or give no context")
    for option in options:
        changed = replace(_over(settings, option), evict=kv_tokens.eviction(settings, option.keep))
        try:
            kv_cache.check(config, changed)
        except RecipeError as error:
            raise RecipeError(f"the option {shown(option.name)} of the cache: {error}") from error
    return len(layers)


def offered(model: Any, settings: CacheSettings, options: Sequence[CacheOption], samples: Tensor) -> list[Candidate]:
    """Return the settings at each option for all keys and values, calibrated on samples int64 [n, seq_len] if need be.

    No cache forgets tokens; options that differ in their tokens alone share one. The model has the hooks of
    compress/kv/hooks.py.
    """
    caches: list[Candidate] = []
    for number, option in enumerate(options):
        if same := [i for i in range(number) if options[i].settings == option.settings]:
            caches.append(caches[same[0]])
            continue
        changed = replace(_over(settings, option), evict=None)
        codings = coded_layers(model.config, changed)
        methods = {coding.method for layer in codings for coding in layer.values()}
        needs = any(plugins.load("kv", method).NEEDS for method in methods)
        static = calibrate(model, codings, samples)[0] if needs else {}
        caches.append(readable(model, Candidate(option.name, changed, static)))
    return caches


def measure(
    model: Any, windows: Tensor, candidates: Sequence[Candidate], sizes: Sequence[CacheSizes], say: Say, batch: int = 1
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


def _over(settings: CacheSettings, option: CacheOption) -> CacheSettings:
    """Lay an option over both kinds of all layers."""
    rules = []
    for rule in settings.layers:
        kinds = {kind: {**rule.settings.get(kind, {}), **option.settings} for kind in KINDS}
        rules.append(replace(rule, settings={**rule.settings, **option.settings, **kinds}))
    keys, values = (settings.of(kind).over(option.settings) for kind in KINDS)
    return replace(settings, keys=keys, values=values, layers=tuple(rules))
