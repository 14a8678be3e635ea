"""Vision tokens that leave a cache: by place, by attention, within the prompt's pass, merged; against slow passes."""

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
from compress.kv.evict import select
from compress.kv.layer import CachePath, KVCache
from compress.kv.settings import cache_settings
from compress.papers.evict import fastv, mustdrop, vision
from compress.papers.evict.pruning import PromptPruning
from compress.papers.evict.vision_layers import placeholder_ids
from helpers import pico, wrappers

BOTH: tuple[CachePath, ...] = ("decode", "fused")
EXACT = {"method": "identity", "sink": 1, "residual_length": 4}
IMAGE = slice(3, 7)  # of the text that `with_image` gives, of 14 tokens
SIDE = 4  # vision tokens
FURTHER = torch.tensor([[7, 100, 31]])


@once
def _built(name: str) -> Any:
    made = wrappers.build(name, {"num_hidden_layers": 3})
    hooks.attach(made)
    attention.register()
    return made


def model(name: str = "llava") -> Any:
    return _built(name)


def made_cache(evict: dict[str, Any], path: CachePath = "decode", made: Any = None) -> KVCache:
    settings = {**EXACT, **({"evict": {"recent": 1, **evict}} if evict else {})}
    return make_cache((made or model()).config, settings, path=path)


@torch.no_grad()
def logits(evict: dict[str, Any], path: CachePath = "decode", name: str = "llava") -> tuple[Tensor, list[int]]:
    """Of the prompt's last token and of those behind it, and how many tokens each layer has stored."""
    made, inputs = model(name), wrappers.with_image(name, model(name))
    made.set_attn_implementation("sdpa" if path == "decode" else attention.NAME)
    cache = made_cache(evict, path, made)
    first = made(**inputs, past_key_values=cache, use_cache=True).logits[:, -1:]
    sizes = [layer.stored_tokens for layer in cache.layers]
    inner = made.model.language_model if name == "llava" else None
    if inner is None:
        return first, sizes
    return torch.cat((first, made(input_ids=FURTHER, past_key_values=cache).logits), 1), sizes


@torch.no_grad()
def by_hand(stages: dict[int, list[list[int]]], unseen: dict[int, set[int]] | None = None) -> Tensor:
    """The same logits of a pass whose layers behind some are given these tokens alone, means of several where named.

    The step behind it is a part of the same pass: later tokens read what each layer was given, but what is `unseen`.
    """
    made: Any = model()
    made.set_attn_implementation("sdpa")
    inputs = wrappers.with_image("llava", made)
    ids = torch.cat((inputs["input_ids"], FURTHER), 1)
    language = made.model.language_model
    embedded = language.embed_tokens(ids)
    features = made.model.get_image_features(pixel_values=inputs["pixel_values"])
    found = getattr(features, "pooler_output", features)
    embedded[0, IMAGE] = torch.cat(list(found)) if not isinstance(found, Tensor) else found.view(SIDE, -1)
    hidden, columns = embedded, list(range(ids.shape[1]))
    for index, block in enumerate(language.layers):
        if index - 1 in stages:
            joins = stages[index - 1]
            rows = [[columns.index(column) for column in group if column in columns] for group in joins]
            hidden = torch.stack([hidden[0, group].mean(0) for group in rows])[None]
            columns = [group[0] for group in joins]
        positions = torch.tensor([columns])
        turns = language.rotary_emb(hidden, positions)
        mask = torch.ones(1, 1, hidden.shape[1], hidden.shape[1], dtype=torch.bool).tril()
        gone = [place for place, column in enumerate(columns) if column in (unseen or {}).get(index, ())]
        mask[..., -FURTHER.shape[1] :, gone] = False
        hidden = block(hidden, attention_mask=mask, position_ids=positions, position_embeddings=turns)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    return made.lm_head(language.norm(hidden[:, -1 - FURTHER.shape[1] :]))


def columns_of(evict: dict[str, Any]) -> list[list[int]]:
    """Return the columns that a method that drops within the pass has left behind each of its stages."""
    seen: list[list[int]] = []
    real = PromptPruning.drop

    def note(self: PromptPruning, chosen: list[Tensor], device: torch.device) -> None:
        real(self, chosen, device)
        assert self.columns is not None
        seen.append(self.columns[0].tolist())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptPruning, "drop", note)
        logits(evict)
    return seen


def alone(left: list[int]) -> list[list[int]]:
    """Return groups of one for these columns and for those of the step behind the prompt."""
    return [[column] for column in [*left, 14, 15, 16]]


@pytest.mark.parametrize(
    ("choose", "kept"), [("first", [0, 1]), ("last", [2, 3]), ("every", [1, 3]), ("attention", None)]
)
def test_places_of_those_that_stay(choose: Any, kept: list[int] | None) -> None:
    scores = vision.places(vision.Config(choose=choose), SIDE, 0.5)
    assert (scores is None) == (kept is None)
    if scores is not None and kept is not None:
        assert sorted(scores.argsort(descending=True, stable=True)[:2].tolist()) == kept
    chosen = vision.places(vision.Config(choose="every"), 64, 0.25)
    assert chosen is not None and chosen.nonzero()[:, 0].tolist() == list(range(2, 64, 4))


@pytest.mark.parametrize("path", BOTH)
def test_forgetting_after_the_prompt_is_a_mask_of_later_steps(path: CachePath) -> None:
    made, inputs = model(), wrappers.with_image("llava", model())
    found, sizes = logits({"method": "vision", "choose": "first", "keep": 0.5}, path)
    assert sizes == [12, 12, 12]
    made.set_attn_implementation("sdpa")
    mask = torch.ones(1, 1, 3, 17, dtype=torch.bool).tril(14)
    mask[..., 5:7] = False
    with torch.no_grad():
        cache = made_cache({})
        first = made(**inputs, past_key_values=cache, use_cache=True).logits[:, -1:]
        embeds = made.get_input_embeddings()(FURTHER)
        inner = made.model.language_model(
            inputs_embeds=embeds, attention_mask=mask, position_ids=torch.arange(14, 17)[None], past_key_values=cache
        )
        expected = torch.cat((first, made.lm_head(inner.last_hidden_state)), 1)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("after", [0, 1])
def test_fastv_is_the_pass_by_hand(path: CachePath, after: int) -> None:
    evict = {"method": "fastv", "keep": 0.5, "after": after}
    found, sizes = logits(evict, path)
    assert sizes == [14] * (after + 1) + [12] * (2 - after)
    (left,) = columns_of(evict)
    assert len(left) == 12 and set(range(14)) - set(left) < set(range(3, 7))
    expected = by_hand({after: alone(left)})
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=0)


@pytest.mark.parametrize("path", BOTH)
def test_merged_neighbours_are_the_pass_by_hand(path: CachePath) -> None:
    evict = {"method": "mustdrop", "keep": 0.5, "merge_after": 0, "after": -1}
    found, sizes = logits(evict, path)
    assert sizes == [14, 12, 12]
    (left,) = columns_of(evict)
    runs = [[c, *(x for x in range(c + 1, 7) if x not in left and not set(range(c + 1, x)) & set(left))] for c in left]
    assert sorted(x for run in runs for x in run) == list(range(14))
    torch.testing.assert_close(found, by_hand({0: [*runs, *alone([])]}), atol=5e-5, rtol=0)


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(("decoding", "is_before_rope"), [(False, False), (True, False), (True, True)])
def test_what_leaves_late_is_forgotten_by_the_layers_before(
    path: CachePath, decoding: bool, is_before_rope: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third stage: layers from the first to the last filter show later steps what is left in the end."""
    monkeypatch.setattr(identity.Identity, "rope", "pre" if is_before_rope else "post")
    if not decoding:
        monkeypatch.setattr(mustdrop, "forgets", lambda config, layer: False)
    evict = {"method": "mustdrop", "keep": 0.25, "merge_after": -1, "after": [0, 1]}
    found, sizes = logits(evict, path)
    assert sizes == ([11, 11, 11] if decoding else [14, 12, 11])
    first, second = columns_of(evict)
    assert set(second) < set(first) and [len(first), len(second)] == [12, 11]
    gone = set(range(14)) - set(second) if decoding else set()
    expected = by_hand({0: alone(first), 1: alone(second)}, {0: gone, 1: gone})
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=0)


def test_the_third_stage_leaves_layers_before_the_first_filter() -> None:
    evict = {"method": "mustdrop", "keep": 0.25}
    assert logits(evict)[1] == [14, 11, 11]
    only_merged = mustdrop.Config(after=-1)
    assert not any(mustdrop.forgets(only_merged, layer) for layer in range(3))
    made = [mustdrop.forgets(mustdrop.Config(after=(2, 6)), layer) for layer in range(8)]
    assert made == [False, False, True, True, True, True, True, False]


def test_the_most_similar_neighbours_are_merged() -> None:
    rows = torch.eye(8)[[0, 1, 1, 1, 2, 3, 3]]  # vision tokens 1..7 of 9, but the fifth is text
    values = torch.zeros(2, 9, 4)
    values[0, 1:8], values[1, 1:8] = rows[:, :4], rows[:, 4:]
    is_vision = torch.tensor([False, True, True, True, True, False, True, True, False])
    found = mustdrop.joins(mustdrop.Config(), 0, values, is_vision, 3)
    assert found is not None
    assert found.tolist() == [0, 1, 2, 2, 2, 5, 6, 6, 8] or found[2:5].tolist() == [2, 2, 2]
    assert mustdrop.joins(mustdrop.Config(), 1, values, is_vision, 3) is None
    assert len(set(mustdrop.joins(mustdrop.Config(), 0, values, is_vision, 1).tolist())) == 5  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
@pytest.mark.parametrize(
    "evict",
    [
        {"method": "vision", "keep": 0.5, "merge": True},
        {"method": "fastv", "keep": 0.25, "after": 1},
        {"method": "mustdrop", "keep": 0.25},
        {"method": "mustdrop", "keep": 0.25, "merge_after": -1, "after": [0, 1]},
    ],
)
def test_both_ways_to_read_agree(evict: dict[str, Any], name: str) -> None:
    found = [logits(evict, path, name) for path in BOTH]
    torch.testing.assert_close(found[0][0], found[1][0], atol=2e-5, rtol=0)
    assert found[0][1] == found[1][1] and min(found[0][1]) < 14


@pytest.mark.parametrize("method", ["vision", "fastv", "mustdrop"])
def test_keeping_all_changes_nothing(method: str) -> None:
    found, sizes = logits({"method": method, "keep": 1.0})
    assert sizes == [14] * 3
    assert torch.equal(found, logits({})[0])


@pytest.mark.parametrize("method", ["vision", "fastv", "mustdrop"])
def test_a_prompt_without_an_image_keeps_all(method: str) -> None:
    made, cache = model(), made_cache({"method": method, "keep": 0.5})
    made.set_attn_implementation("sdpa")
    with torch.no_grad():
        made(input_ids=torch.arange(10, 20)[None], past_key_values=cache)
    assert {layer.stored_tokens for layer in cache.layers} == {10}


@pytest.mark.parametrize("method", ["fastv", "mustdrop"])
def test_rows_of_a_batch_keep_what_they_keep_alone(method: str) -> None:
    made: PreTrainedModel = model()
    made.set_attn_implementation("sdpa")
    one = wrappers.with_image("llava", made)
    other = torch.roll(one["input_ids"], 2, 1)  # the image lies elsewhere
    pixels = torch.cat((one["pixel_values"], one["pixel_values"].flip(2)))
    ids, found = torch.cat((one["input_ids"], other)), []
    with torch.no_grad():
        for rows in (slice(0, 2), slice(0, 1), slice(1, 2)):
            cache = made_cache({"method": method, "keep": 0.25})
            made(input_ids=ids[rows], pixel_values=pixels[rows], past_key_values=cache)
            found.append(made(input_ids=FURTHER.expand(len(ids[rows]), -1), past_key_values=cache).logits)
    torch.testing.assert_close(found[0], torch.cat(found[1:]), atol=2e-5, rtol=0)


@pytest.mark.parametrize("path", ["decode", "fused"])
@pytest.mark.parametrize(
    "evict",
    [{"method": "fastv"}, {"method": "mustdrop"}, {"method": "mustdrop", "merge_after": -1, "after": [0, 1, 2]}],
)
@pytest.mark.parametrize("pads", [0, 3])
def test_rows_with_other_numbers_of_image_tokens(evict: dict[str, Any], path: Any, pads: int) -> None:
    """The shorter row is filled up, which no token may read, though the batch has no padding and so no mask."""
    text = pico.build("llama", {"num_hidden_layers": 4})
    text.config.image_token_id = 249
    hooks.attach(text)
    text.set_attn_implementation(attention.NAME if path == "fused" else "sdpa")
    ids = torch.arange(48).view(2, 24) % 240
    ids[0, 3:15], ids[1, 5:9] = 249, 249
    settings = cache_settings({**EXACT, "evict": {"keep": 0.25, "recent": 1, **evict}})
    found, order = [], torch.tensor([1, 0])
    with torch.no_grad():
        for rows, begin in ((slice(0, 2), 0), (slice(0, 1), 0), (slice(1, 2), pads)):
            cache, mask = make_cache(text.config, settings, path=path), torch.ones(ids[rows].shape, dtype=torch.long)
            mask[-1, : pads if len(mask) > 1 else 0] = 0
            given: dict[str, Any] = {"attention_mask": mask} if pads and len(mask) > 1 else {}
            first = text(input_ids=ids[rows, begin:], past_key_values=cache, **given).logits[:, -1:]
            further = torch.tensor([[7, 100, 31]]).expand(len(mask), -1)
            if len(mask) > 1:  # as beams are
                cache.reorder_cache(order)
            if given:
                given = {"attention_mask": torch.cat((mask[order], torch.ones(2, 3, dtype=torch.long)), 1)}
            later = text(input_ids=further, past_key_values=cache, **given).logits
            found.append(torch.cat((first, later[order] if len(mask) > 1 else later), 1))
    torch.testing.assert_close(found[0], torch.cat(found[1:]), atol=2e-5, rtol=0)


@pytest.mark.parametrize("choose", ["attention", "every", "first", "last"])
def test_text_without_an_image_stays_as_it_is(choose: str) -> None:
    text = pico.build("llama")
    text.config.image_token_id = 249
    hooks.attach(text)
    cache = make_cache(
        text.config, cache_settings({**EXACT, "evict": {"method": "vision", "keep": 0.5, "choose": choose}})
    )
    with torch.no_grad():
        text(input_ids=torch.arange(20)[None], past_key_values=cache)
    assert cache.get_seq_length() == 20 and {layer.stored_tokens for layer in cache.layers} == {20}


def test_ids_are_those_of_the_configuration() -> None:
    assert placeholder_ids(model("qwen2_5_vl").config) == [wrappers.VOCAB_SIZE - 2, wrappers.IMAGE_ID]
    made, cache = model(), made_cache({"method": "vision", "keep": 0.5})
    with pytest.raises(CompressError, match="pass input_ids=... by name"), torch.no_grad():
        made(inputs_embeds=torch.zeros(1, 5, 64), past_key_values=cache)
    text = pico.build("llama")
    hooks.attach(text)
    with pytest.raises(CompressError, match="names no tokens that stand for images"), torch.no_grad():
        cache = made_cache({"method": "fastv", "keep": 0.5, "after": 0}, made=text)
        text(torch.zeros(1, 5, dtype=torch.long), past_key_values=cache)


@pytest.mark.parametrize(
    ("evict", "message"),
    [
        ({"method": "vision", "tokens": 5}, "tokens is not possible with vision"),
        ({"method": "fastv", "keep": 0.5, "merge": True}, "merge is not possible with fastv"),
        ({"method": "fastv", "keep": 0.5, "after": 2}, "after must name a layer of the model, which has 3"),
        ({"method": "mustdrop", "keep": 0.5, "after": 0}, "must name layers behind merge_after"),
        ({"method": "mustdrop", "keep": 0.5, "after": -1, "merge_after": -1}, "are both -1"),
        ({"method": "mustdrop", "keep": 0.5, "after": [-1, 2], "merge_after": -1}, "after must name layers from 0"),
        ({"method": "mustdrop", "keep": 0.5, "after": []}, "after must name layers from 0"),
        ({"method": "mustdrop", "keep": 0.5, "after": -1, "merge_after": 2}, "merge_after must name a layer of the"),
        ({"method": "mustdrop", "keep": 0.5, "merge_after": -2}, "merge_after -2 is no layer"),
        ({"method": "vision", "keep": 0.5, "heads": "ada"}, "heads is not possible with vision"),
    ],
)
def test_settings_that_are_refused(evict: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make_cache(model().config, cache_settings({**EXACT, "evict": evict}))


def test_layers_that_are_refused() -> None:
    with pytest.raises(RecipeError, match="found by a first layer with full attention"):
        make_cache(wrappers.build("gemma3").config, {**EXACT, "evict": {"method": "vision", "keep": 0.5}})


@pytest.mark.parametrize("method", ["vision", "fastv", "mustdrop"])
def test_bytes_are_counted_for_a_text(method: str) -> None:
    config = model().config
    settings = cache_settings({**EXACT, "evict": {"method": method, "keep": 0.25}})
    assert select.by_layer(config, settings, 100) == [select.prompt_of(100)] * 3


def test_shares_behind_the_stages() -> None:
    assert mustdrop.fractions(mustdrop.Config(), 0.25, 4) == {0: 0.5, 1: 0.25}
    assert mustdrop.fractions(mustdrop.Config(merge_after=-1, after=2), 0.25, 4) == {2: 0.25}
    assert mustdrop.fractions(mustdrop.Config(after=(2, 1)), 0.125, 4) == pytest.approx({0: 0.5, 1: 0.25, 2: 0.125})
    assert fastv.fractions(fastv.Config(), 0.25, 4) == {1: 0.25}
