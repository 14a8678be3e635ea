"""Drafts on a part of the target's cache, against masked attention of the whole; whole generations against plain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from compress import speculate
from compress.errors import RecipeError
from compress.kv import generation
from compress.kv.cache import make_cache
from compress.speculate.draft_cache import SINK_TOKENS, DraftCache, read_span
from compress.speculate.drafts import retrieved, upper, window
from compress.speculate.passes import Passes
from compress.speculate.session import Session
from helpers import pico
from helpers.kv_cases import ready

PROMPT, LONG = 150, {"max_position_embeddings": 1024}
KIVI = {"method": "kivi", "bits": 8, "group_size": 16, "sink": 4, "residual_length": 32, "flush": 16}
PLANES = {"method": "quantspec", "group_size": 16, "sink": 4, "residual_length": 32}


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 250, (1, count), generator=torch.Generator().manual_seed(seed))


def gemma() -> PreTrainedModel:
    """A window of 32 in one of two layers."""
    kinds = ["sliding_attention", "full_attention"]
    own = {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 144, "sliding_window": 32}
    return pico.of_type("gemma3_text", {**own, "layer_types": kinds, **LONG})


@torch.no_grad()
def session_of(model: PreTrainedModel, cache: Any = None, count: int = PROMPT) -> Session:
    """A session whose prompt of random tokens, all but the last, is in the cache."""
    ids = tokens(count)
    cache = DynamicCache(config=model.config) if cache is None else cache
    model(input_ids=ids[:, :-1], past_key_values=cache)
    cache.activate_past_recording()
    return Session(Passes(model, cache, {"past_key_values": cache}), ids, [], False, None)


def whole(model: PreTrainedModel, ids: Tensor, visible: Tensor | None = None) -> Tensor:
    """Logits of the last token in float64; visible: bool [H or 1, tokens], what it sees."""
    model = model.double()
    mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()[None]
    if visible is not None:
        mask = mask.repeat(len(visible), 1, 1)
        mask[:, -1] = visible
    try:
        return model(input_ids=ids, attention_mask=mask[None]).logits[0, -1]
    finally:
        model.float()


def tensors(session: Session) -> list[Tensor]:
    return [x for layer in session.cache.layers for x in read_span(layer, 0, 1 << 40)]


@torch.no_grad()
@pytest.mark.parametrize("recipe", [None, KIVI])
def test_a_window_is_what_a_mask_of_the_whole_text_leaves(recipe: Any) -> None:
    model = ready(pico.build("llama", LONG))
    session = session_of(model, None if recipe is None else make_cache(model.config, recipe, path="fused"))
    before = [x.clone() for x in tensors(session)]
    part = window.build(window.Config(40), session)
    visible = torch.zeros(1, PROMPT, dtype=torch.bool)
    visible[:, :SINK_TOKENS] = visible[:, -37:] = True  # 36 of the cache, and itself
    with part.reduce(session):
        logits = session.forward([session.tokens[-1]])[0]
        session.crop(1)
    expected = whole(model, session.ids, visible)
    torch.testing.assert_close(logits.double(), expected, atol=1e-4 if recipe is None else 2e-2, rtol=0)
    assert all(map(torch.equal, tensors(session), before))


@torch.no_grad()
@pytest.mark.parametrize("recipe", [None, KIVI])
def test_chosen_chunks_are_what_a_mask_of_each_head_leaves(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ready(pico.build("llama", LONG))
    session = session_of(model, None if recipe is None else make_cache(model.config, recipe, path="fused"))
    part = retrieved.build(retrieved.Config(SINK_TOKENS + 64 + 8 + 16), session)
    chosen = torch.tensor([[[0, 5], [3, 7]]])  # of each KV head; two query heads share one
    monkeypatch.setattr(retrieved.RetrievedCache, "choose", lambda self, index, query: chosen)
    visible = torch.zeros(4, PROMPT, dtype=torch.bool)
    chunks = (PROMPT - 1 - 64 - SINK_TOKENS) // 8
    visible[:, :SINK_TOKENS] = visible[:, SINK_TOKENS + 8 * chunks :] = True
    for head in range(4):
        for chunk in chosen[0, head // 2].tolist():
            visible[head, SINK_TOKENS + 8 * chunk : SINK_TOKENS + 8 * chunk + 8] = True
    with part.reduce(session):
        logits = session.forward([session.tokens[-1]])[0]
        again = session.forward([17])[0]
        session.crop(2)
    tolerance = 1e-4 if recipe is None else 2e-2
    torch.testing.assert_close(logits.double(), whole(model, session.ids, visible), atol=tolerance, rtol=0)
    assert not torch.equal(logits, again)
    assert model.config._attn_implementation == "sdpa"
    assert session.cache.get_seq_length() == PROMPT - 1


def test_chunks_are_those_of_the_largest_mean_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    query, means = torch.randn(1, 6, 16, generator=generator), torch.randn(1, 2, 30, 16, generator=generator)
    found = retrieved.chunks_of(query, means, 5)
    for head in range(2):
        total = torch.zeros(30, dtype=torch.float64)
        for own in range(3):
            products = [float(query[0, 3 * head + own].double() @ mean.double()) for mean in means[0, head]]
            total += torch.tensor(products, dtype=torch.float64).softmax(0)
        assert found[0, head].tolist() == sorted(total.argsort(descending=True)[:5].tolist())


@torch.no_grad()
def test_means_are_those_of_all_whole_chunks_before_the_newest() -> None:
    model = pico.build("llama", LONG)
    session = session_of(model)
    part = retrieved.RetrievedCache(session, retrieved.Config(SINK_TOKENS + 64 + 8 + 16))
    for count in (PROMPT - 1, PROMPT + 20):
        model(input_ids=tokens(count - session.cache.get_seq_length() or 1), past_key_values=session.cache)
        part.catch_up()
        chunks = (session.cache.get_seq_length() - 64 - SINK_TOKENS) // 8
        for means, layer in zip(part.means, session.cache.layers, strict=True):
            expected = [
                layer.keys[:, :, SINK_TOKENS + 8 * i : SINK_TOKENS + 8 * i + 8].double().mean(2) for i in range(chunks)
            ]
            torch.testing.assert_close(means.view().double(), torch.stack(expected, 2), atol=1e-6, rtol=0)


@torch.no_grad()
def test_what_was_verified_takes_the_place_of_what_was_drafted() -> None:
    model = pico.build("llama", LONG)
    session = session_of(model)
    part = DraftCache(session, 32)
    for seed, accepted in enumerate((1, 3, 4, 0, 2, 4) * 8):
        with part.in_use(session):
            for token in (1, 2, 3):
                session.forward([token])
            session.crop(3)
        session.forward(tokens(accepted + 1, seed)[0].tolist())
        part.catch_up()
        length = session.cache.get_seq_length()
        assert part.length == length
        assert 32 <= length - part.start <= 32 + 64
        for own, layer in zip(part.cache.layers, session.cache.layers, strict=True):
            for mine, all_ in ((own.keys, layer.keys), (own.values, layer.values)):
                assert torch.equal(mine, torch.cat((all_[:, :, :SINK_TOKENS], all_[:, :, part.start :]), 2))


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mistral", "mixtral"])
@pytest.mark.parametrize("plugin", [window, retrieved])
def test_a_part_that_holds_everything_says_what_the_target_says(name: str, plugin: Any) -> None:
    model = gemma() if name == "gemma3" else pico.build(name, LONG)
    session = session_of(model)
    part = plugin.build(plugin.Config(1000), session)
    ids = [session.tokens[-1], 5, 6, 7]
    with part.reduce(session):
        drafted = torch.cat([session.forward([token]) for token in ids])
        session.crop(len(ids))
    torch.testing.assert_close(drafted, session.forward(ids), atol=2e-4, rtol=0)


@torch.no_grad()
def test_windows_of_some_layers_are_read_whole() -> None:
    model = gemma()
    session = session_of(model)
    part = retrieved.build(retrieved.Config(100), session)
    kept = session.cache.layers[0].keys.clone(), session.cache.layers[0].get_seq_length()
    for _ in range(2):
        with part.reduce(session):
            for token in (3, 4, 5, 6):
                session.forward([token])
            session.crop(4)
    layer = session.cache.layers[0]
    assert torch.equal(layer.keys, kept[0])
    assert layer.get_seq_length() == kept[1]


@pytest.mark.parametrize("recipe", [None, KIVI, PLANES])
@pytest.mark.parametrize("drafts", ["window=24", "retrieved=100", "cache=upper", "ngram+window=24"])
def test_generations_are_those_of_the_target_alone(drafts: str, recipe: Any) -> None:
    if drafts == "cache=upper" and recipe != PLANES:
        return
    model, ids = pico.build("llama", LONG), tokens(PROMPT)
    if recipe is not None:
        generation.attach(model, recipe)
    how: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    made = speculate.with_settings(f"{drafts},length=3")
    found = model.generate(ids, custom_generate=made, **how)
    assert made.statistics.drafted
    with torch.no_grad():
        logits = model(input_ids=found).logits[0, PROMPT - 1 : -1]
    chosen = logits.gather(1, found[0, PROMPT:, None])[:, 0]
    assert (logits.amax(1) - chosen).max() < (1e-3 if recipe is None else 0.02)


@torch.no_grad()
@pytest.mark.parametrize("recipe", [None, PLANES])
@pytest.mark.parametrize("plugin", [window, retrieved])
def test_texts_of_few_tokens(plugin: Any, recipe: Any) -> None:
    model = ready(pico.build("llama", LONG))
    session = session_of(model, None if recipe is None else make_cache(model.config, recipe, path="fused"), 3)
    part = plugin.build(plugin.Config(100), session)
    for token in (5, 6, 7, 8):
        with part.reduce(session):
            drafted = session.forward([token])
            session.crop(1)
        torch.testing.assert_close(drafted, session.forward([token]), atol=1e-4, rtol=0)


def test_a_cache_without_planes_is_refused() -> None:
    session = session_of(pico.build("llama", LONG))
    with pytest.raises(RecipeError, match="upper needs a cache in two planes"):
        upper.build(upper.Config(), session)


def test_settings_that_cannot_be() -> None:
    for plugin, wrong in ((window, 4), (retrieved, 80)):
        with pytest.raises(ValueError, match=f"tokens {wrong}"):
            plugin.Config(wrong)
