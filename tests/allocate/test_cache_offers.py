"""Options of a cache that are any of its settings, and the windows on which their errors are measured."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from compress import recipe
from compress.allocate import cache_costs, cache_options, cache_store, cache_units
from compress.allocate.cache_units import CacheOffer
from compress.cli import tables
from compress.errors import RecipeError
from compress.importers import open_checkpoint
from compress.kv import generation, hooks
from compress.kv.settings import KINDS, cache_settings
from compress.recipe import dump
from compress.run.job import Job
from compress.runtime import hf  # noqa: F401  # registers the format
from helpers.pico import build, save_pico
from helpers.runs import TEXT, cli

RECIPE = {"method": "kivi", "group_size": 16, "residual_length": 16, "flush": 16, "sink": 2}
LISTED: list[dict[str, Any]] = [{"bits": 2}, {"method": "lloyd", "bits": 3}, {"bits": 4, "residual_length": 32}]


@pytest.mark.parametrize(
    ("samples", "seq_len", "context", "window"),
    [
        (16, 512, 2048, 2048),  # half of the text is scored: 4096 tokens
        (16, 512, 512, 512),
        (16, 512, 100, 512),  # samples are not cut
        (16, 512, 65536, 4096),  # as far as the text goes
        (128, 2048, 65536, 8192),  # and no further than so
        (1, 300, 65536, 300),
        (4, 16384, 65536, 16384),
    ],
)
def test_windows_are_as_long_as_the_context(samples: int, seq_len: int, context: int, window: int) -> None:
    tokens = torch.zeros(samples, seq_len, dtype=torch.long)
    assert cache_store.window_length(tokens, context) == window


def test_errors_are_measured_at_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of text that does not calibrate, in order, and the facts say at how many tokens."""
    loaded = recipe.load("kv4", ["kv_cache.residual_length=16", "kv_cache.flush=8", "kv_cache.sink=2"])
    job = Job(str(save_pico("llama", tmp_path / "m")), loaded, tmp_path / "out")
    options = cache_options.options(cache_settings(loaded.kv_cache or {}), (2, 4))
    tokens = torch.randint(0, 250, (8, 60), generator=torch.Generator().manual_seed(0))
    seen = []
    real = cache_costs.measure_codes
    monkeypatch.setattr(
        cache_costs, "measure_codes", lambda model, windows, *rest: seen.append(windows) or real(model, windows, *rest)
    )
    checkpoint = open_checkpoint(Path(job.model))
    for context, shape in ((60, (4, 60)), (100, (2, 100)), (250, (1, 240))):
        costs = cache_store.measure_costs(job, checkpoint, options, context, tokens, lambda *a: None)
        assert seen[-1].shape == shape and costs.window == shape[1]
        assert torch.equal(seen[-1].flatten(), tokens[4:].flatten()[: seen[-1].numel()])
        offer = CacheOffer(options, costs, context, 2)
        _, choice = cache_units.divide(offer, (), 10**6)
        said = tables.cache_line(cache_units.describe(offer, choice))
        assert ("errors measured at 240 tokens" in said) == (context == 250)
        assert f"cache of {context} tokens" in said and "bytes a token, calibrated tensors included" in said


def test_any_settings_are_options() -> None:
    settings = cache_settings(RECIPE)
    options = cache_options.options(settings, (), LISTED)
    assert [option.name for option in options] == ["bits=2", "method=lloyd, bits=3", "bits=4, residual_length=32"]
    model = build("llama")
    hooks.attach(model)
    generation.switch(model)
    tokens = torch.randint(0, 250, (4, 150), generator=torch.Generator().manual_seed(0))
    caches = cache_costs.calibrate_options(model, settings, options, tokens)
    sizes = cache_costs.measure_sizes(model, tokens[:1], caches, 150)
    costs = cache_costs.measure_codes(model, tokens[:1], caches, sizes, lambda n: None)
    offer = CacheOffer(options, costs, 150, 2)
    for unit, cost in zip(offer.units, costs.units, strict=True):
        by_name = {entry.option: entry for entry in unit.entries}
        for i, option in enumerate(options):
            entry = by_name[option.name]
            assert entry.nbytes == cost.nbytes[i] and entry.bits == pytest.approx(8 * cost.nbytes[i] / cost.numel)
            assert entry.damage[cache_units.DIVERGENCE] == cost.kls[i]
    for choice in product(range(3), repeat=2):
        by_layer = {0: {"keys": options[choice[0]].name, "values": options[choice[1]].name}}
        by_layer[1] = {"keys": options[1].name, "values": options[0].name}
        found = cache_options.lay_out(settings, by_layer, 2, options).by_layer(2)
        for layer, kinds in by_layer.items():
            for kind in KINDS:
                given = dict(next(option.settings for option in options if option.name == kinds[kind]))
                assert found[layer][kind] == settings.of(kind).over(given)


def load(text: str) -> Any:
    return recipe.load("kv4", ["kv_cache.residual_length=16", f"allocate={text}"])


def test_recipes_list_them() -> None:
    loaded = load("{target: 90KiB, context: 64, cache_options: [{bits: 2}, {method: lloyd, bits: 3}, {}]}")
    assert loaded.allocate.cache_options == ({"bits": 2}, {"method": "lloyd", "bits": 3}, {})
    assert "cache_options" in dump(loaded)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("cache_options: [{bits: 2}, {bits: 9}]", "allocate.cache_options: .*bits 9 is not between 1 and 8"),
        ("cache_options: [{bits: 2}, {bitz: 3}]", "allocate.cache_options: .*unknown key 'bitz'"),
        ("cache_options: [{bits: 2}, {method: nope}]", "allocate.cache_options: .*nope"),
        ("cache_options: [{bits: 2}, {sink: 3}]", "sink is one for keys and values"),
        ("cache_options: [{bits: 2}]", "cache_options are not two or more, all different"),
        ("cache_options: [{bits: 2}, {bits: 2}]", "cache_options are not two or more, all different"),
        ("cache_options: [2, 3]", "an option of cache_options"),
        ("cache_bits: [2, 4], cache_options: [{bits: 2}, {bits: 3}]", "say the same thing; remove one"),
        ("cache_estimator: rule, cache_options: [{bits: 2}, {bits: 3}]", "rule knows of bits alone"),
    ],
)
def test_options_that_cannot_be(words: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as error:
        load(f"{{target: 90KiB, context: 64, {words}}}")
    assert "\n" not in str(error.value)


def test_from_the_recipe_to_a_checkpoint_within_the_target(tmp_path: Path) -> None:
    """Layers with codecs of their own, read back and used by generate."""
    path, out, model = tmp_path / "mine.yaml", tmp_path / "out", save_pico("llama", tmp_path / "m")
    path.write_text(
        "description: d\ncalibration: {num_samples: 8, seq_len: 96}\n"
        "kv_cache: {method: kivi, bits: 2, group_size: 8, sink: 2, residual_length: 16, flush: 8}\n"
        "allocate: {context: 250, cache_options: [{bits: 1}, {method: lloyd, bits: 3, rope: post}, {bits: 8}]}\n"
    )
    plain = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    words = [str(model), "--recipe", str(path), "--calib", str(TEXT), "--measurements", str(tmp_path / "measured")]
    done = cli("quantize", *words, "--target", f"{plain + 30_000}B", "--out", str(out), "--json")
    assert done.code == 0, done.err
    cache = json.loads(done.out)["allocation"]["cache"]
    assert cache["nbytes"] <= 32_000 and cache["measured at"] == 250
    loaded = AutoModelForCausalLM.from_pretrained(out)
    codings = loaded.kv_cache.settings.by_layer(2)
    named = {"bits=1": ("kivi", 1), "method=lloyd, bits=3, rope=post": ("lloyd", 3), "bits=8": ("kivi", 8)}
    for layer, kinds in cache["layers"].items():
        for kind, option in kinds.items():
            coding = codings[int(layer)][kind]
            assert (coding.method, coding.config.bits) == named[option]
    assert len({option for kinds in cache["layers"].values() for option in kinds.values()}) > 1
    made = generation.fresh(loaded)
    with torch.no_grad():
        loaded(torch.arange(250)[None] % 250, past_key_values=made, use_cache=True)
    assert made.nbytes().total + made.nbytes().static <= 1.02 * cache["nbytes"]
