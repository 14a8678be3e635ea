"""Programs of decode steps meet what is unusual: errors, other caches, modules that are replaced, other threads."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from compress.kernels import llvm
from compress.runtime.step import decode
from compress.runtime.step.structure import norm_kind
from helpers.decoding import assert_close, ready, step_of, tokens
from helpers.pico import build

pytestmark = pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled here")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


def begun(model: Any, prompt: int = 9) -> Any:
    """Return a cache after two tokens that were decoded."""
    cache = DynamicCache(config=model.config)
    for seed, count in enumerate((prompt, 1, 1)):
        model(tokens(1, count, seed), past_key_values=cache)
    return cache


def continued(model: Any, cache: Any) -> Tensor:
    return torch.stack([model(tokens(1, 1, seed), past_key_values=cache).logits[:, :, :250] for seed in range(10, 13)])


def after_an_error(model: Any) -> Tensor:
    cache = begun(model)
    with pytest.raises(IndexError):
        model(torch.tensor([[100_000]]), past_key_values=cache)
    return continued(model, cache)


def with_another_norm(model: Any) -> Tensor:
    cache = begun(model)
    norm = copy.deepcopy(model.model.norm)
    norm.weight *= 3
    model.model.norm = norm
    return continued(model, cache)


def with_other_embeddings(model: Any) -> Tensor:
    cache = begun(model)
    table = nn.Embedding(300, 64)
    table.weight.copy_(torch.randn(300, 64, generator=torch.Generator().manual_seed(2)))
    model.model.embed_tokens = table
    return continued(model, cache)


def with_a_cache_of_another_type(model: Any) -> Tensor:
    begun(model)
    cache = begun(model)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.bfloat16(), layer.values.bfloat16()
    return continued(model, cache)


def with_a_cache_of_fewer_heads(model: Any) -> Tensor:
    begun(model)
    cache = begun(model)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :1], layer.values[:, :1]
    with pytest.raises(RuntimeError):
        model(tokens(1, 1), past_key_values=cache)
    return torch.ones(1)


def as_a_tuple(model: Any) -> Tensor:
    result = model.model(input_ids=tokens(1, 1), past_key_values=begun(model), return_dict=False)
    assert isinstance(result, tuple)
    return result[0]


def with_embeddings_given(model: Any) -> Tensor:
    cache = begun(model)
    return model(inputs_embeds=model.model.embed_tokens(tokens(1, 1, 5)), past_key_values=cache).logits


def with_positions_given(model: Any) -> Tensor:
    cache = begun(model)
    return model(tokens(1, 1, 5), position_ids=torch.tensor([[77]]), past_key_values=cache).logits


def with_a_hole_in_the_mask(model: Any) -> Tensor:
    cache, mask = begun(model), torch.ones(1, 12, dtype=torch.int64)
    mask[0, 4] = 0
    return model(tokens(1, 1, 5), attention_mask=mask, past_key_values=cache).logits


def with_infinite_activations(model: Any) -> Tensor:
    results = []
    for value in (float("nan"), float("inf")):
        embedded = model.model.embed_tokens(tokens(1, 1, 5)).clone()
        embedded[0, 0, 3] = value
        results.append(model(inputs_embeds=embedded, past_key_values=begun(model)).logits.isnan().float())
    return torch.stack(results)


def with_keys_that_are_no_numbers(model: Any) -> Tensor:
    cache = begun(model)
    layer: Any = cache.layers[0]
    layer.keys = layer.keys.clone()
    layer.keys[0, 0, 3, 2] = float("nan")
    return model(tokens(1, 1, 5), past_key_values=cache).logits.isnan().float()


CASES: dict[str, Callable[[Any], Tensor]] = {
    each.__name__: each
    for each in (
        after_an_error,
        with_another_norm,
        with_other_embeddings,
        with_a_cache_of_another_type,
        with_a_cache_of_fewer_heads,
        as_a_tuple,
        with_embeddings_given,
        with_positions_given,
        with_a_hole_in_the_mask,
        with_infinite_activations,
        with_keys_that_are_no_numbers,
    )
}


@pytest.mark.parametrize("case", CASES)
def test_unusual_passes_give_what_they_give_without_programs(case: str) -> None:
    expected, model = CASES[case](ready()), ready()
    decode.install(model)
    assert_close(CASES[case](model), expected)


def test_buffers_die_with_their_cache() -> None:
    model = ready()
    decode.install(model)
    cache = begun(model)
    (held,) = map(weakref.ref, step_of(model)._held.values())
    assert held() is not None
    del cache
    gc.collect()
    assert held() is None and step_of(model).running


def test_positions_that_change_frequencies_make_no_new_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rotary module that replaces its own buffers with each token is called, not read."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    results, made, make = [], list[Any](), decode.StepProgram

    def count(*args: Any) -> Any:
        made.append(make(*args))
        return made[-1]

    monkeypatch.setattr(decode, "StepProgram", count)
    for is_installed in (False, True):
        model = build("llama", {"rope_parameters": rope, "max_position_embeddings": 16})
        if is_installed:
            decode.install(model)
        results.append(continued(model, begun(model, 14)))
    assert_close(results[1], results[0])
    assert len(made) == 1


def test_chunks_that_attention_is_not_told_are_left_to_transformers() -> None:
    model = ready()
    config: Any = model.config
    config.layer_types = ["chunked_attention", "full_attention"]
    decode.install(model)
    cache = DynamicCache()
    for count in (5, 1, 1):
        model.model(input_ids=tokens(1, count), past_key_values=cache)
    assert "chunked_attention" in step_of(model).refused


def test_another_thread_reads_as_before_while_blocks_are_read() -> None:
    model, text, seen = ready(), tokens(1, 40), list[Tensor]()
    expected = model(text).logits
    layer: Any = model.model.layers[0]
    decode.install(model)

    def other() -> None:
        with torch.no_grad():
            seen.append(model(text).logits)

    def run_other() -> None:
        """While the model, or a twin of a module, is in the middle of a pass of the first thread."""
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    activation = type(layer.mlp.act_fn)
    original = activation.forward

    def forward(self: nn.Module, x: Tensor) -> Any:
        run_other()
        return original(self, x)

    activation.forward = forward
    try:
        begun(model)
    finally:
        activation.forward = original
    assert len(seen) > 8 and all(torch.equal(each, expected) for each in seen)
    assert step_of(model).running


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm])
def test_large_weights_do_not_hide_whether_one_is_added(kind: Any, dtype: torch.dtype) -> None:
    norm = kind(64, eps=1e-6)
    norm.weight.copy_(60 + torch.rand(64, generator=torch.Generator().manual_seed(0)))
    assert norm_kind(norm.to(dtype), 64, dtype).offset == (kind is GemmaRMSNorm)
