"""Sum rows of small integers times activations, span by span: the base of kernels whose weights are sums of bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from compress.kernels.cpu.emitter import LANES, Writer


class SpanSums(Writer):
    """Sums rows of small integers times activations, span by span: the base of kernels whose weights are sums of bytes.

    `partial[row, token, part]` are the int32 sums of a span, as vectors; a weight is the sum of its parts times their
    ratios, and each part is too large by `bias`.
    """

    x_scales: Any
    x_sums: Any
    out: Any
    spans: Any
    rows: Any

    def allocate(self, together: int, tokens: int, ratios: Sequence[float] = (1.0,), bias: int = 0) -> None:
        """Take the variables for `together` rows and `tokens` rows of activations."""
        self.together, self.tokens, self.ratios, self.bias = together, tokens, ratios, bias
        cells, kind = list(product(range(together), range(tokens))), self.vector(self.float, LANES)
        self.sums = {cell: self.variable(kind) for cell in cells}
        int32 = self.vector(self.word, LANES)
        self.partial = {(*cell, part): self.variable(int32) for cell in cells for part in range(len(ratios))}

    def sum_rows(self, row: Any, add_span: Callable[[Any], None]) -> None:
        """Write the sums of the rows from `row` on; add_span(u) adds the products of a span to `partial`."""
        b = self.b
        for variable in self.sums.values():
            b.store(self.floats(0.0), variable)
        with self.loop(self.spans) as u:
            for variable in self.partial.values():
                b.store(self.constant(self.word, LANES, 0), variable)
            add_span(u)
            for m in range(self.tokens):
                self._scale_span(u, m)
        for m in range(self.tokens):
            bias = self.float(self.bias * sum(self.ratios))
            bias = b.fmul(self.scaled_sums(self.x_scales, self.x_sums, self.i64(m), self.spans), bias)
            for i in range(self.together):
                place = b.add(b.mul(self.rows, self.i64(m)), b.add(row, self.i64(i)))
                self.store(b.fsub(self.total(b.load(self.sums[i, m])), bias), self.out, place)

    def _scale_span(self, u: Any, m: int) -> None:
        b, kind = self.b, self.vector(self.float, LANES)
        scale = self.load(self.x_scales, b.add(b.mul(self.spans, self.i64(m)), u), self.float)
        for part, ratio in enumerate(self.ratios):
            factor = self.splat(b.fmul(scale, self.float(ratio)), LANES)
            for i in range(self.together):
                integers = b.sitofp(b.load(self.partial[i, m, part]), kind)
                b.store(self.multiply_add(integers, factor, b.load(self.sums[i, m])), self.sums[i, m])
