"""Huffman codes of at most 12 bits: lengths against all that can be, streams against a slow writer, damage."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from compress.kernels.cpu import huffman as cpu
from compress.kernels.loops import huffman as compiled
from compress.numerics import huffman


def drawn(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Symbols [rows, columns] of which small ones are frequent."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(rows, columns, generator=generator).log() * -3).clamp(max=255).to(torch.uint8)


def counts(symbols: Tensor) -> Tensor:
    return torch.bincount(symbols.flatten().int(), minlength=256)


def as_text(symbols: Tensor, lengths: Tensor) -> bytes:
    """The streams of rows by strings of bits."""
    codes, out = huffman.codes(lengths).tolist(), b""
    for row in symbols.tolist():
        bits = "".join(f"{codes[s]:0{int(lengths[s])}b}"[::-1] for s in row)
        bits += "0" * (-len(bits) % 8)
        out += bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))
    return out


@pytest.mark.parametrize("frequencies", [(5, 1, 1, 2), (1, 1, 1, 1, 1), (100, 1), (3, 9, 27, 81, 243), (7,)])
def test_lengths_are_the_best_there_are(frequencies: tuple[int, ...]) -> None:
    own = torch.zeros(256, dtype=torch.int64)
    own[: len(frequencies)] = torch.tensor(frequencies)
    lengths = huffman.code_lengths(own)[: len(frequencies)].tolist()
    possible = (
        sum(n * count for n, count in zip(each, frequencies, strict=True))
        for each in itertools.product(range(1, 6), repeat=len(frequencies))
        if sum(2.0**-n for n in each) <= 1
    )
    assert sum(n * count for n, count in zip(lengths, frequencies, strict=True)) == min(possible)


def test_no_code_is_longer_than_the_limit() -> None:
    own = torch.zeros(256, dtype=torch.int64)
    own[:40] = 2 ** torch.arange(40)
    lengths = huffman.code_lengths(own)
    assert lengths.max() == huffman.LIMIT and (lengths > 0).sum() == 40
    huffman.check_lengths("lengths", lengths)


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (9, 200), (2, 1000)])
def test_streams(shape: tuple[int, int]) -> None:
    symbols = drawn(*shape)
    lengths = huffman.code_lengths(counts(symbols))
    stream, sizes = huffman.encode(symbols, lengths)
    assert bytes(stream.tolist()) == as_text(symbols, lengths) and sizes.sum() == len(stream)
    assert torch.equal(huffman.decode(stream, sizes, lengths, shape[1]), symbols)
    if compiled.available():
        assert all(map(torch.equal, compiled.encode(symbols, lengths), (stream, sizes)))


def test_entries_of_the_compiled_decoder_hold_what_single_codes_say() -> None:
    lengths = huffman.code_lengths(counts(drawn(20, 500)))
    single, entries = huffman.lookup(lengths).tolist(), cpu.table(lengths).tolist()
    for number in range(0, huffman.ENTRIES, 7):
        entry, used, expected = entries[number], 0, []
        while len(expected) < cpu.MOST and used + (single[number >> used] >> 8) <= huffman.LIMIT:
            expected.append(single[number >> used] & 0xFF)
            used += single[number >> used] >> 8
        count = entry >> cpu.COUNT & 0xFF
        assert [entry >> 8 * i & 0xFF for i in range(count)] == expected and entry >> cpu.LENGTH == used


def test_damage_is_noticed() -> None:
    symbols = drawn(4, 300)
    lengths = huffman.code_lengths(counts(symbols))
    stream, sizes = huffman.encode(symbols, lengths)
    stream[5] ^= 0x35
    with pytest.raises(ValueError, match="damaged"):
        huffman.decode(stream, sizes, lengths, 299)
    for wrong in (torch.zeros(256, dtype=torch.uint8), torch.ones(256, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="^lengths are no lengths"):
            huffman.check_lengths("lengths", wrong)
