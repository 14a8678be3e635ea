"""Weights decoded by compiled code: what the decoders of the formats share.

A decoder computes in float32 what the format's own one computes, in the same order, and rounds once to the type that is
asked for, so that both give the same bits (but for bfloat16 below 2^-126, zero on CPUs with avx512bf16).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compress.kernels import llvm
from compress.kernels.cpu.emitter import LANES, Emitter
from compress.kernels.dispatch import Decoder

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


def in_rows(write: Callable[[int, int, int, int], None], columns: int) -> Decoder:
    """A decoder that runs write(first row, last row, address of the row `start`, start) on the threads of torch."""

    def decode(out: Tensor, start: int) -> None:
        address = out.data_ptr()
        least = -(-THREAD // columns)
        llvm.parallel(lambda first, last: write(start + first, start + last, address, start), len(out), least)

    return decode


def in_blocks(write: Callable[[int, int, int, int, int], None], columns: int) -> Decoder:
    """As `in_rows`: write(first block of sixteen rows, last block, address of the row `start`, start, end of rows)."""

    def decode(out: Tensor, start: int) -> None:
        address, stop = out.data_ptr(), start + len(out)
        first = start // LANES  # a whole number
        least = -(-THREAD // (LANES * columns))
        blocks = -(-stop // LANES) - first
        llvm.parallel(lambda one, other: write(first + one, first + other, address, start, stop), blocks, least)

    return decode
