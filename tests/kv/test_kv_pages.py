"""Packed pages: exact bytes, errors against float64, and independence of batches and of the order of writes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress.kv import pages
from compress.kv.codecs.lloyd import levels
from compress.kv.pages import PageCodes, Pages, Turn

GAUSSIAN = {2: 0.1175, 3: 0.03455, 4: 0.0095}  # relative squared error of N(0, 1) at the best levels
ALL_BITS = (1, 2, 3, 4, 5, 6, 7, 8)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed_slowly(numbers: list[int], bits: int) -> list[int]:
    """The bytes of one token, bit by bit."""
    planes, low = [], 0
    for width in [width for width in (8, 4, 2, 1) if bits & width]:
        stride = len(numbers) * width // 8
        plane = [0] * stride
        for channel, number in enumerate(numbers):
            plane[channel % stride] |= (number >> low) % 2**width << width * (channel // stride)
        planes += plane
        low += width
    return planes


@pytest.mark.parametrize("bits", ALL_BITS)
def test_packs_bits_where_the_layout_says(bits: int) -> None:
    layout = PageCodes(bits, 48, 48)
    numbers = torch.randint(0, 2**bits, (3, 2, 48), generator=torch.Generator().manual_seed(1))
    codes = pages.pack(numbers, layout)
    assert codes.shape == (3, 2, layout.code_bytes) and codes.dtype == torch.uint8
    assert codes[1, 1].tolist() == packed_slowly(numbers[1, 1].tolist(), bits)
    assert torch.equal(pages.unpack(codes, layout).long(), numbers)


def test_the_layout_of_the_specification() -> None:
    numbers = torch.arange(16) % 8
    three = pages.pack(numbers, PageCodes(3, 16, 16)).tolist()
    low, high = [n % 4 for n in numbers.tolist()], [n // 4 for n in numbers.tolist()]
    assert three[:4] == [low[j] | low[j + 4] << 2 | low[j + 8] << 4 | low[j + 12] << 6 for j in range(4)]
    assert three[4:] == [sum(high[j + 2 * k] << k for k in range(8)) for j in range(2)]
    four = pages.pack(torch.arange(16), PageCodes(4, 16, 16)).tolist()
    assert four == [j | (j + 8) << 4 for j in range(8)]


def test_bytes_of_a_token() -> None:
    assert PageCodes(4, 64, 64).nbytes == 32 + 4
    assert PageCodes(4, 64, 32).nbytes == 32 + 8
    assert PageCodes(3, 64, 64, True).nbytes == 24 + 2
    assert Pages(PageCodes(8, 64, 64), PageCodes(4, 64, 64), 16).token_bytes == 64 + 4 + 32 + 4
    assert hash(PageCodes(4, 64, 64)) == hash(PageCodes(4, 64, 64))


@pytest.mark.parametrize(("bits", "width", "group"), [(0, 64, 64), (9, 64, 64), (3, 20, 20), (4, 64, 48)])
def test_what_is_no_layout(bits: int, width: int, group: int) -> None:
    with pytest.raises(ValueError, match=r"bits|groups"):
        PageCodes(bits, width, group)


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("group", [16, 64])
def test_uniform_codes_are_the_nearest_multiples(bits: int, group: int) -> None:
    x, layout = 3 + 2 * normal(40, 2, 64), PageCodes(bits, 64, group)
    parts = pages.encode(x, layout)
    stored = parts.parameters.view(torch.float16).double()
    scale, least = (part.repeat_interleave(group, -1) for part in stored.chunk(2, -1))
    steps = ((x.double() - least) / scale).round().clamp(0, 2**bits - 1)
    expected = least + scale * steps
    got = pages.decode(*parts, layout)
    assert (got.double() - expected).abs().max() <= 1e-6 * expected.abs().max()
    assert bool(((x - got).abs() <= scale * 0.5 + 0.01).all())  # an end may lie outside by the rounding of float16


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_levels_have_the_error_of_the_best_ones(bits: int) -> None:
    layout, table = PageCodes(bits, 512, 512, True), levels(bits)
    x = normal(4000, 1, 512) * normal(4000, 1, 1, seed=1).exp()
    got = pages.decode(*pages.encode(x, layout, table), layout, table)
    error = (got - x).double().square().sum(-1) / x.double().square().sum(-1)
    assert abs(error.mean() / GAUSSIAN[bits] - 1) < 0.03


@pytest.mark.parametrize("levelled", [False, True])
def test_constant_zero_and_huge_vectors(levelled: bool) -> None:
    layout, table = PageCodes(4, 32, 32, levelled), levels(4)
    x = torch.stack((torch.zeros(32), torch.full((32,), 2.5), torch.full((32,), -1e6), 1e5 * normal(32)))
    got = pages.decode(*pages.encode(x, layout, table), layout, table)
    assert bool(got.isfinite().all())
    assert torch.equal(got[0], x[0])
    assert (got[1] - 2.5).abs().max() < (0.3 if levelled else 1e-3)


def test_reads_what_was_written_in_any_order() -> None:
    layout = Pages(PageCodes(8, 32, 32), PageCodes(3, 64, 64, True), 4)
    k, v, table = normal(11, 2, 32), normal(11, 2, 64, seed=1), levels(3)
    keys, values = pages.encode(k, layout.keys), pages.encode(v, layout.values, table)
    blocks = torch.tensor([5, 1, 3])
    slots = torch.tensor([4 * int(blocks[i // 4]) + i % 4 for i in range(11)])
    expected = None
    for order in (torch.arange(11), torch.randperm(11, generator=torch.Generator().manual_seed(2))):
        held = torch.full((7, 2, 4, layout.token_bytes), 77, dtype=torch.uint8)
        for part in order.split(3):
            padded = torch.cat((part, torch.tensor([0]))), torch.cat((slots[part], torch.tensor([-1])))
            cut_keys = pages.encode(k[padded[0]], layout.keys)
            cut_values = pages.encode(v[padded[0]], layout.values, table)
            layout.write(held, padded[1], cut_keys, cut_values)
        read_keys, read_values = layout.read(held, blocks, 11)
        for got, want in zip((*read_keys, *read_values), (*keys, *values), strict=True):
            assert torch.equal(got, want)
        assert expected is None or torch.equal(held, expected)
        expected = held
    assert expected is not None
    run = expected[1, 1].flatten()  # block 1 holds tokens 4 to 7
    assert run[: 4 * 32].tolist() == keys.codes[4:8, 1].flatten().tolist()
    assert run[4 * 32 : 4 * 36].tolist() == keys.parameters[4:8, 1].flatten().tolist()
    assert run[4 * 36 : 4 * 60].tolist() == values.codes[4:8, 1].flatten().tolist()
    assert run[4 * 60 :].tolist() == values.parameters[4:8, 1].flatten().tolist()
    assert bool((expected[0] == 77).all())  # no other block is written


@pytest.mark.parametrize("shared", [True, False])
def test_turned_attention_is_attention(shared: bool) -> None:
    forward = torch.linalg.qr(normal(16, 16) if shared else normal(2, 16, 16))[0] * normal(16, seed=1).exp()
    turn = Turn(forward, forward.inverse(), normal(2, 16, seed=1))
    q, k = normal(5, 6, 16, seed=2), normal(9, 2, 16, seed=3)
    turned = turn.into(k)
    assert (turn.out_of(turned) - k).abs().max() < 1e-4
    heads, turned_heads = (x.repeat_interleave(3, 1) for x in (k, turned))
    p = torch.einsum("qhd,khd->hqk", q.double(), heads.double()).softmax(-1)
    p_turned = torch.einsum("qhd,khd->hqk", turn.query(q), turned_heads).softmax(-1)
    assert (p - p_turned).abs().max() < 1e-4
    exact = torch.einsum("hqk,khd->qhd", p, heads.double())
    assert (turn.out_of(torch.einsum("hqk,khd->qhd", p_turned, turned_heads)) - exact).abs().max() < 1e-3
