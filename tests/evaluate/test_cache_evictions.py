"""What one layer's forgotten tokens cost: against a cache of its own for each layer, read token by token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from compress.evaluate import cache_layers
from compress.kv import generation, hooks
from compress.kv.cache import coded_layers, make_cache
from compress.kv.settings import cache_settings
from helpers.pico import build

TOKENS, PROMPT = 100, 50
EVICTIONS: dict[str, dict[str, Any]] = {
    "snapkv": {"method": "snapkv", "window": 8, "recent": 8},
    "shared": {"method": "expected_attention", "heads": "shared", "recent": 4, "critical": True},
    "merged": {"method": "d2o", "layers": "equal", "recent": 4},
}


def settings(evict: dict[str, Any], keep: float) -> Any:
    return cache_settings({"method": "kivi", "group_size": 16, "sink": 2, "evict": {**evict, "keep": keep}})


def windows() -> Tensor:
    return torch.randint(0, 250, (3, TOKENS), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=["llama", "gemma2", "llama, fused"])
def model(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    made = build(request.param.partition(",")[0])
    hooks.attach(made)
    if request.param.endswith("fused"):
        assert generation.can_read_codes(made)
        generation.switch(made)
    yield made


@torch.no_grad()
def tail(model: PreTrainedModel, tokens: Tensor, cache: Any) -> Tensor:
    """Log-probabilities [B, n, vocab] behind a prompt, one token at a time, float64."""
    model(tokens[:, :PROMPT], past_key_values=cache, use_cache=True)
    found = [
        model(tokens[:, at : at + 1], past_key_values=cache, use_cache=True).logits for at in range(PROMPT, TOKENS - 1)
    ]
    return torch.cat(found, 1).double().log_softmax(-1)


@pytest.mark.parametrize("name", EVICTIONS)
def test_a_layer_alone_is_a_cache_in_which_it_alone_evicts(model: PreTrainedModel, name: str) -> None:
    asked, ids = [settings(EVICTIONS[name], keep) for keep in (0.3, 0.6)], windows()
    said: list[int] = []
    found = cache_layers.eviction_costs(model, ids, asked[0], [each.evict for each in asked], said.append)
    assert sum(said) == 6
    exact = tail(model, ids, DynamicCache(config=model.config))
    layers = [i for i, kind in enumerate(getattr(model.config, "layer_types", None) or ["full_attention"] * 2)
              if kind == "full_attention"]  # fmt: skip
    for scores, keep in zip(found, (0.3, 0.6), strict=True):
        assert sorted(scores.kls) == sorted(scores.errors) == layers
        assert scores.tokens == 3 * (TOKENS - PROMPT - 1)
        for layer in [*layers, None]:
            shares = [keep if layer in (None, index) and index in layers else 1.0 for index in range(2)]
            plain = {"method": "identity", "sink": 2, "evict": {**EVICTIONS[name], "keep_by_layer": shares}}
            changed = tail(model, ids, make_cache(model.config, plain))
            expected = float((exact.exp() * (exact - changed)).sum(-1).mean())
            measured = scores.together if layer is None else scores.kls[layer]
            assert measured == pytest.approx(expected, rel=2e-3, abs=1e-9) and expected > 1e-6
    for layer in layers:
        assert found[0].kls[layer] > found[1].kls[layer] and found[0].errors[layer] > found[1].errors[layer] > 0


def test_batches_and_the_order_of_windows_do_not_matter(model: PreTrainedModel) -> None:
    asked = settings(EVICTIONS["snapkv"], 0.4)
    ids, says = windows(), []
    one = cache_layers.eviction_costs(model, ids, asked, [asked.evict], says.append)[0]
    both = cache_layers.eviction_costs(model, ids.flip(0), asked, [asked.evict], says.append, batch=2)[0]
    assert says == [1, 1, 1, 2, 1]
    for name in ("kls", "errors"):
        assert getattr(one, name) == pytest.approx(getattr(both, name), rel=1e-4)
    again = cache_layers.eviction_costs(model, ids, asked, [asked.evict], says.append)[0]
    assert again == one  # nothing is left behind


def test_skipped_layers_keep_all() -> None:
    made = build("llama")
    hooks.attach(made)
    asked = cache_settings({"method": "kivi", "group_size": 16, "skip_layers": [0],
                            "evict": {**EVICTIONS["snapkv"], "keep": 0.3}})  # fmt: skip
    assert coded_layers(made.config, asked)[0]["keys"].method == "identity"
    assert asked.evict is not None
    found = cache_layers.eviction_costs(made, windows(), asked, [asked.evict], lambda n: None)[0]
    assert list(found.kls) == [1] and found.together == pytest.approx(found.kls[1], rel=1e-6)
