"""Code and decode streams of compress/numerics/rans.py by compiled code: the same streams, bit for bit.

One symbol after the other, with the 32 states in memory: neighbours do not depend on each other, so that a processor
works on several at once. Streams are shared out to the threads of torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from compress.kernels import llvm
from compress.kernels.loops import compiler
from compress.kernels.loops.compiler import Bytes, Longs, Shorts, Words, loop
from compress.numerics import rans
from compress.numerics.rans import FREQUENCY_BITS, HEAD, LANES, LEAST, SYMBOLS, TOTAL

SYMBOLS_PER_THREAD = 1 << 16  # fewer are not worth waking it


def available() -> bool:
    """Return whether `encode` and `decode` can be compiled here."""
    return compiler.available()


def encode(symbols: Tensor, contexts: Tensor, freqs: Tensor) -> list[Tensor]:
    """Return one int16 stream for each row of symbols uint8 [streams, count]; arguments as in numerics/rans.py."""
    streams, count = symbols.shape
    symbols, offsets = symbols.contiguous(), _offsets(contexts, SYMBOLS)
    ranges = (rans.starts(freqs) << 16 | freqs).to(torch.int32).contiguous()
    out = torch.empty(streams, HEAD + count, dtype=torch.int16)  # no symbol sends more than one word
    left = torch.empty(streams, dtype=torch.int64)
    function = compiler.compiled(_encode)

    def work(first: int, last: int) -> None:
        for row in range(first, last):
            states = torch.empty(LANES, dtype=torch.int32)
            tensors = symbols[row], offsets, ranges, states, out[row], left[row]
            function(*function.signature.arguments(*tensors, count=count, columns=len(offsets), space=out.shape[1]))
            out[row, left[row] - HEAD : left[row]] = states.view(torch.int16)

    llvm.parallel(work, streams, max(1, SYMBOLS_PER_THREAD // max(1, count)))
    return [row[place - HEAD :].clone() for row, place in zip(out, left.tolist(), strict=True)]


def decode(streams: Sequence[Tensor], contexts: Tensor, freqs: Tensor, count: int) -> Tensor:
    """Return the symbols uint8 [streams, count] of int16 streams; ValueError as in numerics/rans.py."""
    rans.check(streams)
    offsets = _offsets(contexts, TOTAL)
    table = _as_int32(rans.lookup(freqs))
    out = torch.empty(len(streams), count, dtype=torch.uint8)
    used = torch.zeros(len(streams), dtype=torch.int64)
    ends = torch.empty(len(streams), LANES, dtype=torch.int32)
    function = compiler.compiled(_decode)

    def work(first: int, last: int) -> None:
        for row in range(first, last):
            stream = streams[row].contiguous()
            ends[row] = stream[:HEAD].clone().view(torch.int32)
            tensors = stream, offsets, table, ends[row], out[row], used[row]
            function(*function.signature.arguments(*tensors, count=count, columns=len(offsets), space=len(stream)))

    llvm.parallel(work, len(streams), max(1, SYMBOLS_PER_THREAD // max(1, count)))
    if used.tolist() != [len(stream) for stream in streams] or not bool((ends == LEAST).all()):
        raise ValueError(rans.DAMAGED)
    return out


def _offsets(contexts: Tensor, entries: int) -> Tensor:
    """Return where the table of each column begins, int32, for tables of so many entries."""
    return (contexts * entries).to(torch.int32).contiguous()


def _as_int32(values: Tensor) -> Tensor:
    """Return int64 numbers below 2^32 as int32 of the same bits."""
    return torch.where(values >= 1 << 31, values - (1 << 32), values).to(torch.int32).contiguous()


# What follows is compiled. Indices are signed, numbers of 32 bits unsigned: they are int64, where nothing wraps.


@loop
def _encode(
    symbols: Bytes, offsets: Words, ranges: Words, states: Words, words: Shorts, begins: Longs,
    count: int, columns: int, space: int,
) -> None:  # fmt: skip
    """Write words from the end of `words` [space] towards its begin, and where they begin."""
    place = space
    for lane in range(LANES):
        states[lane] = LEAST
    for done in range(count):
        at = count - 1 - done
        x, both = np.int64(states[at % LANES]), np.int64(ranges[np.int64(offsets[at % columns]) + symbols[at]])
        freq = both & 0xFFFF
        if x >= freq << (32 - FREQUENCY_BITS):
            place -= 1
            words[place] = np.uint16(x)
            x >>= 16
        quotient = np.uint32(x) // np.uint32(freq)
        states[at % LANES] = np.uint32((quotient << FREQUENCY_BITS) + (both >> 16) + (x - quotient * freq))
    begins[0] = place


@loop
def _decode(
    words: Shorts, offsets: Words, table: Words, states: Words, symbols: Bytes, ends: Longs,
    count: int, columns: int, space: int,
) -> None:  # fmt: skip
    """Read `words` [space], never beyond its end, and write how many were asked for."""
    place = HEAD
    for at in range(count):
        x = np.int64(states[at % LANES])
        entry = np.int64(table[np.int64(offsets[at % columns]) + (x & (TOTAL - 1))])
        x = ((entry >> 20) + 1) * (x >> FREQUENCY_BITS) + (entry >> 8 & (TOTAL - 1))
        word = np.int64(words[min(place, space - 1)])
        is_empty = x < LEAST
        x = x << 16 | word if is_empty else x
        place += 1 if is_empty else 0
        states[at % LANES] = np.uint32(x)
        symbols[at] = np.uint8(entry)
    ends[0] = place
