"""Measure how much a compressed cache changes the output of each attention layer, all else exact.

The model runs with exact caches over a window in two parts. Beside each layer's attention the same module is called
again on the same inputs, with a cache under test in place of the exact one; the first part fills it, the queries of
the second (the last QUERIES tokens) read it. The error of a query is ||o - o_exact||^2 / ||o_exact||^2 of the module's
output, so through the output projection. Errors do not add up over layers here: it ranks caches and layers, and
perplexity decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from compress.errors import UnsupportedModelError
from compress.evaluate.feed import fed
from compress.kv import attention
from compress.kv.evict import queries
from compress.kv.layer import KVCache

QUERIES = 32  # of each window, at its end

Make = Callable[[], KVCache]


@dataclass(frozen=True)
class OutputError:
    """Relative squared errors of one cache, over all queries of each layer, [layers]."""

    mean: Tensor
    p50: Tensor
    p95: Tensor


def output_errors(model: Any, windows: Tensor, makes: Sequence[Make], batch: int = 4) -> list[OutputError]:
    """Return the errors of each cache on windows int64 [windows, seq_len], seq_len > QUERIES; the model has hooks."""
    modules = attentions(model)
    errors: list[dict[int, list[Tensor]]] = [{index: [] for index in modules} for _ in makes]
    for tokens in windows.split(batch):
        caches = [make() for make in makes]
        beside = _Beside(model, caches, errors)
        handles = [module.register_forward_hook(beside, with_kwargs=True) for module in modules.values()]
        try:
            exact = DynamicCache(config=model.config)
            with torch.no_grad():
                for part in (tokens[:, :-QUERIES], tokens[:, -QUERIES:]):
                    fed(model, part.to(model.device), exact)
        finally:
            for handle in handles:
                handle.remove()
    return [_summary(list(found.values())) for found in errors]


def attentions(model: nn.Module) -> dict[int, nn.Module]:
    """Return by layer number the module that updates its cache: the innermost one that knows its number."""
    found = {name: m for name, m in model.named_modules() if isinstance(getattr(m, "layer_idx", None), int)}
    inner = [n for n in found if not any(other.startswith(f"{n}.") for other in found)]
    return {found[name].layer_idx: found[name] for name in inner}


class _Beside:
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
                with _reading(self.model, cache):
                    other = module(*args, **{**kwargs, name: cache})
                if not is_first:
                    errors[module.layer_idx].append(_relative(_tensor(output), _tensor(other)))
        finally:
            self.is_inside = False


class _reading:
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
    found = output[0] if isinstance(output, tuple) else output
    if not isinstance(found, Tensor):
        raise UnsupportedModelError(f"attention returns a {type(found).__name__}; its error cannot be measured")
    return found


def _relative(exact: Tensor, other: Tensor) -> Tensor:
    """Return the relative squared error of each query, [B n] float64, of two outputs [B, n, hidden]."""
    exact, other = exact.double(), other.double()
    return ((exact - other).square().sum(-1) / exact.square().sum(-1).clamp(min=1e-30)).flatten().cpu()


def _summary(layers: list[list[Tensor]]) -> OutputError:
    """Return the statistics over queries of each layer; layers without a cache have no error."""
    rows = [torch.cat(parts) if parts else torch.zeros(1, dtype=torch.float64) for parts in layers]
    return OutputError(
        torch.stack([row.mean() for row in rows]),
        torch.stack([row.median() for row in rows]),
        torch.stack([row.quantile(0.95) for row in rows]),
    )
