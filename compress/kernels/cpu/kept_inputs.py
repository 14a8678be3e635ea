"""List the inputs that a product with sparse inputs reads: their columns and values, span by span."""

from __future__ import annotations

from typing import Any

import torch

from compress.kernels.cpu.emitter import LARGEST, Emitter, float32

QUAD = 4  # columns whose bytes are multiplied together: spans of integers are padded to a multiple
AHEAD = 16  # entries behind the listed columns: columns that may be prefetched and are not read
LEAST = 2.0**-100  # largest magnitude of a span whose reciprocal is a number


class KeptInputs(Emitter):
    """Writes the columns in which some row of x [tokens, inputs] reaches its threshold, and all rows' values there.

    thresholds float32: that of input j is number j * each. |x| >= t is kept, and so is NaN; a value below is 0 in its
    row. Groups of `group` columns are cut into spans of `span`. Written are
    - columns int32 and values float32 [tokens, room], span behind span, where `starts` int64 [spans + 1] says;
    - sums float32 [tokens, spans] of the values.
    As integers, values are scaled by the largest of their span and written as two signed bytes, x = 256 high + low;
    x_scales float32 [tokens, spans] are then NaN where a value is not finite, sums are those of the integers, and spans
    are padded to a multiple of four columns with zeros.
    """

    def __init__(self, dtype: torch.dtype, tokens: int, integers: bool) -> None:
        pointers = "x thresholds columns values low high x_scales sums starts"
        super().__init__("kept_inputs", pointers, "each inputs room group span spans")
        self.dtype, self.tokens = dtype, tokens
        b, named = self.b, self.named
        self.count, self.span_number = self.variable(self.index), self.variable(self.index)
        self.largest, self.total_sum = self.variable(self.word), self.variable(self.word)
        self.sum = self.variable(self.float)
        for variable in (self.count, self.span_number):
            b.store(self.i64(0), variable)
        self.store(self.i64(0), named["starts"], self.i64(0))
        groups = self._over(named["inputs"], named["group"])
        with self.loop(groups) as group:
            first = b.mul(group, named["group"])
            end = self.smaller(b.add(first, named["group"]), named["inputs"])
            with self.loop(self._over(b.sub(end, first), named["span"])) as piece:
                begin = b.add(first, b.mul(piece, named["span"]))
                self._span(begin, self.smaller(b.add(begin, named["span"]), end), integers)
        for i in range(AHEAD):
            place = b.add(b.load(self.count), self.i64(i))
            self.store(b.trunc(b.sub(named["inputs"], self.i64(1)), self.word), named["columns"], place)
        b.ret_void()

    def _over(self, size: Any, part: Any) -> Any:
        return self.b.udiv(self.b.add(size, self.b.sub(part, self.i64(1))), part)

    def _span(self, begin: Any, end: Any, integers: bool) -> None:
        b, start = self.b, self.b.load(self.count)
        with self.loop(end, begin) as column:
            self._take(column)
        if integers:
            self._pad(start)
        stop, number = b.load(self.count), b.load(self.span_number)
        for token in range(self.tokens):
            line = b.mul(self.named["room"], self.i64(token))
            cell = b.add(b.mul(self.named["spans"], self.i64(token)), number)
            if integers:
                self._integers(b.add(line, start), b.add(line, stop), cell)
            else:
                self._total(b.add(line, start), b.add(line, stop), cell)
        number = b.add(number, self.i64(1))
        b.store(number, self.span_number)
        self.store(stop, self.named["starts"], number)

    def _take(self, column: Any) -> None:
        """Write a column and its values behind the others, and count it if it is kept."""
        b, named, count = self.b, self.named, self.b.load(self.count)
        least = self.load(named["thresholds"], b.mul(column, named["each"]), self.float)
        is_kept: Any = self.ir.IntType(1)(0)
        for token in range(self.tokens):
            value = self.load_floats(named["x"], b.add(b.mul(named["inputs"], self.i64(token)), column), self.dtype)
            size = self.intrinsic("llvm.fabs.f32", self.float, value)
            reaches = b.fcmp_unordered(">=", size, least)
            value = b.select(reaches, value, self.float(0.0))
            is_kept = b.or_(is_kept, reaches)
            self.store(value, named["values"], b.add(b.mul(named["room"], self.i64(token)), count))
        self.store(b.trunc(column, self.word), named["columns"], count)
        b.store(b.add(count, b.zext(is_kept, self.index)), self.count)

    def _pad(self, start: Any) -> None:
        """Write the last column again with zeros, up to a whole number of four columns."""
        b, named, count = self.b, self.named, self.b.load(self.count)
        with b.if_then(b.icmp_signed(">", count, start)):
            last = self.load(named["columns"], b.sub(count, self.i64(1)), self.word)
            for i in range(QUAD - 1):
                place = b.add(count, self.i64(i))
                self.store(last, named["columns"], place)
                for token in range(self.tokens):
                    line = b.mul(named["room"], self.i64(token))
                    self.store(self.float(0.0), named["values"], b.add(line, place))
        b.store(b.and_(b.add(count, self.i64(QUAD - 1)), self.i64(-QUAD)), self.count)

    def _total(self, start: Any, stop: Any, cell: Any) -> None:
        b = self.b
        b.store(self.float(0.0), self.sum)
        with self.loop(stop, start) as i:
            b.store(b.fadd(b.load(self.sum), self.load(self.named["values"], i, self.float)), self.sum)
        self.store(b.load(self.sum), self.named["sums"], cell)

    def _integers(self, start: Any, stop: Any, cell: Any) -> None:
        """Write the bytes of values, with their scale and sum."""
        b, named = self.b, self.named
        b.store(self.word(0), self.largest)
        with self.loop(stop, start) as i:  # sizes as integers: NaN is larger than all numbers
            size = b.and_(self.load(named["values"], i, self.word), self.word(0x7FFFFFFF))
            largest = b.load(self.largest)
            b.store(b.select(b.icmp_unsigned(">", size, largest), size, largest), self.largest)
        largest = b.bitcast(b.load(self.largest), self.float)
        usable = b.fcmp_ordered("<", largest, self.float(float("inf")))
        scale = b.select(usable, b.fmul(largest, self.float(float32(1 / LARGEST))), self.float(float("nan")))
        has_inverse = b.and_(usable, b.fcmp_ordered(">", largest, self.float(LEAST)))
        factor = b.select(has_inverse, b.fdiv(self.float(LARGEST), largest), self.float(0.0))
        b.store(self.word(0), self.total_sum)
        with self.loop(stop, start) as i:
            product = b.fmul(self.load(named["values"], i, self.float), factor)
            product = b.select(usable, product, self.float(0.0))
            integer = b.fptosi(self.intrinsic("llvm.rint.f32", self.float, product), self.word)
            b.store(b.add(b.load(self.total_sum), integer), self.total_sum)
            self.store(b.trunc(integer, self.byte), named["low"], i)
            high = b.ashr(b.add(integer, self.word(128)), self.word(8))
            self.store(b.trunc(high, self.byte), named["high"], i)
        self.store(scale, named["x_scales"], cell)
        total = b.sitofp(b.load(self.total_sum), self.float)
        self.store(total, named["sums"], cell)
