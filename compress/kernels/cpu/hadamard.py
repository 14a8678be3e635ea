"""Apply the Hadamard transform of compress/numerics/hadamard.py on a CPU in one compiled call, diagonals included.

For a size K * 2^p, the sums and differences of the power of two are taken in registers, four levels in one pass over a
row, first inside of vectors of 16 numbers and between 16 of them. A table of order K then gives sums over K numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from compress.formats.transforms import SCALE8_BIAS, SCALE8_SHIFT, Diagonal
from compress.kernels import llvm
from compress.kernels.calls import ActivationRows, CompiledCall, Take
from compress.kernels.cpu.emitter import LANES, Writer
from compress.numerics import hadamard

TYPES = (torch.bfloat16, torch.float16, torch.float32)
MIN_POWER_OF_TWO = 4  # smaller ones are no whole vector
RADIX = 16  # vectors in registers
TOGETHER = 8  # sums of a table in registers
THREAD = 1 << 17  # numbers that are worth waking a thread
MANY_ROWS = 4  # rows from which on diagonals are decoded once, before all rows

# Diagonals of numbers, and how they are stored; the first are decoded ones.
SCALES = {"channel_scale": torch.float32, "channel_scale16": torch.float16, "channel_scale8": torch.uint8}


def transform(
    x: Tensor, before: Diagonal | None = None, after: Diagonal | None = None, is_transposed: bool = False
) -> Tensor:
    """Return diag(after) H diag(before) x for each vector of x [..., n], of the same type; H^T if transposed.

    before, after: signs, channel_scale16 or channel_scale8 of n channels as stored; None: ones. Sums are those of
    float32. Other types than `TYPES`, and sizes with few factors of two, are left to PyTorch.
    """
    n = x.shape[-1]
    if not supports(x):
        multiply = hadamard.transpose if is_transposed else hadamard.transform
        y = multiply(x if before is None else before.times(x))
        return y if after is None else after.times(y)
    x = x.contiguous()
    out = torch.empty_like(x)
    rows = ActivationRows(x.numel() // n, x.dtype, x.data_ptr(), out.data_ptr(), n)
    call = _prepare(n, x.dtype, before, after, is_transposed, _is_many(rows.count, before, after))

    def work(first: int, last: int) -> None:
        space = torch.empty(3 * n, dtype=torch.float32, device="cpu")
        call(rows.part(first, last, n), space.data_ptr()).run()

    llvm.parallel(work, rows.count, -(-THREAD // n))
    return out


def transform_call(
    n: int, rows: ActivationRows, take: Take, before: Diagonal | None = None, after: Diagonal | None = None
) -> CompiledCall | None:
    """Return the call that does what `transform` does with rows of n numbers; None where PyTorch does it.

    It is valid as long as the diagonals stay where they are.
    """
    if not _is_compiled(n, rows.dtype):
        return None
    prepared = _prepare(n, rows.dtype, before, after, False, _is_many(rows.count, before, after))
    return prepared(rows, take(12 * n))


def _is_many(rows: int, *diagonals: Diagonal | None) -> bool:
    """Return whether diagonals are decoded before all rows."""
    return rows >= MANY_ROWS and any(diagonal is not None and diagonal.name in SCALES for diagonal in diagonals)


def _prepare(
    n: int, dtype: torch.dtype, before: Diagonal | None, after: Diagonal | None, is_transposed: bool, is_many: bool
) -> Callable[[ActivationRows, int], CompiledCall]:
    """Return what makes the call for some rows and memory for 3 n float32 numbers."""
    names = [None if diagonal is None else diagonal.name for diagonal in (before, after)]
    run, table = _function_and_table(n, dtype, *names, is_many, is_transposed)
    diagonals = [0 if diagonal is None else diagonal.stored.data_ptr() for diagonal in (before, after)]
    return lambda rows, space: CompiledCall(run, (rows.source, *diagonals, table, space, rows.target, rows.count))


def supports(x: Tensor) -> bool:
    """Return whether a compiled function transforms x."""
    return _is_compiled(x.shape[-1], x.dtype)


def _is_compiled(n: int, dtype: torch.dtype) -> bool:
    return dtype in TYPES and llvm.available() and hadamard.order(n).power >= MIN_POWER_OF_TWO


@cache
def _function_and_table(
    n: int, dtype: torch.dtype, before: str | None, after: str | None, is_many: bool, is_transposed: bool
) -> tuple[llvm.Function, int]:
    """Return what transforms vectors of n numbers, and the address of its table."""
    order = hadamard.order(n)
    run = llvm.function(_Transform, order.K, order.power, dtype, (before, after), is_many)
    return run, _table(order, is_transposed).data_ptr() if order.K > 1 else 0


@cache
def _table(order: hadamard.Order, is_transposed: bool) -> Tensor:
    """Return the table of an order; that of a power of two is symmetric and none."""
    with torch.inference_mode(False):
        table = hadamard.table(order).to("cpu", torch.float32)
        return (table.T if is_transposed else table).contiguous()


class _Transform(Writer):
    """Writes the transforms of rows; `before` and `after` are diagonals.

    `space` holds the float32 numbers of a row, and where there are many rows the decoded diagonals behind them.
    """

    def __init__(
        self, K: int, power: int, dtype: torch.dtype, names: tuple[str | None, str | None], is_many: bool
    ) -> None:
        """names: of `before` and `after`; None: ones."""
        super().__init__("transform", "x before after table space out", "rows", dtype)
        self.x, before, after, self.table, self.space, self.out = self.pointers
        (rows,) = self.integers
        self.K, self.vectors = K, 1 << power - MIN_POWER_OF_TWO  # of the power of two
        n = K << power
        self.factor = self.floats(n**-0.5)
        self.before, self.after = (
            self._decode(name, stored, place * n // LANES) if is_many and name in SCALES else (name, stored)
            for place, (name, stored) in enumerate(zip(names, (before, after), strict=True), 1)
        )
        with self.loop(rows) as row:
            self.start = self.b.mul(row, self.i64(n))
            near = min(RADIX, self.vectors)
            with self.loop(self.i64(K * self.vectors // near)) as i:
                self._read(self.b.mul(i, self.i64(near)), near)
            step = near
            while step < self.vectors:
                size = min(RADIX, self.vectors // step)
                self._levels(step, size)
                step *= size
            if K == 1:
                with self.loop(self.i64(self.vectors)) as i:
                    self._write(self._load(i), i)
            else:
                self._sums_of_table()
        self.b.ret_void()

    def _read(self, first: Any, count: int) -> None:
        """Put `count` vectors from number `first` on into the space, and take the levels in and between them."""
        b, vectors = self.b, []
        for i in range(count):
            number = b.add(first, self.i64(i))
            x = self.load_floats(self.x, b.add(self.start, b.mul(number, self.i64(LANES))), self.dtype, LANES)
            vectors.append(self._inside(self._times(x, *self.before, number)))
        for i, vector in enumerate(self._between(vectors)):
            self._keep(vector, b.add(first, self.i64(i)))

    def _levels(self, step: int, size: int) -> None:
        """Take the levels between `size` vectors that are `step` apart."""
        b = self.b
        with self.loop(self.i64(self.K * self.vectors // (step * size))) as i, self.loop(self.i64(step)) as j:
            first = b.add(b.mul(i, self.i64(step * size)), j)
            places = [b.add(first, self.i64(step * k)) for k in range(size)]
            for vector, place in zip(self._between([self._load(place) for place in places]), places, strict=True):
                self._keep(vector, place)

    def _sums_of_table(self) -> None:
        """Write the products of the table with K numbers that are a power of two apart, some rows of it at a time."""
        b, K, together = self.b, self.K, min(TOGETHER, self.K)
        with self.loop(self.i64(self.vectors)) as column, self.loop(self.i64(-(-K // together))) as group:
            row = self.smaller(b.mul(group, self.i64(together)), self.i64(K - together))  # the last ones may be again
            sums = [self.variable(self.factor.type) for _ in range(together)]
            for variable in sums:
                b.store(self.floats(0.0), variable)
            with self.loop(self.i64(K)) as j:
                vector = self._load(b.add(b.mul(j, self.i64(self.vectors)), column))
                for r, variable in enumerate(sums):
                    place = b.add(b.mul(b.add(row, self.i64(r)), self.i64(K)), j)
                    factor = self.splat(self.load(self.table, place, self.float), LANES)
                    b.store(self.multiply_add(vector, factor, b.load(variable)), variable)
            for r, variable in enumerate(sums):
                number = b.add(b.mul(b.add(row, self.i64(r)), self.i64(self.vectors)), column)
                self._write(b.load(variable), number)

    def _inside(self, vector: Any) -> Any:
        """Take the levels inside of a vector."""
        for distance in (1, 2, 4, 8):
            other = self.shuffled(vector, vector, [i ^ distance for i in range(LANES)])
            signs = self.ir.Constant(vector.type, [-1.0 if i & distance else 1.0 for i in range(LANES)])
            vector = self.multiply_add(vector, signs, other)
        return vector

    def _between(self, vectors: list[Any]) -> list[Any]:
        """Take the levels between vectors."""
        vectors, distance = list(vectors), 1
        while distance < len(vectors):
            for i in range(len(vectors)):
                if not i & distance:
                    a, c = vectors[i], vectors[i + distance]
                    vectors[i], vectors[i + distance] = self.b.fadd(a, c), self.b.fsub(a, c)
            distance *= 2
        return vectors

    def _load(self, number: Any) -> Any:
        return self.load(self.space, self.b.mul(number, self.i64(LANES)), self.float, LANES)

    def _keep(self, vector: Any, number: Any) -> None:
        self.store(vector, self.space, self.b.mul(number, self.i64(LANES)))

    def _write(self, vector: Any, number: Any) -> None:
        b = self.b
        value = self.rounded(self._times(b.fmul(vector, self.factor), *self.after, number))
        self.store(value, self.out, b.add(self.start, b.mul(number, self.i64(LANES))))

    def _times(self, vector: Any, name: str | None, stored: Any, number: Any) -> Any:
        """Multiply a vector of this number by its part of a diagonal."""
        if name is None:
            return vector
        b = self.b
        if name == "signs":
            negative = b.bitcast(self._bits(stored, number), self.vector(self.ir.IntType(1), LANES))
            return b.select(negative, b.fneg(vector), vector)
        return b.fmul(vector, self._scales(name, stored, number))

    def _scales(self, name: str, stored: Any, number: Any) -> Any:
        """Return the part of scales that belongs to a vector of this number, float32."""
        first = self.b.mul(number, self.i64(LANES))
        if name == "channel_scale8":
            return self._byte_scales(self.load(stored, first, self.byte, LANES))
        return self.load_floats(stored, first, SCALES[name], LANES)

    def _decode(self, name: str, stored: Any, first: int) -> tuple[str, Any]:
        """Write scales to the space, from a vector of this number on; return what `_times` reads there."""
        with self.loop(self.i64(self.K * self.vectors)) as i:
            self._keep(self._scales(name, stored, i), self.b.add(i, self.i64(first)))
        return "channel_scale", self.at(self.space, self.i64(first * LANES), self.float)

    def _byte_scales(self, codes: Any) -> Any:
        """Return what the codes of a channel_scale8 stand for."""
        b, words = self.b, self.vector(self.word, LANES)
        extended = b.sext(codes, words)  # the sign is in the top bit of all 32
        magnitude = b.shl(
            b.and_(extended, self.constant(self.word, LANES, 127)), self.constant(self.word, LANES, SCALE8_SHIFT)
        )
        sign = b.and_(extended, self.constant(self.word, LANES, -(1 << 31)))
        bits = b.or_(sign, b.add(magnitude, self.constant(self.word, LANES, SCALE8_BIAS)))
        return b.bitcast(bits, self.vector(self.float, LANES))

    def _bits(self, bitmap: Any, number: Any) -> Any:
        """Sixteen bits, lowest first."""
        pointer = self.at(bitmap, self.b.mul(number, self.i64(2)), self.byte)
        return self.b.load(pointer, typ=self.short, align=1)
