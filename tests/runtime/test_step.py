"""Decode steps by programs: the tokens of ordinary passes, and ordinary passes for whatever is unusual."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from compress.formats import columns
from compress.kernels import llvm
from compress.runtime.linear import PackedLinear
from compress.runtime.linears import sparse_for
from compress.runtime.step import decode
from compress.types import IN_THRESHOLD, InputSparsity, PackedWeight, Stored, WeightTransforms
from helpers.cpu_weights import int_weight, trellis_weight
from helpers.decoding import assert_close, ready, step_of, tokens
from helpers.pico import build
from helpers.stored import random_parts

pytestmark = pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled here")
READ = ("llama", "llama_tied", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "mixtral", "qwen3_moe")
LEFT = ("gpt_neox", "opt")  # to transformers


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def generated(model: Any, ids: Tensor, mask: Tensor | None = None, **settings: Any) -> tuple[Tensor, Tensor]:
    """Return the text and the logits of its new tokens."""
    mask = torch.ones_like(ids) if mask is None else mask
    settings = {"max_new_tokens": 12, "do_sample": False, **settings}
    output = model.generate(ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **settings)
    return output.sequences, torch.stack(output.logits)


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("rows", [1, 3])
def test_families_decode_by_a_program(name: str, rows: int) -> None:
    model, ids = ready(name), tokens(rows, 26)
    mask = torch.ones_like(ids)
    mask[0, : 5 * (rows > 1)] = 0  # padding at the left; a window of 32 is passed by 12 new tokens
    expected = generated(model, ids, mask)
    decode.install(model)
    got = generated(model, ids, mask)
    assert list(step_of(model).running) == [decode.ProgramKey(rows, 1, 1)]
    assert torch.equal(got[0], expected[0])
    assert_close(got[1], expected[1])


@pytest.mark.parametrize("name", LEFT)
def test_other_families_stay_with_transformers(name: str) -> None:
    model, ids = ready(name), tokens(1, 9)
    expected = generated(model, ids)
    decode.install(model)
    got = generated(model, ids)
    assert torch.equal(got[1], expected[1])
    assert all(not step.running for step in (vars(each).get(decode.MARK) for each in model.modules()) if step)


def passes(model: Any, actions: list[Any], seed: int = 3) -> Tensor:
    """Return the logits of passes with one cache: an integer reads so many tokens, a function changes the cache."""
    cache, logits = DynamicCache(config=model.config), list[Tensor]()
    with torch.no_grad():
        for number, action in enumerate(actions):
            if isinstance(action, int):
                ids = tokens(2, action, seed + number)
                logits.append(model(ids, past_key_values=cache, use_cache=True).logits[:, -1])
            else:
                action(cache)
    return torch.stack(logits)


def reorder(cache: Any) -> None:
    cache.reorder_cache(torch.tensor([1, 0]))


CHANGES: dict[str, list[Any]] = {
    "longer passes between": [9, 1, 1, 5, 1, 1, 1],
    "cropped": [9, 1, 1, lambda cache: cache.crop(-1), 1, 1],
    "reordered": [9, 1, 1, reorder, 1, 1],
    "rows selected twice": [9, 1, lambda cache: cache.batch_select_indices(torch.tensor([0, 0])), 1, 1],
    "long": [60, *[1] * 80],
}


@pytest.mark.parametrize("case", CHANGES)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_cache_that_others_change(case: str, name: str) -> None:
    model = ready(name)
    if case == "cropped" and name == "gemma2":
        pytest.skip("its windows are not cropped")
    expected = passes(model, CHANGES[case])
    decode.install(model)
    assert_close(passes(model, CHANGES[case]), expected)
    assert step_of(model).running


def test_two_caches_by_turns_and_one_that_is_copied() -> None:
    model, results = ready(), []
    for is_installed in (False, True):
        if is_installed:
            decode.install(model)
        caches, logits = [DynamicCache(config=model.config) for _ in range(2)], list[Tensor]()
        with torch.no_grad():
            for number, count in enumerate([7, 1, 1, 1]):
                for i, cache in enumerate(caches):
                    model(tokens(1, count, 2 * number + i), past_key_values=cache)
            caches.append(copy.deepcopy(caches[0]))
            for number in range(3):
                for i, cache in enumerate(caches):
                    logits.append(model(tokens(1, 1, 50 + 3 * number + i), past_key_values=cache).logits)
        results.append(torch.stack(logits))
    assert_close(results[1], results[0])


def test_what_a_cache_has_shown_is_never_written_again() -> None:
    model = ready()
    decode.install(model)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for number, count in enumerate([9, 1, 1, 1]):
            model(tokens(1, count, number), past_key_values=cache)
        layer: Any = cache.layers[0]
        shown, before = layer.keys, layer.keys.clone()
        cache.crop(-2)
        for number in range(3):
            model(tokens(1, 1, 20 + number), past_key_values=cache)
    assert torch.equal(shown, before) and layer.keys.shape[2] == 13


SETTINGS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "hidden states": {"output_hidden_states": True},
    "attentions": {"output_attentions": True},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_other_ways_to_generate(case: str) -> None:
    model, ids = ready(), tokens(1, 9)
    if case == "attentions":
        model.set_attn_implementation("eager")
    expected = generated(model, ids, **SETTINGS[case])
    decode.install(model)
    got = generated(model, ids, **SETTINGS[case])
    assert torch.equal(got[0], expected[0])
    assert_close(got[1], expected[1])


def test_sampling_takes_the_same_tokens() -> None:
    model, ids, texts = ready(), tokens(4, 9), list[Tensor]()
    for is_installed in (False, True):
        if is_installed:
            decode.install(model)
        torch.manual_seed(5)
        texts.append(generated(model, ids, do_sample=True, temperature=0.7)[0])
    assert torch.equal(texts[0], texts[1]) and step_of(model).running


def add_hook(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * 2)


def replace_forward(model: Any) -> None:
    inner = model.model.layers[0].mlp
    inner.forward = torch.zeros_like


def replace_module(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.Tanh()


def change_weight(model: Any) -> None:
    layer = model.model.layers[0].self_attn.v_proj
    layer.weight = nn.Parameter(layer.weight.detach() * 2)


def move_weight(model: Any) -> None:
    model.model.norm.weight.data = model.model.norm.weight.data * 3


def change_in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(0.5)


MODELS: dict[str, Callable[[Any], None]] = {
    each.__name__: each
    for each in (add_hook, replace_forward, replace_module, change_weight, move_weight, change_in_place)
}


@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_is_changed_between_passes(case: str) -> None:
    model, ids = ready(), tokens(2, 9)
    decode.install(model)
    generated(model, ids)
    assert step_of(model).running
    MODELS[case](model)
    got = generated(model, ids)
    decode.remove(model)
    expected = generated(model, ids)
    assert torch.equal(got[0], expected[0])
    assert_close(got[1], expected[1])


def test_types_that_follow_the_model() -> None:
    model, ids = ready(), tokens(2, 9)
    decode.install(model)
    generated(model, ids)
    model.bfloat16()
    got = generated(model, ids)
    assert step_of(model).running
    decode.remove(model)
    assert_close(got[1][0], generated(model, ids)[1][0], 0.05)


def test_gradients_and_training_are_left_alone() -> None:
    model = ready()
    decode.install(model)
    cache = DynamicCache(config=model.config)
    model(tokens(1, 5), past_key_values=cache)
    loss = model(tokens(1, 1), past_key_values=cache).logits.sum()
    loss.backward()
    assert not step_of(model).running
    assert cast_norm(model).grad is not None


def cast_norm(model: Any) -> nn.Parameter:
    weight: nn.Parameter = model.model.norm.weight
    return weight


def test_copies_begin_anew_and_nothing_is_kept_alive() -> None:
    model, ids = ready(), tokens(1, 9)
    decode.install(model)
    expected = generated(model, ids)
    copied = copy.deepcopy(model)
    assert not step_of(copied).running
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1.01)
    assert torch.equal(generated(model, ids)[1], expected[1])
    decode.remove(model)
    plain = copy.deepcopy(copied)
    decode.remove(plain)
    assert_close(generated(copied, ids)[1], generated(plain, ids)[1])
    buffer = io.BytesIO()
    torch.save(copied, buffer)
    buffer.seek(0)
    alive = weakref.ref(copied)
    del copied
    gc.collect()
    assert alive() is None


def int_codes(shape: tuple[int, int]) -> PackedWeight:
    return int_weight(shape, 4, 32, False)


def turned_trellis(shape: tuple[int, int]) -> PackedWeight:
    """Return trellis codes between two transforms."""
    plain = trellis_weight(shape, 4, 12, 32)
    ops = WeightTransforms(("signs", "hadamard"), ("hadamard", "signs"))
    stored = dataclasses.replace(plain.stored, ops=ops)
    return PackedWeight(stored, random_parts(stored, shape), shape)


def packed(name: str = "llama", weight_of: Callable[[tuple[int, int]], PackedWeight] = int_codes) -> PreTrainedModel:
    """Return a model whose linears in blocks are packed with random codes."""
    model: Any = build(name, {"hidden_size": 64, "intermediate_size": 128}).bfloat16()
    config: Any = model.generation_config
    config.eos_token_id, config.pad_token_id = None, 0
    for path, linear in list(model.model.layers.named_modules()):
        if isinstance(linear, nn.Linear):
            weight = weight_of(tuple(linear.weight.shape))
            parent, _, child = path.rpartition(".")
            bias = linear.bias
            layer = PackedLinear.from_packed(weight, bias)
            setattr(model.model.layers.get_submodule(parent), child, layer)
    return model


@pytest.mark.usefixtures("small_weights_too")
@pytest.mark.parametrize("weight_of", [int_codes, turned_trellis])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma"])
def test_packed_linears(name: str, weight_of: Callable[[tuple[int, int]], PackedWeight]) -> None:
    model, ids = packed(name, weight_of), tokens(3, 9)
    expected = generated(model, ids)
    decode.install(model)
    got = generated(model, ids)
    (running,) = step_of(model).running.values()
    assert len(running.steps.parts) == 1  # one program, no module between
    assert_close(got[1][:2], expected[1][:2], 0.05)
    torch.set_num_threads(2)
    assert torch.equal(generated(model, ids)[1], got[1])


@pytest.mark.usefixtures("small_weights_too")
def test_a_packed_layer_that_moves_its_tensors() -> None:
    model, ids = packed(), tokens(1, 9)
    decode.install(model)
    expected = generated(model, ids)
    model._apply(lambda tensor: tensor.clone())
    gc.collect()
    assert torch.equal(generated(model, ids)[1], expected[1])
    assert step_of(model).running


def sparse_columns(shape: tuple[int, int]) -> PackedWeight:
    """Return 4-bit codes by columns, whose inputs go unread where they are below half of a standard deviation."""
    plain = columns.Params(4, 32, dtype="float16")
    stored = Stored("columns", plain, sparsity=InputSparsity(0.4))
    return PackedWeight(stored, {**random_parts(stored, shape), IN_THRESHOLD: torch.full((shape[1],), 0.5)}, shape)


@pytest.mark.usefixtures("small_weights_too")
def test_small_inputs_go_unread_in_programs() -> None:
    model, ids = packed(weight_of=sparse_columns), tokens(1, 9)
    expected = generated(model, ids)
    decode.install(model)
    got = generated(model, ids)
    (running,) = step_of(model).running.values()
    assert len(running.steps.parts) == 1
    assert_close(got[1], expected[1], 0.05)
    with sparse_for(model, None):
        whole = generated(model, ids)
        assert not step_of(model).running  # no kernel of columns in a program reads all of them
    assert not torch.equal(whole[1], got[1])
    assert torch.equal(generated(model, ids)[1], got[1])
    assert step_of(model).running
