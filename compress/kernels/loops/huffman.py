"""Code rows of compress/numerics/huffman.py by compiled code: the same stream, byte for byte."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from compress.kernels import llvm
from compress.kernels.loops import compiler
from compress.kernels.loops.compiler import Bytes, Longs, Words, loop
from compress.numerics import huffman

SYMBOLS_PER_THREAD = 1 << 16  # fewer are not worth waking it
LENGTH_BITS = 4  # bits of the length in an entry of the table: code << 4 | length


def available() -> bool:
    """Return whether `encode` can be compiled here."""
    return compiler.available()


def encode(symbols: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the streams of symbols uint8 [rows, columns] and their bytes; arguments as in numerics/huffman.py."""
    rows, columns = symbols.shape
    symbols = symbols.contiguous()
    table = (huffman.codes(lengths) << LENGTH_BITS | lengths.long()).to(torch.int32)
    sizes = torch.empty(rows, dtype=torch.int64)
    measure, write = compiler.compiled(_measure), compiler.compiled(_write)
    least = max(1, SYMBOLS_PER_THREAD // max(1, columns))

    def count(first: int, last: int) -> None:
        measure(*measure.signature.arguments(symbols, table, sizes, first=first, last=last, columns=columns))

    llvm.parallel(count, rows, least)
    begins, out = sizes.cumsum(0) - sizes, torch.empty(int(sizes.sum()), dtype=torch.uint8)

    def work(first: int, last: int) -> None:
        tensors = symbols, table, begins, out
        write(*write.signature.arguments(*tensors, first=first, last=last, columns=columns))

    llvm.parallel(work, rows, least)
    return out, sizes


# What follows is compiled.


@loop
def _measure(symbols: Bytes, table: Words, sizes: Longs, first: int, last: int, columns: int) -> None:
    """Write the bytes of rows."""
    for row in range(first, last):
        bits = np.int64(0)
        for at in range(row * columns, (row + 1) * columns):
            bits += np.int64(table[symbols[at]]) & ((1 << LENGTH_BITS) - 1)
        sizes[row] = (bits + 7) >> 3


@loop
def _write(symbols: Bytes, table: Words, begins: Longs, out: Bytes, first: int, last: int, columns: int) -> None:
    """Write rows, each from its own byte on."""
    for row in range(first, last):
        place, waiting, bits = begins[row], np.int64(0), np.int64(0)
        for at in range(row * columns, (row + 1) * columns):
            entry = np.int64(table[symbols[at]])
            waiting |= (entry >> LENGTH_BITS) << bits
            bits += entry & ((1 << LENGTH_BITS) - 1)
            while bits >= 8:
                out[place] = np.uint8(waiting)
                place += 1
                waiting >>= 8
                bits -= 8
        if bits > 0:
            out[place] = np.uint8(waiting)
