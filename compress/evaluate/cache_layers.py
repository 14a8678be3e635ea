"""Measure what a compressed cache costs in each layer, all else exact: errors of attention, and evicted tokens.

Output errors. The model runs with exact caches over a window in two parts. Each layer's attention is called again on
the same inputs, with a cache under test in place of the exact one; the first part fills it, the queries of the second
(the last QUERIES_PER_WINDOW tokens) read it. The error of a query is ||o - o_exact||^2 / ||o_exact||^2 of the module's
output, so through the output projection. Errors do not add up over layers here: it ranks caches and layers, and
perplexity decides.

Evictions: what it costs that one layer forgets tokens of the prompt, while all other layers keep theirs. The prompt of
a window goes through the model with layers that forget nothing, and once for each way to evict, with layers that all
do. Tokens of a prompt attend to each other exactly, so every layer of such a cache holds what it would hold if it were
the only one that evicts. Its layers then take the places of those of the first cache, one at a time, and the tokens
after the prompt are read again: a pass for each layer, whatever the length of the prompt. Keys and values are not
coded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from compress.errors import NumericalError, UnsupportedModelError
from compress.evaluate.reader import Reader, Say, fill
from compress.evaluate.scores import score
from compress.kv import attention
from compress.kv.cache import layer_types, make_cache
from compress.kv.evict import queries
from compress.kv.evict.select import prompt_of
from compress.kv.evict.settings import Eviction
from compress.kv.layer import CodedLayer, KVCache
from compress.kv.settings import CacheSettings, exact

QUERIES_PER_WINDOW = 32  # the last tokens of each

Make = Callable[[], KVCache]


@dataclass(frozen=True)
class AttentionErrors:
    """Relative squared errors of one cache, over all queries of each layer, [layers]."""

    mean: Tensor
    p50: Tensor
    p95: Tensor


def output_errors(model: Any, windows: Tensor, makes: Sequence[Make], batch: int = 4) -> list[AttentionErrors]:
    """Return the errors of each cache on windows int64 [windows, seq_len]; the model has hooks.

    seq_len is larger than QUERIES_PER_WINDOW.
    """
    modules = attentions(model)
    errors: list[dict[int, list[Tensor]]] = [{index: [] for index in modules} for _ in makes]
    for tokens in windows.split(batch):
        caches = [make() for make in makes]
        repeat = _Repeat(model, caches, errors)
        handles = [module.register_forward_hook(repeat, with_kwargs=True) for module in modules.values()]
        try:
            exact = Reader(model).new_cache()
            with torch.no_grad():
                for part in (tokens[:, :-QUERIES_PER_WINDOW], tokens[:, -QUERIES_PER_WINDOW:]):
                    fill(model, part.to(model.device), exact)
        finally:
            for handle in handles:
                handle.remove()
    return [_summary(list(by_layer.values())) for by_layer in errors]


def attentions(model: nn.Module) -> dict[int, nn.Module]:
    """Return by layer number the module that updates its cache: the innermost one that knows its number."""
    numbered = {name: m for name, m in model.named_modules() if isinstance(getattr(m, "layer_idx", None), int)}
    inner = [n for n in numbered if not any(other.startswith(f"{n}.") for other in numbered)]
    return {numbered[name].layer_idx: numbered[name] for name in inner}


class _Repeat:
    """Calls an attention module again with the caches under test, and compares."""

    def __init__(self, model: Any, caches: Sequence[KVCache], errors: Sequence[dict[int, list[Tensor]]]) -> None:
        self.model, self.caches, self.errors = model, caches, errors
        self.is_inside = False

    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        name = next((key for key, value in kwargs.items() if isinstance(value, Cache)), None)
        if self.is_inside or name is None:
            return
        self.is_inside = True
        try:
            for cache, errors in zip(self.caches, self.errors, strict=True):
                is_first = cache.layers[module.layer_idx].get_seq_length() == 0
                with _attention_for(self.model, cache):
                    other = module(*args, **{**kwargs, name: cache})
                if not is_first:
                    errors[module.layer_idx].append(_relative(_tensor(output), _tensor(other)))
        finally:
            self.is_inside = False


class _attention_for:
    """Sets the attention function that a cache needs, and puts the model's own back."""

    def __init__(self, model: Any, cache: KVCache) -> None:
        self.config, self.own = model.config, model.config._attn_implementation
        self.needed = attention.NAME if cache.path == "fused" else self.own
        if cache.path == "decode" and queries.evicts(cache):
            self.needed = queries.register_watched(self.own)

    def __enter__(self) -> None:
        self.config._attn_implementation = self.needed

    def __exit__(self, *_: object) -> None:
        self.config._attn_implementation = self.own


def _tensor(output: Any) -> Tensor:
    hidden = output[0] if isinstance(output, tuple) else output
    if not isinstance(hidden, Tensor):
        raise UnsupportedModelError(f"attention returns a {type(hidden).__name__}; its error cannot be measured")
    return hidden


def _relative(exact: Tensor, other: Tensor) -> Tensor:
    """Return the relative squared error of each query, [B n] float64, of two outputs [B, n, hidden]."""
    exact, other = exact.double(), other.double()
    return ((exact - other).square().sum(-1) / exact.square().sum(-1).clamp(min=1e-30)).flatten().cpu()


def _summary(layers: list[list[Tensor]]) -> AttentionErrors:
    """Return the statistics over queries of each layer; layers without a cache have no error."""
    rows = [torch.cat(parts) if parts else torch.zeros(1, dtype=torch.float64) for parts in layers]
    return AttentionErrors(
        torch.stack([row.mean() for row in rows]),
        torch.stack([row.median() for row in rows]),
        torch.stack([row.quantile(0.95) for row in rows]),
    )


@dataclass(frozen=True)
class EvictionCosts:
    """What one way to evict costs, by layer."""

    kls: dict[int, float]  # KL(exact || this layer evicts), nats a token
    errors: dict[int, float]  # of the layer's attention output, relative squared
    together: float  # KL(exact || all layers evict), nats a token
    tokens: int  # that divergences were taken over


@torch.no_grad()
def eviction_costs(
    model: Any, windows: Tensor, settings: CacheSettings, evictions: Sequence[Eviction], say: Say, batch: int = 1
) -> list[EvictionCosts]:
    """Return the scores of each way to evict on windows int64 [windows, seq_len]; the model has hooks.

    settings: of the cache, of which the codecs play no part. Layers that the settings skip have no scores.
    """
    if not evictions:
        return []
    plain = [_without_codecs(settings, each) for each in evictions]
    rows = {layer: row for row, layer in enumerate(attentions(model))}
    errors = output_errors(model, windows, [lambda s=s: make_cache(model.config, s) for s in plain])  # type: ignore[misc]
    kls: list[dict[int | None, list[Tensor]]] = [{} for _ in plain]
    for tokens in windows.split(batch):
        for parts, kl_by_layer in zip(kls, _divergences(model, tokens.to(model.device), plain), strict=True):
            for layer, kl in kl_by_layer.items():
                parts.setdefault(layer, []).append(kl)
            say(len(tokens))
    costs = []
    for by_layers, error in zip(kls, errors, strict=True):
        means = {layer: max(0.0, float(torch.cat(parts).mean())) for layer, parts in by_layers.items()}
        together, counted = means.pop(None), sum(part.numel() for part in by_layers[None])
        by_number = {layer: kl for layer, kl in means.items() if layer is not None}
        costs.append(EvictionCosts(by_number, {i: float(error.mean[rows[i]]) for i in by_number}, together, counted))
    return costs


def _without_codecs(settings: CacheSettings, eviction: Eviction) -> CacheSettings:
    """Return settings that evict and code nothing."""
    plain = exact(settings.keys.policy.sink)
    return replace(settings, keys=plain, values=plain, layers=(), evict=eviction, read=None)


def _divergences(model: Any, tokens: Tensor, ways: Sequence[CacheSettings]) -> Iterator[dict[int | None, Tensor]]:
    """Yield KL [B, after - 1] float64 of each way to evict, by layer that evicts; None: by all of them."""
    prompt = prompt_of(tokens.shape[1])
    layers = len(layer_types(model.config))
    whole = make_cache(model.config, replace(ways[0], skip_layers=tuple(range(layers))))
    fill(model, tokens[:, :prompt], whole)
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
        fill(model, tokens[:, :prompt], evicting)
        forgetting = {i: layer for i, layer in enumerate(evicting.layers) if not getattr(layer, "is_exempt", True)}
        divergences: dict[int | None, Tensor] = {}
        alone: dict[int | None, dict[int, Any]] = {i: {i: layer} for i, layer in forgetting.items()}
        for key, changed in {None: forgetting, **alone}.items():
            kl = score([logits(changed), exact_logits], target)[2]
            if not torch.isfinite(kl).all():
                raise NumericalError(
                    "the model gives logits that are not finite through a cache; its weights are damaged"
                )
            divergences[key] = kl.unflatten(-1, (len(tokens), -1))
        yield divergences


def _put(cache: KVCache, layers: dict[int, Any]) -> None:
    for index, layer in layers.items():
        cache.layers[index] = layer


def _take_back(cache: KVCache, count: int) -> None:
    """Take the newest tokens out of the layers that are ours; others are replaced by what they were before."""
    for layer in cache.layers:
        if isinstance(layer, CodedLayer):
            layer.crop(-count)
    cache.rope.crop(count)
