"""Write decoded rows of weights: what the compiled decoders of the formats share.

A decoder computes in float32 what the format's own one computes, in the same order, and rounds once to the type that is
asked for, so that both give the same bits (but for bfloat16 below 2^-126, zero on CPUs with avx512bf16).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from compress.kernels import llvm
from compress.kernels.contract import Decoder
from compress.kernels.cpu.emitter import LANES, Emitter

THREAD = 1 << 20  # weights that are worth waking a thread


class Writer(Emitter):
    """Pieces of functions that write floating-point numbers of one type."""

    def __init__(self, name: str, pointers: int, integers: int, dtype: torch.dtype) -> None:
        super().__init__(name, pointers, integers)
        self.dtype = dtype

    def rounded(self, values: Any) -> Any:
        """A float32 vector in the type that is written, bfloat16 as int16."""
        if self.dtype == torch.float32:
            return values
        b, lanes = self.b, values.type.count
        if self.dtype == torch.float16:
            return b.fptrunc(values, self.vector(self.half, lanes))
        if "avx512bf16" in llvm.features():  # numbers below 2^-126 become 0, as in the products of such CPUs
            return b.bitcast(b.fptrunc(values, self.vector(self.bfloat, lanes)), self.vector(self.short, lanes))
        words = b.bitcast(values, self.vector(self.word, lanes))
        sixteen = self.constant(self.word, lanes, 16)
        odd = b.and_(b.lshr(words, sixteen), self.constant(self.word, lanes, 1))
        up = b.add(words, b.add(odd, self.constant(self.word, lanes, 0x7FFF)))  # to the nearest, to even in the middle
        up = b.select(b.fcmp_unordered("uno", values, values), self.constant(self.word, lanes, 0x7FC00000), up)
        return b.trunc(b.lshr(up, sixteen), self.vector(self.short, lanes))

    @contextmanager
    def rows_between(self, first: Any, last: Any, stop: Any) -> Iterator[Any]:
        """for row in the blocks of sixteen from first to last, without those from `stop` on."""
        begin, end = (self.b.mul(block, self.i64(LANES)) for block in (first, last))
        with self.loop(self.smaller(end, stop), begin) as row:
            yield row


def in_rows(write: Callable[..., None], stored: Sequence[int], sizes: Sequence[int], columns: int) -> Decoder:
    """Return a decoder that calls write(*stored, out, first, last, start, stop, *sizes) on the threads of torch.

    That writes the rows of the weight in blocks of sixteen from first to last, without those from `stop` on; the row
    `start` is at the beginning of out.
    """

    def decode(out: Tensor, start: int) -> None:
        address, stop = out.data_ptr(), start + len(out)
        block = start // LANES  # a whole number

        def work(first: int, last: int) -> None:
            write(*stored, address, block + first, block + last, start, stop, *sizes)

        llvm.parallel(work, -(-stop // LANES) - block, -(-THREAD // (LANES * columns)))

    return decode
