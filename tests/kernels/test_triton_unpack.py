"""The assembly that unpacks words (compress/kernels/triton/unpack.py): every word, every field, both types."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compress.kernels.triton import unpack
from compress.numerics import packing
from helpers import (
    interpreter,  # noqa: F401
    ptx,
)

WORDS = torch.arange(1 << 16)
OTHERS = (WORDS * 40503 + 12345) & 0xFFFF  # a permutation of all words
PAIRS = WORDS | OTHERS << 16


def bfloat16(function: Callable[..., Tensor]) -> Callable[[list[Tensor]], Tensor]:
    """An operation on both halves of registers, rounded once."""

    def value(halves: Tensor) -> Tensor:
        return halves.to(torch.int32).to(torch.int16).view(torch.bfloat16).double()

    def both(operands: list[Tensor]) -> Tensor:
        low = function(*(value(o & 0xFFFF) for o in operands)).bfloat16().view(torch.int16).long() & 0xFFFF
        high = function(*(value(o >> 16) for o in operands)).bfloat16().view(torch.int16).long() & 0xFFFF
        return low | high << 16

    return both


@pytest.fixture(autouse=True)
def bfloat16_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ptx.OPERATIONS, "fma.rn.bf16x2", bfloat16(lambda a, b, c: a * b + c))


def numbers(register: Tensor, bf16: bool) -> tuple[Tensor, Tensor]:
    """The low and the high numbers, float64."""
    dtype = torch.bfloat16 if bf16 else torch.float16
    low, high = (h.to(torch.int32).to(torch.int16).view(dtype).double() for h in (register & 0xFFFF, register >> 16))
    return low, high


def field_of(words: Tensor, width: int, field: int) -> Tensor:
    """What packing.py stores in a field of each word, taken as one row with tiles of one word; int64."""
    codes = packing.unpack_planar(words.to(torch.int16)[:, None], width, 1)  # one row a word
    return codes[:, field].long()


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_every_word_gives_its_codes(width: int, bf16: bool) -> None:
    for middle in {0, 1 << (width - 1)} if width < 8 else {128}:
        for field in range(packing.FIELDS[width]):
            (made,) = ptx.run(unpack.field_text(width, field, middle, bf16), 1, [PAIRS])
            low, high = numbers(made, bf16)
            assert torch.equal(low, (field_of(WORDS, width, field) - middle).double()), field
            assert torch.equal(high, (field_of(OTHERS, width, field) - middle).double()), field


@pytest.mark.parametrize("bf16", [False, True])
def test_every_word_of_three_bits_gives_its_codes(bf16: bool) -> None:
    words = torch.stack([WORDS, OTHERS, OTHERS.flip(0)], 1).to(torch.int16)
    codes = packing.unpack_planar(words[:, :, None], 3, 1).long()
    registers = [(words[:, plane].long() & 0xFFFF) * 65537 for plane in range(3)]
    for field in range(16):
        operands = registers if field == 15 else registers[field // 5 : field // 5 + 1]
        (made,) = ptx.run(unpack.field_text(3, field, 4, bf16), 1, operands)
        for half in numbers(made, bf16):
            assert torch.equal(half, (codes[:, field] - 4).double()), field


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("bits", "widths"), [(5, (4, 1)), (6, (4, 2)), (7, (4, 2, 1))])
def test_planes_make_every_code(bits: int, widths: tuple[int, ...], bf16: bool) -> None:
    codes = torch.arange(1 << bits)
    low, made = bits, None
    for width in widths:
        low -= width
        word = ((codes >> low) & ((1 << width) - 1)) * 65537
        middle = 0 if made is not None else 1 << (width - 1)
        (plane,) = ptx.run(unpack.field_text(width, 0, middle, bf16), 1, [word])
        made = plane if made is None else ptx.run(unpack.combine_text(width, bf16), 1, [made, plane])[0]
    assert made is not None
    for half in numbers(made, bf16):
        assert torch.equal(half, (codes - (1 << (bits - 1))).double())


def test_bytes_have_one_middle_in_bfloat16() -> None:
    with pytest.raises(AssertionError):
        unpack.field_text(8, 0, 0, True)


@pytest.mark.parametrize(
    ("count", "group", "tile_words", "fields"),
    [(4, 0, 64, 4), (4, 256, 64, 4), (4, 512, 64, 4), (4, 128, 64, 2), (4, 64, 64, 1), (16, 128, 32, 4), (4, 96, 32, 1),
     (8, 32, 128, 1)],
)  # fmt: skip
def test_chain_stays_within_a_group(count: int, group: int, tile_words: int, fields: int) -> None:
    assert unpack.chain(count, group, tile_words) == fields
