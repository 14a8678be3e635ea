"""Bits of a cache within a budget: against all choices, the published greedy, and what is measured on a pico model."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from transformers import DynamicCache

from compress.allocate import cache_costs, cache_options, cache_units
from compress.allocate.cache_options import CacheOption
from compress.allocate.cache_units import TensorCosts
from compress.allocate.problem import Problem
from compress.allocate.solver import damages_of, solve
from compress.errors import BudgetError, CalibrationError
from compress.evaluate import cache_layers, cache_scores
from compress.evaluate.reader import Candidate
from compress.kernels import contract
from compress.kv import generation, hooks
from compress.kv.settings import KINDS, CacheSettings, cache_settings
from compress.recipe import blocks
from compress.recipe.yaml import compose, mapping
from helpers.pico import build

OFFERED = tuple(CacheOption(f"bits={b}", b, {"bits": b}) for b in (2, 3, 4, 8))
RECIPE = {"method": "kivi", "group_size": 16, "residual_length": 16, "flush": 16, "sink": 2}


def units(layers: int = 3, seed: int = 0) -> list[TensorCosts]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for layer, kind in product(range(layers), KINDS):
        scale = float(torch.rand(1, generator=generator)) + 0.05
        noise = (torch.rand(4, generator=generator) * 0.4 + 0.8).tolist()
        errors = tuple(scale * n * 4.0**-option.bits for n, option in zip(noise, OFFERED, strict=True))
        found.append(TensorCosts(layer, kind, 1000, tuple(int(125 * (o.bits + 1)) for o in OFFERED), errors, errors))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_no_choice_within_the_budget_has_less_damage(seed: int) -> None:
    measured = units(seed=seed)
    for room in (0, 130, 700, 1500, 10**6):
        asked = Problem(cache_units.kind_units(measured, OFFERED), 6 * 375 + room)
        found = solve(asked, damages_of(asked, cache_units.OUTPUT_ERROR))
        assert asked.nbytes(found.choice) <= asked.budget
        choices = [c for c in product(range(4), repeat=6) if asked.nbytes(c) <= asked.budget]
        best = min(asked.damage(c, cache_units.OUTPUT_ERROR) for c in choices)
        assert best * (1 - 1e-9) <= found.damage <= 1.02 * best
        assert found.bound <= best * (1 + 1e-9)


def test_the_published_greedy() -> None:
    measured = [TensorCosts(0, "keys", 10, (30, 40, 50, 90), (1.0, 0.0, 0.0, 0.0), (0.0,) * 4), *units(1)[1:]]
    measured[1] = TensorCosts(0, "values", 10, (30, 40, 50, 90), (0.3, 0.0, 0.0, 0.0), (0.0,) * 4)
    damages = [{2: 1.0, 3: 0.25, 4: 0.0625, 8: 4.0**-6}, {2: 0.3, 3: 0.075, 4: 0.01875, 8: 0.3 * 4.0**-6}]
    for room in range(0, 130, 10):
        at, left = [2, 2], room
        while True:  # gain a bit of every raise that fits, slowly
            gains = {}
            for i, b in product(range(2), (3, 4, 8)):
                if b > at[i] and 10 * (b - at[i]) <= left:
                    gains[i, b] = (damages[i][at[i]] - damages[i][b]) / (b - at[i])
            if not gains:
                break
            i, b = max(gains, key=lambda pair: gains[pair])
            left -= 10 * (b - at[i])
            at[i] = b
        asked = Problem(cache_units.kind_units(measured, OFFERED), 60 + room)
        choice = cache_units.raise_bits(asked)
        assert [asked.units[i].entries[j].bits for i, j in enumerate(choice)] == at, room


def test_a_budget_below_the_fewest_bits() -> None:
    for solver in (lambda asked: solve(asked, damages_of(asked, cache_units.OUTPUT_ERROR)), cache_units.raise_bits):
        with pytest.raises(BudgetError, match=r"smallest .*take 2250 bytes.*than the budget of 2249"):
            solver(Problem(cache_units.kind_units(units(), OFFERED), 2249))


def test_what_is_chosen_is_what_the_cache_gets() -> None:
    text = "kv_cache: {method: kivi, bits: 3, layers: [LAYERS]}"
    for said in ("{match: 1, keys: {residual_length: 64}}", "{match: 0-1, keys: {residual_length: 64}}"):
        recipe = _recipe(text.replace("LAYERS", said))
        chosen = cache_units.chosen_options(cache_units.kind_units(units(2), OFFERED), (0, 3, 2, 1))
        assert chosen == {0: {"keys": "bits=2", "values": "bits=8"}, 1: {"keys": "bits=4", "values": "bits=3"}}
        found = cache_options.lay_out(recipe, chosen, 2, OFFERED)
        settings = found.by_layer(2)
        assert [[layer[kind].config.bits for kind in KINDS] for layer in settings] == [[2, 8], [4, 3]]
        assert settings[1]["keys"].policy.residual_length == 64
        assert settings[1]["values"].policy.residual_length == 128
        assert _recipe(yaml.safe_dump({"kv_cache": found.plain()})) == found
    uniform = {layer: {"keys": "bits=2", "values": "bits=4"} for layer in range(4)}
    rules = "{match: 3, group_size: 16}, {match: 2-3, group_size: 64}, {match: '1', sink: 2, keys: {method: lloyd}}"
    recipe = _recipe(text.replace("LAYERS", rules))
    before, alike = recipe.by_layer(4), cache_options.lay_out(recipe, uniform, 4, OFFERED)
    after = alike.by_layer(4)
    assert [rule.match for rule in alike.layers] == [(0,), (1,), (2, 3)]
    for old, new in zip(before, after, strict=True):
        for kind, bits in (("keys", 2), ("values", 4)):
            config = replace(old[kind].config, bits=bits)
            assert new[kind] == replace(old[kind], config=config)
    assert _recipe(yaml.safe_dump({"kv_cache": alike.plain()})) == alike


def _recipe(text: str) -> CacheSettings:
    entries = mapping(compose(text, "test"), "a recipe")
    return blocks.cache(*entries["kv_cache"])


CODECS: dict[str, dict[str, Any]] = {
    "kivi": {},
    "lloyd": {"rope": "pre"},
    "pca": {"unit": 4},
    "gear": {"rank": 1, "block_tokens": 16, "group_size": 16},
}


@pytest.mark.parametrize("method", CODECS)
def test_measured_bytes_are_those_of_the_whole_context(method: str) -> None:
    model = build("llama")
    hooks.attach(model)
    tokens = torch.randint(0, 250, (8, 200), generator=torch.Generator().manual_seed(0))
    recipe = {**RECIPE, **CODECS[method], "method": method, "skip_layers": [0]}
    if method in ("lloyd", "pca"):
        del recipe["group_size"]
    candidates = cache_costs.calibrate_options(model, cache_settings(recipe), OFFERED[:2], tokens[:, :120])
    for context in (100, 150, 199):
        sizes = cache_costs.measure_sizes(model, tokens[:1, :120], candidates, context)
        for size, candidate in zip(sizes, candidates, strict=True):
            cache = candidate.cache(model.config)
            for start in range(0, context, 16):
                model(tokens[:1, start : min(start + 16, context)], past_key_values=cache, use_cache=True)
            held = cache.nbytes()
            assert size.total == held.total + held.static
            for (layer, kind), nbytes in size.units.items():
                own = cache.layers[layer].stores[kind].nbytes()
                assert layer == 1 and nbytes == own.total + own.static
                assert size.elements[layer, kind] == 2 * 16 * context
    with pytest.raises(CalibrationError, match="30 tokens are too few"):
        cache_costs.measure_sizes(model, tokens[:1, :30], candidates, 100)


def test_bytes_of_what_compiled_readers_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary rows and turned bases, on the path that generation takes, whatever was read while measuring."""
    model = build("llama", {"head_dim": 32})
    hooks.attach(model)
    generation.switch(model)
    tokens = torch.randint(0, 250, (8, 200), generator=torch.Generator().manual_seed(0))
    recipe = cache_settings({"method": "pca", "residual_length": 16, "flush": 16, "sink": 2})
    (candidate,) = cache_costs.calibrate_options(model, recipe, OFFERED[:1], tokens[:, :120])
    (size,) = cache_costs.measure_sizes(model, tokens[:1, :100], [candidate], 198)
    monkeypatch.setattr(contract, "SMALL", 0)
    cache = replace(candidate, path="fused").cache(model.config)
    for start in range(0, 198, 16):
        model(tokens[:1, start : min(start + 16, 198)], past_key_values=cache, use_cache=True)
    held = cache.nbytes()
    assert size.total == held.total + held.static


def test_measured_errors_and_divergences() -> None:
    model = build("llama")
    hooks.attach(model)
    windows = torch.randint(0, 250, (2, 160), generator=torch.Generator().manual_seed(0))
    candidates = cache_costs.calibrate_options(model, cache_settings(RECIPE), OFFERED[:2], windows)
    sizes = cache_costs.measure_sizes(model, windows[:1], candidates, 1000)
    costs = cache_costs.measure_codes(model, windows, candidates, sizes, lambda done: None)
    assert [(unit.layer, unit.kind) for unit in costs.units] == list(product(range(2), KINDS))
    start = min(80, 2 + 16 + 4 * 16)
    assert costs.fixed_nbytes == 0 and costs.tokens == 2 * (159 - start)
    for unit in costs.units:
        assert unit.errors[0] > 2 * unit.errors[1] > 0 and unit.kls[0] > unit.kls[1] > 0
    for layer, kind in ((0, "keys"), (1, "values")):
        expected = _alone(model, windows, layer, kind)
        unit = next(unit for unit in costs.units if (unit.layer, unit.kind) == (layer, kind))
        assert unit.errors[0] == pytest.approx(expected, rel=1e-3)
    for kind in KINDS:  # the shares are of what the kind as a whole costs
        alone = [replace(candidates[0], only=kind)]
        positions = cache_scores.compare(model, windows, alone, 2, lambda done: None)
        own = [unit for unit in costs.units if unit.kind == kind]
        assert sum(u.kls[0] for u in own) == pytest.approx(float(positions[0, 2, :, start:].mean()), rel=1e-6)
        assert own[0].kls[0] / own[1].kls[0] == pytest.approx(own[0].errors[0] / own[1].errors[0], rel=1e-6)


def _alone(model: torch.nn.Module, windows: Tensor, layer: int, kind: str) -> float:
    """The same error from keys and values decoded by hand and put into transformers' cache."""
    config = model.config
    candidate = Candidate("", cache_settings({**RECIPE, "bits": 2}), {})
    first, last = windows[:, : -cache_layers.QUERIES_PER_WINDOW], windows[:, -cache_layers.QUERIES_PER_WINDOW :]
    outputs = []

    def keep(module: torch.nn.Module, args: object, output: tuple[Tensor, ...]) -> None:
        outputs.append(output[0].double())

    for coded in (False, True):
        exact, other = DynamicCache(config=config), candidate.cache(config)
        with torch.no_grad():
            model(first, past_key_values=exact)
            model(first, past_key_values=other)
            if coded:  # of the first layer inputs are exact; later ones are coded from exact keys and values again
                store = candidate.cache(config).layers[layer]
                store.update(exact.layers[layer].keys, exact.layers[layer].values)
                setattr(exact.layers[layer], kind, store.stores[kind].read())
            handle = cache_layers.attentions(model)[layer].register_forward_hook(keep)
            model(last, past_key_values=exact)
            handle.remove()
    plain, changed = outputs
    return float(((plain - changed).square().sum(-1) / plain.square().sum(-1)).mean())
