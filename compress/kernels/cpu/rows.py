"""What compiled products of packed weights with few activations share: activations as int16, sums in int32.

An activation is an int16 times a float32 scale for each span of columns, so that its error, 2^-16 of the largest of its
span, is below that of bfloat16 activations; a weight is a small integer times a scale. Pairs of products are summed in
int32 by one instruction on most CPUs (pmaddwd and its like), and a span's sum meets the scales once. Nothing is
approximated but the activations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from compress import jit

LANES = 16  # of float32 or int32; vectors of int16 have twice as many
TOKENS = (1, 2, 4)  # rows of activations that a compiled product takes at once
LARGEST = 32767.0
MOST = 32  # rows of activations
SMALL = 1 << 19  # weights, up to which a weight that is decoded once stays in the processor's cache
THREAD = 1 << 21  # products of a weight and an activation that are worth waking a thread


def worthwhile(shape: tuple[int, int]) -> bool:
    """Whether code can be compiled here and a weight is so large that reading less of it saves time."""
    return shape[0] * shape[1] > SMALL and jit.available()


class Emitter(jit.Emitter):
    """Pieces of the kernels."""

    def pair_sums(self, a: Any, b: Any) -> Any:
        """Sums of the products of neighbours of two int16 vectors, as int32 vector of half the length."""
        kind = self.vector(self.word, a.type.count)
        product = self.b.mul(self.b.sext(a, kind), self.b.sext(b, kind))
        even, odd = (range(first, a.type.count, 2) for first in (0, 1))
        return self.b.add(self.shuffled(product, product, list(even)), self.shuffled(product, product, list(odd)))

    def total(self, vector: Any) -> Any:
        """The sum of a float vector's elements, in a fixed order."""
        lanes = vector.type.count
        while lanes > 1:
            lanes //= 2
            low = self.shuffled(vector, vector, list(range(lanes)))
            vector = self.b.fadd(low, self.shuffled(vector, vector, list(range(lanes, 2 * lanes))))
        return self.b.extract_element(vector, self.word(0))

    def byte_pairs(self, words: Any) -> Any:
        """int32 vector -> the sums of its first and second two unsigned bytes, as int16 vector of twice the length."""
        b, lanes = self.b, words.type.count
        shorts, octets = self.vector(self.short, 2 * lanes), self.vector(self.byte, 4 * lanes)
        if lanes == LANES and "avx512bw" in jit.features():
            ones = self.constant(self.byte, 4 * lanes, 1)
            return self.intrinsic("llvm.x86.avx512.pmaddubs.w.512", shorts, b.bitcast(words, octets), ones)
        low = self.constant(self.word, lanes, 0x00FF00FF)
        high = b.and_(b.lshr(words, self.constant(self.word, lanes, 8)), low)
        return b.bitcast(b.add(b.and_(words, low), high), shorts)

    def load_some(self, pointer: Any, offset: Any, kind: Any, lanes: int, count: Any) -> Any:
        """The first `count` of `lanes` elements, 0 for the others, whose memory is not touched."""
        b, vector = self.b, self.vector(kind, lanes)
        places = self.ir.Constant(self.vector(self.word, lanes), list(range(lanes)))
        mask = b.icmp_signed("<", places, self.splat(b.trunc(count, self.word), lanes))
        zeros = self.constant(kind, lanes, 0)
        name = f"llvm.masked.load.v{lanes}{kind}.p0"
        here = self.at(pointer, offset, kind)
        if jit.llvm_version() < (22, 0):
            return self.intrinsic(name, vector, here, self.word(1), mask, zeros)
        return self.intrinsic(name, vector, here, mask, zeros)

    def bit_fields(self, stream: Any, offset: Any, bits: int) -> Any:
        """Sixteen fields of 2 to 8 bits of a little-endian bit stream, from a whole byte on, as floats."""
        b, halves = self.b, []
        for half in range(2):
            pointer = self.at(stream, b.add(offset, self.i64(half * bits)), self.byte)
            packed = b.load(pointer, typ=self.ir.IntType(8 * bits), align=1)
            wide = self.splat(packed if bits == 8 else b.zext(packed, self.index), LANES // 2)
            places = self.ir.Constant(self.vector(self.index, LANES // 2), [bits * i for i in range(LANES // 2)])
            halves.append(b.and_(b.lshr(wide, places), self.constant(self.index, LANES // 2, 2**bits - 1)))
        low, high = halves
        return b.uitofp(self.shuffled(low, high, list(range(LANES))), self.vector(self.float, LANES))

    def intrinsic(self, name: str, result: Any, *values: Any) -> Any:
        kind = self.ir.FunctionType(result, [value.type for value in values])
        function = self.module.globals.get(name) or self.ir.Function(self.module, kind, name)
        return self.b.call(function, values)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c of float vectors, in one instruction where there is one."""
        return self.intrinsic(f"llvm.fmuladd.v{a.type.count}f32", a.type, a, b, c)

    def prefetch(self, pointer: Any, offset: Any, kind: Any) -> None:
        """Ask for a line of memory that is read soon; an address past the end does no harm."""
        here = self.at(pointer, offset, kind)
        self.intrinsic("llvm.prefetch.p0", self.ir.VoidType(), here, self.word(0), self.word(3), self.word(1))

    def floats(self, value: float) -> Any:
        return self.constant(self.float, LANES, value)


class _Activations(Emitter):
    """void activations(x, x16, scales, sums, rows, spans, span, lanes): float32 rows of spans * span columns."""

    def __init__(self) -> None:
        super().__init__("activations", 4, 4)
        self.x, self.x16, self.scales, self.sums = self.pointers
        self.rows, spans, span, self.lanes = self.integers
        self.vectors = self.b.udiv(span, self.i64(LANES))
        self.kind = self.vector(self.float, LANES)
        self.largest, self.sum = self.variable(self.kind), self.variable(self.vector(self.word, LANES))
        with self.loop(self.rows) as row, self.loop(spans) as u:
            index = self.b.add(self.b.mul(row, spans), u)
            self._span(row, index, self.b.mul(u, span), self.b.mul(index, span))
        self.b.ret_void()

    def _span(self, row: Any, index: Any, column: Any, start: Any) -> None:
        b = self.b
        b.store(self.floats(0.0), self.largest)
        with self.loop(self.vectors) as i:
            values = self._values(start, i)
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
            rounded = self.intrinsic(f"llvm.rint.v{LANES}f32", self.kind, b.fmul(self._values(start, i), factor))
            words = self.vector(self.word, LANES)
            integers = self.intrinsic(f"llvm.fptosi.sat.v{LANES}i32.v{LANES}f32", words, rounded)  # 0 for NaN
            b.store(b.add(b.load(self.sum), integers), self.sum)
            place = b.add(column, b.mul(i, self.i64(LANES)))
            inside = b.urem(place, self.lanes)
            vector = b.add(b.mul(b.sub(place, inside), self.rows), b.mul(row, self.lanes))
            self.store(b.trunc(integers, self.vector(self.short, LANES)), self.x16, b.add(vector, inside))
        self.store(scale, self.scales, index)
        self.store(self.total(b.sitofp(b.load(self.sum), self.kind)), self.sums, index)

    def _values(self, start: Any, i: Any) -> Any:
        return self.load(self.x, self.b.add(start, self.b.mul(i, self.i64(LANES))), self.float, LANES)


def blocks_of_a_thread(columns: int, tokens: int) -> int:
    """Blocks of sixteen rows that are worth waking a thread."""
    return -(-THREAD // (LANES * columns * tokens))


@cache
def _compiled_activations() -> Callable[..., None]:
    return jit.compiled(_Activations())


def by_tokens(
    x: Tensor, columns: int, span: int, lanes: int, out: Tensor, product: Callable[[int, list[int]], None]
) -> None:
    """product(tokens, addresses of x16, scales, sums, out) for some rows of x and out at a time.

    x, columns, span and lanes as in `activations`; out [rows, out features] float32.
    """
    first = 0
    while first < len(x):
        tokens = max(t for t in TOKENS if t <= len(x) - first)
        given = (*activations(x[first : first + tokens], columns, span, lanes), out[first:])
        product(tokens, [t.data_ptr() for t in given])
        first += tokens


def activations(x: Tensor, columns: int, span: int, lanes: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [rows, in] -> int16 [columns / lanes, rows, lanes], scales and sums of integers float32 [rows, columns / span].

    Vectors of the same columns lie beside each other, because a kernel reads them together. columns is a multiple of
    span and lanes, both of LANES; columns past those of x are 0. A span with a value that is not finite has scale NaN.
    """
    x = torch.nn.functional.pad(x.float(), (0, columns - x.shape[1])).contiguous()
    rows, spans = x.shape[0], columns // span
    integers = torch.empty(rows * columns, dtype=torch.int16, device="cpu")  # the defaults may be others
    scales, sums = (torch.empty(rows, spans, dtype=torch.float32, device="cpu") for _ in range(2))
    _compiled_activations()(*(t.data_ptr() for t in (x, integers, scales, sums)), rows, spans, span, lanes)
    return integers, scales, sums
