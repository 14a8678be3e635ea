"""The `lowrank` format: two thin products, by PyTorch's own operators on any device.

One row of activations on a CPU, which is one word of generated text, takes two compiled functions in their place, if
the factors have 16 bits: they read each factor once, as it is stored, sum in float32, and keep what lies between the
factors in float32. Two products of torch cost twice what a call of torch costs: a layer of half of the parameters of a
small dense one would be slower than it, and other types of activations than the stored one would convert the factors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.formats import lowrank
from compress.formats.lowrank import Params
from compress.kernels import llvm
from compress.kernels.cpu import emitter
from compress.kernels.cpu.row_decoder import Writer

TYPES = (torch.bfloat16, torch.float16, torch.float32)
MANY = 1 << 40  # rows
SIDE = 4  # rows of a factor that are summed side by side
WIDE = 32  # columns at a time: two registers of 512 bits, so that sums wait less for each other


def supports(params: Params, shape: tuple[int, int]) -> bool:
    """Where the factors are smaller than their product."""
    return params.rank * sum(shape) < shape[0] * shape[1]


def most_rows(params: Params, shape: tuple[int, int], dtype: torch.dtype) -> int:
    return MANY


def matmul(x: Tensor, tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> Tensor:
    """x [rows, in] of a type in TYPES -> [rows, out] of the same type."""
    return bind(tensors, params, shape)(x)


def bind(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> Callable[[Tensor], Tensor]:
    """`matmul`, as long as these tensors stay where they are."""

    def product(x: Tensor) -> Tensor:
        a, b = lowrank.factors(tensors, params, shape, x.dtype)
        return F.linear(F.linear(x, a), b.T)

    if params.bits < 16 or not tensors["a"].is_cpu or not emitter.worthwhile(shape):
        return product
    return _Single(tensors, params, shape, product)


class _Single:
    """`product`, one row of activations by compiled functions."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        params: Params,
        shape: tuple[int, int],
        product: Callable[[Tensor], Tensor],
    ) -> None:
        self.factors = tensors["a"], tensors["b"]
        self.a, self.b = (factor.data_ptr() for factor in self.factors)
        self.kind, self.rank, self.product = getattr(torch, params.dtype), params.rank, product
        self.outputs, self.inputs = shape

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in], contiguous."""
        if x.numel() != self.inputs or (torch.is_grad_enabled() and any(t.requires_grad for t in self.factors)):
            return self.product(x)
        hidden = torch.empty(self.rank, dtype=torch.float32, device="cpu")  # the defaults may be others
        out = x.new_empty(*x.shape[:-1], self.outputs)
        middle = hidden.data_ptr()
        _multiply(x.data_ptr(), self.a, middle, (self.rank, self.inputs), (x.dtype, self.kind, torch.float32))
        _multiply(middle, self.b, out.data_ptr(), (self.outputs, self.rank), (torch.float32, self.kind, x.dtype))
        return out


def _multiply(x: int, matrix: int, out: int, shape: tuple[int, int], kinds: tuple[torch.dtype, ...]) -> None:
    """The product of a matrix [rows, columns] and a vector, all of them addresses."""
    count, columns = shape
    side = SIDE if count >= SIDE else 1
    function = _compiled(*kinds, side)

    def work(first: int, last: int) -> None:
        function(x, matrix, out, side * first, min(side * last, count), columns)

    llvm.parallel(work, -(-count // side), -(-emitter.THREAD // (side * columns)))


@cache
def _compiled(x: torch.dtype, matrix: torch.dtype, out: torch.dtype, side: int) -> Callable[..., None]:
    return llvm.compiled(_Dots(x, matrix, out, side))


class _Dots(Writer):
    """void dots(x, matrix, out, first row, last row, columns): out = matrix x for these rows, `side` of them or more.

    The last rows may be computed twice, to the same sums: all steps have `side` rows.
    """

    def __init__(self, x: torch.dtype, matrix: torch.dtype, out: torch.dtype, side: int) -> None:
        super().__init__("dots", 3, 3, out)
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
        b, wide = self.b, self.i64(WIDE)
        for total in self.sums:
            b.store(self.constant(self.float, WIDE, 0.0), total)
        whole = b.udiv(self.columns, wide)
        with self.loop(whole) as i:
            self._add(row, b.mul(i, wide), None)
        left = b.urem(self.columns, wide)
        with b.if_then(b.icmp_signed(">", left, self.i64(0))):
            self._add(row, b.mul(whole, wide), left)
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
