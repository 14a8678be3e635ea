"""Bytes a token at a context, carried on from a few flushes, against a cache that holds that many tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from compress.calib.kv import calibrate
from compress.evaluate.reader import fill
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
    rows = 32 * 4 + 4 if shared else 0  # the cache of such few tokens need not hold rows beside positions
    assert found.bytes_per_token == pytest.approx((held.total - shared + held.static) / CONTEXT + rows, abs=1e-6)
    assert (found.static, found.context, found.exact_bytes_per_token) == (held.static, CONTEXT, 2 * 2 * 2 * 32 * 4)


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
