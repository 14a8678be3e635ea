"""Apply the gate of an MLP, and add rows, on a CPU: in float32, rounded once."""

from __future__ import annotations

import math
from typing import Any

import torch

from compress.kernels.cpu.emitter import LANES, Writer, float32

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu")
LARGEST_POWER = 88.0  # e^x is finite below
LOG2E, LN2_HIGH, LN2_LOW = 1 / math.log(2), 0.693145751953125, 1.428606765330187e-06
# e^x for |x| <= ln 2 / 2, from x^0 on: Taylor's, whose error is below that of float32
EXPONENTIAL = tuple(1 / math.factorial(k) for k in range(8))
# erf(x) for x >= 0 is 1 - t (a1 + a2 t + ...) e^(-x^2) with t = 1 / (1 + p x), to 1.5e-7 (Abramowitz, Stegun 7.1.26)
ERF_P, ERF_SUM = 0.3275911, (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


class Curves(Writer):
    """Pieces of functions that need exponentials; vectors are float32."""

    def exponential(self, x: Any) -> Any:
        """Return e^x for x up to LARGEST_POWER, which larger ones are taken for."""
        b, kind, lanes = self.b, x.type, x.type.count
        limits = [self.constant(self.float, lanes, limit) for limit in (LARGEST_POWER, -LARGEST_POWER + 1)]
        x = self.intrinsic(f"llvm.minnum.v{lanes}f32", kind, x, limits[0])
        x = self.intrinsic(f"llvm.maxnum.v{lanes}f32", kind, x, limits[1])
        whole = self.intrinsic(f"llvm.rint.v{lanes}f32", kind, b.fmul(x, self._same(LOG2E, lanes)))
        rest = self.multiply_add(whole, self._same(-LN2_HIGH, lanes), x)
        rest = self.multiply_add(whole, self._same(-LN2_LOW, lanes), rest)
        value = self._same(EXPONENTIAL[-1], lanes)
        for factor in reversed(EXPONENTIAL[:-1]):
            value = self.multiply_add(value, rest, self._same(factor, lanes))
        words = self.vector(self.word, lanes)
        power = b.add(b.fptosi(whole, words), self.constant(self.word, lanes, 127))
        scale = b.bitcast(b.shl(power, self.constant(self.word, lanes, 23)), kind)
        return b.fmul(value, scale)

    def activate(self, name: str, x: Any) -> Any:
        """Return an activation function of a vector."""
        b, lanes = self.b, x.type.count
        if name == "relu":
            return b.select(b.fcmp_ordered("<", x, self._same(0.0, lanes)), self._same(0.0, lanes), x)
        if name == "gelu":
            return b.fmul(b.fmul(x, self._same(0.5, lanes)), b.fadd(self._same(1.0, lanes), self._erf(x)))
        power = b.fneg(x)
        if name == "gelu_tanh":  # x (1 + tanh u) / 2 = x / (1 + e^(-2u))
            cube = self.multiply_add(b.fmul(x, x), self._same(0.044715, lanes), self._same(1.0, lanes))
            power = b.fmul(b.fmul(x, cube), self._same(-2 * math.sqrt(2 / math.pi), lanes))
        return b.fdiv(x, b.fadd(self._same(1.0, lanes), self.exponential(power)))

    def _erf(self, x: Any) -> Any:
        """Return erf(x / sqrt(2))."""
        b, lanes, kind = self.b, x.type.count, x.type
        size = b.fmul(self.intrinsic(f"llvm.fabs.v{lanes}f32", kind, x), self._same(math.sqrt(0.5), lanes))
        one = self._same(1.0, lanes)
        t = b.fdiv(one, self.multiply_add(size, self._same(ERF_P, lanes), one))
        total = self._same(0.0, lanes)
        for factor in reversed(ERF_SUM):
            total = self.multiply_add(total, t, self._same(factor, lanes))
        value = b.fsub(one, b.fmul(b.fmul(total, t), self.exponential(b.fneg(b.fmul(size, size)))))
        return self.intrinsic(f"llvm.copysign.v{lanes}f32", kind, value, x)

    def _same(self, value: float, lanes: int) -> Any:
        return self.constant(self.float, lanes, float32(value))


class Gate(Curves):
    """Writes act(gate) * up; gate and up lie in rows of `stride` numbers, out is contiguous."""

    def __init__(self, activation: str, dtype: torch.dtype) -> None:
        super().__init__("gate", "gate up out", "rows width stride", dtype)
        gate, up, out = self.pointers
        rows, width, stride = self.integers
        b = self.b
        with self.loop(rows) as row:
            source, target = b.mul(row, stride), b.mul(row, width)

            def write(first: Any, rest: Any) -> None:
                place = b.add(source, first)
                opened, values = (self.load_floats(each, place, dtype, LANES, rest) for each in (gate, up))
                product = b.fmul(self.activate(activation, opened), values)
                self.store_some(self.rounded(product), out, b.add(target, first), rest)

            self.in_chunks(width, LANES, write)
        b.ret_void()


class Add(Writer):
    """Adds rows of y, times a factor, to rows of x; `step`: numbers from one row of y to the next, 0 for a bias."""

    def __init__(self, dtype: torch.dtype, added: torch.dtype, factor: float = 1.0) -> None:
        super().__init__("add", "x y", "rows width stride step", dtype)
        x, y = self.pointers
        rows, width, stride, step = self.integers
        b = self.b
        with self.loop(rows) as row:
            target, source = b.mul(row, stride), b.mul(row, step)

            def write(first: Any, rest: Any) -> None:
                place = b.add(target, first)
                values = self.load_floats(y, b.add(source, first), added, LANES, rest)
                if factor != 1.0:
                    values = b.fmul(values, self.floats(float32(factor)))
                total = b.fadd(self.load_floats(x, place, dtype, LANES, rest), values)
                self.store_some(self.rounded(total), x, place, rest)

            self.in_chunks(width, LANES, write)
        b.ret_void()
