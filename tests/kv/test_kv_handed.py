"""The cache that is handed to a model is the one that it reads and writes, or the call ends with an error."""

from __future__ import annotations

from functools import cache as once
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from compress.errors import UnreadCacheError
from compress.evaluate import saved_cache
from compress.evaluate.reader import Candidate, Reader
from compress.kv import generation, hooks
from compress.kv.cache import make_cache
from compress.kv.layer import KVCache
from compress.kv.settings import cache_settings
from helpers import pico

ORIGINAL = 64  # positions of the short factors
FACTORS = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1 + i / 10 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": ORIGINAL,
}
LONG: dict[str, Any] = {
    "rope_parameters": FACTORS,
    "max_position_embeddings": 256,
    "original_max_position_embeddings": ORIGINAL,
    "num_key_value_heads": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3", {**LONG, "intermediate_size": 192}),
    "phimoe": (
        "phimoe",
        {
            **LONG,
            "rope_parameters": {**FACTORS, "short_mscale": 1.0, "long_mscale": 1.1},
            "intermediate_size": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
    ),
}
EXACT = {"method": "identity", "sink": 4, "residual_length": 8, "flush": 8}
TWO_BITS = {"method": "kivi", "bits": 2, "sink": 4, "residual_length": 8, "flush": 8, "group_size": 8}
HOW: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True},
    "chunks": {"prefill_chunk_size": 16},
    "drafts": {"prompt_lookup_num_tokens": 4},
}


@once
def plain_model(name: str) -> PreTrainedModel:
    model = pico.of_type(*MODELS[name])
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    yield (found := plain_model(request.param))
    generation.detach(found)
    hooks.detach(found)


def prompt(length: int, batch: int = 2) -> Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(0))


def generated(model: Any, ids: Tensor, mask: Tensor | None = None, **how: Any) -> Any:
    torch.manual_seed(1)
    settings = {"do_sample": False, "max_new_tokens": 30, "pad_token_id": 0, "return_dict_in_generate": True, **how}
    return model.generate(ids, attention_mask=torch.ones_like(ids) if mask is None else mask, **settings)


@pytest.mark.parametrize(
    ("length", "path", "how"),
    [
        *((length, path, "greedy") for length in (40, ORIGINAL, 100) for path in ("decode", "fused")),
        *((length, "fused", how) for length in (50, 100) for how in ("beams", "sampling", "chunks", "drafts")),
    ],
)
def test_a_model_that_drops_its_cache_fills_ours_again(model: Any, length: int, path: str, how: str) -> None:
    """Text that crosses the line while it is written, or starts behind it: the tokens of transformers' own cache."""
    ids = prompt(length, 1 if how == "drafts" else 2)
    mask = torch.ones_like(ids)
    if how != "drafts":
        mask[0, :7] = 0
    expected = generated(model, ids, mask, **HOW[how])
    generation.attach(model, EXACT, path=path)
    found = generated(model, ids, mask, **HOW[how])
    assert torch.equal(found.sequences, expected.sequences)
    assert isinstance(found.past_key_values, KVCache)
    assert found.past_key_values.get_seq_length() == found.sequences.shape[1] - 1
    generation.attach(model, TWO_BITS, path=path)
    coded = generated(model, ids, mask, **HOW[how]).past_key_values
    assert coded.layers[0].stores["keys"].coded > length - 32


def test_evicted_tokens_come_back_with_the_whole_text(model: Any) -> None:
    evict = {"method": "knorm", "keep": 0.5, "recent": 4}
    generation.attach(model, {**EXACT, "evict": evict})
    cache = generated(model, prompt(60), max_new_tokens=20).past_key_values
    assert isinstance(cache, KVCache) and cache.get_seq_length() == 79
    assert cache.layers[0].stored_tokens < 60


def test_scores_and_generation_read_the_same_cache(model: Any) -> None:
    """Behind the line all keys have the long factors, as in one pass over the whole text."""
    hooks.attach(model)
    ids, chunks = prompt(96), [(0, 40), (40, 56), (56, 72), (72, 96)]
    exact = torch.cat(list(Reader(model).through(ids, chunks)), 1)
    whole = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(exact[:, 56:], whole[:, 56:], atol=1e-4, rtol=1e-4)
    assert (exact[:, :56] - whole[:, :56]).abs().max() > 1e-3  # the short factors
    cache = Candidate("exact", cache_settings(EXACT), {}).cache(model.config)
    coded = torch.cat(list(Reader(model).through(ids, chunks, cache)), 1)
    torch.testing.assert_close(coded, exact, atol=1e-4, rtol=1e-4)
    assert cache.get_seq_length() == 96


def test_a_saved_prompt_that_crosses_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, and by what is written after it: the text that the model writes without any saved cache."""
    folder = tmp_path / "model"
    pico.save(pico.of_type(*MODELS["phi3"]), folder)
    text = "a saved prompt of some seventy characters, which is more than 64 ones"
    monkeypatch.setattr(saved_cache, "CHUNK_TOKENS", 48)
    for words in (text[:40], text):
        saved_cache.save(folder, words, tmp_path / "prompt.kv", "lossless")
        written = saved_cache.write_on(folder, tmp_path / "prompt.kv", "", 30)
        model, ids = plain_model("phi3"), pico.pico_tokenizer()(words, return_tensors="pt")["input_ids"]
        plain = generated(model, ids, eos_token_id=pico.EOS_ID).sequences[0]
        assert written == pico.pico_tokenizer().decode(plain[ids.shape[1] :], skip_special_tokens=True)
        (tmp_path / "prompt.kv").unlink()


def test_a_part_of_the_text_is_not_taken_for_the_whole(model: Any) -> None:
    """With chunks longer than the line transformers itself would go on without the first tokens."""
    hooks.attach(model)
    cache = make_cache(model.config, EXACT)
    model(input_ids=prompt(30, 1), past_key_values=cache, use_cache=True)
    with pytest.raises(UnreadCacheError, match="tokens of the text are not among the inputs"):
        generated(model, prompt(130, 1), past_key_values=cache, prefill_chunk_size=80)


class _Replaces:
    """A forward pass that goes on with a cache of its own."""

    def __init__(self, inner: Any, is_hidden: bool) -> None:
        self.inner, self.is_hidden = inner, is_hidden

    def __call__(self, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        output = self.inner(*args, past_key_values=DynamicCache(), **kwargs)
        if self.is_hidden:
            output.past_key_values = past_key_values
        return output


@pytest.mark.parametrize(("is_hidden", "what"), [(False, "returns a DynamicCache"), (True, "put 0 into its cache")])
def test_a_forward_pass_that_replaces_its_cache(is_hidden: bool, what: str) -> None:
    model: Any = pico.build("llama")
    generation.attach(model, EXACT)
    model.kv_cache.tried = True
    model.forward = _Replaces(model.forward, is_hidden)
    with pytest.raises(UnreadCacheError, match=f"LlamaForCausalLM .*{what}.*remove kv_cache"):
        generated(model, prompt(20))
    with pytest.raises(UnreadCacheError, match=what):
        next(Reader(model).through(prompt(20), [(0, 20)], make_cache(model.config, EXACT)))


def test_inputs_that_are_prepared_with_another_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = pico.build("llama")
    inner = type(model).prepare_inputs_for_generation

    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        return {**inner(self, *args, **kwargs), "past_key_values": DynamicCache()}

    monkeypatch.setattr(type(model), "prepare_inputs_for_generation", prepare)
    generation.attach(model, EXACT)
    with pytest.raises(UnreadCacheError, match="prepares a forward pass with another cache"):
        generated(model, prompt(20))


def test_a_generate_that_makes_its_own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """No forward pass ever sees ours, so that only the end can tell."""
    model: Any = pico.build("llama")

    def generate(self: Any, ids: Tensor, **kwargs: Any) -> Tensor:
        kwargs.pop("past_key_values", None)
        self._prepare_cache_for_generation(self.generation_config, {}, None, 1, 30)
        return torch.cat((ids, self(input_ids=ids).logits[:, -1:].argmax(-1)), 1)

    monkeypatch.setattr(type(model), "generate", generate)
    generation.attach(model, EXACT)
    with pytest.raises(UnreadCacheError, match="generated a text of 21 tokens, of which its cache has seen 0"):
        model.generate(prompt(20))


def test_detached_models_are_as_they_were(model: Any) -> None:
    before = set(vars(model))
    generation.attach(model, EXACT)
    generated(model, prompt(70), max_new_tokens=2)
    generation.detach(model)
    assert set(vars(model)) == before
