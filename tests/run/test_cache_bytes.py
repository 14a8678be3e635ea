"""Bytes a token at a context, carried on from a few flushes, against a cache that holds that many tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from compress.calib.kv import calibrate
from compress.errors import RecipeError
from compress.evaluate.reader import fill
from compress.kv import attention
from compress.kv.cache import coded_layers, make_cache
from compress.kv.settings import cache_settings
from compress.model import load
from compress.run import kv_cache
from helpers.kv_cases import ready
from helpers.pico import of_type, save_pico
from helpers.runs import TEXT, cli

CONTEXT = 1000
CASES: list[dict[str, Any]] = [
    {"method": "kivi", "bits": 2, "residual_length": 64},
    {"method": "kivi", "bits": 4, "flush": 7, "residual_length": 30, "sink": 3, "values": {"method": "fp8"}},
    {"method": "gear", "block_tokens": 64, "rank": 1},
    {"method": "lloyd", "rope": "pre", "layers": [{"match": 1, "bits": 4}]},
    {"method": "pca", "bits": 3.0, "skip_layers": [0]},
    {"method": "kivi", "residual_length": 2000},
    {"method": "matryoshka", "keep": 0.5, "residual_length": 64},  # layers of different sizes
    {"method": "kv_adaquant", "bits": 3.0, "residual_length": 64},
    {"method": "cskv", "keep": 0.25, "bits": 4, "residual_length": 64},  # positions, and no rotary rows
]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    changes = {"head_dim": 32, "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 2048}
    return ready(of_type("llama", changes))


@pytest.mark.parametrize("recipe", CASES)
def test_the_bytes_are_those_of_a_cache_of_that_length(model: PreTrainedModel, recipe: dict[str, Any]) -> None:
    settings = cache_settings(recipe)
    codings = coded_layers(model.config, settings)
    static = calibrate(model, codings, torch.arange(512).view(4, 128) % 250)[0] if settings.needs() else {}
    found = kv_cache.bytes_at_context(model.config, settings, static, torch.float32, CONTEXT)
    cache = make_cache(model.config, settings, static, "fused")
    tokens = torch.arange(CONTEXT)[None] % 250
    with torch.no_grad():
        for start in (0, 1, *range(101, CONTEXT, 100)):
            fill(model, tokens[:, start : {0: 1, 1: 101}.get(start, min(start + 100, CONTEXT))], cache)
    held = cache.nbytes()
    shared = cache.rope.nbytes
    keeps_rows = recipe["method"] == "pca"  # the cache of such few tokens need not hold rows beside positions
    rows = 32 * 4 * keeps_rows + 4 if shared else 0
    assert found.bytes_per_token == pytest.approx((held.total - shared + held.static) / CONTEXT + rows, abs=1e-6)
    assert (found.static, found.context, found.exact_bytes_per_token) == (held.static, CONTEXT, 2 * 2 * 2 * 32 * 4)


@pytest.mark.parametrize("method", ["quest", "actqkv", "loopserve", "double_sparsity"])
def test_what_a_reader_keeps_is_counted(method: str) -> None:
    """In layers that choose, behind those that read everything; before calibration, too."""
    changes = {"head_dim": 32, "num_key_value_heads": 2, "num_hidden_layers": 4, "max_position_embeddings": 2048}
    model = ready(of_type("llama", changes))
    model.set_attn_implementation(attention.NAME)
    settings = cache_settings({"method": "kivi", "bits": 4, "read": {"method": method}})
    codings = coded_layers(model.config, settings)
    samples = torch.arange(512).view(4, 128) % 250
    static = calibrate(model, codings, samples, reading=settings.read)[0] if method == "double_sparsity" else {}
    cache, tokens = make_cache(model.config, settings, static, "fused"), torch.arange(CONTEXT)[None] % 250
    with torch.no_grad():
        model(tokens[:, :-64], past_key_values=cache)
        for start in range(CONTEXT - 64, CONTEXT):
            model(tokens[:, start : start + 1], past_key_values=cache)
    held = cache.nbytes()
    found = kv_cache.bytes_at_context(model.config, settings, {}, torch.float32, CONTEXT)
    assert found.bytes_per_token == pytest.approx((held.total + held.static) / CONTEXT, rel=1e-3)
    plain = cache_settings({"method": "kivi", "bits": 4})
    assert (
        found.bytes_per_token
        > kv_cache.bytes_at_context(model.config, plain, {}, torch.float32, CONTEXT).bytes_per_token
    )


def test_a_lower_tier_is_counted_as_kept_and_refused_before_any_work(model: PreTrainedModel) -> None:
    def size(low: int) -> float:
        evict = {"method": "zipvl", "tau": None, "keep": 0.25, "low": low}
        settings = cache_settings({"method": "kivi", "bits": 4, "evict": evict})
        return kv_cache.bytes_at_context(model.config, settings, {}, torch.float32, CONTEXT).bytes_per_token

    whole = kv_cache.bytes_at_context(
        model.config, cache_settings({"method": "kivi", "bits": 4}), {}, torch.float32, CONTEXT
    )
    assert size(0) < size(2) and size(2) == pytest.approx(whole.bytes_per_token, rel=0.02)
    with pytest.raises(RecipeError, match="fp8 has no bits that `low` could change"):
        kv_cache.check(model.config, cache_settings({"method": "fp8", "evict": {"method": "zipvl"}}))
    with pytest.raises(RecipeError, match="pca is calibrated for one number of bits"):
        kv_cache.check(model.config, cache_settings({"method": "pca", "evict": {"method": "zipvl"}}))


@pytest.mark.parametrize(
    "recipe",
    [
        *({"method": each} for each in ("pca", "kvquant", "commvq", "balanced")),
        {"method": "pca", "bits": 2.125},
        {"method": "cskv", "keep": 0.25, "ranks": "even"},
        {"method": "matryoshka", "keep": 0.25, "ranks": "even"},
        {"method": "key_pairs", "keep": 0.5},
        {"method": "rotatekv"},
        *({"method": "kv_adaquant", "bits": bits, "widths": [2, 4, 8]} for bits in (2.0, 3.0, 5.0)),
    ],
)
def test_bytes_are_known_before_calibration(model: PreTrainedModel, recipe: dict[str, Any]) -> None:
    settings = cache_settings(recipe)
    static = calibrate(model, coded_layers(model.config, settings), torch.arange(512).view(4, 128) % 250)[0]
    before, after = (
        kv_cache.bytes_at_context(model.config, settings, tensors, torch.float32, CONTEXT) for tensors in ({}, static)
    )
    assert before == after
    assert before.static > 0 or recipe["method"] == "kv_adaquant"


def test_the_longest_context_that_is_named() -> None:
    config = of_type("llama", {"num_key_value_heads": 2, "max_position_embeddings": 300}).config
    assert kv_cache.bytes_at_context(config, cache_settings({"method": "kivi"}), {}, torch.float32).context == 300


def test_runs_and_plans_say_it(tmp_path: Path) -> None:
    model, out = str(save_pico("llama", tmp_path / "model")), tmp_path / "out"
    words = ["--recipe", "kv3", "--calib", str(TEXT), "--set", "kv_cache.residual_length=32"]
    few = ["--set", "calibration.num_samples=8", "--set", "calibration.seq_len=64"]
    done = cli("quantize", model, *words, *few, "--out", str(out))
    assert done.code == 0, done.err
    size = json.loads((out / "report.json").read_text())["kv_cache"]["size"]
    assert size["static"] > 0 and size["context"] == load.load_config(out).max_position_embeddings
    assert f"cache: {size['bytes_per_token']:,.0f} bytes a token at 256 tokens, " in done.out
    assert "of them calibrated tensors (" in done.out and "once for all sequences); exact: 512" in done.out
    planned = cli("plan", model, "--recipe", "kv4", "--set", "kv_cache.residual_length=32")
    assert planned.code == 0 and "bytes a token at 256 tokens; exact: 512" in planned.out, planned.err
