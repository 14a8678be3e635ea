"""Every bit of both layouts, against definitions that look at one bit at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress.numerics.packing import (
    FIELDS,
    WORDS,
    pack_planar,
    pack_planes,
    pack_stream,
    planar_shape,
    plane_fields,
    plane_widths,
    planes_shape,
    unpack_planar,
    unpack_planes,
    unpack_stream,
)

WIDTHS = sorted(FIELDS)
TILES = (16, 32, 64, 128)


def random_codes(*shape: int, width: int) -> Tensor:
    return torch.randint(0, 2**width, shape, generator=torch.Generator().manual_seed(width)).to(torch.uint8)


def bit_position(column: int, bit: int, width: int, tile_words: int) -> tuple[int, int, int]:
    """(plane, word, bit of the word) that stores one bit of the code of a column."""
    tile, within = divmod(column, tile_words * FIELDS[width])
    field, j = divmod(within, tile_words)
    word = tile * tile_words + j
    if width != 3:
        return 0, word, field * width + bit
    if field < 15:
        return field // 5, word, 3 * (field % 5) + bit
    return bit, word, 15


def test_a_word_holds_sixteen_bits_of_codes() -> None:
    assert all(FIELDS[width] * width == 16 * WORDS[width] for width in WIDTHS)


@pytest.mark.parametrize("tile_words", TILES)
@pytest.mark.parametrize("width", WIDTHS)
def test_planar_bits_are_where_the_docstring_says(width: int, tile_words: int) -> None:
    rows, columns = 2, 2 * tile_words * FIELDS[width]
    codes = random_codes(rows, columns, width=width)
    words = pack_planar(codes, width, tile_words)
    assert words.dtype == torch.int16 and words.shape == planar_shape(rows, columns, width)
    expected = torch.zeros(rows, WORDS[width], words.shape[-1], dtype=torch.int64)
    for row, values in enumerate(codes.tolist()):
        for column, code in enumerate(values):
            for bit in range(width):
                plane, word, position = bit_position(column, bit, width, tile_words)
                expected[row, plane, word] += (code >> bit & 1) << position
    assert torch.equal(words.reshape(expected.shape).long() & 0xFFFF, expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_each_planar_bit_has_its_own_place(width: int) -> None:
    columns = 16 * FIELDS[width]
    places = {bit_position(column, bit, width, 16) for column in range(columns) for bit in range(width)}
    assert len(places) == columns * width == WORDS[width] * 16 * 16  # all bits of all words


@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize("tile_words", TILES)
@pytest.mark.parametrize("width", WIDTHS)
def test_planar_round_trip(width: int, tile_words: int, tiles: int) -> None:
    codes = random_codes(3, tiles * tile_words * FIELDS[width], width=width)
    words = pack_planar(codes, width, tile_words)
    assert words.numel() * words.element_size() * 8 == codes.numel() * width
    unpacked = unpack_planar(words, width, tile_words)
    assert unpacked.dtype == torch.uint8 and torch.equal(unpacked, codes)


@pytest.mark.parametrize("width", WIDTHS)
def test_planar_extremes(width: int) -> None:
    """The top bit of a word is its sign: all ones must survive the arithmetic shifts."""
    full = torch.full((2, 16 * FIELDS[width]), 2**width - 1, dtype=torch.uint8)
    assert (pack_planar(full, width, 16) == -1).all()
    assert (pack_planar(full * 0, width, 16) == 0).all()
    assert torch.equal(unpack_planar(pack_planar(full, width, 16), width, 16), full)


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_words_can_be_cut(width: int) -> None:
    codes = random_codes(5, 32 * FIELDS[width], width=width)
    words = pack_planar(codes, width, 16)
    assert torch.equal(unpack_planar(words[1:4], width, 16), codes[1:4])
    middle = unpack_planar(words[..., 16:], width, 16)  # the second tile
    assert torch.equal(middle, codes[:, 16 * FIELDS[width] :])


@pytest.mark.parametrize("width", range(1, 9))
def test_stream_is_one_little_endian_number(width: int) -> None:
    codes = random_codes(2, 3, 24, width=width)
    stream = pack_stream(codes, width)
    assert stream.dtype == torch.uint8 and stream.shape == (2, 3, 24 * width // 8)
    for octets, values in zip(stream.reshape(6, -1).tolist(), codes.reshape(6, -1).tolist(), strict=True):
        assert int.from_bytes(octets, "little") == sum(code << i * width for i, code in enumerate(values))
    unpacked = unpack_stream(stream, width)
    assert unpacked.dtype == torch.uint8 and torch.equal(unpacked, codes)


@pytest.mark.parametrize("width", range(1, 9))
def test_stream_extremes(width: int) -> None:
    full = torch.full((16,), 2**width - 1, dtype=torch.uint8)
    assert (pack_stream(full, width) == 255).all()
    assert torch.equal(unpack_stream(pack_stream(full, width), width), full)


# Codes of any width.


@pytest.mark.parametrize("tile_words", [1, 4, 32])
@pytest.mark.parametrize("bits", range(1, 17))
def test_planes_round_trip(bits: int, tile_words: int) -> None:
    rows, columns = 3, 2 * tile_words * plane_fields(bits)
    codes = torch.randint(0, 2**bits, (rows, columns), generator=torch.Generator().manual_seed(bits))
    codes[0, 0], codes[-1, -1] = 2**bits - 1, 0
    planes = pack_planes(codes, bits, tile_words)
    assert {name: tuple(words.shape) for name, words in planes.items()} == planes_shape(rows, columns, bits)
    assert all(words.dtype == torch.int16 for words in planes.values())
    assert 16 * sum(words.numel() for words in planes.values()) == codes.numel() * bits  # nothing is wasted
    unpacked = unpack_planes(planes, bits, tile_words)
    assert unpacked.dtype == torch.int32 and torch.equal(unpacked, codes.int())
    cut = {name: words[1:2] for name, words in planes.items()}
    assert torch.equal(unpack_planes(cut, bits, tile_words), codes[1:2].int())


@pytest.mark.parametrize(
    ("bits", "widths"), [(1, (1,)), (3, (3,)), (5, (4, 1)), (7, (4, 2, 1)), (9, (8, 1)), (12, (8, 4)), (16, (16,))]
)
def test_planes_are_those_on_disk(bits: int, widths: tuple[int, ...]) -> None:
    assert plane_widths(bits) == widths and sum(widths) == bits
    codes = torch.arange(2**bits).repeat(16)[None, -16 * 16 :]
    low = bits
    for width in widths:
        low -= width
        words = pack_planes(codes, bits, 1)[f"words{width}"]
        if width < 16:
            assert torch.equal(unpack_planar(words, width, 1).long(), codes >> low & (2**width - 1))
        else:
            assert torch.equal(words.long() & 0xFFFF, codes)


@pytest.mark.parametrize("bits", [0, 17])
def test_impossible_widths_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=f"bits {bits}"):
        plane_widths(bits)
