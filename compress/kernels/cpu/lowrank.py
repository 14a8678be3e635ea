"""Multiply with the `lowrank` format: two thin products, by PyTorch's own operators on any device.

One row of activations on a CPU, which is one word of generated text, takes two compiled functions in their place, if
the factors have 16 bits: they read each factor once, as it is stored, sum in float32, and keep what lies between the
factors in float32. Two products of torch cost twice what a call of torch costs: a layer of half of the parameters of a
small dense one would be slower than it, and other types of activations than the stored one would convert the factors.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.formats import lowrank
from compress.formats.lowrank import Params
from compress.kernels import llvm
from compress.kernels.contract import Prepared, Shape
from compress.kernels.cpu import emitter
from compress.kernels.cpu.emitter import Writer

MANY = 1 << 40  # rows
SIDE = 4  # rows of a factor that are summed side by side
WIDE = 32  # columns at a time: two registers of 512 bits, so that sums wait less for each other


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> Prepared | None:
    """Return the product with factors that are smaller than their product."""
    return _LowRank(tensors, params, shape) if params.rank * sum(shape) < shape[0] * shape[1] else None


class _LowRank(Prepared):
    types = (torch.bfloat16, torch.float16, torch.float32)

    def __init__(self, tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> None:
        super().__init__(tensors, params, shape)
        self._factors = (tensors["a"], tensors["b"])
        self._is_compiled = params.bits == 16 and tensors["a"].is_cpu and emitter.worthwhile(shape)
        self._kind = getattr(torch, params.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        outputs, inputs = self.shape
        trained = torch.is_grad_enabled() and any(factor.requires_grad for factor in self._factors)
        if not self._is_compiled or x.numel() != inputs or trained:
            a, b = lowrank.factors(self.tensors, self.params, self.shape, x.dtype)
            return F.linear(F.linear(x, a), b.T)
        rank, kind = self.params.rank, self._kind
        hidden = torch.empty(rank, dtype=torch.float32, device="cpu")  # the defaults may be others
        out = x.new_empty(*x.shape[:-1], outputs)
        a_at, b_at, middle = self._factors[0].data_ptr(), self._factors[1].data_ptr(), hidden.data_ptr()
        _multiply(x.data_ptr(), a_at, middle, (rank, inputs), (x.dtype, kind, torch.float32))
        _multiply(middle, b_at, out.data_ptr(), (outputs, rank), (torch.float32, kind, x.dtype))
        return out

    def most_rows(self, dtype: torch.dtype) -> int:
        return MANY

    def decode(self, dtype: torch.dtype) -> Tensor:
        return lowrank.decode(self.tensors, self.params, self.shape, dtype)


def _multiply(x: int, matrix: int, out: int, shape: tuple[int, int], kinds: tuple[torch.dtype, ...]) -> None:
    """The product of a matrix [rows, columns] and a vector, all of them addresses."""
    count, columns = shape
    side = SIDE if count >= SIDE else 1
    function = llvm.function(_Dots, *kinds, side)

    def work(first: int, last: int) -> None:
        function(x, matrix, out, side * first, min(side * last, count), columns)

    llvm.parallel(work, -(-count // side), -(-emitter.THREAD // (side * columns)))


class _Dots(Writer):
    """Writes matrix x for the rows from `first` to `last`, `side` of them or more.

    The last rows may be computed twice, to the same sums: all steps have `side` rows.
    """

    def __init__(self, x: torch.dtype, matrix: torch.dtype, out: torch.dtype, side: int) -> None:
        super().__init__("dots", "x matrix out", "first last columns", out)
        self.types, self.side = (x, matrix), side
        first, last, self.columns = self.integers
        b = self.b
        self.sums = [self.variable(self.vector(self.float, WIDE)) for _ in range(side)]
        step = self.i64(side)
        count = b.udiv(b.add(b.sub(last, first), self.i64(side - 1)), step)
        with self.loop(count) as i:
            row = self.smaller(b.add(first, b.mul(i, step)), b.sub(last, step))
            self._rows(row)
        b.ret_void()

    def _rows(self, row: Any) -> None:
        b = self.b
        for total in self.sums:
            b.store(self.constant(self.float, WIDE, 0.0), total)
        self.in_chunks(self.columns, WIDE, partial(self._add, row))
        kind = self.vector(self.float, self.side)
        totals = kind(self.ir.Undefined)
        for place, total in enumerate(self.sums):
            totals = b.insert_element(totals, self.total(b.load(total)), self.word(place))
        self.store(self.rounded(totals), self.pointers[2], row)

    def _add(self, row: Any, column: Any, count: Any) -> None:
        """Products of WIDE columns, or of `count`, added to the sums."""
        b, (x, matrix) = self.b, self.types
        values = self.load_floats(self.pointers[0], column, x, WIDE, count)
        for place, total in enumerate(self.sums):
            start = b.add(b.mul(b.add(row, self.i64(place)), self.columns), column)
            weights = self.load_floats(self.pointers[1], start, matrix, WIDE, count)
            b.store(self.multiply_add(weights, values, b.load(total)), total)
