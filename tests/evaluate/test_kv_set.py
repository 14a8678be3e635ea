"""Overrides of the cache recipes that --kv names, how caches are read, and what their bytes are of."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from typer.testing import CliRunner

from compress.cli.app import app
from compress.cli.options import cache_recipes
from compress.errors import RecipeError
from compress.evaluate import cache_speed
from compress.evaluate.cache_candidates import candidates_of
from compress.evaluate.reader import Candidate, readable, readings
from compress.kernels import llvm
from compress.kv import fused
from compress.kv.settings import cache_settings
from helpers.kv_cases import ready
from helpers.pico import of_type
from helpers.runs import TEXT

NO_COMPILER = pytest.mark.skipif(not llvm.available(), reason="compiled code needs llvmlite")


@pytest.mark.parametrize(
    ("overrides", "name", "keys", "values"),
    [
        (["bits=3"], "kv4, bits=3", ("kivi", 3), ("kivi", 3)),
        (["kv_cache.bits=3"], "kv4, bits=3", ("kivi", 3), ("kivi", 3)),
        (["values.bits=2"], "kv4, values.bits=2", ("kivi", 4), ("kivi", 2)),
        (["bits=8", "keys={bits: 2}"], "kv4, bits=8, keys={bits: 2}", ("kivi", 2), ("kivi", 8)),
        (["method=lloyd"], "kv4, method=lloyd", ("lloyd", 4), ("lloyd", 4)),
        (["method=lloyd", "norm_bits=8"], "kv4, method=lloyd, norm_bits=8", ("lloyd", 4), ("lloyd", 4)),
    ],
)
def test_overrides_are_of_the_section(
    overrides: list[str], name: str, keys: tuple[str, int], values: tuple[str, int]
) -> None:
    ((found, settings),) = cache_recipes(["kv4"], overrides).items()
    assert found == name
    for coding, expected in ((settings.keys, keys), (settings.values, values)):
        assert (coding.method, coding.config.bits) == expected


def test_another_method_keeps_the_settings_that_it_has() -> None:
    (settings,) = cache_recipes(["zipkv"], ["method=lloyd", "residual_length=64"]).values()
    assert (settings.keys.config.norm_bits, settings.keys.policy.residual_length) == (8, 64)  # not high, low, important
    (settings,) = cache_recipes(["kv4"], ["method=fp8"]).values()
    assert settings.values.method == "fp8"


def test_several_recipes_get_the_same_overrides() -> None:
    found = cache_recipes(["kv4", "kv8"], ["sink=7"])
    assert list(found) == ["kv4, sink=7", "kv8, sink=7"]
    assert {settings.keys.policy.sink for settings in found.values()} == {7}
    assert cache_recipes(["own"]) == {} and list(cache_recipes(["kv4"])) == ["kv4"]


@pytest.mark.parametrize(
    ("names", "override", "message"),
    [
        (["kv4"], "bitz=3", "--set kv_cache.bitz=3: .*unknown key 'bitz'.*did you mean 'bits'"),
        (["kv4"], "bits=none", "--set kv_cache.bits=none: .*bits must be an integer"),
        (["kv4"], "bits", "--set kv_cache.bits: expected key=value"),
        (["kv4"], "quantize.bits=3", "--set quantize.bits=3: of a recipe of --kv only kv_cache is used"),
        (["own"], "bits=3", "--set changes a recipe of --kv"),
        ([], "bits=3", "--set changes a recipe of --kv"),
        (["int4"], "bits=3", "recipe 'int4' has no kv_cache"),
    ],
)
def test_errors(names: list[str], override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as error:
        cache_recipes(names, [override])
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return ready(of_type("llama", {"head_dim": 64, "num_key_value_heads": 2, "intermediate_size": 64}))


def of(model: Any, **settings: Any) -> Any:
    return readings(model, readable(model, Candidate("", cache_settings(settings), {})))


@NO_COMPILER
def test_who_reads_a_cache(model: PreTrainedModel) -> None:
    found = of(model, method="kivi", bits=4)
    assert found.scored.path == "decode" and found.generated.path == "fused"
    assert found.generated.text == "fused attention, compiled code"
    assert of(model, method="kivi", bits=5).generated.text == "fused attention, PyTorch"
    mixed = of(model, method="kivi", bits=4, values={"bits": 5})
    assert mixed.generated.text == "fused attention, keys: compiled code, values: PyTorch"
    half = of(model, method="kivi", bits=4, layers=[{"match": 1, "keys": {"bits": 5}}])
    assert half.generated.compiled == {"keys": 0.5, "values": 1.0}
    assert of(model, method="kivi", bits=4, skip_layers=[0, 1]).generated.text == "fused attention, nothing coded"
    unread = of(model, method="zipvl", judge="probes")
    assert unread.scored.path == unread.generated.path == "fused"
    assert unread.text == "scored and used by generate: fused attention, PyTorch"


@NO_COMPILER
@pytest.mark.parametrize("path", ["decode", "fused"])
@pytest.mark.parametrize("bits", [4, 5])
def test_what_is_said_is_what_runs(
    model: PreTrainedModel, path: Any, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled code is called in a decode step with much past exactly where a reading says so."""
    from compress.kernels.cpu import kv_affine, kv_decode

    called = []
    for module, names in ((kv_affine, ("scores", "mix")), (kv_decode, ("decode",))):
        for name in names:
            real = getattr(module, name)
            monkeypatch.setattr(module, name, lambda *a, real=real, name=name: called.append(name) or real(*a))
    made = Candidate("", cache_settings({"method": "kivi", "bits": bits, "residual_length": 32}), {}, path)
    cache = made.cache(model.config)
    monkeypatch.setattr(model.config, "max_position_embeddings", 4096)
    with torch.no_grad():
        model(input_ids=torch.arange(1200)[None] % 250, past_key_values=cache, use_cache=True)
        called.clear()
        model(input_ids=torch.zeros(1, 1, dtype=torch.long), past_key_values=cache, use_cache=True)
    assert set(fused.reads_of_cache(cache, model.device).compiled.values()) == {float(bits == 4)}
    assert bool(called) == (bits == 4)


def test_bytes_a_token_include_what_is_calibrated(
    model: PreTrainedModel, pico_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = cache_settings({"method": "pca", "residual_length": 32})
    (made,) = candidates_of(model, pico_dir("llama"), {"c": settings}, str(TEXT), lambda *a: None)
    tokens = torch.arange(200)[None] % 250
    found, longer = (cache_speed.sizes(model, tokens[:, :n], [made], lambda n: None)[0] for n in (128, 200))
    for size in (found, longer):
        held = sum(value for name, value in size.parts.items() if name not in ("static", "allocated"))
        assert size.static > 0 and size.bytes_per_token * size.context == pytest.approx(held + size.static, rel=1e-12)
    assert (found.context, longer.context) == (128, 200) and found.static == longer.static
    exact = replace(made, settings=cache_settings({"method": "identity"}), static={})
    (plain,) = cache_speed.sizes(model, tokens, [exact], lambda n: None)
    assert plain.static == 0 and plain.bytes_per_token == plain.exact_per_token


def test_the_commands_take_overrides_and_say_how_the_cache_is_read(pico_dir: Callable[..., Path]) -> None:
    directory = str(pico_dir("llama"))
    given = ["--kv", "kv8", "--set", "residual_length=32", "--set", "group_size=16"]

    def run(*words: str) -> Any:
        result = CliRunner().invoke(app, [*words, "--device", "cpu"])
        assert result.exit_code == 0, result.stderr
        return result

    text = ["--text", str(TEXT), "--seq-len", "100", "--max-tokens", "300"]
    scored = json.loads(run("eval", directory, *given, *text, "--json").stdout)
    assert scored["kl_mean"] > 0 and scored["cache"]["scored"]["path"] == "decode"
    assert "cache scored: decoded before attention, " in run("eval", directory, *given, *text).stdout
    words = ["generate", directory, "--prompt", "a" * 70, "--max-new-tokens", "2"]
    assert json.loads(run(*words, *given, "--json").stdout)["cache"]["path"] == "fused"
    assert "compress: cache: fused attention, " in run(*words, *given).stderr
    assert "cache" not in json.loads(run(*words, "--json").stdout)
    bench = ["--context", "128", "--max-tokens", "400", "--text", str(TEXT), "--no-speed", "--needles", "0"]
    found = json.loads(run("kv", "bench", directory, *given, *bench, "--json").stdout)
    (name,) = {row["recipe"] for row in found["rows"]}
    assert name == "kv8, residual_length=32, group_size=16" and found["readings"][name]["generated"]["path"] == "fused"
    shown = run("kv", "bench", directory, *given, *bench).stdout
    assert f"{name}, scored: decoded before attention" in shown and "static included" in shown
