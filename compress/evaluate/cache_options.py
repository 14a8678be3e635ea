"""What allocations of a cache's bits are made from: bytes and errors of every option, for each layer's keys and values.

Errors are those of cache_error.py, with one tensor kind coded and everything else exact. Bytes are measured at the
windows' length and at half of it, in the type that the model runs in, and carried on to the context along that slope.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compress.evaluate.cache_error import kind_only, output_errors
from compress.evaluate.cache_scores import Candidate, readable
from compress.kv.budget import Measured, Option
from compress.kv.cache import CodedLayer, KVCache
from compress.kv.settings import EXACT, KINDS


def measure(
    model: Any, windows: Tensor, recipe: Mapping[str, Any], offered: Sequence[Option], context: int
) -> list[Measured]:
    """Of each tensor kind of each coded layer, for one sequence of `context` tokens.

    windows int64 [windows, seq_len], longer than what stays exact; the model has the hooks of compress/kv/hooks.py.
    Codecs that are calibrated cannot be offered.
    """
    candidates = [readable(model, Candidate(option.name, _over(recipe, option), {})) for option in offered]
    makes: list[Callable[[], KVCache]] = [
        lambda c=candidate, k=kind: kind_only(model.config, c, k)  # type: ignore[misc]
        for candidate in candidates
        for kind in KINDS
    ]
    errors = output_errors(model, windows, makes)
    sizes = [_sizes(model, windows[:1], candidate, context) for candidate in candidates]
    found = []
    for place, layer in enumerate(sizes[0]):
        for number, kind in enumerate(KINDS):
            own = tuple(float(errors[len(KINDS) * i + number].mean[place]) for i in range(len(offered)))
            nbytes = tuple(size[layer][kind] for size in sizes)
            found.append(Measured(layer, kind, _elements(model, candidates[0], layer, kind) * context, nbytes, own))
    return found


def _over(recipe: Mapping[str, Any], option: Option) -> dict[str, Any]:
    """The option for both kinds of all layers."""
    sides = {kind: {**recipe.get(kind, {}), **option.settings} for kind in KINDS}
    layers = {
        key: {**value, **option.settings, **{kind: {**value.get(kind, {}), **option.settings} for kind in KINDS}}
        for key, value in recipe.get("layers", {}).items()
    }
    return {**recipe, **sides, "layers": layers}


@torch.no_grad()
def _sizes(model: Any, tokens: Tensor, candidate: Candidate, context: int) -> dict[int, dict[str, int]]:
    """Bytes at the context, by layer and kind."""
    cache, half = candidate.cache(model.config), tokens.shape[1] // 2
    parts = []
    for part in (tokens[:, :half], tokens[:, half : 2 * half]):
        model(input_ids=part.to(model.device), past_key_values=cache, use_cache=True)
        cache.nbytes()  # stores what is pending
        parts.append({i: {k: layer.stores[k].nbytes().total for k in KINDS} for i, layer in _coded(cache)})
    before, after = parts

    def carried(layer: int, kind: str) -> int:
        slope = (after[layer][kind] - before[layer][kind]) / half
        return round(after[layer][kind] + slope * (context - 2 * half))

    return {layer: {kind: carried(layer, kind) for kind in KINDS} for layer in after}


def _coded(cache: KVCache) -> list[tuple[int, CodedLayer]]:
    """Layers that are not skipped."""
    return [
        (index, layer)
        for index, layer in enumerate(cache.layers)
        if isinstance(layer, CodedLayer) and any(c.method != EXACT for c in cache.settings.layers[index].values())
    ]


@torch.no_grad()
def _elements(model: Any, candidate: Candidate, layer: int, kind: str) -> int:
    """Numbers of one token."""
    cache = candidate.cache(model.config)
    model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True)
    spec = cache.codecs[layer, kind].spec
    return spec.heads * spec.width
