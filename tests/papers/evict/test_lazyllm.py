"""Prompts that lose tokens from layer to layer (LazyLLM), against plain loops in float64."""

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
from compress.kv.codecs import identity
from compress.kv.layer import CachePath, KVCache
from compress.kv.settings import cache_settings
from compress.papers.evict import lazyllm
from compress.run import kv_cache
from helpers.pico import build
from helpers.pruned_llama import SlowLlama

LAYERS, TOKENS, PADS, SINK, RECENT, KEEP = 6, 60, 13, 4, 8, 0.6
LAZY: dict[str, Any] = {"method": "lazyllm", "keep": KEEP, "recent": RECENT, "window": 1}
EXACT = {"method": "identity", "sink": SINK, "residual_length": 16}
KIVI = {"method": "kivi", "bits": 4, "group_size": 8, "sink": SINK, "residual_length": 8, "flush": 8}
BOTH: tuple[CachePath, ...] = ("decode", "fused")
FURTHER = [7, 100, 31, 200, 5, 66, 150, 90]


@once
def model() -> PreTrainedModel:
    made = build("llama", {"num_hidden_layers": LAYERS})
    hooks.attach(made)
    attention.register()
    return made


def prepared(path: CachePath) -> PreTrainedModel:
    model().set_attn_implementation("sdpa" if path == "decode" else attention.NAME)
    return model()


def prompt(rows: int = 2, tokens: int = TOKENS) -> Tensor:
    return torch.randint(0, 250, (rows, tokens), generator=torch.Generator().manual_seed(3))


def made_cache(path: CachePath = "decode", base: dict[str, Any] = EXACT, **settings: Any) -> KVCache:
    return make_cache(model().config, {**base, "evict": {**LAZY, **settings}}, path=path)


@torch.no_grad()
def steps(made: Any, ids: Tensor, pads: int, cache: Any, sizes: list[int]) -> Tensor:
    """Logits of the last token of the prompt and of FURTHER, fed in steps; the second row begins with padding."""
    mask = torch.ones_like(ids)
    mask[1:, :pads] = 0
    found, further = [], torch.tensor([FURTHER[: sum(sizes)]]).expand(len(ids), -1)
    for part in (ids, *further.split(sizes, 1)):
        start = mask.shape[1] if found else 0
        mask = torch.cat((mask, torch.ones_like(part)), 1) if found else mask
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, start:]
        logits = made(part, past_key_values=cache, attention_mask=mask, position_ids=positions).logits
        found.append(logits if found else logits[:, -1:])
    return torch.cat(found, 1)


@once
def slow(row: int, pads: int, revive: bool = False, window: int = 1) -> tuple[Tensor, tuple[int, ...]]:
    """The same of one row by itself in float64, and how many tokens each layer has stored."""
    stays = lazyllm.fractions(lazyllm.Config(), KEEP, LAYERS)
    one = SlowLlama(model(), stays, SINK, RECENT, revive, window)
    logits = [one.prompt(prompt()[row, pads:].tolist()), *map(one.step, FURTHER)]
    return torch.stack(logits), tuple(one.lengths)


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(("pads", "sizes"), [(0, [5, 1, 2]), (PADS, [5, 1, 2]), (PADS, [1] * 8)])
def test_it_is_the_pruned_pass_by_plain_loops(path: CachePath, pads: int, sizes: list[int]) -> None:
    """And further tokens read what each layer has; a padded row is what it is alone."""
    cache = made_cache(path)
    found = steps(prepared(path), prompt(), pads, cache, sizes)
    expected = torch.stack((slow(0, 0)[0], slow(1, pads)[0]))
    torch.testing.assert_close(found.double(), expected, atol=5e-5, rtol=0)
    assert tuple(layer.stored_tokens for layer in cache.layers) == slow(0, 0)[1]
    assert [layer.seen for layer in cache.layers] == [TOKENS + len(FURTHER)] * LAYERS
    assert len(set(slow(1, pads)[1])) == 4  # three times tokens were dropped


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("pads", [0, PADS])
def test_keeping_all_changes_no_bit(path: CachePath, pads: int) -> None:
    made, caches = prepared(path), [made_cache(path, KIVI, keep=1.0), make_cache(model().config, KIVI, path=path)]
    found = [steps(made, prompt(), pads, cache, [1, 4]) for cache in caches]
    assert torch.equal(*found)
    assert caches[0].nbytes() == caches[1].nbytes()


@pytest.mark.parametrize("path", BOTH)
def test_rows_are_reordered_and_tokens_taken_back(path: CachePath) -> None:
    made, index = prepared(path), torch.tensor([1, 0, 1])
    cache, plain = made_cache(path), made_cache(path)
    for each in (cache, plain):
        steps(made, prompt(), 0, each, [])
    cache.batch_select_indices(index)
    token = prompt(1, 3)
    with torch.no_grad():
        made(token.expand(3, -1), past_key_values=cache)
        cache.crop(-3)
        found = made(token.expand(3, -1), past_key_values=cache).logits
        expected = made(token.expand(2, -1), past_key_values=plain).logits
    torch.testing.assert_close(found, expected[index], atol=2e-5, rtol=0)
    cache.crop(-3 - RECENT)
    with pytest.raises(CompressError, match="cannot take back 1 tokens"):
        cache.crop(-1)
    assert {layer.seen for layer in cache.layers} == {TOKENS - RECENT}  # none was cut


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("is_before_rope", [False, True])
def test_dropped_tokens_come_back(path: CachePath, is_before_rope: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is computed once in a layer, at its place in the text, and read from then on."""
    expected, lengths = slow(0, 0, True)
    if is_before_rope:
        build_codec = identity.build

        def built(config: Any, spec: Any, static: Any) -> Any:
            codec = build_codec(config, spec, static)
            codec.rope = "pre" if spec.kind == "keys" else "post"
            return codec

        monkeypatch.setattr(identity, "build", built)
    cache = made_cache(path, revive=True)
    found = steps(prepared(path), prompt(1), 0, cache, [1] * len(FURTHER))
    torch.testing.assert_close(found[0].double(), expected, atol=1e-4, rtol=0)
    assert tuple(layer.stored_tokens for layer in cache.layers) == lengths
    assert sum(lengths) > sum(slow(0, 0)[1]) + 10 and not torch.allclose(expected, slow(0, 0)[0], atol=1e-2)
    for layer in cache.layers:
        assert len(set(layer.columns.tolist())) == layer.stored_tokens


def test_coming_back_is_for_one_sequence() -> None:
    with pytest.raises(CompressError, match="takes one sequence without padding"):
        steps(prepared("decode"), prompt(), 0, made_cache(revive=True), [1])
    cache = made_cache(revive=True)
    steps(prepared("decode"), prompt(1), 0, cache, [1])
    with pytest.raises(CompressError, match="revive: true cannot take tokens back"):
        cache.crop(-1)


@pytest.mark.parametrize(
    ("after", "keep"), [((), 1.0), ((), 0.75), ((), 0.34), ((0,), 0.17), ((2, -2), 0.51), ((0, 1, 2), 0.6)]
)
def test_the_mean_over_layers_is_what_is_asked_for(after: tuple[int, ...], keep: float) -> None:
    stays = lazyllm.fractions(lazyllm.Config(after), keep, LAYERS)
    fraction, total = 1.0, 0.0
    for layer in range(LAYERS):
        total += fraction
        fraction = stays.get(layer, fraction)
    assert total / LAYERS == pytest.approx(keep)
    assert list(stays) == sorted(x % LAYERS for x in after or (1, 2, 4))
    ratios = [b / a for a, b in zip([1.0, *stays.values()], stays.values(), strict=False)]
    assert max(ratios) == pytest.approx(min(ratios))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": 0.1}, "keep 0.1 is too little: layers up to 1 cache all tokens"),
        ({"after": [5]}, "after must name layers of the model, which has 6, and not the last one"),
        ({"heads": "ada"}, "heads is not possible with lazyllm"),
        ({"decode": True}, "decode is not possible with lazyllm"),
        ({"keep": None, "keep_by_layer": [0.5] * LAYERS}, "keep_by_layer is not possible with lazyllm"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    evict = {key: value for key, value in {**LAZY, **settings}.items() if value is not None}
    with pytest.raises(RecipeError, match=message):
        make_cache(model().config, cache_settings({**EXACT, "evict": evict}))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"labels": torch.zeros(1, 20, dtype=torch.long)}, "labels asks for all tokens"),
        ({"logits_to_keep": RECENT + 1}, "of which only the newest 8 are sure to stay"),
    ],
)
def test_passes_that_are_refused(asked: dict[str, Any], message: str) -> None:
    made = prepared("decode")
    with pytest.raises(CompressError, match=message), torch.no_grad():
        made(prompt(1, 20), past_key_values=made_cache(), **asked)


def test_models_that_are_refused() -> None:
    with pytest.raises(RecipeError, match="layers of type sliding_attention do not allow"):
        make_cache(build("gemma2").config, {**EXACT, "evict": LAZY})
    made = build("opt")
    with pytest.raises(RecipeError, match="tokens cannot be dropped between the layers of this model"):
        kv_cache.check(made.config, cache_settings({**EXACT, "evict": LAZY}))
