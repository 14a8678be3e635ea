"""Code and decode streams of compress/numerics/rans.py by compiled code: the same streams, bit for bit.

One symbol after the other, with the 32 states in memory: neighbours do not depend on each other, so that a processor
works on several at once. Streams are shared out to the threads of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compress.kernels import llvm
from compress.numerics import rans
from compress.numerics.rans import BITS, HEAD, LANES, LEAST, SYMBOLS, TOTAL

THREAD = 1 << 16  # symbols that are worth waking a thread


def available() -> bool:
    """Return whether `encode` and `decode` can be compiled here."""
    return llvm.available()


def encode(symbols: Tensor, contexts: Tensor, freqs: Tensor) -> list[Tensor]:
    """Return one int16 stream for each row of symbols uint8 [streams, count]; arguments as in numerics/rans.py."""
    streams, count = symbols.shape
    symbols, offsets = symbols.contiguous(), _offsets(contexts, SYMBOLS)
    ranges = (rans.starts(freqs) << 16 | freqs).to(torch.int32).contiguous()
    out = torch.empty(streams, HEAD + count, dtype=torch.int16)  # no symbol sends more than one word
    left = torch.empty(streams, dtype=torch.int64)
    function = llvm.function(_Encode)

    def work(first: int, last: int) -> None:
        for row in range(first, last):
            states = torch.empty(LANES, dtype=torch.int32)
            pointers = (symbols[row], offsets, ranges, states, out[row], left[row])
            function(*(t.data_ptr() for t in pointers), count, len(offsets), out.shape[1])
            out[row, left[row] - HEAD : left[row]] = states.view(torch.int16)

    llvm.parallel(work, streams, max(1, THREAD // max(1, count)))
    return [row[place - HEAD :].clone() for row, place in zip(out, left.tolist(), strict=True)]


def decode(streams: Sequence[Tensor], contexts: Tensor, freqs: Tensor, count: int) -> Tensor:
    """Return the symbols uint8 [streams, count] of int16 streams; ValueError as in numerics/rans.py."""
    rans.check(streams)
    offsets = _offsets(contexts, TOTAL)
    table = _unsigned(rans.lookup(freqs))
    out = torch.empty(len(streams), count, dtype=torch.uint8)
    used = torch.zeros(len(streams), dtype=torch.int64)
    ends = torch.empty(len(streams), LANES, dtype=torch.int32)
    function = llvm.function(_Decode)

    def work(first: int, last: int) -> None:
        for row in range(first, last):
            stream = streams[row].contiguous()
            ends[row] = stream[:HEAD].clone().view(torch.int32)
            pointers = (stream, offsets, table, ends[row], out[row], used[row])
            function(*(t.data_ptr() for t in pointers), count, len(offsets), len(stream))

    llvm.parallel(work, len(streams), max(1, THREAD // max(1, count)))
    if used.tolist() != [len(stream) for stream in streams] or not bool((ends == LEAST).all()):
        raise ValueError(rans.DAMAGED)
    return out


def _offsets(contexts: Tensor, entries: int) -> Tensor:
    """Return where the table of each column begins, int32, for tables of so many entries."""
    return (contexts * entries).to(torch.int32).contiguous()


def _unsigned(values: Tensor) -> Tensor:
    """Return int64 numbers below 2^32 as int32 of the same bits."""
    return torch.where(values >= 1 << 31, values - (1 << 32), values).to(torch.int32).contiguous()


class _Coder(llvm.Emitter):
    """void name(symbols or words, offsets, table, states, out, place, count, columns, words)."""

    def __init__(self, name: str) -> None:
        super().__init__(name, 6, 3)
        self.source, self.offsets, self.table, self.states, self.out, self.place = self.pointers
        self.count, self.columns, self.words = self.integers
        self.moving = self.variable(self.index)  # the place of the next word

    def wide(self, value: Any) -> Any:
        """An unsigned number in 64 bits."""
        return self.b.zext(value, self.index)

    def state(self, symbol: Any) -> tuple[Any, Any]:
        """Return the place of the state of a symbol, and the state in 64 bits."""
        place = self.b.and_(symbol, self.i64(LANES - 1))
        return place, self.wide(self.load(self.states, place, self.word))

    def offset(self, symbol: Any) -> Any:
        """Return where the table of a symbol begins."""
        return self.wide(self.load(self.offsets, self.b.urem(symbol, self.columns), self.word))


class _Encode(_Coder):
    """Words are written from the end of `out` [words] towards its begin; `place` is told where they begin."""

    def __init__(self) -> None:
        super().__init__("rans_encode")
        b = self.b
        with self.loop(self.i64(LANES)) as lane:
            self.store(self.word(LEAST), self.states, lane)
        b.store(self.words, self.moving)
        with self.loop(self.count) as done:
            at = b.sub(b.sub(self.count, self.i64(1)), done)
            lane, x = self.state(at)
            symbol = self.wide(self.load(self.source, at, self.byte))
            both = self.wide(self.load(self.table, b.add(self.offset(at), symbol), self.word))
            freq, base = b.and_(both, self.i64(0xFFFF)), b.lshr(both, self.i64(16))
            full = b.icmp_unsigned(">=", x, b.shl(freq, self.i64(32 - BITS)))
            with b.if_then(full):
                place = b.sub(b.load(self.moving, typ=self.index), self.i64(1))
                b.store(place, self.moving)
                self.store(b.trunc(x, self.short), self.out, place)
            x = b.trunc(b.select(full, b.lshr(x, self.i64(16)), x), self.word)
            freq = b.trunc(freq, self.word)
            whole, rest = b.udiv(x, freq), b.urem(x, freq)
            x = b.add(b.add(b.shl(whole, self.word(BITS)), b.trunc(base, self.word)), rest)
            self.store(x, self.states, lane)
        self.store(b.load(self.moving, typ=self.index), self.place, self.i64(0))
        b.ret_void()


class _Decode(_Coder):
    """Words are read from `source` [words], never beyond its end; `place` is told how many were asked for."""

    def __init__(self) -> None:
        super().__init__("rans_decode")
        b = self.b
        last = b.sub(self.words, self.i64(1))
        b.store(self.i64(HEAD), self.moving)
        with self.loop(self.count) as at:
            lane, x = self.state(at)
            slot = b.add(self.offset(at), b.and_(x, self.i64(TOTAL - 1)))
            entry = self.wide(self.load(self.table, slot, self.word))
            freq = b.add(b.lshr(entry, self.i64(20)), self.i64(1))
            rest = b.and_(b.lshr(entry, self.i64(8)), self.i64(TOTAL - 1))
            x = b.add(b.mul(freq, b.lshr(x, self.i64(BITS))), rest)
            empty = b.icmp_unsigned("<", x, self.i64(LEAST))
            place = b.load(self.moving, typ=self.index)
            word = self.wide(self.load(self.source, self.smaller(place, last), self.short))
            x = b.select(empty, b.or_(b.shl(x, self.i64(16)), word), x)
            b.store(b.add(place, self.wide(empty)), self.moving)
            self.store(b.trunc(x, self.word), self.states, lane)
            self.store(b.trunc(entry, self.byte), self.out, at)
        self.store(b.load(self.moving, typ=self.index), self.place, self.i64(0))
        b.ret_void()
