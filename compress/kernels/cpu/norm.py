"""Normalize rows on a CPU as RMSNorm and LayerNorm do, in float32, rounded once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from compress.kernels.cpu.emitter import LANES, Writer, float32


class NormKind(NamedTuple):
    """What a norm computes: (x - mean) / sqrt(mean square + eps) times weights, plus a bias."""

    eps: float
    weight: torch.dtype | None  # type of the weights; None: ones
    offset: bool = False  # 1 is added to the weights
    centred: bool = False  # the mean is taken away
    bias: torch.dtype | None = None


class Rms(Writer):
    """Pieces of functions that normalize: the factor of a row, and its numbers."""

    def square_factor(self, width: Any, kind: NormKind, read: Any) -> tuple[Any, Any]:
        """Return 1 / sqrt(mean square + eps) of `width` numbers, and their mean (None if it stays).

        read(first, rest) gives a vector of them.
        """
        b, mean = self.b, None
        count = b.sitofp(width, self.float)
        if kind.centred:
            mean = b.fdiv(self._sum(width, read), count)
            all_means = self.splat(mean, LANES)

            def read_centred(first: Any, rest: Any) -> Any:
                values = b.fsub(read(first, rest), all_means)
                return values if rest is None else self.only(values, rest)

            squares = self._sum(width, lambda first, rest: self._square(read_centred(first, rest)))
        else:
            squares = self._sum(width, lambda first, rest: self._square(read(first, rest)))
        total = b.fadd(b.fdiv(squares, count), self.float(float32(kind.eps)))
        return b.fdiv(self.float(1.0), self.intrinsic("llvm.sqrt.f32", self.float, total)), mean

    def only(self, values: Any, rest: Any) -> Any:
        """Return the first `rest` of a vector, 0 for the others."""
        b = self.b
        places = self.ir.Constant(self.vector(self.index, LANES), list(range(LANES)))
        return b.select(b.icmp_signed("<", places, self.splat(rest, LANES)), values, self.floats(0.0))

    def times_weight(self, values: Any, weight: Any, place: Any, kind: NormKind, rest: Any) -> Any:
        """Multiply a vector by the weights from a place on."""
        if kind.weight is None:
            return values
        factors = self.load_floats(weight, place, kind.weight, LANES, rest)
        return self.b.fmul(values, self.b.fadd(factors, self.floats(1.0)) if kind.offset else factors)

    def _square(self, values: Any) -> Any:
        return self.b.fmul(values, values)

    def _sum(self, width: Any, read: Any) -> Any:
        b, total = self.b, self.variable(self.vector(self.float, LANES))
        b.store(self.floats(0.0), total)

        def add(first: Any, rest: Any) -> None:
            b.store(b.fadd(b.load(total), read(first, rest)), total)

        self.in_chunks(width, LANES, add)
        return self.total(b.load(total))


class Norm(Rms):
    """Writes rows of x, normalized, to out; both are contiguous."""

    def __init__(self, kind: NormKind, dtype: torch.dtype) -> None:
        super().__init__("norm", "x weight bias out", "rows width", dtype)
        x, weight, bias, out = self.pointers
        rows, width = self.integers
        b = self.b
        with self.loop(rows) as row:
            start = b.mul(row, width)

            def read(first: Any, rest: Any) -> Any:
                return self.load_floats(x, b.add(start, first), dtype, LANES, rest)

            factor, mean = self.square_factor(width, kind, read)
            factors = self.splat(factor, LANES)

            def write(first: Any, rest: Any) -> None:
                values = read(first, rest)
                if mean is not None:
                    values = b.fsub(values, self.splat(mean, LANES))
                values = self.times_weight(b.fmul(values, factors), weight, first, kind, rest)
                if kind.bias is not None:
                    values = b.fadd(values, self.load_floats(bias, first, kind.bias, LANES, rest))
                self.store_some(self.rounded(values), out, b.add(start, first), rest)

            self.in_chunks(width, LANES, write)
        b.ret_void()
