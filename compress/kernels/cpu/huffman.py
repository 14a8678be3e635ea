"""Decode the Huffman codes of bfloat16 exponents (formats/exponents.py) on a CPU, and join them with their fractions.

The next 12 bits of a row choose an entry of a table, which holds as many whole codes as begin there: up to six, 3.7 of
the exponents of a usual weight. Its symbols are written all at once, and the row goes on by their number. Each step
needs the one before, so `TOGETHER` rows are decoded side by side. A word of 64 bits that is read anywhere has at least
57 bits of use, those of `STEPS` entries.

Nothing outside of the tensors is read or written, whatever the stream holds; what is damaged decodes to other weights.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from compress.kernels import llvm
from compress.kernels.cpu.emitter import THREAD, Emitter
from compress.numerics import huffman

TOGETHER = 4  # rows
STEPS = 4  # entries that are looked up in a word
MOST = 6  # symbols of an entry, in its lowest bytes
COUNT, LENGTH = 48, 56  # bits at which the number of symbols, and that of their bits, begin
WORD = 8  # bytes
SPACE = 64  # bytes behind a row of exponents that may be written: STEPS * MOST + WORD are
CHUNK = 32  # weights that are joined at a time


def table(lengths: Tensor) -> Tensor:
    """Return what each number of 12 bits begins with, int64 [4096]: symbols, their number, and that of their bits."""
    single = huffman.lookup(lengths)
    index = torch.arange(huffman.ENTRIES)
    entries, used, count, fits = index * 0, index * 0, index * 0, index >= 0
    for number in range(MOST):
        entry = single[index >> used]
        fits &= used + (entry >> 8) <= huffman.LIMIT
        entries |= torch.where(fits, (entry & 0xFF) << (8 * number), 0)
        used += torch.where(fits, entry >> 8, 0)
        count += fits
    return entries | count << COUNT | used << LENGTH


@lru_cache(maxsize=64)
def known_table(lengths: bytes) -> Tensor:
    """Return `table` of the bytes of lengths; what was made is kept."""
    return table(torch.frombuffer(bytearray(lengths), dtype=torch.uint8))


def decode(stream: Tensor, begins: Tensor, entries: Tensor, fractions: Tensor) -> Tensor:
    """Return weights bfloat16 [rows, columns] of a stream of `WORD` bytes or more.

    begins: the first byte of each row, int64; entries: those of `table`; fractions uint8 [rows, columns], contiguous.
    """
    rows, columns = fractions.shape
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device="cpu")
    function = llvm.function(_Decode)

    def work(first: int, last: int) -> None:
        space = torch.empty(TOGETHER * (columns + SPACE), dtype=torch.uint8, device="cpu")
        tensors = stream, begins, entries, fractions, space, out
        given = {"first": first, "last": last, "rows": rows, "columns": columns, "nbytes": len(stream)}
        function(*function.signature.arguments(*tensors, **given))

    llvm.parallel(work, -(-rows // TOGETHER), max(1, THREAD // (TOGETHER * columns)))
    return out


class _Decode(Emitter):
    """Writes groups of rows."""

    def __init__(self) -> None:
        super().__init__("decode", "stream begins table fractions space out", "first last rows columns nbytes")
        self.stream, begins, self.table, self.fractions, self.space, self.out = self.pointers
        first, last, rows, self.columns, self.nbytes = self.integers
        b = self.b
        self.last_bit = b.sub(b.mul(self.nbytes, self.i64(8)), self.i64(1))
        self.last_word = b.sub(self.nbytes, self.i64(WORD))
        self.pitch = b.add(self.columns, self.i64(SPACE))
        self.places = [self.variable(self.index) for _ in range(TOGETHER)]  # bits
        self.counts = [self.variable(self.index) for _ in range(TOGETHER)]  # exponents so far
        with self.loop(last, first) as group:
            own = [
                self.smaller(b.add(b.mul(group, self.i64(TOGETHER)), self.i64(k)), b.sub(rows, self.i64(1)))
                for k in range(TOGETHER)
            ]
            for k, row in enumerate(own):
                b.store(b.mul(self.load(begins, row, self.index), self.i64(8)), self.places[k])
                b.store(self.i64(0), self.counts[k])
            self._read_exponents()
            for k, row in enumerate(own):
                near, line = b.mul(self.pitch, self.i64(k)), b.mul(row, self.columns)
                self.in_chunks(self.columns, CHUNK, partial(self._join, near, line))
        b.ret_void()

    def _read_exponents(self) -> None:
        """Write the exponents of all rows to the space, until each has its columns."""
        b = self.b
        head, body, done = (b.append_basic_block(name) for name in ("more", "read", "enough"))
        b.branch(head)
        b.position_at_end(head)
        least = b.load(self.counts[0], typ=self.index)
        for count in self.counts[1:]:
            least = self.smaller(b.load(count, typ=self.index), least)
        b.cbranch(b.icmp_signed("<", least, self.columns), body, done)
        b.position_at_end(body)
        words = [self._word(place) for place in self.places]
        for _ in range(STEPS):
            words = [self._step(k, word) for k, word in enumerate(words)]
        for count in self.counts:
            b.store(self.smaller(b.load(count, typ=self.index), self.columns), count)
        b.branch(head)
        b.position_at_end(done)

    def _word(self, place: Any) -> Any:
        """The bits from a place on, in the lowest ones of a word."""
        b = self.b
        bit = self.smaller(b.load(place, typ=self.index), self.last_bit)
        byte = self.smaller(b.lshr(bit, self.i64(3)), self.last_word)
        word = b.load(self.at(self.stream, byte, self.byte), typ=self.index, align=1)
        return b.lshr(word, b.sub(bit, b.shl(byte, self.i64(3))))

    def _step(self, k: int, word: Any) -> Any:
        """Write the symbols of an entry, and return the bits behind them."""
        b = self.b
        entry = self.load(self.table, b.and_(word, self.i64(huffman.ENTRIES - 1)), self.index)
        count = b.load(self.counts[k], typ=self.index)
        target = self.at(self.space, b.add(b.mul(self.pitch, self.i64(k)), count), self.byte)
        b.store(entry, target, align=1)
        b.store(b.add(count, b.and_(b.lshr(entry, self.i64(COUNT)), self.i64(0xFF))), self.counts[k])
        length = b.lshr(entry, self.i64(LENGTH))
        b.store(b.add(b.load(self.places[k], typ=self.index), length), self.places[k])
        return b.lshr(word, length)

    def _join(self, near: Any, line: Any, column: Any, rest: Any) -> None:
        """Write weights of exponents and fractions."""
        b, kind = self.b, self.vector(self.short, CHUNK)
        exponents = self.load(self.space, b.add(near, column), self.byte, CHUNK)
        place = b.add(line, column)
        fractions = b.zext(self.load_some(self.fractions, place, self.byte, CHUNK, rest), kind)
        bits = join_halves(self, b.zext(exponents, kind), fractions)
        self.store_some(bits, self.out, place, rest)


def join_halves(e: Emitter, exponents: Any, fractions: Any) -> Any:
    """Return bfloat16 numbers, as int16, of vectors int16 of exponents and fractions."""
    b, lanes = e.b, exponents.type.count
    sign = b.shl(b.and_(fractions, e.constant(e.short, lanes, 0x80)), e.constant(e.short, lanes, 8))
    rest = b.or_(b.shl(exponents, e.constant(e.short, lanes, 7)), b.and_(fractions, e.constant(e.short, lanes, 0x7F)))
    return b.or_(sign, rest)
