"""Channels within a budget: codecs that store fewer of them, beside others, in the bytes that were said."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compress.allocate import cache_costs, cache_options, cache_units
from compress.allocate.cache_units import CacheOffer
from compress.allocate.problem import Problem
from compress.calib.kv import calibrate
from compress.errors import RecipeError
from compress.evaluate.reader import Candidate
from compress.kv import generation, hooks
from compress.kv.cache import coded_layers
from compress.kv.settings import KINDS, cache_settings
from helpers.pico import build

CONTEXT, MEASURED = 200, 150
RECIPE: dict[str, Any] = {
    "method": "kivi",
    "group_size": 8,
    "sink": 2,
    "residual_length": 16,
    "flush": 8,
    "evict": {"method": "knorm", "recent": 8, "heads": "shared", "keep": 1.0},
}
LISTED: dict[str, list[dict[str, Any]]] = {
    "cskv": [
        {"method": "cskv", "keep": 0.25},
        {"method": "cskv", "keep": 0.75, "bits": 4},
        {"method": "cskv", "keep": 0.75, "bits": 4, "evict": {"keep": 0.5}},
    ],
    "key_pairs": [
        {"method": "key_pairs", "keep": 0.25},
        {"method": "key_pairs", "keep": 0.75, "codes": "fp8", "evict": {"keep": 0.5}},
        {"method": "key_pairs", "keep": 0.75},
    ],
    "matryoshka": [
        {"method": "matryoshka", "keep": 0.25, "exact_tail": 16},
        {"method": "matryoshka", "keep": 0.75, "bits": 8, "exact_tail": 16, "unit": 2},
        {"bits": 8, "evict": {"keep": 0.5}},
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("method", LISTED)
def test_a_budget_gives_layers_different_channels(method: str) -> None:
    settings, listed = cache_settings(RECIPE), [*LISTED[method], {"bits": 8}]
    model = build("llama")
    hooks.attach(model)
    generation.switch(model)
    tokens = torch.randint(0, 250, (4, MEASURED), generator=torch.Generator().manual_seed(0))
    options = cache_options.options(settings, (), listed)
    assert cache_options.check(model.config, settings, options, CONTEXT) == 2
    asked = cache_costs.OfferedCache(settings, options, CONTEXT)
    caches = cache_costs.calibrate_options(model, settings, options, tokens[:3])
    sizes = cache_costs.measure_option_sizes(model, tokens[3:], caches, asked)
    costs = cache_costs.measure_codes(model, tokens[3:], caches, sizes, lambda n: None)
    few, many = (sum(unit.kls[i] for unit in costs.units) for i in (0, 1 if method != "key_pairs" else 2))
    assert few > many > 0
    # made up, so that all options are best somewhere
    ranked = [
        cache_units.TensorCosts(u.layer, u.kind, u.numel, u.nbytes, u.errors, tuple((i + 1) / n**2 for n in u.nbytes))
        for i, u in enumerate(costs.units)
    ]
    kept = cache_costs.measure_evictions(model, tokens[3:], asked, sizes, lambda n: None)
    offer = CacheOffer(
        options, cache_units.CacheCosts(tuple(ranked), costs.fixed_nbytes, 1, MEASURED, kept), CONTEXT, 2
    )
    empty, seen = Problem(offer.units, 0), set()
    for part in (0.0, 0.4, 0.8):
        room = int(empty.least + part * (empty.most - empty.least)) + costs.fixed_nbytes
        nbytes, choice = cache_units.divide(offer, (), room)
        by_layer = cache_units.chosen_options(offer.units, choice)
        laid = cache_options.lay_out(settings, by_layer, 2, options)
        shares = {i: {o.name: o.keep for o in options}[kinds["keys"]] for i, kinds in by_layer.items()}
        evict = cache_options.eviction_by_layer(settings, shares, 2)
        static = calibrate(model, coded_layers(model.config, laid), tokens[:3])[0]
        cache = Candidate("", cache_settings({**laid.plain(), **_section(evict)}), static, "fused").cache(model.config)
        with torch.no_grad():
            for start, stop in ((0, 136), *((at, at + 8) for at in range(136, CONTEXT, 8))):
                model(tokens.view(1, -1)[:, start:stop], past_key_values=cache, use_cache=True)
        held = cache.nbytes()
        taken = held.total + held.static
        is_before = any(layer.stores["keys"].codec.rope == "pre" for layer in cache.layers)
        assert taken == nbytes if is_before or method != "cskv" else taken < nbytes  # no rotary rows
        seen.add(tuple(by_layer[i][kind] for i in by_layer for kind in KINDS))
    assert len(seen) == 3 and any(method in name for names in seen for name in names)


def _section(evict: Any) -> dict[str, Any]:
    return {"evict": None if evict is None else evict.plain()}


def test_layers_share_out_channels_alone() -> None:
    """One budget of channels for all layers would change what a layer stores with the choice of another."""
    kivi = cache_settings({key: value for key, value in RECIPE.items() if key != "evict"})
    for method, ranks in (("cskv", "even"), ("matryoshka", "layer")):
        own, fewer = cache_options.options(kivi, (), [{"method": method}, {"method": method, "keep": 0.25}])
        assert own.settings["ranks"] == fewer.settings["ranks"] == ranks and own.name == f"method={method}"
        with pytest.raises(RecipeError, match=f"divides channels among layers.*set ranks: {ranks}"):
            cache_options.options(kivi, (), [{"bits": 2}, {"method": method, "ranks": "model"}])
        whole = cache_options.options(kivi, (), [{"bits": 2}, {"method": method, "ranks": "even"}])[1]
        assert whole.settings == {"method": method, "ranks": "even"}
        section = cache_settings({"method": method, "keep": 0.5})
        assert cache_options.options(section, (), [{}, {"keep": 0.25}])[1].settings == {"keep": 0.25, "ranks": ranks}
        assert "ranks" not in cache_options.options(section, ())[0].settings  # bits leave the ranks as they are
