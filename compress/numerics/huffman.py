"""Code bytes by their frequencies: canonical Huffman codes of at most 12 bits, each row of symbols a stream of its own.

    lengths = code_lengths(counts)              # uint8 [256]; 0: the symbol does not come up
    stream, sizes = encode(symbols, lengths)    # all rows behind each other, and the bytes of each
    decode(stream, sizes, lengths, columns)     # the same symbols

A row begins at a whole byte. Within it codes lie in the order of columns from the lowest bit of a byte to the highest,
and a code begins with its most significant bit. So the next 12 bits, read as one little-endian number, choose an entry
of a table which tells the symbol and the length of its code, and one row is decoded without any other.

The limit costs little: it is reached only by symbols rarer than 1 in 4,096. Lengths are those of the package-merge
algorithm (Larmore and Hirschberg, 1990), the best under a limit.

This file is the plain form, in torch, which takes a step for each column, all rows at once. The compiled forms, of
`encode` in compress/kernels/loops/huffman.py and of `decode` in compress/kernels/cpu/huffman.py, give the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

LIMIT = 12  # bits of a code, at most
ENTRIES = 1 << LIMIT
SYMBOLS = 256
SLACK = 8  # bytes behind a stream that may be read


def code_lengths(counts: Tensor) -> Tensor:
    """Return the bits of each symbol's code, uint8 [256], for counts int64 [256]; 0 where it was not counted.

    A symbol that is alone has a code of one bit.
    """
    leaves: list[tuple[int, tuple[int, ...]]]
    leaves = sorted((count, (symbol,)) for symbol, count in enumerate(counts.tolist()) if count)
    lengths = torch.zeros(SYMBOLS, dtype=torch.uint8)
    if len(leaves) == 1:
        lengths[leaves[0][1][0]] = 1
        return lengths
    packages = leaves
    for _ in range(LIMIT - 1):
        pairs = zip(packages[::2], packages[1::2], strict=False)
        packages = sorted([*leaves, *((a + b, s + t) for (a, s), (b, t) in pairs)], key=lambda package: package[0])
    for _, symbols in packages[: 2 * len(leaves) - 2]:
        lengths += torch.bincount(torch.tensor(symbols), minlength=SYMBOLS).to(torch.uint8)
    return lengths


def check_lengths(name: str, lengths: Tensor) -> None:
    """Check that codes of these lengths can be told apart; ValueError, which begins with `name`."""
    known = lengths[lengths > 0].long()
    if not len(known) or known.max() > LIMIT or int((ENTRIES >> known).sum()) > ENTRIES:
        raise ValueError(f"{name} are no lengths of codes of 1 to {LIMIT} bits that can be told apart")


def codes(lengths: Tensor) -> Tensor:
    """Return the code of each symbol as it is written, its first bit the lowest: int64 [256]."""
    made, code, before = torch.zeros(SYMBOLS, dtype=torch.int64), 0, 0
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(lengths.tolist()) if length):
        code <<= length - before
        made[symbol] = int(f"{code:0{length}b}"[::-1], 2)
        code, before = code + 1, length
    return made


def lookup(lengths: Tensor) -> Tensor:
    """Return what each number of 12 bits begins with, int64 [4096]: symbol | length << 8; 1 << 8 where no code does."""
    table = torch.full((ENTRIES,), 1 << 8, dtype=torch.int64)
    for symbol, (code, length) in enumerate(zip(codes(lengths).tolist(), lengths.tolist(), strict=True)):
        if length:
            table[code :: 1 << length] = symbol | length << 8
    return table


def row_sizes(symbols: Tensor, lengths: Tensor) -> Tensor:
    """Return the bytes of each row, int64 [rows]."""
    return (lengths.to(torch.int32)[symbols.int()].sum(1, dtype=torch.int64) + 7) // 8


def encode(symbols: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the streams of symbols uint8 [rows, columns] behind each other, uint8, and their bytes, int64 [rows].

    Every symbol that comes up has a code.
    """
    sizes, words = row_sizes(symbols, lengths), codes(lengths)
    begins = 8 * (sizes.cumsum(0) - sizes)
    bits = torch.zeros(8 * int(sizes.sum()), dtype=torch.uint8)
    for row, begin in zip(symbols.long(), begins.tolist(), strict=True):
        size, code = lengths[row].long(), words[row]
        place = begin + size.cumsum(0) - size
        for bit in range(int(size.max()) if len(size) else 0):
            is_there = size > bit
            bits[place[is_there] + bit] = ((code[is_there] >> bit) & 1).to(torch.uint8)
    weights = 1 << torch.arange(8, dtype=torch.uint8)
    return (bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8), sizes


def decode(stream: Tensor, sizes: Tensor, lengths: Tensor, columns: int) -> Tensor:
    """Return the symbols uint8 [rows, columns]; arguments as `encode` returns them, on any device.

    What is damaged decodes to other symbols, or raises ValueError where a row does not end where it should.
    """
    table = lookup(lengths.cpu()).to(stream.device)
    padded = torch.cat((stream, stream.new_zeros(SLACK))).to(torch.int32)
    sizes = sizes.long()
    begins, last = 8 * (sizes.cumsum(0) - sizes), 8 * len(stream)
    out = torch.empty(columns, len(sizes), dtype=torch.uint8, device=stream.device)
    place = begins.clone()
    for column in range(columns):
        first = (place >> 3).clamp(max=last >> 3)
        three = padded[first] | padded[first + 1] << 8 | padded[first + 2] << 16
        entry = table[(three >> (place & 7)) & (ENTRIES - 1)]
        out[column] = (entry & 0xFF).to(torch.uint8)
        place += entry >> 8
    if not torch.equal((place - begins + 7) // 8, sizes):
        raise ValueError("a row of coded exponents is damaged: it does not end where it should")
    return out.T.contiguous()
