"""Turn rows of activations into int16 with scales, and the sums of products with them into rows of outputs."""

from __future__ import annotations

from typing import Any

import torch

from compress.kernels.cpu.emitter import LANES, LARGEST, Emitter, Writer


class Quantize(Emitter):
    """Writes rows of `inputs` values of one type as integers, with the scale and the sum of each span."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__("quantize", "x x16 scales sums", "rows spans span lanes inputs")
        self.dtype = dtype
        self.x, self.x16, self.scales, self.sums = self.pointers
        self.rows, spans, span, self.lanes, self.inputs = self.integers
        self.vectors = self.b.udiv(span, self.i64(LANES))
        self.kind = self.vector(self.float, LANES)
        self.largest, self.sum = self.variable(self.kind), self.variable(self.vector(self.word, LANES))
        self.read = self.variable(self.kind)
        with self.loop(self.rows) as row, self.loop(spans) as u:
            self._span(row, self.b.add(self.b.mul(row, spans), u), self.b.mul(u, span))
        self.b.ret_void()

    def _span(self, row: Any, index: Any, column: Any) -> None:
        b = self.b
        b.store(self.floats(0.0), self.largest)
        with self.loop(self.vectors) as i:
            values = self._values(row, b.add(column, b.mul(i, self.i64(LANES))))
            size = self.intrinsic(f"llvm.fabs.v{LANES}f32", self.kind, values)
            largest = self.intrinsic(f"llvm.maximum.v{LANES}f32", self.kind, b.load(self.largest), size)  # NaN stays
            b.store(largest, self.largest)
        largest = self.intrinsic(f"llvm.vector.reduce.fmaximum.v{LANES}f32", self.float, b.load(self.largest))
        usable = b.fcmp_ordered("<", largest, self.float(float("inf")))
        scale = b.select(usable, b.fmul(largest, self.float(1 / LARGEST)), self.float(float("nan")))
        positive = b.fcmp_ordered(">", scale, self.float(2.0**-126))  # smaller ones have no reciprocal
        factor = self.splat(b.select(positive, b.fdiv(self.float(1.0), scale), self.float(0.0)), LANES)
        b.store(self.constant(self.word, LANES, 0), self.sum)
        with self.loop(self.vectors) as i:
            place = b.add(column, b.mul(i, self.i64(LANES)))
            rounded = self.intrinsic(f"llvm.rint.v{LANES}f32", self.kind, b.fmul(self._values(row, place), factor))
            words = self.vector(self.word, LANES)
            integers = self.intrinsic(f"llvm.fptosi.sat.v{LANES}i32.v{LANES}f32", words, rounded)  # 0 for NaN
            b.store(b.add(b.load(self.sum), integers), self.sum)
            inside = b.urem(place, self.lanes)
            vector = b.add(b.mul(b.sub(place, inside), self.rows), b.mul(row, self.lanes))
            self.store(b.trunc(integers, self.vector(self.short, LANES)), self.x16, b.add(vector, inside))
        self.store(scale, self.scales, index)
        self.store(self.total(b.sitofp(b.load(self.sum), self.kind)), self.sums, index)

    def _values(self, row: Any, column: Any) -> Any:
        """Sixteen activations as float32, 0 past the last."""
        b, left = self.b, self.b.sub(self.inputs, column)
        place = b.add(b.mul(row, self.inputs), column)
        with b.if_else(b.icmp_signed(">=", left, self.i64(LANES))) as (whole, some):
            with whole:
                b.store(self.load_floats(self.x, place, self.dtype, LANES), self.read)
            with some:
                b.store(self.load_floats(self.x, place, self.dtype, LANES, left), self.read)
        return b.load(self.read)


class Finish(Writer):
    """Writes sums float32 [rows, stored rows] as [rows, outputs] of a type, in rows of `width`, times scale / divisor
    and the scales of the outputs where there are any.

    kinds: divisor, whether there is a scale, and whether there are scales of outputs; several, where the sums of as
    many weights are added.
    """

    def __init__(self, dtype: torch.dtype, *kinds: tuple[float, bool, bool]) -> None:
        pointers = " ".join(f"sums{k} scale{k} row_scales{k}" for k in range(len(kinds)))
        super().__init__("finish", f"{pointers} out", "rows stored_rows outputs width", dtype)
        *given, out = self.pointers
        count, stored, outputs, width = self.integers
        b, factors = self.b, []
        for k, (divisor, scaled, _) in enumerate(kinds):
            scale = self.load(given[3 * k + 1], self.i64(0), self.float) if scaled else None
            factors.append(None if scale is None else self.splat(b.fmul(scale, self.float(1 / divisor)), LANES))
        with self.loop(count) as row, self.loop(b.udiv(stored, self.i64(LANES))) as i:
            column, values = b.mul(i, self.i64(LANES)), None
            for k, (_, _, by_row) in enumerate(kinds):
                part = self.load(given[3 * k], b.add(b.mul(row, stored), column), self.float, LANES)
                part = part if factors[k] is None else b.fmul(part, factors[k])
                if by_row:
                    part = b.fmul(part, self.load_floats(given[3 * k + 2], column, torch.float16, LANES))
                values = part if values is None else b.fadd(values, part)
            left, place = b.sub(outputs, column), b.add(b.mul(row, width), column)
            rounded = self.rounded(values)
            with b.if_else(b.icmp_signed(">=", left, self.i64(LANES))) as (whole, some):
                with whole:
                    self.store(rounded, out, place)
                with some:
                    self.store_some(rounded, out, place, left)
        b.ret_void()
