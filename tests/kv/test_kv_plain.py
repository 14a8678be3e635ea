"""Compiled attention of few tokens over transformers' own caches, beside its sdpa."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from compress.kernels import llvm
from compress.kernels.cpu import attention as compiled
from compress.kv import plain
from compress.kv.generation import attach

pytestmark = pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled here")

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def gemma() -> Any:
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, sliding_window=7, layer_types=kinds)).eval()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many queries each compiled call had."""
    counts: list[int] = []
    attend = compiled.attend

    def count(q: Tensor, *rest: Any) -> Tensor:
        counts.append(q.shape[2])
        return attend(q, *rest)

    monkeypatch.setattr(compiled, "attend", count)
    yield counts


IDS = torch.arange(2 * 40).view(2, 40) * 37 % 97


def logits(model: Any, mask: Tensor | None, steps: tuple[int, ...], cache: Any = None) -> Tensor:
    """Of all tokens of IDS, read in pieces."""
    cache, outputs, start = cache or DynamicCache(config=model.config), [], 0
    with torch.no_grad():
        for count in steps:
            end = start + count
            given = None if mask is None else mask[:, :end]
            ids = IDS[:, start:end]
            outputs.append(model(input_ids=ids, attention_mask=given, past_key_values=cache, use_cache=True).logits)
            start = end
    return torch.cat(outputs, 1)


def padded() -> Tensor:
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :9] = 0
    return mask


@pytest.mark.parametrize("make", [llama, gemma])
@pytest.mark.parametrize("mask", [None, padded()], ids=["whole", "padded"])
def test_steps_are_those_of_sdpa(make: Callable[[], Any], mask: Tensor | None, calls: list[int]) -> None:
    model, steps = make(), (20, 1, 1, 5, 3, 10)
    reference = logits(model, mask, steps)
    plain.attach(model)
    output = logits(model, mask, steps)
    assert calls == [count for count in steps[1:] for _ in range(2)]
    seen = slice(None) if mask is None else mask.bool()
    assert (output - reference)[seen].norm() < 1e-5 * reference[seen].norm()
    assert model.config._attn_implementation == "sdpa"
    plain.detach(model)
    assert torch.equal(logits(model, mask, steps), reference) and len(calls) == 10


def test_a_static_cache_is_read_as_far_as_it_is_filled(calls: list[int]) -> None:
    model, steps = llama(), (20, 1, 4, 15)
    reference = logits(model, None, steps)
    plain.attach(model)
    output = logits(model, None, steps, StaticCache(config=model.config, max_cache_len=64))
    assert (output - reference).norm() < 1e-5 * reference.norm() and calls == [1, 1, 4, 4, 15, 15]


def test_generate_writes_the_same(calls: list[int]) -> None:
    model = llama()
    options = {"attention_mask": padded()[:, :20], "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    reference = model.generate(IDS[:, :20], **options)
    plain.attach(model)
    assert torch.equal(model.generate(IDS[:, :20], **options), reference) and calls


def test_whatever_is_unusual_goes_to_sdpa(calls: list[int]) -> None:
    model = llama()
    plain.attach(model)
    ids = IDS[:, :8]
    model(ids).logits.sum().backward()  # a gradient
    model.zero_grad()
    with torch.no_grad():
        model(IDS[:, :17])  # more tokens
        with_gap = torch.ones(2, 8, dtype=torch.long)
        with_gap[:, 3] = 0
        reference = model.set_attn_implementation("eager") or model(ids, attention_mask=with_gap).logits
        model.set_attn_implementation("sdpa")
        assert (model(ids, attention_mask=with_gap).logits - reference).norm() < 1e-5 * reference.norm()
        allowed = torch.ones(2, 1, 8, 8, dtype=torch.bool)  # every token sees all
        model(ids, attention_mask=allowed)
        additive = torch.zeros(2, 1, 8, 8)
        model(ids, attention_mask=additive)
    assert not calls
    with torch.no_grad():
        model(ids)
    assert calls == [8, 8]


def test_a_pass_that_fails_leaves_the_model_as_it_was() -> None:
    model = llama()
    plain.attach(model)
    with pytest.raises(ValueError, match="input_ids"):
        model(input_ids=IDS[:, :3], inputs_embeds=torch.zeros(2, 3, 64))
    assert model.config._attn_implementation == "sdpa"


def test_a_compressed_cache_keeps_its_own_attention(calls: list[int]) -> None:
    model = llama()
    plain.attach(model)
    attach(model, {"method": "kivi", "bits": 4})
    model.generate(IDS[:1, :20], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert not calls and model.config._attn_implementation == "sdpa"


def test_masks_are_read() -> None:
    mask = torch.ones(3, 12, dtype=torch.bool).tril(9)[None].repeat(2, 1, 1)
    assert plain.read_mask(mask) == (12, 0, None)
    mask[1, :, :4] = False
    sight = plain.read_mask(mask)
    assert sight is not None and sight.starts is not None and sight.starts.tolist() == [0, 4]
    windowed = mask & torch.ones(3, 12, dtype=torch.bool).triu(6)
    sight = plain.read_mask(windowed)
    assert sight is not None and sight[:2] == (12, 4) and sight.starts is not None
    for change in ((0, 1, 11, True), (0, 2, 6, False), (0, 1, 0, False)):
        other = mask.clone()
        other[change[:3]] = change[3]
        assert plain.read_mask(other) is None
    assert plain.read_mask(torch.zeros(1, 1, 5, dtype=torch.bool)) is None


def test_bfloat16_is_no_farther_from_float64_than_sdpa() -> None:
    module: Any = nn.Module()
    module.num_key_value_groups = 3
    generator = torch.Generator().manual_seed(0)
    q, key, value = (torch.randn(2, h, n, 64, generator=generator) for h, n in ((9, 1), (3, 700), (3, 700)))
    rounded = [x.bfloat16() for x in (2 * q, key, value)]
    ours, theirs = (
        attend(module, rounded[0], rounded[1], rounded[2], None)[0].double()
        for attend in (plain.attention, sdpa_attention_forward)
    )
    exact = sdpa_attention_forward(module, rounded[0].double(), rounded[1].double(), rounded[2].double(), None)[0]
    assert (ours - exact).norm() <= 1.01 * (theirs - exact).norm()
