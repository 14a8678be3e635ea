"""Measure the damage of every option of a cache, for keys and values by layer.

Errors are those of evaluate/cache_error.py, with one tensor kind coded and everything else exact. Divergences are those
of evaluate/cache_scores.py, with one kind coded by one option in all layers, shared out by the errors: as many passes
as there are kinds and options, whatever the number of layers, and their sum for a uniform choice is what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from compress import plugins
from compress.allocate.kv_budget import CacheCosts, CacheOption, TensorCosts
from compress.allocate.kv_sizes import CacheSizes
from compress.calib.kv import calibrate
from compress.errors import RecipeError
from compress.evaluate.cache_error import attentions, output_errors
from compress.evaluate.cache_scores import Candidate, Say, compare, exact_tokens, readable
from compress.kv.generation import check_length
from compress.kv.settings import EXACT, KINDS, resolve
from compress.recipe.kv import CacheRecipe
from compress.run import kv_cache
from compress.runtime.kv_config import layer_count


def check(config: Any, recipe: CacheRecipe, context: int) -> int:
    """Return the number of the model's layers.

    Raises CompressError where the model has fewer positions than the context, RecipeError for a cache that does not fit
    the model or codes no layer.
    """
    check_length(config, context)
    layers = kv_cache.check(config, recipe).layers
    if all(coding.method == EXACT for layer in layers for coding in layer.values()):
        raise RecipeError("kv_cache: skip_layers leaves no layer to code; name fewer, or give no context")
    return len(layers)


def offered(model: Any, recipe: Mapping[str, Any], options: Sequence[CacheOption], samples: Tensor) -> list[Candidate]:
    """Return the recipe at each option for all keys and values, calibrated on samples int64 [n, seq_len] if need be.

    The model has the hooks of compress/kv/hooks.py.
    """
    caches = []
    for option in options:
        table = _over(recipe, option)
        settings = kv_cache.coded(model.config, resolve(table, layer_count(model.config)))
        methods = {coding.method for layer in settings.layers for coding in layer.values()}
        needs = any(plugins.load("kv", method).NEEDS for method in methods)
        static = calibrate(model, settings, samples)[0] if needs else {}
        caches.append(readable(model, Candidate(option.name, table, static)))
    return caches


def measure(
    model: Any, windows: Tensor, candidates: Sequence[Candidate], sizes: Sequence[CacheSizes], say: Say, batch: int = 1
) -> CacheCosts:
    """Return the costs of each tensor kind of each coded layer.

    windows int64 [windows, seq_len], longer than what stays exact.
    """
    alone = [replace(candidate, only=kind) for candidate in candidates for kind in KINDS]
    errors = output_errors(model, windows, [lambda c=c: c.cache(model.config) for c in alone])  # type: ignore[misc]
    positions = compare(model, windows, alone, batch, say)
    start = min(windows.shape[1] // 2, max(exact_tokens(c.cache(model.config).settings) for c in candidates))
    kls = positions[:, 2, :, start:].mean((1, 2))
    rows = {layer: row for row, layer in enumerate(attentions(model))}
    units = []
    for layer, kind in sizes[0].units:
        numbers = [len(KINDS) * i + KINDS.index(kind) for i in range(len(candidates))]
        of_layer = tuple(float(errors[n].mean[rows[layer]]) for n in numbers)
        shares = tuple(
            float(kls[n].clamp(min=0)) * error / max(float(errors[n].mean.sum()), 1e-30)
            for n, error in zip(numbers, of_layer, strict=True)
        )
        nbytes = tuple(size.units[layer, kind] for size in sizes)
        units.append(TensorCosts(layer, kind, sizes[0].elements[layer, kind], nbytes, of_layer, shares))
    fixed = max(size.total - sum(size.units.values()) for size in sizes)
    return CacheCosts(tuple(units), fixed, positions[0, 2, :, start:].numel())


def _over(recipe: Mapping[str, Any], option: CacheOption) -> dict[str, Any]:
    """Lay an option over both kinds of all layers."""
    sides = {kind: {**recipe.get(kind, {}), **option.settings} for kind in KINDS}
    layers = {
        key: {**value, **option.settings, **{kind: {**value.get(kind, {}), **option.settings} for kind in KINDS}}
        for key, value in recipe.get("layers", {}).items()
    }
    return {**recipe, **sides, "layers": layers}
