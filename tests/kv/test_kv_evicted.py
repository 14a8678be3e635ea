"""The cache layer that evicts: masks, padding, both ways to read, codecs, cropping, batches, decoding, bytes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache as once
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from compress.errors import CompressError, RecipeError
from compress.kv import attention, generation, hooks
from compress.kv.cache import make_cache
from compress.kv.codecs import identity
from compress.kv.layer import CachePath, KVCache
from compress.kv.token_store import Store
from helpers.pico import build

TOKENS, PADS = 90, 21
RECENT, SINK = 8, 4
BASE = {"keep": 0.5, "recent": RECENT}
SNAP = {"method": "snapkv", "window": 8, **BASE}
EVICTIONS: dict[str, dict[str, Any]] = {
    "snapkv": SNAP,
    "expected": {"method": "expected_attention", **BASE},
    "knorm": {"method": "knorm", **BASE},
    "d2o": {"method": "d2o", **BASE},
    "ada": {"method": "expected_attention", "heads": "ada", "critical": True, **BASE},
    "shared": {**SNAP, "heads": "shared", "layers": "pyramid", "critical": True},
    "tokens": {**SNAP, "keep": None, "tokens": 40},
}
EVICTIONS["tokens"].pop("keep")
EXACT = {"method": "identity", "sink": SINK, "residual_length": 16}
KIVI = {"method": "kivi", "bits": 4, "group_size": 8, "sink": SINK, "residual_length": 8, "flush": 8}


@once
def model(name: str = "llama") -> PreTrainedModel:
    made = build(name, {"max_position_embeddings": 2048})
    hooks.attach(made)
    attention.register()
    return made


@pytest.fixture(params=["decode", "fused"])
def path(request: pytest.FixtureRequest) -> Iterator[CachePath]:
    yield request.param


def prepared(path: CachePath, name: str = "llama") -> PreTrainedModel:
    made = model(name)
    own = "eager" if name == "gemma2" else "sdpa"
    made.set_attn_implementation(own if path == "decode" else attention.NAME)
    return made


def prompt(rows: int = 2, tokens: int = TOKENS, seed: int = 0) -> Tensor:
    return torch.randint(0, 250, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def steps(made: PreTrainedModel, ids: Tensor, pads: int, cache: Any, sizes: list[int]) -> Tensor:
    """The logits of further tokens, fed in steps of these sizes; the first `pads` of the second row are padding."""
    mask = torch.ones_like(ids)
    mask[1:, :pads] = 0
    further = prompt(len(ids), sum(sizes), seed=5)[:1].expand(len(ids), -1)
    found = []
    for start, part in zip([0] * (1 + len(sizes)), (ids, *further.split(sizes, 1)), strict=True):
        if part is not ids:
            start = mask.shape[1]
            mask = torch.cat((mask, torch.ones_like(part)), 1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, start:]
        found.append(made(part, past_key_values=cache, attention_mask=mask, position_ids=positions).logits)
    return torch.cat(found[1:], 1)


def made_cache(evict: dict[str, Any], path: CachePath = "decode", base: dict[str, Any] = EXACT) -> KVCache:
    return make_cache(model().config, {**base, "evict": evict}, path=path)


@once
def reference(name: str, pads: int) -> Tensor:
    """One token at a time, decoded, then attended to."""
    return steps(prepared("decode"), prompt(), pads, made_cache(EVICTIONS[name]), [1] * 8)


@pytest.mark.parametrize("pads", [0, PADS])
@pytest.mark.parametrize("name", EVICTIONS)
def test_steps_of_many_tokens_are_steps_of_one(name: str, pads: int, path: CachePath) -> None:
    """Layers and heads of different lengths included: the mask of each is its own, in both ways to read."""
    cache = made_cache(EVICTIONS[name], path)
    found = steps(prepared(path), prompt(), pads, cache, [5, 1, 2])
    torch.testing.assert_close(found, reference(name, pads), atol=2e-5, rtol=0)
    assert cache.get_seq_length() == TOKENS + 8
    assert any(layer.stored_tokens < TOKENS for layer in cache.layers)


@pytest.mark.parametrize("name", EVICTIONS)
def test_a_padded_row_is_what_it_is_alone(name: str) -> None:
    """Whatever row is beside it, and without its pads."""
    alone = steps(prepared("decode"), prompt()[1:, PADS:], 0, made_cache(EVICTIONS[name]), [5, 1, 2])
    torch.testing.assert_close(reference(name, PADS)[1:], alone, atol=2e-5, rtol=0)


@pytest.mark.parametrize("pads", [0, PADS])
@pytest.mark.parametrize("name", ["snapkv", "ada", "d2o"])
def test_keeping_all_changes_nothing(name: str, pads: int, path: CachePath) -> None:
    made = prepared(path)
    evict = {**EVICTIONS[name], "keep": 1.0}
    plain = make_cache(made.config, KIVI, path=path)
    own = made_cache(evict, path, KIVI)
    found, expected = (steps(made, prompt(), pads, cache, [1, 4]) for cache in (own, plain))
    if name == "ada":  # heads are stored apart
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    else:
        assert torch.equal(found, expected)


def exact_states(ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    cache = DynamicCache(config=model().config)
    with torch.no_grad():
        prepared("decode")(ids, past_key_values=cache)
    return [(layer.keys, layer.values) for layer in cache.layers]


def columns(stored: Tensor, states: Tensor) -> list[Tensor]:
    """The tokens whose rows a head has stored, by their bytes: stored [h, m, width], states [h, n, width]."""
    same = (stored[:, :, None] == states[:, None]).all(-1)
    return [row.nonzero()[:, 1] for row in same]


@pytest.mark.parametrize("name", ["snapkv", "expected", "knorm", "shared"])
def test_survivors_are_rows_of_the_prompt(name: str) -> None:
    """In token order, as many in each head; first and newest tokens stay; keys and values are those of one token."""
    ids, cache = prompt(1), made_cache(EVICTIONS[name])
    states = exact_states(ids)
    with torch.no_grad():
        prepared("decode")(ids, past_key_values=cache)
    for layer, (keys, values) in zip(cache.layers, states, strict=True):
        kept = columns(layer.stores["keys"].read()[0], keys[0])
        for head, own in enumerate(kept):
            assert torch.equal(layer.stores["values"].read()[0, head], values[0, head, own])
            assert len(own) == layer.stored_tokens < TOKENS
            assert torch.equal(own, own.sort().values)
            assert set(range(SINK)) | set(range(TOKENS - RECENT, TOKENS)) <= set(own.tolist())
        assert (name == "shared") == torch.equal(kept[0], kept[1])


@pytest.mark.parametrize("name", ["snapkv", "ada"])
def test_codes_are_those_of_the_survivors(name: str, path: CachePath) -> None:
    """Evicting and coding is coding what stays: the same bytes as a store that never saw the others."""
    ids, exact, coded = prompt(1), made_cache(EVICTIONS[name], path), made_cache(EVICTIONS[name], path, KIVI)
    with torch.no_grad():
        for cache in (exact, coded):
            prepared(path)(ids, past_key_values=cache)
            cache.nbytes()
    for one, other in zip(exact.layers, coded.layers, strict=True):
        for kind in ("keys", "values"):
            pairs = [(one.stores[kind], other.stores[kind])]
            if name == "ada":
                pairs = list(zip(one.stores[kind].heads, other.stores[kind].heads, strict=True))
            for kept, store in pairs:
                fresh = Store(store.codec, store.policy)
                fresh.append(kept.read())
                assert fresh.coded == store.coded > 0
                assert torch.equal(fresh.read(), store.read())


def test_bytes_shrink() -> None:
    """Heads of different lengths take what they have, not what the longest has."""
    ids, sizes = prompt(1), {}
    for name in ("all", "snapkv", "ada"):
        cache = made_cache(EVICTIONS[name]) if name != "all" else make_cache(model().config, EXACT)
        with torch.no_grad():
            prepared("decode")(ids, past_key_values=cache)
        sizes[name] = cache.nbytes()
    kept = TOKENS // 2
    assert sizes["snapkv"].total - sizes["snapkv"].state == sizes["all"].total * kept // TOKENS
    assert sizes["ada"].total - sizes["ada"].state == sizes["all"].total * kept // TOKENS
    assert max(sizes["snapkv"].state, sizes["ada"].state) < 100
    lengths = {len(store) for layer in cache.layers for store in layer.stores["keys"].heads}
    assert len(lengths) > 1


class Pre(identity.Identity):
    """Exact keys from before the rotary embedding."""

    rope = "pre"


@pytest.mark.parametrize("pads", [0, PADS])
def test_keys_before_rope_keep_the_rows_of_their_positions(
    pads: int, path: CachePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reference("shared", pads)
    monkeypatch.setattr(identity, "Identity", Pre)
    cache = made_cache(EVICTIONS["shared"], path)
    found = steps(prepared(path), prompt(), pads, cache, [5, 1, 2])
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=0)
    with pytest.raises(RecipeError, match="all heads must keep the same tokens; set kv_cache.evict.heads: shared"):
        steps(prepared(path), prompt(), pads, made_cache(SNAP, path), [1])


@pytest.mark.parametrize("name", ["snapkv", "ada"])
def test_taking_tokens_back(name: str, path: CachePath) -> None:
    """As far as all tokens are there; beyond, it is refused."""
    made, ids = prepared(path), prompt(1)
    cropped, plain = (made_cache(EVICTIONS[name], path) for _ in range(2))
    with torch.no_grad():
        for cache in (cropped, plain):
            made(ids, past_key_values=cache)
        made(prompt(1, 3, seed=7), past_key_values=cropped)
        cropped.crop(-3)
        a, b = (made(ids[:, :1], past_key_values=cache).logits for cache in (cropped, plain))
        torch.testing.assert_close(a, b, atol=2e-5, rtol=0)
        cropped.crop(-RECENT - 1)
        assert cropped.get_seq_length() == TOKENS - RECENT
        with pytest.raises(CompressError, match="cannot take back 1 tokens"):
            cropped.crop(-1)


@pytest.mark.parametrize("name", ["snapkv", "ada", "d2o"])
def test_rows_are_reordered(name: str, path: CachePath) -> None:
    made, index = prepared(path), torch.tensor([1, 0, 1])
    cache, others = made_cache(EVICTIONS[name], path), made_cache(EVICTIONS[name], path)
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, :PADS] = 0
    with torch.no_grad():
        for each in (cache, others):
            made(prompt(), past_key_values=each, attention_mask=mask)
        cache.batch_select_indices(index)
        mask = torch.cat((mask, torch.ones(2, 2, dtype=torch.long)), 1)
        token = prompt(1, 2, seed=3)
        found = made(token.expand(3, -1), past_key_values=cache, attention_mask=mask[index]).logits
        expected = made(token.expand(2, -1), past_key_values=others, attention_mask=mask).logits
    torch.testing.assert_close(found, expected[index], atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_generation(name: str, path: CachePath) -> None:
    """Beams, padding, and layers with sliding windows beside; the tokens of both ways to read are the same."""
    made, ids = model(name), prompt(2, 60, seed=1)
    made.set_attn_implementation("eager" if name == "gemma2" else "sdpa")
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    found = []
    for way in ("decode", path):
        generation.attach(made, {**EXACT, "evict": {**SNAP, "heads": "ada"}}, path=way)
        found.append(made.generate(ids, attention_mask=mask, max_new_tokens=6, num_beams=2, do_sample=False))
        generation.detach(made)
        hooks.attach(made)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "evict",
    [{**SNAP, "decode": True, "interval": 10}, {**EVICTIONS["expected"], "keep": 0.4, "decode": True, "interval": 10}],
)
def test_eviction_while_decoding(evict: dict[str, Any], path: CachePath) -> None:
    """As many tokens stay as of all that were seen, whatever the size of steps between two evictions."""
    made, found = prepared(path), []
    for sizes in ([1] * 40, [5] * 8):
        cache = made_cache(evict, path)
        found.append(steps(made, prompt(), PADS, cache, sizes))
        assert [layer.stored_tokens for layer in cache.layers] == [int(evict["keep"] * (TOKENS + 40))] * 2
    torch.testing.assert_close(found[0], found[1], atol=5e-5, rtol=0)
    with pytest.raises(CompressError, match="decode: true cannot take tokens back"):
        cache.crop(-1)


def test_a_number_of_tokens_stays_while_decoding() -> None:
    evict = {**EVICTIONS["tokens"], "decode": True, "interval": 1}
    cache = made_cache(evict, "fused", KIVI)
    steps(prepared("fused"), prompt(1), 0, cache, [1] * 12)
    assert [layer.stored_tokens for layer in cache.layers] == [40, 40] and cache.get_seq_length() == TOKENS + 12
    cache.reset()
    steps(prepared("fused"), prompt(1), 0, cache, [1])
    assert [layer.stored_tokens for layer in cache.layers] == [40, 40]


def test_skipped_layers_keep_all_tokens(path: CachePath) -> None:
    base = {**EXACT, "skip_layers": [0]}
    logits = []
    for sizes in ([1] * 8, [5, 1, 2]):
        cache = made_cache(SNAP, path, base)
        logits.append(steps(prepared(path), prompt(), PADS, cache, sizes))
    torch.testing.assert_close(logits[0], logits[1], atol=2e-5, rtol=0)
    assert [layer.stored_tokens for layer in cache.layers] == [TOKENS + 8, TOKENS // 2 + 8]


def test_a_pass_that_hooks_do_not_see_is_refused() -> None:
    made = build("llama")
    for evict in (SNAP, EVICTIONS["knorm"]):
        cache = make_cache(made.config, {**EXACT, "evict": evict})
        with pytest.raises(CompressError, match="call compress.kv.hooks.attach"), torch.no_grad():
            made(prompt(1), past_key_values=cache)
            cache.nbytes()
