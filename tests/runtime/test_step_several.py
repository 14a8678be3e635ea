"""Passes of several new tokens by programs: as the model's own, whatever is cropped between, and without copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from compress.kernels import llvm
from compress.runtime import bypass
from compress.runtime.levels import at_level
from compress.runtime.step import caches, decode, programs
from helpers.decoding import assert_close, ready, step_of, tokens
from helpers.nested_models import nested_model

pytestmark = pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled here")
FAMILIES = ("llama", "llama_tied", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "mixtral", "qwen3_moe")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


def passes(model: Any, counts: list[int], batch: int = 1, mask: Tensor | None = None) -> list[Tensor]:
    """Return the logits of all new tokens of passes with one cache; a negative number crops it."""
    cache, logits, ids = DynamicCache(config=model.config), list[Tensor](), tokens(batch, 0)
    cache.activate_past_recording()
    for number, count in enumerate(counts):
        if count < 0:
            ids = ids[:, :count]
            continue
        ids = torch.cat([ids, tokens(batch, count, number)], 1)
        own = None
        if mask is not None:
            own = torch.cat([mask, torch.ones(batch, ids.shape[1], dtype=torch.int64)], 1)[:, : ids.shape[1]]
        output = model(ids[:, -count:], attention_mask=own, past_key_values=cache, use_cache=True)
        logits.append(output.logits)
        cache.crop(min([0, *counts[number + 1 : number + 2]]))  # once for each pass, as caches want it
    return logits


def assert_all_close(got: list[Tensor], expected: list[Tensor], ratio: float = 1e-4) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.shape == other.shape
        assert_close(one, other, ratio)


ROUNDS = [26, 1, 5, -3, 1, 1, -2, 4, -4, 8, 2, -1, 16]  # windows of 32 are passed


@pytest.mark.parametrize("name", FAMILIES)
def test_rounds_of_speculation_are_those_of_the_model(name: str) -> None:
    model = ready(name)
    expected = passes(model, ROUNDS)
    decode.install(model)
    assert_all_close(passes(model, ROUNDS), expected)
    assert {(key.batch, key.new) for key in step_of(model).running} == {(1, count) for count in (1, 2, 4, 5, 8, 16)}


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_several_tokens_of_several_sequences_with_padding(name: str) -> None:
    model, mask = ready(name), torch.ones(3, 26, dtype=torch.int64)
    mask[0, :7], mask[2, :2] = 0, 0
    counts = [26, 4, -2, 5, 1, 5]
    expected = passes(model, counts, 3, mask)
    decode.install(model)
    assert_all_close(passes(model, counts, 3, mask), expected)
    assert {(key.batch, key.new) for key in step_of(model).running} == {(3, count) for count in (1, 4, 5)}


def test_more_tokens_than_programs_take_are_left_to_the_model() -> None:
    model = ready()
    decode.install(model)
    passes(model, [9, 1, 17])
    passes(model, [9, 6], 3)
    assert {(key.batch, key.new) for key in step_of(model).running} == {(1, 1)}


def test_rows_of_a_pass_are_those_of_single_passes() -> None:
    model = ready("qwen3")
    decode.install(model)
    together, singly = passes(model, [40, 6]), passes(model, [40, 1, 1, 1, 1, 1, 1])
    first = tokens(1, 6, 1)
    cache = DynamicCache(config=model.config)
    model(tokens(1, 40, 0), past_key_values=cache)
    alone = [model(first[:, i : i + 1], past_key_values=cache).logits for i in range(6)]
    assert singly[0].shape == (1, 40, 264)
    assert_close(together[1], torch.cat(alone, 1), 1e-5)


def test_a_crop_copies_nothing_unless_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ready()
    decode.install(model)
    cache: Any = DynamicCache(config=model.config)
    for count in (9, 1, 3):
        model(tokens(1, count), past_key_values=cache)
    place = cache.layers[0].keys.data_ptr()
    cache.crop(-2)
    model(tokens(1, 3), past_key_values=cache)
    assert cache.layers[0].keys.data_ptr() == place
    kept = [layer.values[:, :, -1:] for layer in cache.layers]  # a part of what is cropped away
    before = [each.clone() for each in kept]
    cache.crop(-2)
    model(tokens(1, 3), past_key_values=cache)
    assert cache.layers[0].keys.data_ptr() != place
    assert all(torch.equal(*pair) for pair in zip(kept, before, strict=True))
    cache.crop(-1)
    monkeypatch.setattr(caches, "_count_users", None)
    place = cache.layers[0].keys.data_ptr()
    model(tokens(1, 1), past_key_values=cache)
    assert cache.layers[0].keys.data_ptr() != place


def test_attention_that_sees_all_is_left_to_the_model() -> None:
    model: Any = ready()
    decode.install(model)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    cache = DynamicCache(config=model.config)
    for count in (9, 1, 3):
        model(tokens(1, count), past_key_values=cache)
    assert [key.new for key in step_of(model).running] == [1]


SETS = [frozenset[tuple[int, str]](), frozenset({(0, "attention")}), frozenset({(0, "mlp"), (1, "attention")})]


def programs_made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list that programs are added to as they are made."""
    made, make = list[Any](), decode.StepProgram

    def count(*args: Any) -> Any:
        made.append(make(*args))
        return made[-1]

    monkeypatch.setattr(decode, "StepProgram", count)
    return made


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe"])
def test_programs_without_sublayers_alternate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that pass over sublayers, checks that do not, on one cache; what is not computed is zeros in it."""
    model, results, made = ready(name), list[list[Tensor]](), programs_made(monkeypatch)
    for is_installed in (False, True):
        if is_installed:
            decode.install(model)
        cache: Any = DynamicCache(config=model.config)
        model(tokens(1, 9), past_key_values=cache)
        logits = list[Tensor]()
        for number in range(6):
            with bypass.bypassed(model, SETS[number % 3]):
                for seed in range(3):
                    logits.append(model(tokens(1, 1, 10 * number + seed), past_key_values=cache).logits)
                    logits += [layer.keys[:, :, -1:].clone() for layer in cache.layers]
            cache.crop(-3)
            logits.append(model(tokens(1, 4, number), past_key_values=cache).logits)
            cache.crop(-number)
        results.append(logits)
    assert_all_close(results[1], results[0])
    assert len(made) == len(step_of(model).running) == 4


def test_bodies_are_read_whole_though_sublayers_are_passed_over() -> None:
    model = ready()
    decode.install(model)
    with bypass.bypassed(model, bypass.sublayers_of(model)):
        got = passes(model, [9, 1, 3])
    assert step_of(model).running and not step_of(model).refused
    decode.remove(model)
    with bypass.bypassed(model, bypass.sublayers_of(model)):
        assert_all_close(got, passes(model, [9, 1, 3]))


@pytest.mark.usefixtures("small_weights_too")
@pytest.mark.parametrize("has_original", [False, True])
def test_programs_of_levels_alternate(has_original: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts at the lowest level, without a sublayer or with all, and checks at the whole: each by a program."""
    model = nested_model("llama", (4,), original=torch.bfloat16) if has_original else nested_model("llama")
    model = model.bfloat16()
    results, made = list[list[Tensor]](), programs_made(monkeypatch)
    for is_installed in (False, True):
        if is_installed:
            decode.install(model)
        cache: Any = DynamicCache(config=model.config)
        model(tokens(1, 9), past_key_values=cache)
        logits = list[Tensor]()
        for number in range(4):
            with at_level(model, 4), bypass.bypassed(model, SETS[number % 2]):
                logits += [model(tokens(1, 1, 10 * number + i), past_key_values=cache).logits for i in range(3)]
            cache.crop(-3)
            logits.append(model(tokens(1, 4, number), past_key_values=cache).logits)
            cache.crop(-number)
        results.append(logits)
    assert_all_close(results[1], results[0], 0.05)
    running = step_of(model).running
    assert len(made) == len(running)
    assert {key.passed for key in running if set(key.levels) == {4}} == {SETS[0], SETS[1]}


def test_no_buffers_where_there_is_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = ready()
    decode.install(model)
    made = list[Any]()
    monkeypatch.setattr(decode, "Held", made.append)
    monkeypatch.setattr(programs, "LEAST_COMPILED", 2)
    passes(model, [9, 1, 3, 1])
    assert not made and not step_of(model).running
