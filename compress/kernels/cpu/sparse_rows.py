"""Read rows of the `sparse` format on a CPU: kept weights, the patterns of 2:4, and bitmaps.

Kept weights come as two vectors, the even and the odd ones of a run: of 2:4 these are the first and the second of each
group of four columns, and a word of two bfloat16 or two codes holds one of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from compress.formats import dense
from compress.formats import int as int_format
from compress.formats.sparse import Params
from compress.kernels import llvm
from compress.kernels.cpu.decoded import Put, RowReader
from compress.kernels.cpu.emitter import LANES, Emitter
from compress.kernels.cpu.unpack import SHORTS, NarrowTiles, whole_tiles, words

GROUP = 4  # columns of a pattern
MASK_WORD = 8  # bytes of the mask that are loaded at once

Halves = tuple[Any, Any]  # even and odd ones of some kept weights, float32 vectors
Body = Callable[[Any, Sequence[Halves]], None]  # (number of the first kept weight; those of several rows from it on)


def register_lanes() -> int:
    """Return the float32 of a register."""
    return LANES if "avx512f" in llvm.features() else LANES // 2


class DenseKept:
    """Reads kept weights of a row that are stored as they are."""

    def __init__(self, e: Emitter, named: Mapping[str, Any], params: dense.Params, lanes: int) -> None:
        self.e, self.values, self.kept, self.lanes = e, named["values"], named["kept"], lanes
        self.dtype = getattr(torch, params.dtype)

    def each(self, rows: Sequence[Any], body: Body) -> None:
        lines = [self.e.b.mul(row, self.kept) for row in rows]

        def chunk(first: Any, rest: Any) -> None:
            body(first, [self._halves(self.e.b.add(line, first), rest) for line in lines])

        self.e.in_chunks(self.kept, 2 * self.lanes, chunk)

    def _halves(self, place: Any, rest: Any) -> Halves:
        e, b, lanes = self.e, self.e.b, self.lanes
        if self.dtype != torch.bfloat16:
            values = e.load_floats(self.values, place, self.dtype, 2 * lanes, rest)
            return e.shuffled(values, values, range(0, 2 * lanes, 2)), e.shuffled(
                values, values, range(1, 2 * lanes, 2)
            )
        pairs = b.bitcast(e.load_some(self.values, place, e.short, 2 * lanes, rest), e.vector(e.word, lanes))
        even, odd = b.shl(pairs, e.constant(e.word, lanes, 16)), b.and_(pairs, e.constant(e.word, lanes, -1 << 16))
        return b.bitcast(even, e.vector(e.float, lanes)), b.bitcast(odd, e.vector(e.float, lanes))


class IntKept:
    """Reads kept weights of a row that are stored as codes with scales of groups."""

    def __init__(
        self, e: Emitter, named: Mapping[str, Any], params: int_format.Params, span: int, has_tail: bool, lanes: int
    ) -> None:
        self.e, self.named, self.params, self.span, self.lanes = e, named, params, span, lanes
        planes, b = [named[name] for name in words(params.bits).split()], e.b
        self.whole = b.mul(named["tiles"], e.i64(params.tile_columns))
        in_row = b.add(self.whole, b.mul(named["tail"], e.i64(int_format.NARROW)))
        self.read = whole_tiles(e, planes, params.bits, params.tile_words, in_row, SHORTS)
        widths = int_format.PLANES[params.bits]
        self.narrow = NarrowTiles(e, planes, widths, int_format.NARROW, in_row, self.whole) if has_tail else None

    def each(self, rows: Sequence[Any], body: Body) -> None:
        e, b, size = self.e, self.e.b, self.params.tile_columns
        with e.loop(self.named["tiles"]) as tile:
            column = b.mul(tile, e.i64(size))
            scales = [self._scale_and_shift(row, column) for row in rows]
            for position in range(0, size, SHORTS):
                place = b.add(column, e.i64(position))
                if position and position % self.span == 0:
                    scales = [self._scale_and_shift(row, place) for row in rows]
                codes = [self.read(tile, row, position) for row in rows]
                self._give(place, scales, codes, body)
        if self.narrow is not None:
            with e.loop(self.named["tail"]) as tile:
                place = b.add(self.whole, b.mul(tile, e.i64(int_format.NARROW)))
                scales = [self._scale_and_shift(row, place) for row in rows]
                self._give(place, scales, [self.narrow.codes(tile, row, 0, int_format.NARROW) for row in rows], body)

    def _give(self, place: Any, scales: Sequence[Any], codes: Sequence[Any], body: Body) -> None:
        """Give parts of as many numbers as a register has."""
        e, count, whole = self.e, self.lanes, [self._values(*each) for each in zip(scales, codes, strict=True)]
        for first in range(0, SHORTS // 2, count):
            part = [tuple(e.shuffled(half, half, range(first, first + count)) for half in each) for each in whole]
            body(e.b.add(place, e.i64(2 * first)), [(even, odd) for even, odd in part])

    def _scale_and_shift(self, row: Any, column: Any) -> tuple[Any, Any]:
        """The scale of the group of a kept weight and what it takes off, for all lanes."""
        e, b = self.e, self.e.b
        cell = b.add(b.mul(b.udiv(column, self.named["group"]), self.named["rows"]), row)
        scale = e.load_floats(self.named["scales"], cell, getattr(torch, self.params.scale_dtype))
        zero = e.float(2.0 ** (self.params.bits - 1))
        if not self.params.symmetric:
            zero = b.uitofp(e.bit_field(self.named["zeros"], cell, self.params.bits), e.float)
        return e.splat(scale, SHORTS // 2), e.splat(b.fmul(scale, b.fneg(zero)), SHORTS // 2)

    def _values(self, scale_and_shift: tuple[Any, Any], codes: Any) -> Halves:
        """Scale times code, less scale times zero: every one of these numbers is exact in float32."""
        e, b, count, (scale, shift) = self.e, self.e.b, SHORTS // 2, scale_and_shift
        pairs = b.bitcast(codes, e.vector(e.word, count))
        halves = b.and_(pairs, e.constant(e.word, count, 0xFFFF)), b.lshr(pairs, e.constant(e.word, count, 16))
        even, odd = (e.multiply_add(b.uitofp(half, scale.type), scale, shift) for half in halves)
        return even, odd


class SparseReader(RowReader):
    """Pieces of functions that read kept weights and masks."""

    def __init__(self, e: Emitter, named: Mapping[str, Any], params: Params, span: int, has_tail: bool) -> None:
        super().__init__(e, named)
        self.params, self.lanes = params, register_lanes()
        kept = params.inner_params
        self.kept: DenseKept | IntKept = (
            DenseKept(e, named, kept, self.lanes)
            if isinstance(kept, dense.Params)
            else IntKept(e, named, kept, span, has_tail, self.lanes)
        )

    @staticmethod
    def arguments(params: Params, span: int, has_tail: bool) -> tuple[str, str]:
        if params.inner == "dense":
            return "mask values", "features pitch mask_bytes kept"
        return f"mask {words(params.bits)} scales zeros", "features pitch mask_bytes kept rows group tiles tail"


def pattern_bits(e: Emitter, named: Mapping[str, Any], row: Any, kept: Any) -> Any:
    """Return the codes of the sixteen patterns from a kept weight of a row on, 3 bits each, as int64; more is above.

    kept: a multiple of 16. named: mask, its `pitch` in bytes, and its `mask_bytes` in all.
    """
    b = e.b
    place = b.add(b.mul(row, named["pitch"]), b.mul(b.lshr(kept, e.i64(4)), e.i64(3)))
    place = e.smaller(place, b.sub(named["mask_bytes"], e.i64(3)))  # of padding any pattern will do
    begin = e.smaller(place, b.sub(named["mask_bytes"], e.i64(MASK_WORD)))
    word = b.load(e.at(named["mask"], begin, e.byte), typ=e.index, align=1)
    return b.lshr(word, b.mul(b.sub(place, begin), e.i64(8)))


class PatternReader(SparseReader):
    """Reads rows of 2:4 weights: vectors of as many groups of four columns as a register has float32."""

    def patterns(self, row: Any, kept: Any) -> Sequence[Any]:
        """Return what the patterns say from a kept weight of a row on, for each group: vectors of single bits.

        Whether the first weight is in column 0; in 0 or 1; whether the second is in column 1; in 2.
        """
        e, b, lanes = self.e, self.b, self.lanes
        octets = b.bitcast(e.splat(pattern_bits(e, self.named, row, kept), lanes // 2), e.vector(e.byte, 4 * lanes))
        order = [3 * group // 8 + min(side, 1) for group in range(lanes) for side in range(4)]
        fields = b.bitcast(e.shuffled(octets, octets, order), e.vector(e.word, lanes))
        places = e.ir.Constant(e.vector(e.word, lanes), [3 * group % 8 for group in range(lanes)])
        codes = b.and_(b.lshr(fields, places), e.constant(e.word, lanes, 7))
        three, five, none, one = (e.constant(e.word, lanes, value) for value in (3, 5, 0, 1))
        return (
            b.icmp_unsigned("<", codes, three),
            b.icmp_unsigned("<", codes, five),
            b.icmp_unsigned("==", codes, none),
            b.icmp_unsigned("==", b.and_(codes, five), one),  # 1 and 3
        )

    def choose(self, patterns: Sequence[Any], columns: Sequence[Any]) -> tuple[Any, Any]:
        """Return which of the four columns of each group the first weights meet, and the second ones."""
        b, (in_0, in_0_or_1, second_in_1, second_in_2) = self.b, patterns
        first = b.select(in_0, columns[0], b.select(in_0_or_1, columns[1], columns[2]))
        return first, b.select(second_in_1, columns[1], b.select(second_in_2, columns[2], columns[3]))

    def write(self, row: Any, features: Any, put: Put) -> None:
        e, b = self.e, self.b

        def chunk(kept: Any, halves: Sequence[Halves]) -> None:
            values = self._expand(self.patterns(row, kept), *halves[0])
            column = b.shl(kept, e.i64(1))
            left = b.sub(features, column)
            with b.if_else(b.icmp_signed(">=", left, e.i64(GROUP * self.lanes))) as (full, part):
                with full:
                    put(0, column, values, None)
                with part:
                    put(0, column, values, left)

        self.kept.each([row], chunk)

    def _expand(self, patterns: Sequence[Any], even: Any, odd: Any) -> Any:
        """Return the columns of all groups, in order."""
        e, b, lanes = self.e, self.b, self.lanes
        zeros, (in_0, in_0_or_1, second_in_1, second_in_2) = e.constant(e.float, lanes, 0.0), patterns
        one = b.select(second_in_1, odd, b.select(in_0, zeros, b.select(in_0_or_1, even, zeros)))
        two = b.select(second_in_2, odd, b.select(in_0_or_1, zeros, even))
        three = b.select(second_in_1, zeros, b.select(second_in_2, zeros, odd))
        halves = [e.shuffled(a, z, range(2 * lanes)) for a, z in ((b.select(in_0, even, zeros), one), (two, three))]
        return e.shuffled(halves[0], halves[1], [p * lanes + group for group in range(lanes) for p in range(GROUP)])


class BitmapReader(SparseReader):
    """Reads rows of weights with any mask: what is kept lies in the space before it is expanded."""

    def write(self, row: Any, features: Any, put: Put) -> None:
        e, b = self.e, self.b
        order = [i // 2 + i % 2 * self.lanes for i in range(2 * self.lanes)]
        self.kept.each(
            [row], lambda first, halves: e.store(e.shuffled(halves[0][0], halves[0][1], order), self.space, first)
        )
        place = e.variable(e.index)
        b.store(e.i64(0), place)
        line = b.mul(b.udiv(row, e.i64(self.params.block_rows)), self.named["pitch"])

        def chunk(column: Any, rest: Any) -> None:
            put(0, column, self._expand_sixteen(self._bits(line, column), place), rest)

        e.in_chunks(features, LANES, chunk)

    def _bits(self, line: Any, column: Any) -> Any:
        """The entries of the mask for sixteen columns, int32, the first one lowest; others may be above."""
        e, b, last = self.e, self.b, self.named["mask_bytes"]
        entry = b.udiv(column, e.i64(self.params.block_columns))
        place = b.add(line, b.lshr(entry, e.i64(3)))
        bits = b.zext(e.load(self.named["mask"], place, e.byte), e.word)
        if self.params.block_columns == 1:
            second = e.load(self.named["mask"], e.clamped(b.add(place, e.i64(1)), last), e.byte)
            return b.or_(bits, b.shl(b.zext(second, e.word), e.word(8)))
        moved = b.lshr(bits, b.trunc(b.and_(entry, e.i64(7)), e.word))
        return b.and_(moved, e.word((1 << LANES // self.params.block_columns) - 1))

    def _expand_sixteen(self, bits: Any, place: Any) -> Any:
        """Sixteen columns; `place` is moved behind the kept weights among them."""
        e, b, lanes, width = self.e, self.b, self.lanes, self.params.block_columns
        parts = []
        for first in range(0, LANES, lanes):
            entries = [(first + j) // width for j in range(lanes)]
            begin = e.smaller(b.load(place), self.named["kept"])
            values = e.load(self.space, begin, e.float, lanes)
            own = e.splat(bits, lanes)
            is_kept = b.icmp_signed("!=", b.and_(own, self._words([1 << i for i in entries])), self._words([0] * lanes))
            if lanes == LANES:
                name = f"llvm.x86.avx512.mask.expand.v{lanes}f32"
                parts.append(e.intrinsic(name, values.type, values, e.floats(0.0), is_kept))
            else:
                below = self._words([sum({1 << i for i in entries if i < entry}) for entry in entries])
                count = e.intrinsic(f"llvm.ctpop.v{lanes}i32", below.type, b.and_(own, below))
                inside = min(width, lanes)
                order = b.add(
                    b.mul(count, self._words([inside] * lanes)), self._words([j % inside for j in range(lanes)])
                )
                parts.append(b.select(is_kept, self._permute(values, order), e.constant(e.float, lanes, 0.0)))
            counted = e.intrinsic("llvm.ctpop.i32", e.word, b.and_(bits, e.word(sum({1 << i for i in entries}))))
            b.store(b.add(begin, b.mul(b.zext(counted, e.index), e.i64(min(width, lanes)))), place)
        return parts[0] if len(parts) == 1 else e.shuffled(parts[0], parts[1], range(LANES))

    def _permute(self, values: Any, order: Any) -> Any:
        e, b = self.e, self.b
        if "avx2" in llvm.features():
            return e.intrinsic("llvm.x86.avx2.permps", values.type, values, order)
        permuted = values
        for lane in range(self.lanes):
            taken = b.extract_element(values, b.extract_element(order, e.word(lane)))
            permuted = b.insert_element(permuted, taken, e.word(lane))
        return permuted

    def _words(self, values: Sequence[int]) -> Any:
        return self.e.ir.Constant(self.e.vector(self.e.word, len(values)), list(values))
