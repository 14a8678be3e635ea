"""States of linear attention and Mamba as codes: the codec against float64, and caches of models of many families."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from compress.errors import CompressError, RecipeError
from compress.kv import generation
from compress.kv.cache import make_cache
from compress.kv.hooks import cache_argument
from compress.kv.layer import KVCache
from compress.kv.settings import cache_settings
from compress.kv.states import StateCodes
from compress.run import kv_cache
from helpers.pico import of_type

HEADS: dict[str, Any] = {"head_dim": 32, "num_key_value_heads": 2, "intermediate_size": 64}
DELTA = {f"linear_{key}": value for key, value in {"key_head_dim": 16, "value_head_dim": 24}.items()}
DELTA |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
STATE = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "falcon_h1": {**HEADS, **STATE},  # states and keys in each layer; changed in place at each token
    "jamba": {**HEADS, "attn_layer_offset": 1, "attn_layer_period": 2, "use_mamba_kernels": False, "num_experts": 2},
    "kimi_linear": {
        **MIXED,
        **{"intermediate_size": 64, "kv_lora_rank": 32, "q_lora_rank": None, "qk_rope_head_dim": 16},
        **{"qk_nope_head_dim": 16, "v_head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4},
        **{"num_experts_per_token": 2, "linear_head_dim": 16, "linear_num_heads": 4},
    },
    "mamba": {"state_size": 16},  # no attention at all, and a cache under another name
    "mamba2": {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 1, "expand": 2, "chunk_size": 16},
    "qwen3_next": {
        **{**HEADS, **DELTA, **MIXED},
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        **{"shared_expert_intermediate_size": 32},
    },
}
CHUNKED = ("falcon_h1", "kimi_linear", "mamba2", "qwen3_next")  # that read a prompt in chunks in transformers
_models: dict[str, PreTrainedModel] = {}


def model_of(name: str) -> PreTrainedModel:
    if name not in _models:
        torch.manual_seed(0)  # of parameters that transformers draws
        _models[name] = of_type(name, FAMILIES[name])
    return _models[name]


def prompt(rows: int = 3, count: int = 14) -> Tensor:
    return torch.randint(250, (rows, count), generator=torch.Generator().manual_seed(1))


def feed(model: PreTrainedModel, ids: Tensor, cache: Any, chunks: list[int]) -> Tensor:
    """Logits [B, tokens, vocabulary] of text that is read in chunks."""
    with torch.no_grad():
        parts = [model(x, use_cache=True, **{cache_argument(model): cache}).logits for x in ids.split(chunks, 1)]
    return torch.cat(parts, 1)


def coded(model: PreTrainedModel, ids: Tensor, chunks: list[int] | None = None) -> tuple[KVCache, Tensor]:
    cache = make_cache(model.config, {"states": 12})
    return cache, feed(model, ids, cache, chunks or [ids.shape[1] - 4, 1, 1, 1, 1])


def states_of(cache: KVCache) -> list[StateCodes]:
    return [state for layer in cache.layers for state in getattr(layer, "coded_states", {}).values()]


def error(x: Tensor, wanted: Tensor) -> float:
    return ((x.double() - wanted.double()).norm() / wanted.double().norm()).item()


def parts_of(cache: KVCache, rows: Tensor) -> list[Tensor]:
    """Rows of everything that the linear layers of a cache hold."""
    tensors = [x for state in states_of(cache) for x in state.parts().values()]
    tensors += [x for layer in cache.layers for x in getattr(layer, "conv_states", {}).values()]
    return [x[rows] for x in tensors]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) > 2 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (2, 9, 16), (1, 2, 4, 1)])
def test_codes_are_the_nearest_of_12_bits(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, shape[-2])[:, None]
    state = StateCodes(x)
    steps = x.double().abs().amax(-1, keepdim=True) / 127 / 16
    wanted = (x.double() / steps).round() * steps
    assert ((state.decode().double() - wanted).abs() <= 1e-3 * steps).all()
    assert ((StateCodes(x, 8).decode().double() - x.double()).abs() <= 8.01 * steps).all()
    assert state.nbytes == x.numel() + x[..., 0].numel() * (-(-shape[-1] // 2) + 4)
    again = StateCodes(state.decode())
    assert torch.equal(again.codes, state.codes) and torch.equal(again.parts()["residuals"], state.parts()["residuals"])


def test_numbers_that_are_none_and_zeros() -> None:
    x = torch.tensor([[[0.0, 0.0], [1.0, torch.nan], [torch.inf, 1.0], [-2.0, 1e-30]]])
    decoded = StateCodes(x).decode()[0]
    assert decoded[0].eq(0).all() and not decoded[1:3].isfinite().any() and decoded[3].tolist() == [-2.0, 0.0]
    assert StateCodes(x.bfloat16()).decode().dtype == torch.bfloat16


@pytest.mark.parametrize("decay", [0.9, 0.99, 0.999])
def test_errors_of_a_gated_delta_rule(decay: float) -> None:
    """12 bits have a third of bfloat16's error in the output at most, and int8 alone has more than bfloat16."""
    generator, size = torch.Generator().manual_seed(0), 64
    codings = {
        "exact": lambda x: x,
        "bf16": lambda x: x.bfloat16().double(),
        "int8": lambda x: StateCodes(x.float(), 8).decode().double(),
        "12": lambda x: StateCodes(x.float()).decode().double(),
    }
    states = {name: torch.zeros(1, 1, size, size, dtype=torch.float64) for name in codings}
    outputs: dict[str, list[Tensor]] = {name: [] for name in codings}
    for _ in range(250):
        key, query, value = torch.randn(3, size, dtype=torch.float64, generator=generator)
        key, beta = key / key.norm(), torch.rand(1, dtype=torch.float64, generator=generator)
        for name, coding in codings.items():
            state = states[name] * decay
            states[name] = coding(state + key[:, None] * (beta * (value - key @ state[0, 0])))
            outputs[name].append(query @ states[name][0, 0])
    errors = {name: error(torch.stack(outputs[name]), torch.stack(outputs["exact"])) for name in codings}
    assert errors["12"] <= errors["bf16"] / 3 and errors["int8"] > errors["bf16"]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_reads_text_through_coded_states(name: str) -> None:
    """Token by token against transformers' cache, where bfloat16 states have at least twice the error."""
    model, ids = model_of(name), prompt()
    cache, logits = coded(model, ids)
    exact = DynamicCache(config=model.config)
    wanted = feed(model, ids, exact, [10, 1, 1, 1, 1])
    assert 0 < error(logits, wanted) < 2e-3
    assert states_of(cache) and not hasattr(cache, "missing")
    nbytes = cache.nbytes()
    held = [x for layer in exact.layers for x in getattr(layer, "recurrent_states", {}).values()]
    assert 0 < nbytes.scales == sum(4 * x.numel() // x.shape[-1] for x in held)
    convolutions = [x for layer in cache.layers for x in getattr(layer, "conv_states", {}).values()]
    assert all(x.dtype == torch.float32 for x in convolutions)
    for state, whole in zip(states_of(cache), held, strict=True):
        assert error(state.decode(), whole) < 2e-3 and state.decode().dtype == whole.dtype


@pytest.mark.parametrize("name", FAMILIES)
def test_operations_on_the_batch_act_on_the_codes(name: str) -> None:
    model, ids = model_of(name), prompt()
    cache, _ = coded(model, ids)
    all_rows, index, repeated = torch.arange(3), torch.tensor([2, 0, 0]), torch.tensor([0, 0, 2, 2])
    before = parts_of(cache, index)
    cache.reorder_cache(index)
    assert same(parts_of(cache, all_rows), before)
    cache.batch_select_indices(torch.tensor([0, 2]))
    cache.batch_repeat_interleave(2)
    assert same(parts_of(cache, torch.arange(4)), [x[repeated] for x in before])
    rows = ids[index[repeated]]
    assert error(feed(model, rows[:, :1], cache, [1]), feed(model, rows[:, :1], coded(model, rows)[0], [1])) < 1e-3
    cache.reset()
    assert torch.equal(feed(model, ids, cache, [10, 1, 1, 1, 1]), coded(model, ids)[1])
    with pytest.raises(CompressError, match="cannot be offloaded"):
        next(layer for layer in cache.layers if hasattr(layer, "coded_states")).offload()


@pytest.mark.parametrize("name", FAMILIES)
def test_neither_batch_nor_chunks_matter(name: str) -> None:
    model, ids = model_of(name), prompt()
    _, logits = coded(model, ids)
    apart = torch.cat([coded(model, row)[1] for row in ids.split(1)])
    assert error(apart, logits) < 1e-3  # a sum in another order may round to another code
    if name in CHUNKED:
        assert error(coded(model, ids, [5, 1, 4, 1, 1, 1, 1])[1], logits) < 2e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_generation_is_that_of_states_as_they_are(name: str) -> None:
    model, ids = model_of(name), prompt()
    how = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    how |= {"return_dict_in_generate": True, "output_logits": True}
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
    generation.attach(model, {"states": 12})
    try:
        given = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        beams = {**how, "num_beams": 2, "output_logits": False, "return_dict_in_generate": False}
        assert model.generate(ids, attention_mask=torch.ones_like(ids), **beams).shape == (3, 18)
    finally:
        generation.detach(model)
    probabilities, others = (torch.stack(x.logits).double().log_softmax(-1) for x in (wanted, given))
    assert (probabilities.exp() * (probabilities - others)).sum(-1).mean() < 1e-5


def test_one_state_at_a_time_is_decoded() -> None:
    cache, _ = coded(model_of("mamba"), prompt())
    assert sum(state._lent is not None for state in states_of(cache)) == 1
    cache.nbytes()
    assert not any(state._lent is not None for state in states_of(cache))


def test_bytes_of_a_sequence_are_known_before_any_weight_is_read() -> None:
    model = model_of("qwen3_next")
    settings = cache_settings({"method": "kivi", "group_size": 16, "residual_length": 32, "states": 12})
    kv_cache.check(model.config, settings)
    size = kv_cache.bytes_at_context(model.config, settings, {}, torch.float32)
    state = states_of(coded(model, prompt(1))[0])[0]
    assert (size.states, size.exact_states) == (state.nbytes, 4 * state.codes.numel()) and size.bytes_per_token > 0
    assert kv_cache.left_exact(model.config, settings) == "the states of 1 of 2 layers are coded"
    alone = cache_settings({"states": 12})
    assert alone.plain()["states"] == 12 and cache_settings(alone.plain()) == alone
    said = kv_cache.left_exact(model_of("falcon_h1").config, alone)
    assert said == "the states of 2 of 2 layers are coded; the cache of 2 of 2 layers (2 of hybrid) stays as it is"
    assert kv_cache.bytes_at_context(model_of("mamba").config, alone, {}, torch.float32).bytes_per_token == 0


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(RecipeError, match="states must be one of 12 or null"):
        cache_settings({"states": 8})
    with pytest.raises(RecipeError, match="keys have no method"):
        cache_settings({"sink": 4})
    with pytest.raises(RecipeError, match="no layer of this model keeps the state of a recurrence; remove states"):
        kv_cache.check(of_type("llama", HEADS).config, cache_settings({"states": 12}))
    with pytest.raises(RecipeError, match="no layer of this model has the full attention that is coded"):
        kv_cache.check(model_of("mamba").config, cache_settings({"method": "kivi", "states": 12}))
