"""Multiply with the `ternary` format on a CPU, in integers: for a few rows of activations.

    y[m, n] = sum over spans u of scale[u, n] x_scale[m, u] (step sum_k code[n, k] x16[m, k] - sum_k x16[m, k])

A code is t + 1, 0 to 2, and step 1; for `binary` it is (t + 1) / 2 and step 2. A span is as many columns as share a
scale of activations, all of one group of weights. An activation of 16 bits is two bytes (byte_products.py), so sums are
exact, and the error of a product is that of 16-bit activations: below that of bfloat16.

Four bytes beside each other are four columns of a row, and a unit has sixteen rows: so four bytes of activations,
copied to all rows, meet the digits of all bytes, and the sums of rows come out beside each other. Two bits of a byte
take a shift and a mask; a digit of base 3 two comparisons, the next one two additions. That is little more work than
looking sums of activations up (T-MAC, arXiv 2407.00088), and needs no tables rounded to 8 bits.

Rows of the weight are decoded in blocks of sixteen, from a table of the three values of each row and group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product as pairs
from math import lcm
from typing import Any

import torch
from torch import Tensor

from compress.formats import ternary
from compress.formats.ternary import (
    BASE3,
    BINARY,
    BYTE_DIGITS,
    FIELD_BITS,
    LARGEST_ZERO,
    ROW_MULTIPLE,
    TOGETHER,
    Params,
)
from compress.kernels import llvm
from compress.kernels.contract import Decoder, Shape
from compress.kernels.cpu import emitter, small_matmul
from compress.kernels.cpu.byte_products import LARGEST_BYTE, ByteProducts, as_it_is
from compress.kernels.cpu.emitter import LANES, PRODUCT, Emitter, Writer
from compress.kernels.cpu.small_matmul import Product, ProductSizes

UNIT_BYTES = ROW_MULTIPLE * TOGETHER
LONGEST_SPAN = 128  # columns; int16 holds sums of 252, float32 all of their total
ROW_SPANS = {BASE3: 80, ternary.PLANAR: 128, BINARY: 128}  # columns where a row has one scale: a few whole units
HALF = UNIT_BYTES // 2
SHORT_PERIOD = 32  # digits; longer ones, of groups of base 3, would be more code than the processor keeps decoded


def span_columns(params: Params) -> int:
    """Return the columns of a span: the most that divide a group, in whole vectors; 0: there are none."""
    if params.group_size == -1:
        return ROW_SPANS[params.packing]
    sizes = (size for size in range(LONGEST_SPAN, 0, -LANES) if params.group_size % size == 0)
    return next(sizes, 0)


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> Ternary | None:
    """Return the product with a weight of any width, if its groups are multiples of 16 columns."""
    return Ternary(tensors, params, shape) if emitter.worthwhile(shape) and span_columns(params) else None


class Ternary(Product):
    def __init__(self, tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> None:
        span, (rows, columns) = span_columns(params), shape
        spans, blocks = -(-columns // span), -(-rows // ROW_MULTIPLE)
        digits = BYTE_DIGITS[params.packing]
        per_period = lcm(span // TOGETHER, digits)  # digits of a row, until spans and units begin together again
        periods, rest = divmod(-(-columns // TOGETHER), per_period)
        groups = params.groups(columns)
        layout = ProductSizes(columns, rows, spans * span, blocks * ROW_MULTIPLE, span, LANES, spans * span // 2)
        stored = {name: tensors[name].data_ptr() for name in ("codes", "scales")}
        units = -(-columns // params.unit)
        sizes = {"features": columns, "units": units, "spans": spans, "periods": periods, "groups": groups}
        sizes |= {"rows": layout.rows, "group": params.group(columns)}
        super().__init__(tensors, params, shape, layout, stored, sizes)
        self._scaling = "tensor" if params.tensor_scale else "row" if params.group_size == -1 else "group"
        per_group = 0 if params.group_size == -1 else params.group_size // span
        self._settings = (params.packing, span, rest, self._scaling, params.scale_dtype, per_group)

    def most_rows(self, dtype: torch.dtype) -> int:
        return emitter.MOST_OF_INTEGERS if emitter.widens(dtype) else super().most_rows(dtype)

    def kernel(self, tokens: int) -> llvm.Function:
        return llvm.function(TernarySums, *self._settings, tokens)

    def decoder(self, dtype: torch.dtype) -> Decoder:
        function = llvm.function(_TernaryRows, self.params.packing, self._scaling, self.params.scale_dtype, dtype)
        space = len(_VALUES) * UNIT_BYTES * self.sizes["groups"]
        return small_matmul.in_rows(function, {**self.stored, **self.sizes}, self.shape[1], space)


class _DigitReader:
    """Pieces of functions that read codes and scales."""

    def __init__(self, e: Emitter, packing: str, scaling: str, scale_dtype: str) -> None:
        self.e, self.b, self.packing = e, e.b, packing
        self.scaling, self.scale_dtype = scaling, getattr(torch, scale_dtype)
        self.codes, self.scales, self.units, self.rows = (e.named[x] for x in ("codes", "scales", "units", "rows"))

    def load(self, block: Any, unit: Any, part: Any, count: int) -> Any:
        """Return `count` bytes of a unit, number `part` of such vectors."""
        place = self.b.add(self.b.mul(block, self.units), unit)
        offset = self.b.add(self.b.mul(place, self.e.i64(UNIT_BYTES)), self.b.mul(part, self.e.i64(count)))
        return self.e.load(self.codes, offset, self.e.byte, count)

    def digits(self, octets: Any) -> Iterator[Any]:
        """Yield the codes of all digits of bytes, one vector after the other."""
        e, b, kind = self.e, self.b, octets.type
        if self.packing == BASE3:
            for _ in range(BYTE_DIGITS[BASE3]):
                low, high = (
                    b.icmp_signed(">", octets, self._bytes(kind, x)) for x in (-LARGEST_ZERO - 1, LARGEST_ZERO)
                )
                yield b.sub(b.sub(self._bytes(kind, 0), b.sext(low, kind)), b.sext(high, kind))
                octets = as_it_is(e, b.add(b.add(octets, octets), octets))
            return
        bits = FIELD_BITS[self.packing]
        shorts = e.vector(e.short, kind.count // 2)
        for k in range(BYTE_DIGITS[self.packing]):
            moved = octets
            if k:
                places = e.constant(e.short, shorts.count, k * bits)
                moved = b.bitcast(b.lshr(b.bitcast(octets, shorts), places), kind)
            yield b.and_(moved, self._bytes(kind, 2**bits - 1))

    def _bytes(self, kind: Any, value: int) -> Any:
        return self.e.constant(kind.element, kind.count, value)

    def row_scales(self, group: Any, start: Any, count: int) -> Any:
        """Return the scales of `count` rows from `start` on, float32."""
        if self.scaling == "tensor":
            return self.e.splat(self.e.load_floats(self.scales, self.e.i64(0), self.scale_dtype), count)
        cell = self.b.add(self.b.mul(group, self.rows), start)
        return self.e.load_floats(self.scales, cell, self.scale_dtype, count)


class TernarySums(Emitter):
    """Sums rows of the weight times few rows of activations."""

    def __init__(
        self, packing: str, span: int, rest: int, scaling: str, scale_dtype: str, per_group: int, tokens: int
    ) -> None:
        """rest: digits of a row behind the last whole period. per_group: spans of a group."""
        super().__init__("product", f"codes scales {PRODUCT}", "first last units spans periods rows")
        self.span, self.tokens, self.scaling, self.per_group = span, tokens, scaling, per_group
        self.per_unit, self.per_span = BYTE_DIGITS[packing], span // TOGETHER
        self.largest, self.step = (1, 2.0) if packing == BINARY else (2, 1.0)
        self.reader = _DigitReader(self, packing, scaling, scale_dtype)
        self.x16, self.x_scales, self.x_sums, self.out, self.space = self.pointers[-5:]
        self.spans, self.rows = self.named["spans"], self.named["rows"]
        b, self.columns = self.b, self.b.mul(self.spans, self.i64(span))
        wide = "avx512bw" in llvm.features()
        self.size = UNIT_BYTES if wide else HALF  # bytes of a vector
        period, vectors = lcm(self.per_span, self.per_unit), UNIT_BYTES // self.size
        together = vectors if tokens == 1 and period <= SHORT_PERIOD else 1  # vectors of the rows of a block
        kind = self.vector(self.float, self.size // 4)
        self.sums = [[self.variable(kind) for _ in range(tokens)] for _ in range(together)]
        self._split_inputs()
        with self.loop(self.named["last"], self.named["first"]) as block, self.loop(self.i64(vectors // together)) as i:
            self.parts = [b.add(b.mul(i, self.i64(together)), self.i64(part)) for part in range(together)]
            for part, m in pairs(range(together), range(tokens)):
                b.store(self.constant(self.float, self.size // 4, 0.0), self.sums[part][m])
            with self.loop(self.named["periods"]) as number:
                self._add_digits(block, number, period, period)
            if rest:
                self._add_digits(block, self.named["periods"], period, rest)
            self._finish(block)
        b.ret_void()

    def _split_inputs(self) -> None:
        """Write the bytes of the activations: of each row the low ones [columns], then the high ones."""
        b = self.b
        with self.loop(b.udiv(self.columns, self.i64(LANES))) as chunk:
            for m in range(self.tokens):
                place = b.mul(b.add(b.mul(chunk, self.i64(self.tokens)), self.i64(m)), self.i64(LANES))
                x = self.load(self.x16, place, self.short, LANES)
                middle, eight = (self.constant(self.short, LANES, value) for value in (LARGEST_BYTE, 8))
                for plane, value in enumerate((x, b.ashr(b.add(x, middle), eight))):
                    offset = b.add(self._line(m, plane), b.mul(chunk, self.i64(LANES)))
                    self.store(b.trunc(value, self.vector(self.byte, LANES)), self.space, offset)

    def _line(self, m: int, plane: int) -> Any:
        """Where the bytes of a row of activations begin."""
        return self.b.mul(self.columns, self.i64(2 * m + plane))

    def _add_digits(self, block: Any, number: Any, period: int, count: int) -> None:
        """Add the first `count` digits of a period."""
        b = self.b
        unit, first = (b.mul(number, self.i64(each)) for each in (period // self.per_unit, period // self.per_span))
        column = b.mul(number, self.i64(period * TOGETHER))
        sums = self._no_sums()
        for k in range(count):
            if k % self.per_unit == 0:
                self.barrier()  # or what later units need is loaded too early, and registers run out
                place = b.add(unit, self.i64(k // self.per_unit))
                digits = [self.reader.digits(self.reader.load(block, place, part, self.size)) for part in self.parts]
            codes = [next(each) for each in digits]
            for m, plane in pairs(range(self.tokens), range(2)):
                x = self._input(b.add(column, self.i64(TOGETHER * k)), m, plane)
                for part, vector in enumerate(codes):
                    sums[part, m, plane].add(vector, x)
            if (k + 1) % self.per_span == 0 or k + 1 == count:
                self._end_span(block, b.add(first, self.i64(k // self.per_span)), sums)
                sums = self._no_sums()

    def _no_sums(self) -> dict[tuple[int, int, int], ByteProducts]:
        cells = pairs(range(len(self.parts)), range(self.tokens), range(2))
        return {cell: ByteProducts(self, self.size, self.largest, in_order=True) for cell in cells}

    def _input(self, column: Any, m: int, plane: int) -> Any:
        """Return four bytes of a row of activations, copied to all rows of the weight."""
        offset = self.b.add(self._line(m, plane), column)
        word = self.b.load(self.at(self.space, offset, self.byte), typ=self.word, align=1)
        return self.b.bitcast(self.splat(word, self.size // 4), self.vector(self.byte, self.size))

    def _end_span(self, block: Any, u: Any, sums: dict[tuple[int, int, int], ByteProducts]) -> None:
        """Add the sums of a span times its scales."""
        b, count = self.b, self.size // 4
        for part, of_part in enumerate(self.parts):
            scale = None
            if self.scaling == "group":
                group = b.udiv(u, self.i64(self.per_group))
                scale = self.reader.row_scales(group, self._row(block, of_part), count)
            for m in range(self.tokens):
                low, high = (sums[part, m, plane].total() for plane in range(2))
                total = b.add(low, b.shl(high, self.constant(self.word, count, 8)))
                values = b.sitofp(total, self.vector(self.float, count))
                cell = b.add(b.mul(self.spans, self.i64(m)), u)
                of_x, x_sum = (
                    self.splat(self.load(each, cell, self.float), count) for each in (self.x_scales, self.x_sums)
                )
                if self.step != 1:
                    values = b.fmul(values, self.constant(self.float, count, self.step))
                values = b.fsub(values, x_sum)  # of whole numbers below 2^24: exact
                held, both = self.sums[part][m], of_x if scale is None else b.fmul(scale, of_x)
                b.store(self.multiply_add(values, both, b.load(held)), held)

    def _row(self, block: Any, part: Any) -> Any:
        b = self.b
        return b.add(b.mul(block, self.i64(ROW_MULTIPLE)), b.mul(part, self.i64(self.size // TOGETHER)))

    def _finish(self, block: Any) -> None:
        """Write the sums of sixteen rows with all rows of activations."""
        b = self.b
        for part, sums in zip(self.parts, self.sums, strict=True):
            row = self._row(block, part)
            for m, held in enumerate(sums):
                values = b.load(held)
                if self.scaling != "group":
                    values = b.fmul(values, self.reader.row_scales(self.i64(0), row, self.size // 4))
                self.store(values, self.out, b.add(b.mul(self.rows, self.i64(m)), row))


_VALUES = (-1.0, 0.0, 1.0)


class _TernaryRows(Writer):
    """Writes rows of the weight, in blocks of sixteen."""

    def __init__(self, packing: str, scaling: str, scale_dtype: str, dtype: torch.dtype) -> None:
        integers = "first last start stop features units rows group groups"
        super().__init__("decode", "codes scales space out", integers, dtype)
        self.reader, self.per_unit, self.is_binary = (
            _DigitReader(self, packing, scaling, scale_dtype),
            BYTE_DIGITS[packing],
            packing == BINARY,
        )
        self.space, self.out = self.named["space"], self.named["out"]
        self.features, self.groups, self.group = (self.named[name] for name in ("features", "groups", "group"))
        b = self.b
        unit_columns = self.i64(TOGETHER * self.per_unit)
        with self.loop(self.named["last"], self.named["first"]) as block:
            with self.loop(self.groups) as group:
                self._write_table(block, group)
            whole = b.udiv(self.features, unit_columns)
            with self.loop(whole) as unit:
                self._write_unit(block, unit, partial=False)
            with b.if_then(b.icmp_signed("<", b.mul(whole, unit_columns), self.features)):
                self._write_unit(block, whole, partial=True)
        b.ret_void()

    def _write_table(self, block: Any, group: Any) -> None:
        """Write the three values of sixteen rows and a group, each row's four times."""
        scales = self.reader.row_scales(group, self.b.mul(block, self.i64(ROW_MULTIPLE)), ROW_MULTIPLE)
        for i, value in enumerate(_VALUES):
            values = self.rounded(self.b.fmul(scales, self.constant(self.float, ROW_MULTIPLE, value)))
            four = self.shuffled(values, values, [row for row in range(ROW_MULTIPLE) for _ in range(TOGETHER)])
            self.store(four, self.space, self._table_place(group, i))

    def _table_place(self, group: Any, i: int) -> Any:
        return self.b.mul(self.b.add(self.b.mul(group, self.i64(len(_VALUES))), self.i64(i)), self.i64(UNIT_BYTES))

    def _write_unit(self, block: Any, unit: Any, partial: bool) -> None:
        """Write the columns of a unit, only those within the features if it is a partial one."""
        b = self.b
        kind = {torch.float32: self.float, torch.float16: self.half, torch.bfloat16: self.short}[self.dtype]
        base = b.mul(unit, self.i64(TOGETHER * self.per_unit))
        for k, codes in enumerate(self.reader.digits(self.reader.load(block, unit, self.i64(0), UNIT_BYTES))):
            column = b.add(base, self.i64(TOGETHER * k))
            group = self.smaller(b.udiv(column, self.group), b.sub(self.groups, self.i64(1)))
            low, zero, high = (self.load(self.space, self._table_place(group, i), kind, UNIT_BYTES) for i in range(3))
            one = self.constant(self.byte, UNIT_BYTES, 1)
            values = b.select(b.icmp_unsigned("<", codes, one), low, high)
            if not self.is_binary:
                values = b.select(b.icmp_unsigned("==", codes, one), zero, values)
            left = b.sub(self.features, column) if partial else None
            self._write_rows(block, column, values, left)

    def _write_rows(self, block: Any, column: Any, values: Any, left: Any) -> None:
        """Write four columns of sixteen rows; those past the last one go where it is written after them."""
        b = self.b
        last = b.sub(self.named["stop"], self.i64(1))
        for r in reversed(range(ROW_MULTIPLE)):
            row = self.smaller(b.add(b.mul(block, self.i64(ROW_MULTIPLE)), self.i64(r)), last)
            place = b.add(b.mul(b.sub(row, self.named["start"]), self.features), column)
            four = self.shuffled(values, values, range(TOGETHER * r, TOGETHER * (r + 1)))
            self.store_some(four, self.out, place, left)
