"""Multiply codes of 2 and 4 bits with few rows of activations on x86, as bytes.

An activation x is two bytes, x = 256 high + low, whose products with codes are summed apart: by instructions that take
twice as many bytes as int16 (vpmaddubsw, or vpdpbusd where there is one). The two bytes of a word hold fields that lie
half of the fields apart. The low bytes of eight words are put before their high bytes, so that neighbours, whose
products are added, belong to one field. Sums of int16 are added to sums of int32 before they can overflow. The integers
of a span are exact, and meet the scales of sixteen rows at once, in the order of spans, as in int_tiles.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from itertools import product as pairs
from typing import Any

import torch

from compress.formats.int import NARROW, PLANES
from compress.kernels import llvm
from compress.kernels.cpu.byte_products import LARGEST_BYTE, ByteProducts
from compress.kernels.cpu.emitter import PRODUCT, Emitter
from compress.kernels.cpu.integer_totals import integer_totals
from compress.kernels.cpu.unpack import AHEAD, SHORTS, NarrowTiles, words
from compress.numerics.packing import FIELDS

BYTE_BITS = (2, 4)
BLOCK_ROWS = 16  # rows of the weight whose scales are read together
EIGHT = 8  # words of a register of 128 bits
MOST = 4  # rows of the weight times rows of activations, whose sums are added up together
LINE = 32  # words of a line of the cache


def reads(bits: int, span: int) -> bool:
    """Return whether this processor has such instructions, and codes and spans are those of this kernel."""
    return bits in BYTE_BITS and span % SHORTS == 0 and "avx2" in llvm.features()


def is_faster(tile_words: int, tokens: int) -> bool:
    """Return whether this kernel beats products of int16, measured as it is said in int.py.

    Bytes take fewer instructions to come by, and as many to multiply: that pays with one row of activations, where a
    tile has more than a vector of words. Codes of 3 bits take more instructions as bytes, and are left out.
    """
    return tokens == 1 and tile_words > LINE


def fields(bits: int) -> list[tuple[int, int]]:
    """Return the fields of the low and the high bytes of each vector of bytes that a vector of words makes."""
    half = FIELDS[bits] // 2
    return [(field, field + half) for field in range(half)]


def owners(bits: int, tile_words: int, span: int) -> list[tuple[int, ...]]:
    """Return the spans of a tile that the low and the high bytes of each of these vectors belong to, one if alike."""
    blocks = span // tile_words
    return [tuple(dict.fromkeys(field // blocks for field in pair)) for pair in fields(bits)]


def units(bits: int, tile_words: int, span: int) -> int:
    """Return how many sums of a tile are kept apart."""
    return sum(map(len, set(owners(bits, tile_words, span))))


def count_floats(bits: int, tile_words: int, span: int, columns: int, tiles: int, tail: int) -> int:
    """Return the float32 that a thread works in, for one row of activations."""
    return (tiles * units(bits, tile_words, span) + tail) * BLOCK_ROWS + columns // 2


class IntBytes(Emitter):
    """Sums rows of the weight times few rows of activations."""

    more_pointers, more_integers = "", ""  # of weights that leave columns out

    def __init__(
        self, bits: int, tile_words: int, span: int, symmetric: bool, scale_dtype: str, has_tail: bool, tokens: int
    ) -> None:
        pointers = f"{self.more_pointers} {words(bits)} scales zeros {PRODUCT}"
        super().__init__("product", pointers, f"first last spans rows group tiles tail {self.more_integers}")
        self.bits, self.tile_words, self.span, self.tokens = bits, tile_words, span, tokens
        self.symmetric, self.scale_dtype = symmetric, getattr(torch, scale_dtype)
        self.plane = self.named[words(bits)]
        self.scales, self.zeros, self.x16, self.x_scales, self.x_sums, self.out, self.space = self.pointers[-7:]
        first, last, self.spans, self.rows, self.group, self.tiles, self.tail = self.integers[:7]
        b, (width,) = self.b, PLANES[bits]
        self.columns = FIELDS[width] * tile_words  # of a tile
        self.count = min(tile_words, 32 if "avx512bw" in llvm.features() else 16)  # words of a vector
        self.whole = b.mul(self.tiles, self.i64(self.columns))
        self.in_row = b.add(self.whole, b.mul(self.tail, self.i64(NARROW)))
        self.narrow = NarrowTiles(self, [self.plane], [width], NARROW, self.in_row, self.whole)
        self.together = max(1, MOST // tokens)  # rows of the weight whose sums are added up together
        self.owners = owners(bits, tile_words, span)
        kept = b.add(b.mul(self.tiles, self.i64(units(bits, tile_words, span))), self.tail)
        self.bytes = self.at(self.space, b.mul(kept, self.i64(BLOCK_ROWS * tokens)), self.float)
        kind = self.vector(self.float, BLOCK_ROWS)
        self.sums, self.shift = ([self.variable(kind) for _ in range(tokens)] for _ in range(2))
        with self.loop(self.tiles) as tile:
            self._split_inputs(tile)
        with self.loop(last, first) as block:
            start = b.mul(block, self.i64(BLOCK_ROWS))
            with self.loop(self.i64(BLOCK_ROWS // self.together)) as some:
                row = b.mul(some, self.i64(self.together))
                with self.loop(self.tiles) as tile:
                    self._add_tile(tile, b.add(start, row), row)
                if has_tail:
                    with self.loop(self.tail) as tile:
                        self._add_narrow(tile, b.add(start, row), row)
            self._finish(start)
        b.ret_void()

    @property
    def places(self) -> Iterator[tuple[int, int, int]]:
        """The vectors of bytes of a tile: their number, where their words begin, and the number among their fields."""
        for chunk in range(self.tile_words // self.count):
            for i in range(len(self.owners)):
                yield chunk * len(self.owners) + i, chunk * self.count, i

    def _split_inputs(self, tile: Any) -> None:
        """Write the bytes of the activations of a tile in the order of the vectors of bytes: low ones, high ones."""
        b, size = self.b, 2 * self.count
        column = b.mul(tile, self.i64(self.columns))
        order = [
            EIGHT * lane + i + side for lane in range(size // 16) for side in (0, self.count) for i in range(EIGHT)
        ]
        octets = self.vector(self.byte, size)
        for number, word, i in self.places:
            for m in range(self.tokens):
                low_side, high_side = (
                    self._input(column, field * self.tile_words + word, m, self.count) for field in fields(self.bits)[i]
                )
                x = self.shuffled(low_side, high_side, order)
                high = b.ashr(
                    b.add(x, self.constant(self.short, size, LARGEST_BYTE)), self.constant(self.short, size, 8)
                )
                self.store(b.trunc(x, octets), self.bytes, self._place(tile, number, m, 0))
                self.store(b.trunc(high, octets), self.bytes, self._place(tile, number, m, 1))

    def _place(self, tile: Any, number: int, m: int, plane: int) -> Any:
        """Where the bytes of a row of activations that meet a vector of bytes are."""
        b, size = self.b, 2 * self.count
        inside = self.i64((number * self.tokens + m) * 2 * size + plane * size)
        return b.add(b.mul(tile, self.i64(2 * self.columns * self.tokens)), inside)

    def _input(self, column: Any, inside: int, m: int, lanes: int) -> Any:
        """Activations from a column, which is a multiple of SHORTS, and `inside` more on."""
        b, (vector, rest) = self.b, divmod(inside, SHORTS)
        offset = b.add(b.mul(column, self.i64(self.tokens)), self.i64((vector * self.tokens + m) * SHORTS + rest))
        return self.load(self.x16, offset, self.short, lanes)

    def _add_tile(self, tile: Any, number: Any, row: Any) -> None:
        """Write the sums of the spans of a tile of rows from `row` of the sixteen on, which is `number` of all."""
        kept = list(self._owner_units())
        sums: dict[tuple[int, ...], list[Any]] = {owner: [] for owner, _ in kept}
        for r in range(self.together):
            for owner in sums:
                sums[owner] += self._sum(tile, self.b.add(number, self.i64(r)), owner)
        for owner, unit in kept:
            self._keep(integer_totals(self, sums[owner], len(owner)), self._tile_place(tile, unit), row, len(owner))

    def _owner_units(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """The sums of a tile that are kept apart: what they belong to, and how many are before them."""
        before = 0
        for owner in dict.fromkeys(self.owners):
            yield owner, before
            before += len(owner)

    def _tile_place(self, tile: Any, unit: int) -> Any:
        """Where the sums of sixteen rows begin that are `unit` of a tile, in rows of activations."""
        b = self.b
        return b.add(
            b.mul(tile, self.i64(BLOCK_ROWS * units(self.bits, self.tile_words, self.span))),
            self.i64(BLOCK_ROWS * unit),
        )

    def _tail_place(self, tile: Any) -> Any:
        return self.b.add(self._tile_place(self.tiles, 0), self.b.mul(tile, self.i64(BLOCK_ROWS)))

    def _keep(self, totals: Any, place: Any, row: Any, sides: int) -> None:
        """Write [rows, tokens, sides] sums."""
        b = self.b
        offset = b.add(b.mul(place, self.i64(self.tokens)), b.mul(row, self.i64(self.tokens * sides)))
        self.store(totals, self.space, offset)

    def _kept_sums(self, place: Any, sides: int) -> list[list[Any]]:
        """The sums of sixteen rows, for each row of activations and side."""
        offset, size = self.b.mul(place, self.i64(self.tokens)), self.tokens * sides
        whole = self.load(self.space, offset, self.word, BLOCK_ROWS * size)
        return [
            [self.shuffled(whole, whole, range(m * sides + side, BLOCK_ROWS * size, size)) for side in range(sides)]
            for m in range(self.tokens)
        ]

    def _sum(self, tile: Any, number: Any, owner: tuple[int, ...]) -> list[Any]:
        """Return the sums of an owner and a row with each row of activations, as vectors of int32."""
        size = 2 * self.count
        sums = [[ByteProducts(self, size, 2**self.bits - 1) for _ in range(2)] for _ in range(self.tokens)]
        vectors: dict[int, Any] = {}
        for n, word, i in self.places:
            if self.owners[i] != owner:
                continue
            if word not in vectors:
                vectors[word] = self._words(tile, number, word)
            codes = self._codes(vectors[word], i)
            for m, plane in pairs(range(self.tokens), range(2)):
                sums[m][plane].add(codes, self.load(self.bytes, self._place(tile, n, m, plane), self.byte, size))
        eight = self.constant(self.word, size // 4, 8)
        return [self.b.add(low.total(), self.b.shl(high.total(), eight)) for low, high in sums]

    def _words(self, tile: Any, number: Any, word: int) -> Any:
        """The bytes of the words of a row from one of a tile on."""
        b, (width,) = self.b, PLANES[self.bits]
        in_row = b.udiv(self.in_row, self.i64(FIELDS[width]))
        first = b.add(b.mul(number, in_row), b.mul(tile, self.i64(self.tile_words)))
        offset = b.add(first, self.i64(word))
        read = self.load(self.plane, offset, self.short, self.count)
        if word % LINE == 0:
            self.prefetch(self.plane, b.add(offset, self.i64(AHEAD)), self.short)
        return self._apart(read)

    def _apart(self, words: Any) -> Any:
        """The low bytes of each eight words before their high bytes."""
        octets = self.b.bitcast(words, self.vector(self.byte, 2 * self.count))
        lanes = range(0, 2 * self.count, 2 * EIGHT)
        return self.shuffled(
            octets, octets, [at + i + side for at in lanes for side in (0, 1) for i in range(0, 16, 2)]
        )

    def _codes(self, octets: Any, i: int) -> Any:
        """Vector number i of the codes that bytes of words hold."""
        b, kind = self.b, octets.type
        shorts = b.bitcast(octets, self.vector(self.short, self.count))
        moved = b.lshr(shorts, self.constant(self.short, self.count, i * self.bits)) if i else shorts
        return b.and_(b.bitcast(moved, kind), self.constant(kind.element, kind.count, 2**self.bits - 1))

    def _add_narrow(self, tile: Any, number: Any, row: Any) -> None:
        """Write the sums of a tile of the tail."""
        b = self.b
        column = b.add(self.whole, b.mul(tile, self.i64(NARROW)))
        inputs = [self._input(column, 0, m, NARROW) for m in range(self.tokens)]
        sums = list[Any]()
        for r in range(self.together):
            codes = self.narrow.codes(tile, b.add(number, self.i64(r)), 0, NARROW)
            sums += [self.pair_sums(codes, x) for x in inputs]
        self._keep(integer_totals(self, sums), self._tail_place(tile), row, 1)

    def _finish(self, start: Any) -> None:
        """Write the sums of sixteen rows with all rows of activations."""
        b = self.b
        for variable in (*self.sums, *self.shift):
            b.store(self.constant(self.float, BLOCK_ROWS, 0.0), variable)
        with self.loop(self.spans) as u:
            zero = self._zero(start, u)
            for m, variable in enumerate(self.shift):
                total = self.splat(
                    self.load(self.x_sums, b.add(b.mul(self.spans, self.i64(m)), u), self.float), BLOCK_ROWS
                )
                both = b.fmul(self._scale(start, u, m), zero)
                b.store(self.multiply_add(both, total, b.load(variable)), variable)
        with self.loop(self.tiles) as tile:
            parts = self.columns // self.span
            totals: dict[int, list[list[Any]]] = {part: [[] for _ in self.sums] for part in range(parts)}
            for owner, unit in self._owner_units():
                for m, sides in enumerate(self._kept_sums(self._tile_place(tile, unit), len(owner))):
                    for part, side in zip(owner, sides, strict=True):
                        totals[part][m].append(side)
            for part, of_part in totals.items():
                self._add(start, b.add(b.mul(tile, self.i64(parts)), self.i64(part)), of_part)
        with self.loop(self.tail) as tile:
            column = b.add(self.whole, b.mul(tile, self.i64(NARROW)))
            self._add(start, b.udiv(column, self.i64(self.span)), self._kept_sums(self._tail_place(tile), 1))
        for m, (sums, shift) in enumerate(zip(self.sums, self.shift, strict=True)):
            place = b.add(b.mul(self.rows, self.i64(m)), start)
            self.store(b.fsub(b.load(sums), b.load(shift)), self.out, place)

    def _add(self, start: Any, u: Any, integers: list[list[Any]]) -> None:
        """Add the integers of a span, for each row of activations, times their scales."""
        for m, each in enumerate(integers):
            values = self.b.sitofp(reduce(self.b.add, each), self.vector(self.float, BLOCK_ROWS))
            both, held = self._scale(start, u, m), self.sums[m]
            self.b.store(self.multiply_add(values, both, self.b.load(held)), held)

    def _cell(self, start: Any, u: Any) -> Any:
        group = self.b.udiv(self.b.mul(u, self.i64(self.span)), self.group)
        return self.b.add(self.b.mul(group, self.rows), start)

    def _scale(self, start: Any, u: Any, m: int) -> Any:
        """The scales of sixteen rows times that of a row of activations."""
        b = self.b
        scale = self.load_floats(self.scales, self._cell(start, u), self.scale_dtype, BLOCK_ROWS)
        of_inputs = self.load(self.x_scales, b.add(b.mul(self.spans, self.i64(m)), u), self.float)
        return b.fmul(scale, self.splat(of_inputs, BLOCK_ROWS))

    def _zero(self, start: Any, u: Any) -> Any:
        """Zero points of sixteen rows."""
        if self.symmetric:
            return self.constant(self.float, BLOCK_ROWS, 2 ** (self.bits - 1))
        stream = self.b.udiv(self.b.mul(self._cell(start, u), self.i64(self.bits)), self.i64(8))
        return self.bit_fields(self.zeros, stream, self.bits)
