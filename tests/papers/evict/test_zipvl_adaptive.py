"""ZipVL: the share of important tokens, attention among them, and two tiers of a cache, against loops in float64."""

from __future__ import annotations

from functools import cache as once
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compress.errors import CompressError, RecipeError
from compress.kv import attention, hooks
from compress.kv.cache import make_cache
from compress.kv.evict.select import Seen
from compress.kv.layer import CachePath, KVCache
from compress.kv.settings import cache_settings
from compress.papers.evict import tiers, zipvl
from helpers import wrappers
from helpers.pico import build

BOTH: tuple[CachePath, ...] = ("decode", "fused")
LAYERS, TOKENS, PADS, RECENT, FURTHER = 3, 100, 13, 8, 6
KIVI = {"method": "kivi", "bits": 8, "group_size": 8, "sink": 4, "residual_length": 128}
BY_TOKEN = {"method": "per_token", "bits": 8, "group_size": 8, "sink": 4, "residual_length": 128}  # groups of one token
LLOYD = {"method": "lloyd", "bits": 8, "sink": 4, "residual_length": 128}
EVICT = {"method": "zipvl", "recent": RECENT, "recent_probes": 16, "random_probes": 16, "low": 8}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@once
def model() -> PreTrainedModel:
    made = build("llama", {"num_hidden_layers": LAYERS})
    hooks.attach(made)
    attention.register()
    return made


def text() -> Tensor:
    return torch.randint(0, 250, (2, TOKENS + FURTHER), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits(cache: KVCache, ids: Tensor, pads: int, sizes: list[int]) -> Tensor:
    """Of the last token of the prompt and of those behind it; the last row begins with padding."""
    made = model()
    made.set_attn_implementation("sdpa" if cache.path == "decode" else attention.NAME)
    mask = torch.ones_like(ids)
    mask[-1, :pads] = 0
    prompt = ids.shape[1] - FURTHER
    found, end = [], 0
    for part in (ids[:, :prompt], *ids[:, prompt:].split(sizes, 1)):
        start, end = end, end + part.shape[1]
        positions = (mask[:, :end].cumsum(-1) - 1).clamp(min=0)[:, start:]
        one = made(part, past_key_values=cache, attention_mask=mask[:, :end], position_ids=positions).logits
        found.append(one if start else one[:, -1:])
    return torch.cat(found, 1)


def made_cache(path: CachePath = "decode", base: dict[str, Any] = KIVI, **settings: Any) -> KVCache:
    return make_cache(model().config, {**base, "evict": {**EVICT, **settings}}, path=path)


@pytest.mark.parametrize("tau", [0.5, 0.9, 1.0, None])
def test_the_fewest_tokens_that_hold_the_share(tau: float | None) -> None:
    config = zipvl.Config(tau=tau, recent_probes=5, random_probes=7)
    queries, keys, tokens = normal(4, 40, 8), normal(2, 40, 8, seed=1), 40
    columns = zipvl.probe_columns(config, tokens)
    assert len(set(columns.tolist())) == 12 and columns[-5:].tolist() == list(range(35, 40))
    mass, seen_by = [0.0] * tokens, [0] * tokens
    for probe in columns.tolist():
        for token in range(probe + 1):
            seen_by[token] += 1
        for head in range(4):
            row = (keys[head // 2, : probe + 1].double() @ queries[head, probe].double() * 0.3).softmax(0)
            for token, p in enumerate(row.tolist()):
                mass[token] += p / 4
    found = zipvl.attention_mass(queries[:, columns] * 0.3, columns, keys)
    torch.testing.assert_close(found.double(), torch.tensor(mass, dtype=torch.float64), atol=1e-5, rtol=0)
    chosen = zipvl.important_tokens(config, found, columns, 1.0 if tau else 0.4, (2, 3))
    largest, held, count = sorted(mass, reverse=True), 0.0, 0
    while tau is not None and held < tau * sum(mass) - 1e-6:
        held, count = held + largest[count], count + 1
    count = 16 if tau is None else count
    by_probe = sorted(range(2, 37), key=lambda token: -mass[token] / seen_by[token])[: count - 5]
    assert chosen.tolist() == sorted([0, 1, 37, 38, 39, *by_probe])


def test_scores_are_of_the_newest_probes() -> None:
    keys, queries = normal(2, 30, 8), normal(4, 30, 8, seed=1)
    found = zipvl.score(zipvl.Config(recent_probes=6), Seen(keys, keys, queries, 0.3, 2))
    mass = zipvl.attention_mass(queries[:, 24:] * 0.3, torch.arange(24, 30), keys)
    torch.testing.assert_close(found[1, :25], mass[:25] / 6)
    torch.testing.assert_close(found[0, 29], mass[29])


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("prefill", ["important", "keys"])
def test_attention_of_a_prompt_by_loops(prefill: str, is_masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "SCORES", 200)
    query, key, value, chosen = (
        normal(4, 20, 8),
        normal(2, 20, 8, seed=1),
        normal(2, 20, 6, seed=2),
        torch.tensor([0, 3, 4, 9, 17, 19]),
    )
    mask = torch.ones(1, 20, 20, dtype=torch.bool).tril() if is_masked else None
    read = tiers.among_important if prefill == "important" else tiers.to_important
    found = read(query, key, value, chosen, mask, 0.4)
    kept = set(chosen.tolist())
    for token in range(20):
        open_to = [j for j in range(token + 1) if j in kept or j == token]
        for head in range(4):
            expected = torch.zeros(6, dtype=torch.float64)
            if prefill == "keys" or token in kept:
                p = (key[head // 2, open_to].double() @ query[head, token].double() * 0.4).softmax(0)
                expected = p @ value[head // 2, open_to].double()
            torch.testing.assert_close(found[token, head].double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("pads", [0, PADS])
def test_where_all_are_important_no_bit_changes(path: CachePath, pads: int) -> None:
    caches = [made_cache(path, tau=1.0, random_probes=TOKENS), make_cache(model().config, KIVI, path=path)]
    found = [logits(cache, text(), pads, [2, 1, 3]) for cache in caches]
    torch.testing.assert_close(*found, atol=1e-5, rtol=0)  # attention of sdpa with and without its mask
    assert caches[0].nbytes() == caches[1].nbytes()
    assert {share for layer in caches[0].layers for share in layer.shares} == {1.0}


@pytest.mark.parametrize("base", [KIVI, LLOYD])
@pytest.mark.parametrize("path", BOTH)
def test_tiers_of_eight_bits_are_nearly_the_exact_cache(path: CachePath, base: dict[str, Any]) -> None:
    """Where the prompt is computed in full, order and rotary rows of both tiers are right, padding or not."""
    cache = made_cache(path, base, tau=0.7, prefill="all")
    found = logits(cache, text(), PADS, [2, 1, 3])
    exact = make_cache(model().config, {"method": "identity"}, path=path)
    torch.testing.assert_close(found, logits(exact, text(), PADS, [2, 1, 3]), atol=0.05, rtol=0)
    for layer in cache.layers:
        low, high = layer.stores["keys"].tiers
        assert len(low) + len(high) == layer.stored_tokens and 0.2 < layer.shares[0] < 0.9
        assert len(low) >= round(TOKENS * (1 - layer.shares[0]))


@pytest.mark.parametrize("settings", [{"low": 2}, {"low": 0}, {"prefill": "keys", "low": 2}])
def test_both_paths_and_a_row_alone(settings: dict[str, Any]) -> None:
    chosen = {"base": BY_TOKEN, "tau": 0.7, **settings}
    caches = [made_cache(path, **chosen) for path in BOTH]
    both = [logits(cache, text(), PADS, [2, 1, 3]) for cache in caches]
    torch.testing.assert_close(*both, atol=2e-5, rtol=0)
    for row, start in ((0, 0), (1, PADS)):
        alone = logits(made_cache(**chosen), text()[row : row + 1, start:], 0, [2, 1, 3])
        torch.testing.assert_close(alone, both[0][row : row + 1], atol=2e-5, rtol=0)
    sizes = [layer.stored_tokens for layer in caches[0].layers]
    assert (max(sizes) < TOKENS) == (chosen["low"] == 0)
    assert len({layer.shares[0] for layer in caches[0].layers}) > 1  # each layer has its own


def test_rows_are_reordered_and_tokens_taken_back() -> None:
    cache, plain, index = made_cache(tau=0.7), made_cache(tau=0.7), torch.tensor([1, 0, 1])
    prompt, token = text()[:, :TOKENS], text()[:1, TOKENS : TOKENS + 3]
    model().set_attn_implementation("sdpa")
    with torch.no_grad():
        for each in (cache, plain):
            model()(prompt, past_key_values=each)
        cache.batch_select_indices(index)
        model()(token.expand(3, -1), past_key_values=cache)
        cache.crop(-3)
        found = model()(token.expand(3, -1), past_key_values=cache).logits
        expected = model()(token.expand(2, -1), past_key_values=plain).logits
    torch.testing.assert_close(found, expected[index], atol=2e-5, rtol=0)
    with pytest.raises(CompressError, match="cannot take back"):
        cache.crop(-3 - RECENT - 1)


def test_the_work_of_attention() -> None:
    probes = {"recent_probes": 2, "random_probes": 3}
    shares = {
        prefill: zipvl.attention_work(zipvl.Config(prefill=prefill, **probes), 100, 40)  # type: ignore[arg-type]
        for prefill in ("important", "keys", "all")
    }
    assert shares["important"] == pytest.approx((820 + 500) / 5050)
    assert shares["keys"] == pytest.approx((2020 + 500) / 5050)
    assert shares["all"] == pytest.approx((5050 + 500) / 5050)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen3_5", "gemma3"])
def test_models_that_see_images(name: str) -> None:
    """Generation with an image in the prompt; sliding layers of gemma3 are not coded, so nothing is judged there."""
    made = wrappers.build(name)
    hooks.attach(made)
    found = []
    for path in BOTH:
        settings = {**KIVI, "sink": 1, "evict": {**EVICT, "recent": 2, "tau": 0.7, "low": 2}}
        cache = make_cache(made.config, settings, path=path)
        made.set_attn_implementation("sdpa" if path == "decode" else attention.NAME)
        inputs = wrappers.with_image(name, made)
        with torch.no_grad():
            found.append(made.generate(**inputs, past_key_values=cache, max_new_tokens=4, do_sample=False).tolist())
        judged = [layer.shares[0] for layer in cache.layers if isinstance(layer, tiers.TieredLayer)]
        assert all(0 < share < 1 for share in judged) and bool(judged) == (name != "gemma3")
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("base", "evict", "message"),
    [
        (KIVI, {"tau": 0.0}, "tau 0.0 is not a fraction above 0"),
        (KIVI, {"low": 9}, "low 9 is not a number of bits"),
        (KIVI, {"heads": "ada"}, "heads is not possible with zipvl"),
        (KIVI, {"decode": True}, "decode is not possible with zipvl"),
        (KIVI, {"tokens": 50}, "tokens and keep are both set"),
        ({"method": "identity"}, {"low": 2}, "identity has no bits that `low` could change"),
    ],
)
def test_settings_that_are_refused(base: dict[str, Any], evict: dict[str, Any], message: str) -> None:
    settings = {key: value for key, value in {**EVICT, **evict}.items() if value is not None}
    with pytest.raises(RecipeError, match=message), torch.no_grad():
        cache = make_cache(model().config, cache_settings({**base, "evict": settings}))
        logits(cache, text()[:1], 0, [FURTHER])
