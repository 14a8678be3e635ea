"""Measure what it costs that one layer forgets tokens of the prompt, while all other layers keep theirs.

The prompt of a window goes through the model with layers that forget nothing, and once for each way to evict, with
layers that all do. Tokens of a prompt attend to each other exactly, so every layer of such a cache holds what it would
hold if it were the only one that evicts. Its layers then take the places of those of the first cache, one at a time,
and the tokens after the prompt are read again: a pass of AFTER tokens for each layer, whatever the length of the
prompt. Keys and values are not coded.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compress.errors import NumericalError
from compress.evaluate.cache_error import attentions, output_errors
from compress.evaluate.cache_scores import Say
from compress.evaluate.feed import fed
from compress.evaluate.scores import score
from compress.kv.cache import layer_types, make_cache
from compress.kv.evict.kept_tokens import prompt_of
from compress.kv.evict.settings import Eviction
from compress.kv.layer import CodedLayer, KVCache
from compress.kv.settings import CacheSettings, exact


@dataclass(frozen=True)
class EvictionScores:
    """What one way to evict costs, by layer."""

    kls: dict[int, float]  # KL(exact || this layer evicts), nats a token
    errors: dict[int, float]  # of the layer's attention output, relative squared
    together: float  # KL(exact || all layers evict), nats a token
    tokens: int  # that divergences were taken over


@torch.no_grad()
def by_layer(
    model: Any, windows: Tensor, settings: CacheSettings, evictions: Sequence[Eviction], say: Say, batch: int = 1
) -> list[EvictionScores]:
    """Return the scores of each way to evict on windows int64 [windows, seq_len]; the model has hooks.

    settings: of the cache, of which the codecs play no part. Layers that the settings skip have no scores.
    """
    if not evictions:
        return []
    plain = [_uncoded(settings, each) for each in evictions]
    rows = {layer: row for row, layer in enumerate(attentions(model))}
    errors = output_errors(model, windows, [lambda s=s: make_cache(model.config, s) for s in plain])  # type: ignore[misc]
    kls: list[dict[int | None, list[Tensor]]] = [{} for _ in plain]
    for tokens in windows.split(batch):
        for parts, kl_by_layer in zip(kls, _divergences(model, tokens.to(model.device), plain), strict=True):
            for layer, kl in kl_by_layer.items():
                parts.setdefault(layer, []).append(kl)
            say(len(tokens))
    found = []
    for by_layers, error in zip(kls, errors, strict=True):
        means = {layer: max(0.0, float(torch.cat(parts).mean())) for layer, parts in by_layers.items()}
        together, counted = means.pop(None), sum(part.numel() for part in by_layers[None])
        by_number = {layer: kl for layer, kl in means.items() if layer is not None}
        found.append(EvictionScores(by_number, {i: float(error.mean[rows[i]]) for i in by_number}, together, counted))
    return found


def _uncoded(settings: CacheSettings, eviction: Eviction) -> CacheSettings:
    """Return settings that evict and code nothing."""
    plain = exact(settings.keys.policy.sink)
    return replace(settings, keys=plain, values=plain, layers=(), evict=eviction, read=None)


def _divergences(model: Any, tokens: Tensor, ways: Sequence[CacheSettings]) -> Iterator[dict[int | None, Tensor]]:
    """Yield KL [B, after - 1] float64 of each way to evict, by layer that evicts; None: by all of them."""
    prompt = prompt_of(tokens.shape[1])
    layers = len(layer_types(model.config))
    whole = make_cache(model.config, replace(ways[0], skip_layers=tuple(range(layers))))
    fed(model, tokens[:, :prompt], whole)
    states = {i: layer for i, layer in enumerate(whole.layers) if not isinstance(layer, CodedLayer)}
    rest, target = tokens[:, prompt:], tokens[:, prompt + 1 :].flatten()

    def logits(changed: dict[int, Any]) -> Tensor:
        own = {index: whole.layers[index] for index in changed}
        _put(whole, {**{i: copy.deepcopy(state) for i, state in states.items()}, **changed})
        out = model(input_ids=rest, past_key_values=whole, use_cache=True).logits[:, :-1].flatten(0, 1)
        _take_back(whole, rest.shape[1])
        _put(whole, own)
        return out

    exact_logits = logits({})
    for settings in ways:
        evicting = make_cache(model.config, settings)
        fed(model, tokens[:, :prompt], evicting)
        forgetting = {i: layer for i, layer in enumerate(evicting.layers) if not getattr(layer, "is_exempt", True)}
        found: dict[int | None, Tensor] = {}
        alone: dict[int | None, dict[int, Any]] = {i: {i: layer} for i, layer in forgetting.items()}
        for key, changed in {None: forgetting, **alone}.items():
            kl = score([logits(changed), exact_logits], target)[2]
            if not torch.isfinite(kl).all():
                raise NumericalError(
                    "the model gives logits that are not finite through a cache; its weights are damaged"
                )
            found[key] = kl.unflatten(-1, (len(tokens), -1))
        yield found


def _put(cache: KVCache, layers: dict[int, Any]) -> None:
    for index, layer in layers.items():
        cache.layers[index] = layer


def _take_back(cache: KVCache, count: int) -> None:
    """Take the newest tokens out of the layers that are ours; others are replaced by what they were before."""
    for layer in cache.layers:
        if isinstance(layer, CodedLayer):
            layer.crop(-count)
    cache.rope.crop(count)
