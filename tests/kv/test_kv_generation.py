"""Generation with every codec at its finest: the tokens of the exact cache, however they are chosen or text is cut."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache as once
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from compress import plugins
from compress.calib.kv import calibrate
from compress.kv import attention, hooks
from compress.kv.cache import make_cache
from compress.kv.layer import CachePath, KVCache
from compress.kv.settings import cache_settings
from helpers.pico import build

POLICY = {"sink": 2, "residual_length": 8, "flush": 8, "other_layers": "exact"}
FINE: dict[str, dict[str, Any]] = {
    "identity": {},
    "fp8": {},
    "kivi": {"bits": 8, "group_size": 32},
    "quantspec": {"group_size": 32},
    "kvquant": {"bits": 8},
    "gear": {"bits": 8, "group_size": 32, "block_tokens": 32},
    "squat": {"bits": 8, "group_size": 32},
    "rotatekv": {"bits": 8, "group_size": 32},
    "lloyd": {"bits": 8},
    "zipvl": {"high": 8, "low": 8},
    "pca": {"bits": 7.0},
    "cskv": {"keep": 1.0},
    "kv_adaquant": {"bits": 8, "widths": [8]},
    "matryoshka": {"keep": 1.0},
    "key_pairs": {"keep": 1.0},
    "per_token": {"bits": 8},
    "balanced": {"bits": 8},
}
COARSE = {"commvq"}  # sums of entries are never exact: tests/papers/codecs/test_commvq.py
CLOSEST = (
    "identity",
    "kivi",
    "kvquant",
    "lloyd",
)  # where ten draws, or three beams, are those of the exact cache too
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama", {"head_dim": 32, "max_position_embeddings": 2048}),  # two query heads share a KV head
    "mixed": ("gemma2", {"head_dim": 32}),  # the first layer has a sliding window
}
SEEDS = {"full": 54, "mixed": 41}  # of prompts without a tie among the logits that a rounding could turn
PADS = 7
HOW: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampling": {"do_sample": True},
    "chunks": {"do_sample": False, "prefill_chunk_size": 16},
}


@once
def model(name: str) -> PreTrainedModel:
    kind, changes = MODELS[name]
    made = build(kind, changes)
    hooks.attach(made)
    attention.register()
    return made


@once
def static(method: str) -> dict[str, Tensor]:
    made = prepared("full", "decode")
    return calibrate(made, cache_settings({"method": method, **FINE[method]}).by_layer(2), prompt(8, 60, seed=2))[0]


@pytest.fixture(params=["decode", "fused"])
def path(request: pytest.FixtureRequest) -> Iterator[CachePath]:
    yield request.param


def prepared(name: str, path: CachePath) -> PreTrainedModel:
    made = model(name)
    own = "eager" if name == "mixed" else "sdpa"
    made.set_attn_implementation(own if path == "decode" else attention.NAME)
    return made


def prompt(batch: int, tokens: int, seed: int) -> Tensor:
    return torch.randint(0, 250, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def own_cache(name: str, method: str, path: CachePath) -> KVCache:
    settings = {"method": method, **FINE[method], **POLICY}
    tensors = static(method) if plugins.load("kv", method).NEEDS else {}
    return make_cache(model(name).config, settings, tensors, path)


def generated(name: str, path: CachePath, how: str, cache: Any, ids: Tensor | None = None) -> Tensor:
    ids = prompt(2, 90, SEEDS[name]) if ids is None else ids
    mask = torch.ones_like(ids)
    mask[1:, :PADS] = 0
    torch.manual_seed(0)
    settings = {"max_new_tokens": 10, "eos_token_id": None, **HOW[how]}
    return prepared(name, path).generate(ids, attention_mask=mask, past_key_values=cache, **settings)


@once
def expected(name: str, how: str) -> Tensor:
    return generated(name, "decode", how, DynamicCache(config=model(name).config))


def test_no_codec_is_missing() -> None:
    assert set(FINE) | COARSE == set(plugins.names("kv"))


@pytest.mark.parametrize(
    ("method", "how"),
    [(method, how) for how in ("greedy", "chunks") for method in FINE]
    + [(method, how) for how in ("beams", "sampling") for method in CLOSEST],
)
def test_a_padded_batch(method: str, how: str, path: CachePath) -> None:
    own = own_cache("full", method, path)
    assert torch.equal(generated("full", path, how, own), expected("full", how))
    assert own.nbytes().codes > 0


@pytest.mark.parametrize("method", ["identity", "lloyd", "zipvl"])
@pytest.mark.parametrize("how", ["greedy", "beams"])
def test_layers_with_a_sliding_window_beside(method: str, how: str, path: CachePath) -> None:
    own = own_cache("mixed", method, path)
    assert torch.equal(generated("mixed", path, how, own), expected("mixed", how))
    assert own.nbytes().codes > 0 and own.nbytes().exact > 0


@pytest.mark.parametrize("method", ["identity", "kivi", "lloyd"])
def test_a_conversation_goes_on(method: str, path: CachePath) -> None:
    """The same cache, a longer text: what was said before is not read again."""
    more, found = prompt(2, 20, seed=41), []
    for cache in (own_cache("full", method, path), DynamicCache(config=model("full").config)):
        how = path if isinstance(cache, KVCache) else "decode"
        said = generated("full", how, "greedy", cache)
        found.append(generated("full", how, "greedy", cache, torch.cat((said, more), 1)))
        assert cache.get_seq_length() == found[-1].shape[1] - 1
    assert torch.equal(*found)


def test_a_short_prompt_of_a_padded_batch_says_what_it_says_alone(path: CachePath) -> None:
    """Two bits change what is said, so that it matters which tokens stay exact."""
    recipe = {"method": "lloyd", "bits": 2, "keys": {"centre": "none"}, "sink": 4, "residual_length": 4, "flush": 1}
    made, ids, said = prepared("full", path), prompt(2, 24, seed=11), []
    ids[1, :21] = 0
    mask = torch.ones_like(ids)
    mask[1, :21] = 0
    for rows, start in ((slice(0, 2), 0), (slice(1, 2), 21)):
        own = make_cache(made.config, recipe, path=path)
        given = {"attention_mask": mask[rows, start:], "max_new_tokens": 30, "eos_token_id": None, "do_sample": False}
        said.append(made.generate(ids[rows, start:], past_key_values=own, **given)[-1, -30:])
    assert torch.equal(*said)
    exact = made.generate(ids[1:, 21:], **given)[-1, -30:]
    assert not torch.equal(said[1], exact)
