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
SIZES = [150, 1, 1, 30, 1, 1]  # tokens of the forward passes of a `Case`
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
    if read is not None and read["method"].startswith("double_sparsity"):
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


def attended(q: Tensor, keys: Tensor, values: Tensor, read: Tensor) -> Tensor:
    """Attention in float64 of q [H, width] over keys and values [h, n, width], to the tokens read, bool [h, n]."""
    out = []
    for head in range(q.shape[0]):
        own = head * keys.shape[0] // q.shape[0]
        places = read[own].nonzero()[:, 0]
        scores = keys[own, places].double() @ q[head].double() * WIDTH**-0.5
        out.append(scores.softmax(0) @ values[own, places].double())
    return torch.stack(out)


class Case:
    """A cache fed step by step, and for each query after the first pass what dense attention would have read."""

    def __init__(self, read: Mapping[str, Any], codec: str, heads: tuple[int, int], layer: int = 0) -> None:
        self.made = cache(read, codec, layer + 1, heads=heads)
        self.layer: Any = self.made.layers[layer]
        self.heads, self.config = heads, self.made.reading.config if self.made.reading else None
        self.data = chunks(SIZES, 2, heads)

    def run(self, chosen: Any) -> list[tuple[Tensor, Tensor]]:
        """Return outputs found and expected, [queries, H, width]; chosen(self, row, queries so far, keys, coded) gives
        the candidates that the last query reads, bool [h, coded].
        """
        pairs = []
        past: list[list[Tensor]] = [[], []]
        for q, k, v in self.data:
            stores = self.layer.stores
            coded = self.layer.candidates()
            before = [store.read() for store in stores.values()] if stores else None
            found = step(self.layer, q, k, v)
            if before is not None:
                keys, values = (torch.cat((b, x), 2) for b, x in zip(before, (k, v), strict=True))
                stored = before[0].shape[2]
                for row in range(q.shape[0]):
                    for n in range(q.shape[2]):
                        queries = torch.cat([*past[row], q[row, :, : n + 1]], 1)
                        read = torch.ones(self.heads[1], stored + n + 1, dtype=torch.bool)
                        read[:, 3 : 3 + coded] = chosen(self, row, queries, keys[row, :, 3 : 3 + coded], coded)
                        here = slice(0, stored + n + 1)
                        pairs.append(
                            (found[row, n], attended(q[row, :, n], keys[row, :, here], values[row, :, here], read))
                        )
            for row in range(q.shape[0]):
                past[row].append(q[row])
        return pairs


def best(scores: Tensor, count: int) -> Tensor:
    """The `count` largest of scores [h, n], bool."""
    found = torch.zeros_like(scores, dtype=torch.bool)
    for head in range(len(scores)):
        for place in sorted(range(scores.shape[1]), key=lambda i: -float(scores[head, i]))[:count]:  # noqa: B023
            found[head, place] = True
    return found


def shared(q: Tensor, keys: Tensor) -> Tensor:
    """Mean over query heads of the softmax of q [H, width] over keys [h, n, width], [h, n] float64."""
    heads = []
    for own in range(keys.shape[0]):
        group = q.unflatten(0, (keys.shape[0], -1))[own].double()
        heads.append((group @ keys[own].double().T * WIDTH**-0.5).softmax(-1).mean(0))
    return torch.stack(heads)
