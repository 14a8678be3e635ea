"""Multiply with the `e8p` format on a CPU: the eight points of a code are two table entries of eight bytes, xored.

    y[m, r] = row_scale[r] scale / 4 * sum over spans u of x_scale[m, u] (sum_c point4[r, c] x16[m, c]
                                                                         + ratio sum_c residual[r, c] x16[m, c])

point4, four times the point of a coordinate, is 4 h - 14 + shift, where h is its half-odd number plus 3.5 (1 to 6) and
shift is +-1. Changing the sign is h ^ 7, so that 15 + point4 = (4 h) ^ (28 or 0) ^ (2 or 0), the first by the high byte
of the code, the others by its low byte. A residual of 3 bits is twice the `ball`, plus 15; `ratio` is what a residual
counts beside a quarter. The 15 are taken off the sums, times the sum of the activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from itertools import product as pairs
from math import gcd
from typing import Any

import torch
from torch import Tensor

from compress.formats import e8p as e8p_format
from compress.formats.e8p import DIM, RHO, Params
from compress.kernels import llvm
from compress.kernels.contract import Decoder, Shape
from compress.kernels.cpu import emitter, small_matmul
from compress.kernels.cpu.emitter import LANES, PRODUCT
from compress.kernels.cpu.small_matmul import Factors, Product, ProductSizes
from compress.kernels.cpu.span_sums import SpanSums

SPAN = 512  # columns that share the scale of an activation, or a part of them that divides the row
CHUNK = 2 * LANES  # columns of one vector
TOGETHER = {1: 4, 2: 4, 4: 2}  # rows that share a load of activations, by the number of tokens
RESIDUAL_UNIT = {3: 0.5, 4: 0.25}  # of the integers in the table of residuals
TABLES = ("high", "low", "ball")  # arguments that `_tables` gives
CODE_BIAS = 15  # of the integers in all tables


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> Product | None:
    """Return the product with a weight of any width."""
    return _E8p(tensors, params, shape) if emitter.worthwhile(shape) else None


class _E8p(Product):
    def __init__(self, tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> None:
        rows, columns = e8p_format.padded_shape(shape)
        span = gcd(columns, SPAN)
        codes = [tensors[name] for name in _code_names(params.bits)]
        by_row = tensors["row_scales"].data_ptr() if params.row_scales else 0
        factors = Factors(tensors["scale"].data_ptr(), by_row, 4.0)
        layout = ProductSizes(shape[1], shape[0], columns, rows, span, CHUNK, 0)
        names = (*_code_names(params.bits), *TABLES)
        stored = {name: t.data_ptr() for name, t in zip(names, (*codes, *_tables()), strict=True)}
        sizes = {"columns": columns, "rows": rows, "span": span, "features": shape[1]}
        super().__init__(tensors, params, shape, layout, stored, sizes, factors)

    def kernel(self, tokens: int) -> llvm.Function:
        return llvm.function(_E8pSums, self.params.bits, tokens)

    def decoder(self, dtype: torch.dtype) -> Decoder:
        function = llvm.function(_E8pRows, self.params.bits, self.params.row_scales, dtype)
        return small_matmul.in_rows(function, {**self.stored, **self.sizes, **self.factors.by_name}, self.shape[1])


def _code_names(bits: int) -> tuple[str, ...]:
    return ("codes", "residual") if bits in RHO else ("codes",)


@cache
def _tables() -> tuple[Tensor, Tensor, Tensor]:
    """uint8 [256, 8]: what the high and the low byte of a code give, and residuals of 3 bits."""
    numbers = e8p_format.magnitudes() + 3.5
    numbers[:, -1] = torch.where(e8p_format.odd_sum(), 7 - numbers[:, -1], numbers[:, -1])
    bits = torch.arange(256, device="cpu")[:, None] >> torch.arange(DIM, device="cpu") & 1
    parity = bits.sum(1) & 1
    bits[:, 0] ^= parity
    low = 28 * bits + 2 * (1 - parity)[:, None]
    ball = e8p_format.ball() / RESIDUAL_UNIT[3] + CODE_BIAS
    return (4 * numbers).to(torch.uint8), low.to(torch.uint8), ball.to(torch.uint8)


class _Points(emitter.Writer):
    """Turns codes into bytes, for both functions. Their first arguments are the codes, the residuals if there are any,
    and the tables."""

    def __init__(self, name: str, pointers: str, integers: str, bits: int, dtype: torch.dtype) -> None:
        self.bits, self.parts = bits, len(_code_names(bits))
        super().__init__(name, " ".join((*_code_names(bits), *TABLES, pointers)), integers, dtype)
        self.codes, self.tables = self.pointers[: self.parts], self.pointers[self.parts : self.parts + 3]

    def chunk(self, part: int, index: Any) -> Any:
        """Integers plus CODE_BIAS of CHUNK // DIM codes, or residuals, from number `index` on: unsigned bytes."""
        points = [self._points(part, self.b.add(index, self.i64(i))) for i in range(CHUNK // DIM)]
        return self.join([self.b.bitcast(each, self.vector(self.byte, DIM)) for each in points])

    def _points(self, part: int, index: Any) -> Any:
        b, codes = self.b, self.codes[part]
        high, low, ball = self.tables
        if part and self.bits == 3:
            return self._row_of(ball, codes, index)
        first = b.mul(index, self.i64(2))
        return b.xor(self._row_of(high, codes, b.add(first, self.i64(1))), self._row_of(low, codes, first))

    def _row_of(self, table: Any, codes: Any, place: Any) -> Any:
        return self.load(table, self.b.zext(self.load(codes, place, self.byte), self.index), self.index)

    def join(self, vectors: list[Any]) -> Any:
        while len(vectors) > 1:
            size = 2 * vectors[0].type.count
            vectors = [self.shuffled(a, b, range(size)) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        return vectors[0]


class _E8pSums(_Points, SpanSums):
    """Sums rows of the weight times few rows of activations."""

    def __init__(self, bits: int, tokens: int) -> None:
        super().__init__("sums", PRODUCT, "first last columns rows span", bits, torch.float32)
        self.x16, self.x_scales, self.x_sums, self.out, _ = self.pointers[-5:]
        first, last, self.columns, self.rows, self.span = self.integers
        b = self.b
        self.spans = b.udiv(self.columns, self.span)
        ratios = [1.0, emitter.float32(4 * RESIDUAL_UNIT[bits] / RHO[bits])] if self.parts == 2 else [1.0]
        self.allocate(TOGETHER[tokens], tokens, ratios, CODE_BIAS)
        some = self.i64(LANES // self.together)
        with self.loop(b.mul(last, some), b.mul(first, some)) as number:
            row = b.mul(number, self.i64(self.together))
            self.sum_rows(row, partial(self._add_span, row))
        b.ret_void()

    def _add_span(self, row: Any, u: Any) -> None:
        first = self.b.mul(u, self.span)
        with self.loop(self.b.udiv(self.span, self.i64(CHUNK))) as chunk:
            self._chunk(row, self.b.add(first, self.b.mul(chunk, self.i64(CHUNK))))

    def _chunk(self, row: Any, column: Any) -> None:
        b, shorts = self.b, self.vector(self.short, CHUNK)
        place = b.mul(column, self.i64(self.tokens))
        inputs = [self.load(self.x16, b.add(place, self.i64(m * CHUNK)), self.short, CHUNK) for m in range(self.tokens)]
        for i, p in pairs(range(self.together), range(self.parts)):
            line = b.mul(b.add(row, self.i64(i)), self.columns)
            index = b.udiv(b.add(line, column), self.i64(DIM))
            values = b.zext(self.chunk(p, index), shorts)
            for m, x in enumerate(inputs):
                held = self.partial[i, m, p]
                b.store(b.add(b.load(held), self.pair_sums(values, x)), held)


class _E8pRows(_Points):
    """Writes rows of the weight."""

    def __init__(self, bits: int, by_row: bool, dtype: torch.dtype) -> None:
        super().__init__("decode", "scale row_scales out", "first last start stop features columns", bits, dtype)
        self.kind = self.vector(self.float, CHUNK)
        scales, row_scales, self.out = self.pointers[-3:]
        first, last, self.start, stop, self.features, self.columns = self.integers
        with self.rows_between(first, last, stop) as row:
            scale = self.load(scales, self.i64(0), self.float)
            if by_row:
                scale = self.b.fmul(scale, self.load_floats(row_scales, row, torch.float16))
            self.in_chunks(self.features, CHUNK, partial(self._write, row, self.splat(scale, CHUNK)))
        self.b.ret_void()

    def _write(self, row: Any, scale: Any, column: Any, rest: Any) -> None:
        line = self.b.mul(self.b.sub(row, self.start), self.features)
        self.store_some(self._weights(row, column, scale), self.out, self.b.add(line, column), rest)

    def _weights(self, row: Any, column: Any, scale: Any) -> Any:
        b = self.b
        index = b.udiv(b.add(b.mul(row, self.columns), column), self.i64(DIM))
        parts = []
        for part in range(self.parts):
            unit = RESIDUAL_UNIT[self.bits] if part else 0.25
            biased = b.fsub(b.uitofp(self.chunk(part, index), self.kind), self.constant(self.float, CHUNK, CODE_BIAS))
            parts.append(b.fmul(biased, self.constant(self.float, CHUNK, unit)))
        value = parts[0]
        if len(parts) > 1:
            rho = self.constant(self.float, CHUNK, emitter.float32(RHO[self.bits]))
            value = b.fadd(value, b.fdiv(parts[1], rho))
        return self.rounded(b.fmul(value, scale))
