"""Every codec of compress/kv with small settings, calibrated on random samples; and the bits that its docstring states.

    for case in CASES: cache = case.cache("fused")      # of one layer, 4 query heads and 2 KV heads of 16 channels

Codecs that look at queries are there twice. `kind_bits` is written from the formulas in the docstrings, and by hand, so
that what is stored can be compared with what is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, LlamaConfig, PreTrainedModel

from compress import plugins
from compress.calib.kv import calibrate
from compress.errors import RecipeError
from compress.kv import attention, generation, hooks
from compress.kv.cache import make_cache
from compress.kv.codec import Spec
from compress.kv.layer import CachePath, KVCache, build
from compress.kv.settings import KINDS, cache_settings
from helpers import pico

QUERIES, HEADS, WIDTH = 4, 2, 16
POLICY = {"sink": 4, "residual_length": 32, "flush": 32}
SAMPLES = 600  # tokens of calibration
BOTH: tuple[CachePath, ...] = ("decode", "fused")

Bits = Callable[[str, Mapping[str, Tensor]], float]  # kind, its calibrated tensors -> bits of an element


@dataclass(frozen=True, eq=False)
class Case:
    method: str
    settings: Mapping[str, Any]
    bits: Bits
    paths: tuple[CachePath, ...] = BOTH
    is_before_rope: bool = False  # its keys

    @property
    def recipe(self) -> dict[str, Any]:
        return {"method": self.method, **self.settings, **POLICY}

    def __str__(self) -> str:
        return "-".join([self.method, *(str(v) for v in self.settings.values() if isinstance(v, str))])

    def static(self, layers: int = 1) -> dict[str, Tensor]:
        return calibrated(self.recipe, layers)

    def cache(self, path: CachePath) -> KVCache:
        config = LlamaConfig(
            num_hidden_layers=1, num_attention_heads=QUERIES, num_key_value_heads=HEADS, hidden_size=QUERIES * WIDTH
        )
        return make_cache(config, self.recipe, self.static(), path)

    def kind_bits(self, kind: str) -> float:
        prefix = f"layers.0.{kind}."
        own = {name.removeprefix(prefix): t for name, t in self.static().items() if name.startswith(prefix)}
        return self.bits(kind, own)


def ready(model: PreTrainedModel) -> PreTrainedModel:
    """The model, with hooks for caches that are given to it and are read in either way."""
    hooks.attach(model)
    generation.switch(model)
    return model


def windows(count: int = 3, length: int = 200) -> Tensor:
    """Random tokens [count, length]."""
    return torch.randint(0, 250, (count, length), generator=torch.Generator().manual_seed(0))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def calibrated(recipe: Mapping[str, Any], layers: int) -> dict[str, Tensor]:
    """As calib/kv.py gives it, from samples with a mean and channels of falling size."""
    fall, mean = torch.logspace(0, -1, WIDTH), normal(HEADS, WIDTH, seed=9)
    kinds = ("keys", "keys_pre", "values", "gradients", "gradients_rotated")
    samples = {name: normal(SAMPLES, HEADS, WIDTH, seed=i) * fall + mean for i, name in enumerate(kinds)}
    asked = ("queries", "queries_pre", "queries_scaled", "gradients_output")
    samples |= {name: normal(SAMPLES, QUERIES, WIDTH, seed=i) for i, name in enumerate(asked)}
    samples["projections"] = normal(HEADS * WIDTH, QUERIES * WIDTH)
    samples |= {
        name: normal(4, POLICY["sink"], HEADS, WIDTH, seed=i) for i, name in enumerate(("keys_sink", "values_sink"))
    }
    found = {}
    for index, layer in enumerate(cache_settings(recipe).by_layer(layers)):
        for kind in KINDS:
            plugin, config = plugins.load("kv", layer[kind].method), layer[kind].config
            if plugin.NEEDS:
                spec = Spec(kind, index, layers, HEADS, WIDTH, QUERIES // HEADS)  # type: ignore[arg-type]
                own = plugin.calibrate(config, spec, samples)
                found |= {f"layers.{index}.{kind}.{name}": tensor for name, tensor in own.items()}
    return found


def through_a_model(
    recipe: Mapping[str, Any], repeats: int = 2
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Return what a small model calibrates to, and logits of a padded batch: decoded, fused, with the exact cache."""
    model = pico.build("llama", {"max_position_embeddings": 2048})
    ids = torch.randint(0, 250, (2, 60), generator=torch.Generator().manual_seed(1))
    static, _ = calibrate(model, cache_settings(recipe).by_layer(2), ids.repeat(repeats, 1))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    hooks.attach(model)
    attention.register()

    @torch.no_grad()
    def logits(cache: Cache) -> Tensor:
        is_fused = isinstance(cache, KVCache) and cache.path == "fused"
        model.set_attn_implementation(attention.NAME if is_fused else "sdpa")
        model(ids[:, :50], attention_mask=mask[:, :50], past_key_values=cache)
        return model(ids[:, 50:], attention_mask=mask, past_key_values=cache).logits

    decoded, fused = (logits(make_cache(model.config, recipe, static, path)) for path in BOTH)
    return static, (decoded, fused, logits(DynamicCache(config=model.config)))


def refusal(method: str, spec: Spec, own: Mapping[str, Tensor], **settings: Any) -> str:
    """The error for calibrated tensors that are not those of a codec."""
    static = {f"layers.{spec.layer}.{spec.kind}.{name}": tensor for name, tensor in own.items()}
    with pytest.raises(RecipeError) as caught:
        build(cache_settings({"method": method, **settings}).of(spec.kind), spec, static)
    return str(caught.value)


def _kvquant(kind: str, static: Mapping[str, Tensor]) -> float:
    slot = (16 + 8) / (HEADS * WIDTH)  # one outlier of a token: 0.01 of 32 channels is less than one
    return 3 + slot + (32 / (HEADS * WIDTH) if kind == "values" else 0)


def _gear(kind: str, static: Mapping[str, Tensor]) -> float:
    return 2 + 32 / 16 + 16 * 1 * (1 / WIDTH + 1 / 32) + 2 / 32 * (16 + 8)  # of 32 entries one at each end


def _pca(kind: str, static: Mapping[str, Tensor]) -> float:
    """Planes of 4, 2 and 1 bits, each filled up to whole words of 16 bits."""
    bits = static["bits"].flatten().int()
    assert int(bits.sum()) <= 2 * HEADS * WIDTH
    words = sum(-(-int((bits & plane).ne(0).sum()) * plane // 16) for plane in (4, 2, 1))
    return 16 * words / (HEADS * WIDTH) + 8 / WIDTH


def _ranks(bits: int) -> Bits:
    """Channels of each head that stay, and a byte for each head and token where these are no plain numbers."""

    def made(kind: str, static: Mapping[str, Tensor]) -> float:
        total = int(static["ranks"].sum())
        assert total <= HEADS * WIDTH / 2
        return bits * total / (HEADS * WIDTH) + (8 / WIDTH if bits < 16 else 0)

    return made


def _fixed(bits: float) -> Bits:
    return lambda kind, static: bits


def _narrow(bits: float, keep: float) -> Bits:
    return lambda kind, static: bits * (keep if kind == "keys" else 1)


def _balanced(kind: str, static: Mapping[str, Tensor]) -> float:
    return int(static["bits"]) + 32 / WIDTH


TIERS = 0.25 * 4 + 0.75 * 2 + (16 + 1) / WIDTH
CASES = (
    Case("identity", {}, _fixed(32)),
    Case("fp8", {}, _fixed(8 + 16 / WIDTH)),
    Case("kivi", {"bits": 3, "group_size": 16}, _fixed(3 + 32 / 16)),
    Case("quantspec", {"group_size": 16}, _fixed(8 + 32 / 16)),
    Case("kvquant", {"bits": 3}, _kvquant, is_before_rope=True),
    Case("gear", {"bits": 2, "group_size": 16, "rank": 1, "block_tokens": 32}, _gear),
    Case("squat", {"bits": 2, "group_size": 16}, _fixed(2 + 32 / 16)),
    Case("squat", {"bits": 2, "group_size": 16, "subspace": "prompt"}, _fixed(2 + 32 / 16), ("fused",)),
    Case("rotatekv", {"bits": 2, "group_size": 32}, _fixed(2 + 32 / 32), is_before_rope=True),
    Case("lloyd", {"bits": 3}, _fixed(3 + 16 / WIDTH), is_before_rope=True),
    Case("lloyd", {"bits": 2, "rope": "post"}, _fixed(2 + 16 / WIDTH)),
    Case("per_token", {"bits": 4, "group_size": 8}, _fixed(4 + 32 / 8)),
    Case("per_token", {"bits": 3, "levels": "lloyd"}, _fixed(3 + 16 / WIDTH)),
    Case("balanced", {"bits": 4.0}, _balanced),
    Case("kv_adaquant", {"bits": 2.0, "group_size": 16}, lambda _, static: int(static["bits"]) + 32 / 16),
    Case("zipvl", {}, _fixed(TIERS), is_before_rope=True),
    Case("zipvl", {"judge": "probes"}, _fixed(TIERS), ("fused",), is_before_rope=True),
    Case("key_pairs", {"keep": 0.5}, _narrow(32, 0.5)),
    Case("key_pairs", {"keep": 0.5, "codes": "kivi", "bits": 4, "group_size": 16}, _narrow(4 + 32 / 16, 0.5)),
    Case("pca", {"bits": 2.0}, _pca, is_before_rope=True),
    Case("matryoshka", {"ranks": "layer"}, _ranks(16)),
    Case("matryoshka", {"ranks": "layer", "bits": 4, "basis": "orthogonal"}, _ranks(4)),
    Case("cskv", {}, _fixed(16 / 2), is_before_rope=True),
    Case("cskv", {"bits": 4, "metric": "loss"}, _fixed(4 / 2 + 8 / (HEADS * WIDTH)), is_before_rope=True),
    Case("commvq", {"bits": 2.0, "entries": 16, "norm": "token"}, _fixed(2 + 8 / (HEADS * WIDTH)), is_before_rope=True),
)
