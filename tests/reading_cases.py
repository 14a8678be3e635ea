"""Caches that read a part of what they store, of random keys and queries, for the tests of compress/kv/sparse."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from compress.kv import attention
from compress.kv.cache import make_cache
from compress.kv.layer import KVCache

WIDTH = 32
POLICY = {"sink": 3, "residual_length": 20, "flush": 1}
CODECS: dict[str, dict[str, Any]] = {
    "identity": {"method": "identity"},
    "kivi": {"method": "kivi", "bits": 4, "group_size": 32},
    "lloyd": {"method": "lloyd", "bits": 4, "keys": {"rope": "post"}},
    "gear": {"method": "gear", "bits": 4, "group_size": 16, "rank": 1, "block_tokens": 32},
}
Chunks = list[tuple[Tensor, Tensor, Tensor]]


def channels(heads: int, count: int) -> Tensor:
    """Label channels of each head, in a random order."""
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randperm(WIDTH, generator=generator)[:count] for _ in range(heads)]
    return torch.stack(rows).to(torch.int16)


def cache(read: Mapping[str, Any] | None, codec: str = "identity", layers: int = 1, **kwargs: Any) -> KVCache:
    heads, kv_heads = kwargs.pop("heads", (4, 2))
    config = LlamaConfig(
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=heads * WIDTH
    )
    recipe = {**CODECS[codec], **POLICY, **({} if read is None else {"read": dict(read)}), **kwargs}
    static = {}
    if read is not None and read["method"] == "double_sparsity":
        count = min(read.get("channels", 16), WIDTH)
        static = {f"layers.{i}.read.channels": channels(kv_heads, count) for i in range(layers)}
    return make_cache(config, recipe, static, "fused")


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def chunks(sizes: list[int], batch: int = 2, heads: tuple[int, int] = (4, 2)) -> Chunks:
    """Queries, keys and values of each forward pass; queries are large, so that attention is uneven."""
    made = []
    for i, n in enumerate(sizes):
        q, k, v = (normal(batch, h, n, WIDTH, seed=3 * i + j) for j, h in enumerate((heads[0], heads[1], heads[1])))
        made.append((2 * q, k, v))
    return made


def step(layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
    """One call of attention, [B, H, n, width] -> [B, n, H, width]."""
    keys, values = layer.update(k, v)
    module = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], is_causal=True)
    return attention.attention(module, q, keys, values, mask, scaling=WIDTH**-0.5, **kwargs)[0]
