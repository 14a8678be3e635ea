"""Shares of tokens by layer, and the tokens and bytes of a context that are said before there is a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from compress.errors import RecipeError
from compress.evaluate.reader import fill
from compress.kv import generation, hooks
from compress.kv.cache import make_cache
from compress.kv.evict import select
from compress.kv.layer import KVCache
from compress.kv.settings import cache_settings
from compress.run import kv_cache
from compress.runtime import kv_config
from helpers.pico import build

CONTEXT, LAYERS = 300, 4
BASE: dict[str, Any] = {"method": "kivi", "bits": 4, "group_size": 16, "residual_length": 16, "flush": 16, "sink": 2}
SNAP: dict[str, Any] = {"method": "snapkv", "window": 8, "recent": 8}
LLOYD: dict[str, Any] = {"method": "lloyd", "rope": "pre", "residual_length": 16, "flush": 8, "sink": 2}
CASES: dict[str, dict[str, Any]] = {
    "keep": {**BASE, "evict": {**SNAP, "keep": 0.3}},
    "by layer": {**BASE, "evict": {**SNAP, "keep_by_layer": [1.0, 0.5, 0.03, 0.001]}},
    "skipped": {**BASE, "skip_layers": [1], "evict": {**SNAP, "keep_by_layer": [0.5, 0.5, 0.25, 1]}},
    "tokens": {**BASE, "evict": {"method": "knorm", "tokens": 90, "recent": 8}},
    "pyramid": {**BASE, "skip_layers": [0], "evict": {**SNAP, "keep": 0.4, "layers": "pyramid"}},
    "before the rotary embedding": {**LLOYD, "evict": {**SNAP, "keep": 0.5, "heads": "shared"}},
    "exact": {"method": "identity", "sink": 2, "evict": {**SNAP, "keep": 0.25}},
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    made = build("llama", {"max_position_embeddings": 512, "num_hidden_layers": LAYERS})
    hooks.attach(made)
    generation.switch(made)
    return made


@torch.no_grad()
def filled(model: PreTrainedModel, recipe: dict[str, Any], context: int = CONTEXT) -> KVCache:
    cache = make_cache(model.config, recipe, {}, "fused")
    tokens = torch.arange(context)[None] % 250
    prompt = select.prompt_of(context)
    fill(model, tokens[:, :prompt], cache)
    for start in range(prompt, context, 16):
        fill(model, tokens[:, start : start + 16], cache)
    cache.nbytes()  # stores what is pending
    return cache


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_bytes_are_those_of_a_cache_of_that_context(model: PreTrainedModel, name: str) -> None:
    settings = cache_settings(CASES[name])
    for context in (CONTEXT, 41):
        cache = filled(model, CASES[name], context)
        prompt = select.prompt_of(context)
        assert prompt == {CONTEXT: CONTEXT - 64, 41: 21}[context]
        stored = [kept + context - prompt for kept in select.by_layer(model.config, settings, context)]
        assert stored == [layer.stored_tokens for layer in cache.layers]
        assert min(stored) < context or name == "tokens"
        found = kv_cache.bytes_at_context(model.config, settings, {}, torch.float32, context)
        held, rope = cache.nbytes(), cache.rope.nbytes
        rows = 4 if rope else 0  # positions: `lloyd` needs no rows of the rotary embedding
        expected = (held.total - rope + held.static) / context + rows
        assert found.bytes_per_token == pytest.approx(expected, abs=1e-6)


def test_layers_keep_the_shares_that_are_named(model: PreTrainedModel) -> None:
    shares = [0.25, 1.0, 0.5, 0.25]
    cache = filled(model, {**BASE, "evict": {**SNAP, "keep_by_layer": shares}})
    assert [layer.stored_tokens for layer in cache.layers] == [64 + int(236 * share) for share in shares]
    for share in (0.5, 0.25):  # the same tokens as where all layers keep so many
        alike = filled(model, {**BASE, "evict": {**SNAP, "keep": share}})
        for index in (index for index, each in enumerate(shares) if each == share):
            first, other = (x.layers[index].stores["keys"].read()[:, :, :-64] for x in (cache, alike))
            if index == 0:  # whose inputs are the same
                assert torch.equal(first, other)
            assert first.shape == other.shape
    plain = filled(model, {**BASE, "evict": {**SNAP, "keep": 0.5}})
    same = filled(model, {**BASE, "evict": {**SNAP, "keep_by_layer": [0.5] * LAYERS}})
    for one, two in zip(plain.layers, same.layers, strict=True):
        assert torch.equal(one.stores["values"].read(), two.stores["values"].read())


def test_they_are_written_and_read_back(model: PreTrainedModel) -> None:
    settings = cache_settings(CASES["by layer"])
    section = kv_config.plain_section(settings, LAYERS)
    assert section["evict"]["keep_by_layer"] == [1.0, 0.5, 0.03, 0.001] and "keep" not in section["evict"]
    assert kv_config.read(section, LAYERS).evict == settings.evict
    assert "keep_by_layer" not in kv_config.plain_section(cache_settings(CASES["keep"]), LAYERS)["evict"]


@pytest.mark.parametrize(
    ("evict", "message"),
    [
        ({**SNAP, "keep_by_layer": [0.5, 1.5]}, "keep_by_layer 1.5 is not a fraction above 0"),
        ({**SNAP, "keep_by_layer": [0.5, 0.0]}, "keep_by_layer 0.0 is not a fraction above 0"),
        ({**SNAP, "keep_by_layer": [0.5], "keep": 0.5}, "keep_by_layer and keep are both set"),
        ({**SNAP, "keep_by_layer": [0.5], "tokens": 9}, "keep_by_layer and tokens are both set"),
        ({**SNAP, "keep": 0.5, "tokens": 9}, "tokens and keep are both set"),
        ({**SNAP, "keep_by_layer": [0.5], "layers": "pyramid"}, "both divide the tokens; set layers: equal"),
        ({**SNAP, "keep_by_layer": "half"}, "keep_by_layer must be a list"),
        ({**SNAP, "keep_by_layer": []}, "keep or tokens is needed"),
    ],
)
def test_settings_that_cannot_be(evict: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as error:
        cache_settings({**BASE, "evict": evict})
    assert "\n" not in str(error.value)


def test_they_are_as_many_as_layers(model: PreTrainedModel) -> None:
    few = {**BASE, "evict": {**SNAP, "keep_by_layer": [0.5, 0.25]}}
    with pytest.raises(RecipeError, match="keep_by_layer has 2 numbers, the model 4 layers"):
        make_cache(model.config, few)
    before_rope = {**LLOYD, "skip_layers": [1], "evict": {**SNAP, "keep_by_layer": [1, 1, 1, 0.5]}}
    with pytest.raises(RecipeError, match=r"layer 3.*set kv_cache.evict.heads: shared"):
        kv_cache.check(model.config, cache_settings(before_rope))
    whole = {**before_rope, "evict": {**SNAP, "keep_by_layer": [1, 0.5, 1, 1]}}  # the one that evicts is exact
    kv_cache.check(model.config, cache_settings(whole))
