"""Attention of few queries over stored keys and values, beside the definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels import llvm
from compress.kernels.cpu import attention
from compress.kernels.cpu.attention import Manner, attend
from compress.kernels.cpu.attention_tables import PART, SHARES, HeadSizes, table

pytestmark = pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled here")

TYPES = (torch.bfloat16, torch.float16, torch.float32)


def expected(q: Tensor, keys: Tensor, values: Tensor, how: Manner) -> Tensor:
    """The definition, float64 [B, n, H, width]."""
    scale, softcap, window, starts, sinks = how
    q, keys, values = q.double(), keys.double(), values.double()
    batch, heads, new, _ = q.shape
    tokens = keys.shape[2]
    keys, values = (x.repeat_interleave(heads // x.shape[1], 1) for x in (keys, values))
    scores = q @ keys.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    here, there = torch.arange(tokens - new, tokens)[:, None], torch.arange(tokens)
    seen = (there <= here) & (there > here - (window or tokens))
    seen = seen[None] if starts is None else seen[None] & (there >= starts[:, None, None])
    scores = scores.masked_fill(~seen[:, None], -float("inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(batch, heads, new, 1)), -1)
    p = scores.softmax(-1)[..., :tokens]
    return (p.nan_to_num(0.0) @ values).transpose(1, 2)


def inputs(sizes: tuple[int, ...], dtype: torch.dtype, value_width: int | None = None) -> tuple[Tensor, ...]:
    """Queries, keys and values of (batch, query heads, heads, new, tokens, width), none of them contiguous."""
    batch, queries, heads, new, tokens, width = sizes
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(batch, new, queries, width, generator=generator).to(dtype).transpose(1, 2)
    keys = torch.randn(batch, heads, tokens + 3, width, generator=generator).to(dtype)[:, :, :tokens]
    values = torch.randn(batch, tokens, heads, value_width or width, generator=generator).to(dtype).transpose(1, 2)
    return q, keys, values


def relative(output: Tensor, reference: Tensor) -> float:
    return float((output.double() - reference).norm() / reference.norm())


CASES: list[tuple[tuple[int, ...], int | None, dict[str, Any]]] = [
    ((1, 9, 3, 1, 3 * PART - 5, 64), None, {}),
    ((2, 8, 2, 5, PART + 1, 80), None, {}),
    ((1, 4, 1, 16, 2 * PART, 256), None, {"window": 100}),
    ((2, 4, 4, 3, 7, 64), 128, {"softcap": 3.0}),
    ((2, 6, 1, 1, 2 * PART + 1, 96), 64, {"window": PART, "sinks": torch.linspace(-1, 4, 6)}),
    ((3, 4, 2, 7, PART, 32), None, {"starts": torch.tensor([0, PART - 2, 50]), "window": 90}),
]


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("dtype", TYPES)
def test_outputs_are_those_of_the_definition(dtype: torch.dtype, case: int) -> None:
    sizes, value_width, options = CASES[case]
    q, keys, values = inputs(sizes, dtype, value_width)
    how = Manner(0.3, **options)
    output = attend(q, keys, values, how)
    reference = expected(q, keys, values, how)
    assert output.dtype == dtype and output.shape == reference.shape
    rounding = relative(reference.to(dtype), reference)
    assert relative(output, reference) < (1.1 * rounding if dtype != torch.float32 else 40 * rounding)


def test_a_query_that_sees_nothing_gives_zeros() -> None:
    q, keys, values = inputs((2, 4, 2, 3, 9, 32), torch.float32)
    how = Manner(1.0, starts=torch.tensor([7, 9]))
    output = attend(q, keys, values, how)
    reference = expected(q, keys, values, how)
    assert torch.equal(output == 0, reference == 0) and not output[1].any() and output[0, 1:].all()


def test_nothing_but_what_is_seen_is_read() -> None:
    q, keys, values = inputs((1, 4, 2, 2, PART + 30, 32), torch.float32)
    how = Manner(1.0, window=PART, starts=torch.tensor([20]))
    output = attend(q, keys, values, how)
    for each in (keys, values):
        each[:, :, :20] = float("nan")
    assert torch.equal(attend(q, keys, values, how), output)


def test_what_is_not_a_number_stays_so() -> None:
    q, keys, values = inputs((1, 4, 2, 1, 40, 32), torch.bfloat16)
    keys[0, 1, 17] = float("nan")
    output = attend(q, keys, values, Manner(1.0))
    assert output[:, :, 2:].isnan().all() and not output[:, :, :2].isnan().any()


def test_sequences_and_threads_do_not_matter() -> None:
    q, keys, values = inputs((3, 6, 2, 2, 5 * PART + 9, 64), torch.bfloat16)
    whole = attend(q, keys, values, Manner(0.1))
    single = [attend(q[i : i + 1], keys[i : i + 1], values[i : i + 1], Manner(0.1)) for i in range(3)]
    assert torch.equal(torch.cat(single), whole)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(attend(q, keys, values, Manner(0.1)), whole)
    finally:
        torch.set_num_threads(threads)


def test_a_prepared_call_follows_the_state() -> None:
    q, keys, values = inputs((1, 4, 2, 1, 2 * PART + 40, 64), torch.bfloat16)
    heads = HeadSizes(4, 2, 64, 64, 0.2)
    state = table((0, 1, 1, 0))
    layer = (keys.data_ptr(), values.data_ptr(), *keys.stride()[:3], *values.stride()[:3], 0, 0)
    cache, out = table(layer), torch.empty(1, 1, 4, 64)
    space = torch.empty(attention.space_size(heads, 1, 1, keys.shape[2]))
    steps = attention.functions(heads, torch.bfloat16, torch.bfloat16, torch.float32)
    first = steps[0].signature.arguments(state, cache, q, space, first=0, last=SHARES, q_batch=0, q_head=64, q_token=0)
    second = steps[1].signature.arguments(state, cache, space, out, first=0, last=SHARES)
    for tokens in (1, PART, PART + 1, keys.shape[2]):
        state[0] = tokens
        steps[0](*first)
        steps[1](*second)
        reference = expected(q, keys[:, :, :tokens], values[:, :, :tokens], Manner(0.2))
        assert relative(out, reference) < 2e-6
