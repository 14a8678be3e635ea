"""Read keys stored before the rotary embedding, as codes of a linear transform, on CPUs with AVX-512.

A key of a head is mean + norm back level(code), turned by the position of its token. Codes become levels
(compress/kernels/cpu/kv_mixed.py), of which there is a product with `back`, and what follows is done by
compress/kernels/cpu/kv_turned.py.

The product is one of matrices in AMX tiles, of int16 numbers, or float32: see compress/kernels/cpu/kv_basis.py.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compress.kernels import llvm
from compress.kernels.contract import BLOCK, MOST_MIXED_BITS, LevelTables, MixedCodes, Rotary
from compress.kernels.cpu import kv_mixed
from compress.kernels.cpu.emitter import LANES
from compress.kernels.cpu.kv_basis import PAIR, STEP, TILE, KeyTransform, transform
from compress.kernels.cpu.kv_turned import LINE, ChannelPlace, Turned, TurnedSizes, run

__all__ = ["scores", "supports", "transform", "write"]

TOGETHER = 8  # tokens of a product that are in registers together


def supports(width: int) -> bool:
    """Return whether keys of this width are read here, where half of the channels that turn fill registers, too."""
    return width % (2 * LANES) == 0 and kv_mixed.supports(width)


def scores(q: Tensor, coded: MixedCodes, made: KeyTransform, tables: LevelTables, turns: Rotary, out: Tensor) -> None:
    """q [B, h, m, width] float32; out [B, h, m, n] float32, its last axis contiguous, n a multiple of BLOCK."""
    q = q.contiguous()
    sizes = TurnedSizes(q.shape[3], turns.width, turns.cos.dtype)
    run(_function(sizes, tables, q.shape[2], torch.float32, made), (q, out, 4), coded, made, turns)


def write(coded: MixedCodes, made: KeyTransform, tables: LevelTables, turns: Rotary, out: Tensor) -> None:
    """out [B, h, n, width] of float32, float16 or bfloat16, its last axis contiguous, n a multiple of BLOCK."""
    sizes = TurnedSizes(out.shape[3], turns.width, turns.cos.dtype)
    kernel = _function(sizes, tables, 0, out.dtype, made)
    run(kernel, (out, out, out.element_size() * out.stride(2)), coded, made, turns)


def _function(
    sizes: TurnedSizes, tables: LevelTables, count: int, dtype: torch.dtype, made: KeyTransform
) -> Callable[..., None]:
    kind = {torch.bfloat16: _TileKeys, torch.int16: _Integers, torch.float32: _Plain}[made.back.dtype]
    return llvm.function(kind, sizes, tables, count, dtype)


class _Principal(Turned):
    def prepare(self, layout: LevelTables) -> None:
        self.tables = self.entries(layout)

    @abstractmethod
    def entries(self, tables: LevelTables) -> list[list[int]]:
        """Return the words by bits that codes are looked up in."""

    @abstractmethod
    def keep(self, words: Any, offset: Any) -> None:
        """Store sixteen levels in a."""

    def sums_of(self, steps: Any, place: ChannelPlace, zero: Any, step: Any, add: Any, end: Any) -> None:
        """c of a pair, TOGETHER tokens at a time in registers: add(left, right, sum) for all steps, end(sum, side).

        step(k) returns the two registers of `back` and a function that loads the number of a row of a.
        """
        b = self.b
        held = [[self.variable(zero.type) for _ in range(2)] for _ in range(TOGETHER)]
        with self.loop(self.i64(BLOCK // TOGETHER)) as part:
            for x in (x for own in held for x in own):
                b.store(zero, x)
            rows = [b.add(b.mul(part, self.i64(TOGETHER)), self.i64(t)) for t in range(TOGETHER)]
            with self.loop(steps) as k:
                right, left_of = step(k)
                for row, own in zip(rows, held, strict=True):
                    left = self.splat(left_of(row), LANES)
                    for x, y in zip(own, right, strict=True):
                        b.store(add(left, y, b.load(x)), x)
            for row, own in zip(rows, held, strict=True):
                for side, x in enumerate(own):
                    self.store(end(b.load(x), side), self.c, self.cell(place, side, row))

    def unpack(self, head: Any, token: Any) -> None:
        b = self.b
        self.read_norms(head, token)
        for place in range(MOST_MIXED_BITS):
            with self.loop(self.piece_bound(head, place + 1), self.piece_bound(head, place)) as piece:
                planes, column = self.planes(piece, MOST_MIXED_BITS - place), self.column(piece)
                with self.loop(self.i64(BLOCK // kv_mixed.UNROLLED)) as part:
                    for i in range(kv_mixed.UNROLLED):
                        inside = b.add(b.mul(part, self.i64(kv_mixed.UNROLLED)), self.i64(i))
                        levels = self.levels(b.add(token, inside), planes, MOST_MIXED_BITS - place)
                        self.keep(levels, b.add(b.mul(inside, self.pitch), column))


class _TileKeys(_Principal):
    """Levels as bfloat16; a is [BLOCK, pitch] of them, in the first half of its memory."""

    def entries(self, tables: LevelTables) -> list[list[int]]:
        return [[(word >> 16) & 0xFFFF for word in table] for table in kv_mixed.words(tables)]

    def keep(self, words: Any, offset: Any) -> None:
        self.store(self.b.trunc(words, self.vector(self.short, LANES)), self.a, offset)

    def begin(self) -> None:
        self._tile("ldtilecfg", self.config)

    def end(self) -> None:
        self._tile("tilerelease")

    def multiply(self, first: Any, fields: Any, place: ChannelPlace) -> None:
        b = self.b
        most = b.lshr(self.pitch, self.i64(5))
        steps = b.lshr(b.add(fields, self.i64(STEP - 1)), self.i64(5))
        first = b.add(first, b.mul(b.mul(place.pair, b.add(most, self.second)), self.i64(PAIR)))
        for tile in range(4):
            self._tile("tilezero", self.byte(tile))
        with self.loop(steps) as step:
            self._step(step, b.add(first, b.mul(step, self.i64(PAIR))))
        with self.loop(self.second) as step:
            self._step(step, b.add(first, b.mul(b.add(most, step), self.i64(PAIR))))
        for tile in range(4):
            at = self.cell(place, tile % 2, self.i64(tile // 2 * LANES))
            self._tile("tilestored64", self.byte(tile), self.at(self.c, at, self.float), self.i64(4 * LANES))

    def _step(self, step: Any, at: Any) -> None:
        """Two tiles of 16 tokens times two of 16 channels, whose numbers begin at `at`."""
        b = self.b
        left, stride = b.mul(step, self.i64(STEP)), b.mul(self.pitch, self.i64(2))
        for i, offset in enumerate((left, b.add(left, b.mul(self.pitch, self.i64(LANES))))):
            self._tile("tileloadd64", self.byte(4 + i), self.at(self.a, offset, self.short), stride)
            here = self.at(self.back, b.add(at, self.i64(i * TILE)), self.short)
            self._tile("tileloadd64", self.byte(6 + i), here, self.i64(LINE))
        for tile in range(4):
            self._tile("tdpbf16ps", *(self.byte(x) for x in (tile, 4 + tile // 2, 6 + tile % 2)))

    def _tile(self, name: str, *values: Any) -> None:
        self.intrinsic(f"llvm.x86.{name}", self.ir.VoidType(), *values)


class _Plain(_Principal):
    """Levels as float32."""

    def entries(self, tables: LevelTables) -> list[list[int]]:
        return kv_mixed.words(tables)

    def keep(self, words: Any, offset: Any) -> None:
        self.store(words, self.a, offset)

    def multiply(self, first: Any, fields: Any, place: ChannelPlace) -> None:
        def step(k: Any) -> tuple[list[Any], Any]:
            at = self.b.add(first, self.b.mul(k, self.i64(self.sizes.width)))
            right = [self.load(self.back, self.b.add(at, x), self.float, LANES) for x in place[1:]]
            return right, lambda row: self.load(self.a, self.b.add(self.b.mul(row, self.pitch), k), self.float)

        zero = self.floats(0.0)
        self.sums_of(fields, place, zero, step, self.multiply_add, lambda x, side: x)


class _Integers(_Principal):
    """Levels as int16, two of them and two numbers of `back` multiplied and added up at a time; a is [BLOCK, pitch]."""

    def entries(self, tables: LevelTables) -> list[list[int]]:
        return [[round(level) for level in table] for table in tables]

    def keep(self, words: Any, offset: Any) -> None:
        self.store(words, self.a, offset)

    def levels(self, token: Any, planes: Mapping[int, Any], bits: int) -> Any:
        """The table's numbers for sixteen channels of a token, int16: half the register, and none to be narrowed."""
        b, joined, low = self.b, None, bits
        for width, start in planes.items():
            low -= width
            spread = self._words(b.add(b.mul(token, self.row), start), width)
            moves = self.ir.Constant(spread.type, [(width * lane - low) % 16 for lane in range(LANES)])
            moved = self.intrinsic(f"llvm.fshr.v{LANES}i16", spread.type, spread, spread, moves)
            if joined is not None:
                below = (1 << (low + width)) - 1
                above = b.and_(joined, self.constant(self.short, LANES, 0xFFFF - below))
                moved = b.or_(above, b.and_(moved, self.constant(self.short, LANES, below)))
            joined = moved
        return self._short_levels(joined, self.tables[bits])

    def _words(self, offset: Any, width: int) -> Any:
        """The number with sixteen fields; each lane has those 16 bits of it that its field is in."""
        b, kind = self.b, self.ir.IntType(LANES * width)
        number = b.load(self.at(self.codes, offset, self.byte), typ=kind, align=1)
        all_words = b.bitcast(self.splat(number, LANES // width), self.vector(self.short, LANES))
        return self.shuffled(all_words, all_words, [width * lane // 16 for lane in range(LANES)])

    def _short_levels(self, index: Any, table: Sequence[int]) -> Any:
        """Numbers of a table, whose length is a power of 2, by the lowest bits of the indices."""
        b, short = self.b, self.short
        if len(table) <= LANES:
            own = self.ir.Constant(index.type, [table[i % len(table)] for i in range(LANES)])
            return self.intrinsic("llvm.x86.avx512.permvar.hi.256", index.type, own, index)
        wide = self.vector(short, 2 * LANES)
        index = self.shuffled(index, index, list(range(2 * LANES)))
        tables = [self.ir.Constant(wide, table[at : at + 2 * LANES]) for at in range(0, len(table), 2 * LANES)]
        if len(tables) == 1:
            halves = [self.intrinsic("llvm.x86.avx512.permvar.hi.512", wide, tables[0], index)]
        else:
            name, pairs = "llvm.x86.avx512.vpermi2var.hi.512", zip(tables[::2], tables[1::2], strict=True)
            halves = [self.intrinsic(name, wide, low, index, high) for low, high in pairs]
        if len(halves) == 2:
            masked = b.and_(index, self.constant(short, 2 * LANES, 64))
            is_set = b.icmp_unsigned("!=", masked, self.constant(short, 2 * LANES, 0))
            halves = [b.select(is_set, halves[1], halves[0])]
        return self.shuffled(halves[0], halves[0], list(range(LANES)))

    def multiply(self, first: Any, fields: Any, place: ChannelPlace) -> None:
        b, half = self.b, self.b.lshr(self.pitch, self.i64(1))
        first = b.add(first, b.mul(b.mul(place.pair, half), self.i64(4 * LANES)))

        def step(k: Any) -> tuple[list[Any], Any]:
            at = b.add(first, b.mul(k, self.i64(4 * LANES)))
            right = [self.load(self.back, b.add(at, self.i64(i * 2 * LANES)), self.short, 2 * LANES) for i in range(2)]
            return right, lambda row: self.load(self.a, b.add(b.mul(row, half), k), self.word)

        def add(left: Any, right: Any, held: Any) -> Any:
            return b.add(held, self.pair_sums(b.bitcast(left, right.type), right))

        first_of_head = b.mul(self.head, self.i64(self.sizes.width))
        factors = [self.load(self.factors, b.add(first_of_head, x), self.float, LANES) for x in place[1:]]

        def scale(x: Any, side: int) -> Any:
            return b.fmul(b.sitofp(x, factors[side].type), factors[side])

        steps = b.lshr(b.add(fields, self.i64(1)), self.i64(1))
        self.sums_of(steps, place, self.constant(self.word, LANES, 0), step, add, scale)
