"""Rows of a batch with every codec: selected, repeated, cropped, padded at the left; and both ways to read them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from compress.kv import attention
from compress.kv.layer import CodedLayer, KVCache
from compress.kv.settings import KINDS
from helpers.kv_cases import CASES, HEADS, POLICY, QUERIES, WIDTH, Case, normal

BATCH, TOKENS, FIRST = 3, 300, 200
KEYS, VALUES = (normal(BATCH, HEADS, TOKENS, WIDTH, seed=i) for i in (1, 2))
ASKED = normal(BATCH, QUERIES, TOKENS, WIDTH, seed=0)
ROTATED = 2 * torch.arange(WIDTH // 2).repeat(2) / WIDTH

every_case = pytest.mark.parametrize("case", CASES, ids=str)


def turns(pads: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """cos and sin [B, n, WIDTH] of columns, counted from the first that is no padding."""
    places = (torch.arange(start, stop) - pads[:, None]).clamp(min=0)
    angle = places[..., None] * 10000.0**-ROTATED
    return angle.cos(), angle.sin()


def feed(cache: KVCache, rows: Tensor, start: int, stop: int, pads: Tensor | None = None) -> None:
    """Columns start..stop of these rows of the batch, in two chunks."""
    layer, none = cache.layers[0], torch.zeros(len(rows), dtype=torch.long)
    assert isinstance(layer, CodedLayer)
    for first, last in ((start, start + 90), (start + 90, stop)):
        layer.turns = turns(none if pads is None else pads, first, last)
        layer.update(KEYS[rows, :, first:last], VALUES[rows, :, first:last])
        layer.commit(ASKED[rows, :, first:last])


def read(cache: KVCache) -> list[Tensor]:
    return [cache.layers[0].stores[kind].read() for kind in KINDS]


def same(one: KVCache, other: KVCache) -> None:
    for a, b in zip(read(one), read(other), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    assert one.nbytes()[:-1] == other.nbytes()[:-1]


@every_case
@pytest.mark.parametrize("is_padded", [False, True])
def test_select_and_repeat(case: Case, is_padded: bool) -> None:
    rows, chosen = torch.arange(BATCH), torch.tensor([2, 0, 0, 1, 2, 2])
    pads = torch.tensor([0, 5, 30]) if is_padded else None
    made, again = case.cache("fused"), case.cache("fused")
    made.pads = pads
    feed(made, rows, 0, FIRST, pads)
    if is_padded:
        made.reorder_cache(torch.tensor([2, 0, 1]))
        made.reorder_cache(torch.tensor([1, 2, 0]))
    else:
        made.batch_repeat_interleave(2)
        made.batch_select_indices(torch.arange(0, 2 * BATCH, 2))
    made.batch_select_indices(chosen)
    own = None if pads is None else pads[chosen]
    feed(made, chosen, FIRST, TOKENS, own)
    again.pads = own
    feed(again, chosen, 0, FIRST, own)
    feed(again, chosen, FIRST, TOKENS, own)
    same(made, again)


@every_case
def test_what_stands_in_the_padding_does_not_matter(case: Case) -> None:
    rows, pads, found = torch.arange(BATCH), torch.tensor([0, 5, 30]), []
    for junk in (0.0, 1e4):
        cache = case.cache("fused")
        cache.pads = pads
        keep = [x.clone() for x in (KEYS, VALUES, ASKED)]
        try:
            for x in (KEYS, VALUES, ASKED):
                for row, count in enumerate(pads):
                    x[row, :, :count] = junk
            feed(cache, rows, 0, TOKENS, pads)
        finally:
            for x, own in zip((KEYS, VALUES, ASKED), keep, strict=True):
                x.copy_(own)
        found.append(read(cache))
    sink = POLICY["sink"]
    for (a, b), exact in zip(zip(*found, strict=True), (KEYS, VALUES), strict=True):
        for row, count in enumerate(pads):
            assert torch.equal(a[row, :, count:], b[row, :, count:])
            assert torch.equal(a[row, :, count : count + sink], exact[row, :, count : count + sink])


@every_case
@pytest.mark.parametrize("count", [7, 60, 150])
def test_crop(case: Case, count: int) -> None:
    """What stays reads as before, and what comes then is stored beside it."""
    rows = torch.arange(BATCH)
    made = case.cache("fused")
    feed(made, rows, 0, TOKENS)
    before = read(made)
    made.crop(-count)
    assert made.get_seq_length() == TOKENS - count
    assert len(made.rope) == (TOKENS - count if case.is_before_rope else 0)
    for one, other in zip(read(made), before, strict=True):
        torch.testing.assert_close(one, other[:, :, :-count], atol=1e-5, rtol=0)
    layer = made.layers[0]
    layer.turns = turns(torch.zeros(BATCH, dtype=torch.long), TOKENS - count, TOKENS)
    layer.update(KEYS[:, :, -count:], VALUES[:, :, -count:])
    layer.commit(ASKED[:, :, -count:])
    for one, exact in zip(read(made), (KEYS, VALUES), strict=True):
        assert torch.equal(one[:, :, -POLICY["residual_length"] :], exact[:, :, -POLICY["residual_length"] :])
    error = [(one - exact).square().mean() for one, exact in zip(read(made), (KEYS, VALUES), strict=True)]
    first = [(one - exact).square().mean() for one, exact in zip(before, (KEYS, VALUES), strict=True)]
    assert all(a < 1.5 * b + 1e-6 for a, b in zip(error, first, strict=True))


@every_case
def test_both_paths_in_bfloat16(case: Case) -> None:
    cache = case.cache("fused")
    layer, last = cache.layers[0], slice(TOKENS - 1, TOKENS)
    k, v, q = (x.bfloat16() for x in (KEYS, VALUES, ASKED))
    zeros = torch.zeros(BATCH, dtype=torch.long)
    for start, stop in ((0, FIRST), (FIRST, TOKENS - 1)):
        layer.turns = turns(zeros, start, stop)
        layer.update(k[:, :, start:stop], v[:, :, start:stop])
        layer.commit(q[:, :, start:stop])
    pair = zip(KINDS, (k, v), strict=True)
    keys, values = (layer.stores[kind].read(x[:, :, last]).repeat_interleave(2, 1).double() for kind, x in pair)
    expected = ((q[:, :, last].double() @ keys.mT / 4).softmax(-1) @ values).transpose(1, 2)
    layer.turns = turns(zeros, TOKENS - 1, TOKENS)
    handles = layer.update(k[:, :, last], v[:, :, last])
    module = SimpleNamespace(num_key_value_groups=QUERIES // HEADS, is_causal=True)
    found = attention.attention(module, q[:, :, last], *handles, None, scaling=0.25)[0]
    assert found.dtype == torch.bfloat16
    most = 1e-3 + 2.0**-8 * float(expected.abs().max())  # decoded keys and outputs are rounded to 2^-9
    torch.testing.assert_close(found.double(), expected, atol=most, rtol=0)
