"""Tokens within a budget: what is chosen, its bytes in a cache of that context, and what a run writes."""

from __future__ import annotations

import json
from functools import cache as once
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from compress import recipe
from compress.allocate import cache_costs, cache_options, cache_store, cache_units
from compress.allocate.cache_options import CacheOption
from compress.allocate.cache_units import CacheCosts, CacheOffer, LayerCosts, TensorCosts
from compress.allocate.problem import Problem
from compress.cli import tables
from compress.errors import RecipeError
from compress.evaluate.reader import Candidate
from compress.kv import generation, hooks
from compress.kv.evict import select
from compress.kv.settings import KINDS, CacheSettings, cache_settings
from compress.recipe import dump
from compress.runtime import hf  # noqa: F401  # registers the format
from helpers.pico import build, save_pico
from helpers.runs import TEXT, cli, one_line

CONTEXT = 250
SNAP: dict[str, Any] = {"method": "snapkv", "window": 8, "recent": 8, "keep": 1.0}
BASE: dict[str, Any] = {"method": "kivi", "bits": 4, "group_size": 8, "sink": 2, "residual_length": 16, "flush": 8}
RECIPE: dict[str, Any] = {**BASE, "evict": SNAP}
LISTED: list[dict[str, Any]] = [
    {"bits": 2},
    {"bits": 8},
    {"bits": 2, "evict": {"keep": 0.5}},
    {"bits": 8, "evict": {"keep": 0.5}},
    {"bits": 8, "evict": {"keep": 0.25}},
]


def words(settings: dict[str, Any], listed: list[dict[str, Any]]) -> Any:
    text = json.dumps({"target": "1MiB", "context": CONTEXT, "cache_options": listed})
    return recipe.load("kv4", [f"kv_cache={json.dumps(settings)}", f"allocate={text}"])


def made_up(seed: int, layers: int = 3) -> CacheOffer:
    """Costs at random for four options: 2 and 8 bits, with all tokens and with half of them."""
    generator = torch.Generator().manual_seed(seed)

    def damage(scale: float) -> float:
        return float(torch.rand(1, generator=generator)) * scale

    options = tuple(
        CacheOption(f"bits={bits}{said}", None, {"bits": bits}, keep)
        for said, keep in (("", None), (", tokens=0.5", 0.5))
        for bits in (2, 8)
    )
    units, forgotten = [], []
    for layer in range(layers):
        for kind in KINDS:
            rough = damage(1)
            units.append(TensorCosts(layer, kind, 800, (200, 800, 100, 400), (1.0,) * 4, (rough, 0, rough, 0)))
        lost = damage(1)
        forgotten.append(LayerCosts(layer, (0, 0, 1.0, 1.0), (0, 0, lost, lost), (1, 1, 0.5, 0.5), 9))
    return CacheOffer(options, CacheCosts(tuple(units), 70, 100, 64, tuple(forgotten)), 64, layers)


@pytest.mark.parametrize("seed", range(4))
def test_no_choice_within_the_budget_has_less_damage(seed: int) -> None:
    offer = made_up(seed)
    costs = {(unit.layer, unit.kind): unit for unit in offer.costs.units}
    alike = [pair for pair in product(range(4), repeat=2) if pair[0] // 2 == pair[1] // 2]
    for room in (70 + 600, 1200, 2000, 3000, 10**5):
        nbytes, choice = cache_units.divide(offer, (), room)
        found = cache_units.describe(offer, choice)
        assert nbytes == found["nbytes"] <= room
        best = min(
            sum(
                costs[layer, "keys"].kls[k] + costs[layer, "values"].kls[v] + offer.costs.forgotten[layer].kls[k]
                for layer, (k, v) in enumerate(each)
            )
            for each in product(alike, repeat=3)
            if 70
            + sum(costs[i, kind].nbytes[o] for i, pair in enumerate(each) for kind, o in zip(KINDS, pair, strict=True))
            <= room
        )
        assert best - 1e-9 <= found["divergence"] <= 1.05 * best + 1e-9
        for by_kind in found["layers"].values():
            assert ("tokens" in by_kind["keys"]) == ("tokens" in by_kind["values"])
        halves = sum("tokens" in by_kind["keys"] for by_kind in found["layers"].values())
        assert found["tokens stored"] == pytest.approx(1 - halves / 6) and found["tokens after prompts"] == 9
    assert set(found["layers"].values().__iter__().__next__().values()) == {"bits=8"}


@once
def pico() -> Any:
    model = build("llama")
    hooks.attach(model)
    generation.switch(model)
    return model


def prepared(
    tokens: Tensor, settings: CacheSettings, listed: list[dict[str, Any]], context: int, batch: int = 1
) -> Any:
    """A pico model, its options and their costs on these windows, which calibrate, too."""
    model = pico()
    options = cache_options.options(settings, (), listed)
    asked = cache_costs.OfferedCache(settings, options, context)
    caches = cache_costs.calibrate_options(model, settings, options, tokens)
    sizes = cache_costs.measure_option_sizes(model, tokens[:1], caches, asked)
    costs = cache_costs.measure_codes(model, tokens, caches, sizes, lambda n: None, batch)
    forgotten = cache_costs.measure_evictions(model, tokens, asked, sizes, lambda n: None, batch)
    costs = CacheCosts(costs.units, costs.fixed_nbytes, costs.tokens, costs.window, forgotten)
    return model, CacheOffer(options, costs, context, 2), caches


def random_text(rows: int = 2, tokens: int = CONTEXT) -> Tensor:
    return torch.randint(0, 250, (rows, tokens), generator=torch.Generator().manual_seed(0))


def applied(settings: dict[str, Any], listed: list[dict[str, Any]], offer: CacheOffer, choice: Any) -> CacheSettings:
    loaded = words(settings, listed)
    found = cache_options.apply_choice(loaded, loaded.allocate, cache_units.describe(offer, choice)).kv_cache
    assert found is not None
    return found


@torch.no_grad()
def held(model: Any, settings: CacheSettings, context: int, static: Any) -> tuple[int, list[int]]:
    """Bytes and tokens by layer of a cache that is really filled."""
    cache = Candidate("", settings, static, "fused").cache(model.config)
    tokens, prompt = random_text(1, context), select.prompt_of(context)
    model(tokens[:, :prompt], past_key_values=cache, use_cache=True)
    for start in range(prompt, context, 8):
        model(tokens[:, start : start + 8], past_key_values=cache, use_cache=True)
    found = cache.nbytes()
    return found.total + found.static, [layer.stored_tokens for layer in cache.layers]


LLOYD: dict[str, Any] = {"method": "lloyd", "rope": "pre", "residual_length": 16, "flush": 8, "sink": 2}
SHAPES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "codes": (RECIPE, LISTED),
    "own share": ({**BASE, "evict": {**SNAP, "keep": 0.4}}, [{"bits": 2}, {"bits": 4}, {"evict": {"keep": 0.8}}]),
    "own shares": (
        {**BASE, "evict": {"method": "snapkv", "window": 8, "recent": 8, "keep_by_layer": [1.0, 0.3]}},
        [{"bits": 2}, {"bits": 6, "evict": {"keep": 0.2}}],
    ),
    "before the rotary embedding": (
        {**LLOYD, "evict": {**SNAP, "heads": "shared"}},
        [{"bits": 2}, {"bits": 4, "evict": {"keep": 0.5}}, {"bits": 2, "evict": {"keep": 0.3}}],
    ),
    "tokens alone": (
        {"method": "identity", "sink": 2, "residual_length": 16, "flush": 8, "evict": SNAP},
        [{}, {"evict": {"keep": 0.5}}, {"evict": {"keep": 0.1}}],
    ),
    "few": (RECIPE, [{"bits": 8}, {"bits": 8, "evict": {"keep": 0.01}}, {"bits": 2, "evict": {"keep": 0.05}}]),
    "skipped": ({**RECIPE, "skip_layers": [0]}, LISTED),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_bytes_are_those_of_a_cache_that_is_filled(name: str) -> None:
    """Whether the context is as long as what was measured, shorter or longer."""
    plain, listed = SHAPES[name]
    settings = cache_settings(plain)
    for context in (CONTEXT, 150) if name in ("codes", "before the rotary embedding") else (CONTEXT,):
        model, offer, caches = prepared(random_text(1, 180), settings, listed, context)
        seen = set()
        smallest = Problem(offer.units, 0).least + offer.costs.fixed_nbytes
        largest = Problem(offer.units, 0).most + offer.costs.fixed_nbytes
        for part in (0.0, 0.5, 1.0):
            nbytes, choice = cache_units.divide(offer, (), int(smallest + part * (largest - smallest)))
            found = applied(plain, listed, offer, choice)
            taken, stored = held(model, found, context, caches[0].static)
            assert taken == nbytes
            of_units = [stored[of.layer] for of in offer.costs.forgotten]
            said = cache_units.describe(offer, choice)["tokens stored"]
            assert said == pytest.approx(sum(of_units) / len(of_units) / context)
            seen.add(tuple(stored))
        assert len(seen) > 1


@pytest.mark.parametrize("text", ["one word again and again", "words at random"])
def test_tokens_or_bits_as_the_text_asks(text: str) -> None:
    """Of copies of one token any will do, but all have the same error of coding; of tokens at random all are needed."""
    same = text.startswith("one")
    tokens = torch.full((2, CONTEXT), 7) if same else random_text()
    listed: list[dict[str, Any]] = [{"bits": 2}, {"bits": 8, "evict": {"keep": 0.1}}]
    _, offer, _ = prepared(tokens, cache_settings({**RECIPE, "sink": 0}), listed, CONTEXT)
    _, choice = cache_units.divide(offer, (), 10**6)
    chosen = {name for kinds in cache_units.describe(offer, choice)["layers"].values() for name in kinds.values()}
    assert chosen == ({"bits=8, tokens=0.1"} if same else {"bits=2"})
    for of in offer.costs.forgotten:
        assert of.kls[0] == of.errors[0] == 0 and of.stored[0] == 1
        assert (of.kls[1] < 1e-6) == (of.errors[1] < 1e-6) == same  # sums of float32


def test_batches_of_windows_do_not_matter() -> None:
    one, both = (prepared(random_text(3), cache_settings(RECIPE), LISTED, CONTEXT, batch)[1] for batch in (1, 3))
    for first, second in zip(one.costs.forgotten, both.costs.forgotten, strict=True):
        assert first.kls == pytest.approx(second.kls, rel=1e-4) and first.stored == second.stored
    for room in (26_000, 32_000, 44_000):
        assert cache_units.divide(one, (), room) == cache_units.divide(both, (), room)


def test_the_other_estimator_counts_tokens_too() -> None:
    offer = prepared(random_text(), cache_settings(RECIPE), LISTED, CONTEXT)[1]
    kinds = {(unit.layer, unit.kind): unit for unit in offer.costs.units}
    for unit in offer.units:
        of = next(of for of in offer.costs.forgotten if of.layer == unit.block)
        for entry in unit.entries:
            names = [option.name for option in offer.options]
            k, v = map(names.index, entry.option.split(cache_units.PAIR_SEPARATOR))
            keys, values = (kinds[unit.block, kind] for kind in KINDS)
            errors = keys.errors[k] + values.errors[v] + of.errors[k]
            assert entry.damage[cache_units.OUTPUT_ERROR] == pytest.approx(errors) and of.errors[k] == of.errors[v]
            assert entry.nbytes == keys.nbytes[k] + values.nbytes[v]
    assert cache_units.divide(offer, (), 30_000, "output_error")[0] <= 30_000


def test_one_share_of_all_options_leaves_keys_and_values_apart() -> None:
    plain = {**BASE, "evict": {**SNAP, "keep": 0.5}}
    _, offer, _ = prepared(random_text(), cache_settings(plain), [{"bits": 2}, {"bits": 8}], CONTEXT)
    assert [unit.name for unit in offer.units] == [f"kv_cache.layers.{i}.{kind}" for i in range(2) for kind in KINDS]
    nbytes, choice = cache_units.divide(offer, (), 10**6)
    facts = cache_units.describe(offer, choice)
    lost = sum(of.kls[0] for of in offer.costs.forgotten)
    assert lost > 0
    assert facts["divergence"] == pytest.approx(lost + sum(unit.kls[1] for unit in offer.costs.units))
    assert applied(plain, [{"bits": 2}, {"bits": 8}], offer, choice).evict == cache_settings(plain).evict


def test_shares_become_settings() -> None:
    settings = cache_settings(RECIPE)
    by_layer = cache_options.eviction_by_layer(settings, {0: 0.5, 1: None, 2: 0.25}, 4)
    assert by_layer is not None and by_layer.budget.keep is None
    assert by_layer.budget.keep_by_layer == (0.5, 1.0, 0.25, 1.0) and by_layer.config == settings.evict.config
    alike = cache_options.eviction_by_layer(settings, {0: 0.5, 2: 0.5}, 4)
    assert alike is not None and alike.budget.keep == 0.5 and not alike.budget.keep_by_layer
    assert cache_options.eviction_by_layer(settings, {0: 1.0, 1: None}, 2) is None
    assert cache_options.eviction_by_layer(settings, {0: None, 1: None}, 2) is settings.evict
    assert cache_options.eviction_by_layer(cache_settings(BASE), {0: None}, 2) is None


@pytest.mark.parametrize(
    ("settings", "listed", "message"),
    [
        (BASE, [{"bits": 2}, {"evict": {"keep": 0.5}}], "evict needs a method; set kv_cache.evict"),
        (RECIPE, [{"bits": 2}, {"evict": {"keep": 1.5}}], "keep 1.5 is not a fraction above 0"),
        (RECIPE, [{"bits": 2}, {"evict": {"keep": "half"}}], "is not a fraction above 0"),
        (RECIPE, [{"bits": 2}, {"evict": {"tokens": 5}}], "evict says keep, the share of tokens, and nothing else"),
        (RECIPE, [{"bits": 2}, {"evict": 0.5}], "evict says keep, the share of tokens, and nothing else"),
        (RECIPE, [{"evict": {"keep": 0.5}}, {"evict": {"keep": 0.5}}], "not two or more, all different"),
    ],
)
def test_options_that_cannot_be(settings: dict[str, Any], listed: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as error:
        words(settings, listed)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("evict", "message"),
    [
        ({"keep": None, "tokens": 90}, "counts shares of its tokens; set keep in place of tokens"),
        ({"decode": True}, "set decode: false"),
        ({"heads": "ada"}, "set equal or shared"),
        ({"layers": "pyramid"}, "set layers: equal in place of pyramid"),
        ({"method": "lazyllm"}, "lazyllm drops tokens for all layers behind one; choose another method"),
    ],
)
def test_evictions_whose_bytes_are_not_known(evict: dict[str, Any], message: str) -> None:
    own = {key: value for key, value in {**SNAP, **evict}.items() if value is not None}
    settings, model = cache_settings({**BASE, "evict": own}), build("llama")
    with pytest.raises(RecipeError, match=message) as error:
        cache_options.check(model.config, settings, cache_options.options(settings, (), LISTED), CONTEXT)
    assert "\n" not in str(error.value)


def test_options_that_do_not_fit_are_known_before_any_work() -> None:
    settings, model = cache_settings(RECIPE), build("llama")
    before = {"method": "lloyd", "rope": "pre", "bits": 4}
    options = cache_options.options(settings, (), [{"bits": 2}, {**before, "evict": {"keep": 0.5}}])
    with pytest.raises(RecipeError, match=r"the option .*tokens=0.5.*kv_cache.evict.heads: shared"):
        cache_options.check(model.config, settings, options, CONTEXT)
    options = cache_options.options(settings, (), [{"bits": 2, "evict": {"keep": 0.5}}, before])
    assert cache_options.check(model.config, settings, options, CONTEXT) == 2  # where it is stored whole


def asked(model: Path, folder: Path, name: str) -> list[str]:
    path, listed = folder / "mine.yaml", [{"bits": 2}, *LISTED[1:]]
    allocate = {"context": CONTEXT, "cache_options": listed}
    calibration = {"num_samples": 8, "seq_len": 96}
    path.write_text(
        json.dumps({"description": "d", "calibration": calibration, "kv_cache": RECIPE, "allocate": allocate})
    )
    return [str(model), "--recipe", str(path), "--calib", str(TEXT), "--measurements", str(folder / name), "--json"]


@pytest.mark.slow
def test_from_the_command_line(tmp_path: Path) -> None:
    """A checkpoint whose layers keep different shares, in the bytes that were said; the same after an interruption."""
    model = save_pico("llama", tmp_path / "m")
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    results = []
    for name in ("broken", "whole"):
        out = tmp_path / f"out-{name}"
        line = ["quantize", *asked(model, tmp_path, name), "--target", f"{size + 32_000}B", "--out", str(out)]
        if name == "broken":
            killed = "import os; from compress.allocate import cache_costs as costs; "
            killed += "costs.measure_evictions = lambda *_: os._exit(9)"
            assert cli(*line, prepare=killed).code == 9
        done = cli(*line)
        assert done.code == 0, done.err
        results.append(
            [
                (out / "recipe.yaml").read_bytes(),
                (out / "config.json").read_bytes(),
                next((tmp_path / name).glob("cache-*.json")).read_bytes(),
            ]
        )
    assert results[0] == results[1]
    cache = json.loads(done.out)["allocation"]["cache"]
    assert "of its tokens stored" in tables.cache_line(cache)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    shares = loaded.kv_cache.settings.evict.budget
    assert shares.keep_by_layer or shares.keep < 1
    made, prompt = generation.fresh(loaded), select.prompt_of(CONTEXT)
    with torch.no_grad():
        loaded(random_text(1)[:, :prompt], past_key_values=made, use_cache=True)
        for start in range(prompt, CONTEXT, 8):
            loaded(random_text(1)[:, start : start + 8], past_key_values=made, use_cache=True)
    assert made.nbytes().total + made.nbytes().static == cache["nbytes"]
    stored = [layer.stored_tokens / CONTEXT for layer in made.layers]
    assert sum(stored) / 2 == pytest.approx(cache["tokens stored"]) and min(stored) < 1
    read = recipe.load(str(out / "recipe.yaml"))
    assert read.kv_cache == loaded.kv_cache.settings or read.kv_cache.evict == loaded.kv_cache.settings.evict
    assert "evict" in dump(words(RECIPE, LISTED)) and cache_store.COSTS_LAYOUT["forgotten"]
    line[-3] = f"{size + 5_000}B"
    done = cli(*line[:-1], str(tmp_path / "none"))
    assert done.code == 1 and "raise the target, shorten the context" in one_line(done)
