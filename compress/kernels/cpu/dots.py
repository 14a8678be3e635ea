"""Multiply stored rows of float32, bfloat16 or float16 with rows of float32: pieces of compiled functions.

What is stored is read in chunks of two registers. The two halves of a chunk of bfloat16 are its even and its odd
numbers, because a word holds one of each, and a shift or a mask makes a float32 of it. What the chunks are multiplied
with lies in memory in the same order: `arrange` makes it, `natural` undoes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from compress.kernels import llvm
from compress.kernels.cpu.emitter import Writer, float32

STORED = (torch.float32, torch.bfloat16, torch.float16)  # types that are read
HIGH = -1 << 16  # mask of the upper half of a word
ROWS = 4  # rows of float32 multiplied with a chunk while it is in registers
ROUNDER = 1.5 * 2.0**23  # added to a float32 below 2^22, it leaves a whole number
LEAST_POWER = -126.0  # 2^x is 0 below
FRACTION_BITS, EXPONENT_BIAS = 23, 127
# 2^x for |x| <= 1/2: the polynomial with the smallest relative error, 2e-9
POWERS = (1.0, 0.6931472056, 0.24022646609, 0.05550328997, 0.00961851953, 0.00133998604, 0.000153375768)


@cache
def register_lanes() -> int:
    """Return the float32 of a register."""
    return 16 if "avx512f" in llvm.features() else 8


@cache
def stored_rows(rows: int) -> int:
    """Return how many stored rows are read beside each other for so many rows of float32: registers hold all sums."""
    wide = register_lanes() == 16  # which go with 32 registers
    return {1: 8, 2: 8 if wide else 4, 3: 4}.get(rows, 4 if wide else 2)


class Dots(Writer):
    """Reads chunks of rows of `stored` numbers and sums products with them."""

    def __init__(
        self, name: str, pointers: str, integers: str, stored: torch.dtype, written: torch.dtype, lanes: int = 0
    ) -> None:
        super().__init__(name, pointers, integers, written)
        self.stored, self.lanes = stored, lanes or register_lanes()
        self.chunk = 2 * self.lanes
        self.floating = self.vector(self.float, self.lanes)

    def zeros(self) -> Any:
        return self.constant(self.float, self.lanes, 0.0)

    def array(self, size: int) -> Any:
        """Take memory for `size` float32 of the function."""
        with self.b.goto_block(self._entry):
            memory = self.b.alloca(self.ir.ArrayType(self.float, size))
        memory.type = self.pointer  # any type may be stored there
        return memory

    def element(self) -> Any:
        """Return the type of an element that is stored."""
        return {torch.float32: self.float, torch.float16: self.half, torch.bfloat16: self.short}[self.stored]

    def read_chunk(self, pointer: Any, offset: Any, count: Any = None) -> tuple[Any, Any]:
        """Load a chunk as two vectors of float32; with `count` so many elements, 0 for the others."""
        b, lanes = self.b, self.lanes
        if self.stored != torch.bfloat16:
            rest = None if count is None else b.sub(count, self.i64(lanes))
            low = self.load_floats(pointer, offset, self.stored, lanes, count)
            return low, self.load_floats(pointer, b.add(offset, self.i64(lanes)), self.stored, lanes, rest)
        pairs = self.load_some(pointer, offset, self.short, self.chunk, count)
        words = b.bitcast(pairs, self.vector(self.word, lanes))
        even = b.shl(words, self.constant(self.word, lanes, 16))
        odd = b.and_(words, self.constant(self.word, lanes, HIGH))
        return b.bitcast(even, self.floating), b.bitcast(odd, self.floating)

    def arrange(self, low: Any, high: Any) -> tuple[Any, Any]:
        """Return the two halves of a chunk in the order of `read_chunk`."""
        if self.stored != torch.bfloat16:
            return low, high
        even, odd = (list(range(start, self.chunk, 2)) for start in (0, 1))
        return self.shuffled(low, high, even), self.shuffled(low, high, odd)

    def natural(self, even: Any, odd: Any) -> tuple[Any, Any]:
        """Undo `arrange`."""
        if self.stored != torch.bfloat16:
            return even, odd
        order = [i // 2 + i % 2 * self.lanes for i in range(self.chunk)]
        return self.shuffled(even, odd, order[: self.lanes]), self.shuffled(even, odd, order[self.lanes :])

    def add_products(self, chunks: Sequence[tuple[Any, Any]], rows: Any, places: Sequence[Any], sums: Any) -> None:
        """Add the products of stored chunks with rows of float32 at offsets of a pointer to sums[row][chunk]."""
        for half in range(2):
            for row, place in enumerate(places):
                x = self.load(rows, self.b.add(place, self.i64(half * self.lanes)), self.float, self.lanes)
                for j, chunk in enumerate(chunks):
                    total = sums[row][j]
                    self.b.store(self.multiply_add(x, chunk[half], self.b.load(total)), total)

    def totals(self, vectors: Sequence[Any]) -> Any:
        """Return the sums of float vectors, a power of 2 of them and at most as many as lanes, as one vector."""
        order = _Tree(None).owners([[i] * self.lanes for i in range(len(vectors))])
        inputs: list[Any] = [None] * len(vectors)
        for place, owner in enumerate(order):
            inputs[owner] = vectors[place]
        return _Tree(self).sums(inputs)

    def power_of_two(self, x: Any) -> Any:
        """Return 2^x of a float vector up to 2^127: 0 below 2^-126, NaN of NaN."""
        b, lanes, kind = self.b, x.type.count, x.type

        def constant(value: float) -> Any:
            return self.constant(self.float, lanes, float32(value))

        tiny = b.fcmp_ordered("<", x, constant(LEAST_POWER))
        bounded = b.select(tiny, constant(LEAST_POWER), x)
        shifted = b.fadd(bounded, constant(ROUNDER))
        fraction = b.fsub(bounded, b.fsub(shifted, constant(ROUNDER)))
        power = constant(POWERS[-1])
        for factor in POWERS[-2::-1]:
            power = self.multiply_add(power, fraction, constant(factor))
        words = self.vector(self.word, lanes)
        biased = b.add(b.bitcast(shifted, words), self.constant(self.word, lanes, EXPONENT_BIAS))
        scale = b.bitcast(b.shl(biased, self.constant(self.word, lanes, FRACTION_BITS)), kind)
        return b.select(tiny, constant(0.0), b.fmul(power, scale))

    def largest(self, vector: Any) -> Any:
        """Return the largest element of a float vector; NaN counts as none."""
        return self.intrinsic(f"llvm.vector.reduce.fmax.v{vector.type.count}f32", self.float, vector)


class _Tree:
    """Sums of vectors by halves: which lanes go together is found without an emitter, too."""

    def __init__(self, emitter: Dots | None) -> None:
        self.emitter = emitter

    def owners(self, lanes: Sequence[Sequence[int]]) -> list[int]:
        """Return whose sum each lane of the result is."""
        while len(lanes) > 1:
            lanes = [self._pick(a, b)[2] for a, b in zip(lanes[::2], lanes[1::2], strict=True)]
        return list(dict.fromkeys(lanes[0]))

    def sums(self, vectors: list[Any]) -> Any:
        assert self.emitter is not None
        shuffled, add = self.emitter.shuffled, self.emitter.b.fadd
        lanes: list[Sequence[int]] = [[i] * vectors[0].type.count for i in range(len(vectors))]
        while len(vectors) > 1:
            picked = [self._pick(a, b) for a, b in zip(lanes[::2], lanes[1::2], strict=True)]
            vectors = [
                add(shuffled(a, b, first), shuffled(a, b, second))
                for a, b, (first, second, _) in zip(vectors[::2], vectors[1::2], picked, strict=True)
            ]
            lanes = [owners for _, _, owners in picked]
        total, owners = vectors[0], list(lanes[0])
        while len(owners) > len(set(owners)):
            first, second = _halves(owners)
            total = add(shuffled(total, total, first), shuffled(total, total, second))
            owners = [owners[i] for i in first]
        return total

    def _pick(self, a: Sequence[int], b: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """Return the lanes of two vectors, those of the second behind, that are added up, and whose they are then.

        Where the lanes of a sum fit into 128 bits, they stay in them.
        """
        count = len(a)
        size = 4 if a.count(a[0]) <= 4 else count  # lanes that are not left
        first, second = [], []
        for start in range(0, count, size):
            for vector, owners in ((0, a), (count, b)):
                low, high = _halves(owners[start : start + size])
                first += [vector + start + i for i in low]
                second += [vector + start + i for i in high]
        both = [*a, *b]
        return first, second, [both[i] for i in first]


def _halves(owners: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the places of the first and of the second half of each owner's lanes."""
    first: list[int] = []
    second: list[int] = []
    for owner in dict.fromkeys(owners):
        places = [i for i, other in enumerate(owners) if other == owner]
        first += places[: len(places) // 2]
        second += places[len(places) // 2 :]
    return first, second
