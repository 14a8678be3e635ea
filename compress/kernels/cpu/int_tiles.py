"""Multiply the `int` format with many rows of activations: decode sixteen rows of the weight, multiply them in tiles.

The words of a tile are turned, so that a vector holds two neighbouring words of sixteen rows, and decoded to int16: two
neighbouring columns of sixteen rows. It is multiplied with two columns of a row of activations, which are copied to all
lanes: each lane sums for its own row of the weight, so that a span's sum meets its scales once for sixteen rows,
however short the span is. The sums of a span are exact, and are added in the order of spans, as those of int.py, to the
bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from itertools import chain
from typing import Any

import torch

from compress.formats.int import NARROW, PLANES
from compress.kernels import llvm
from compress.kernels.cpu.emitter import LANES, PRODUCT, Emitter, Writer
from compress.kernels.cpu.unpack import SHORTS, NarrowTiles, Planar, field_codes, words
from compress.numerics.packing import FIELDS, WORDS

BLOCK_ROWS = 16  # rows of the weight that are decoded together
ALIGNED = 64  # bytes
# Rows of activations whose sums are in registers at once: of sixteen sums each, in one register of 512 bits or in two.
TOKENS, TOKENS_OF_SMALL = (8, 4, 2, 1), (4, 2, 1)
SUMS = 16  # registers of sums where there are 32: a product is added to one of them only after the one before is there
SHORT = 64  # columns of a span, up to which most of the time goes to what is done once for a span
Put = Callable[[Any, int, Any], None]  # (first, j, turned): pair number first + j of sixteen rows
MOST_TILED = 128  # rows of activations that are taken at once, for which a weight is decoded once


def least_tiled(tile_words: int, span: int) -> int:
    """Return the rows of activations from which this kernel is faster than that of few rows, several times.

    Measured with one thread of an EPYC of the fifth generation, with AVX-512 and as if it had AVX2 alone: 4096 x 4096
    out of memory, 576 x 576 and 576 x 1536 in the cache, 2, 3, 4, 6 and 8 bits. The sums are the same to the bit.
    """
    if "avx512f" not in llvm.features():
        return 5 if span <= SHORT else 8
    if span > SHORT:
        return 12
    return 5 if tile_words < SHORTS else 8


class IntTiles(Writer):
    """Sums rows of the weight times any number of rows of activations, which lie in spans: [spans, tokens, span]."""

    def __init__(
        self, bits: int, tile_words: int, span: int, symmetric: bool, scale_dtype: str, has_tail: bool
    ) -> None:
        pointers = f"{words(bits)} scales zeros {PRODUCT}"
        super().__init__("product", pointers, "first last spans rows group tiles tail tokens", torch.float32)
        self.bits, self.span, self.symmetric = bits, span, symmetric
        self.scale_dtype = getattr(torch, scale_dtype)
        planes = self.pointers[: len(PLANES[bits])]
        self.scales, self.zeros, self.x16, self.x_scales, self.x_sums, self.out, self.space = self.pointers[-7:]
        first, last, self.spans, self.rows, self.group, self.tiles, self.tail, self.tokens = self.integers
        b = self.b
        self.columns = max(FIELDS[w] for w in PLANES[bits]) * tile_words  # of a tile
        self.whole = b.mul(self.tiles, self.i64(self.columns))
        in_row = b.add(self.whole, b.mul(self.tail, self.i64(NARROW)))
        self.planar = Planar(self, planes, PLANES[bits], tile_words, in_row)
        self.narrow = NarrowTiles(self, planes, PLANES[bits], NARROW, in_row, self.whole)
        self.size = BLOCK_ROWS if "avx512f" in llvm.features() else BLOCK_ROWS // 2  # of the squares that are turned
        with b.goto_block(self._entry):
            self._allocate()
        self._begin()
        with self.loop(last, first) as block:
            self._start(b.mul(block, self.i64(BLOCK_ROWS)))
            self._add_tiles()
            if has_tail:
                self._add_tail()
            self._finish()
        b.ret_void()

    def _allocate(self) -> None:
        """Take the memory that tiles are decoded to."""
        # [pairs of words, rows] of the words of a tile that belong together, for each plane
        self.turned_words = [
            [self._memory(self._plane_words(w) // 2) for _ in range(WORDS[w])] for w in self.planar.widths
        ]
        self.turned = self._memory(self.columns // 2)  # [pairs of columns, rows], codes
        self.by_row = self._memory(NARROW // 2)  # [rows, pairs of columns], of a tile of the tail

    def _begin(self) -> None:
        """Write what is done once for all rows of the weight."""
        return

    def _memory(self, pairs: int) -> Any:
        """Take memory for pairs of int16 of sixteen rows."""
        memory = self.b.alloca(self.vector(self.word, LANES), pairs * BLOCK_ROWS // LANES)
        memory.align = ALIGNED
        memory.type = self.ir.PointerType()  # of anything
        return memory

    def _plane_words(self, width: int) -> int:
        """Words of a plane in a tile, of those that belong together the first of each."""
        return self.columns // FIELDS[width]

    def _start(self, first_row: Any) -> None:
        """Set the sums of sixteen rows to zero, and sum what zero points take off."""
        b = self.b
        self.first_row = first_row
        with self.loop(b.mul(self.tokens, self.i64(2))) as i:
            self.store(self.floats(0.0), self.space, b.mul(i, self.i64(BLOCK_ROWS)))
        with self.loop(self.spans) as u:
            scale, zero = self._scale(u), self._zero(u)
            with self.loop(self.tokens) as m:
                both = b.fmul(self._with_inputs(scale, u, m), zero)
                total = self.splat(self.load(self.x_sums, b.add(b.mul(self.spans, m), u), self.float), LANES)
                self._add(b.add(self.tokens, m), both, total)

    def _cell(self, u: Any) -> Any:
        """Where the scales of a span and sixteen rows are."""
        group = self.b.udiv(self.b.mul(u, self.i64(self.span)), self.group)
        return self.b.add(self.b.mul(group, self.rows), self.first_row)

    def _scale(self, u: Any) -> Any:
        """The scales of sixteen rows."""
        return self.load_floats(self.scales, self._cell(u), self.scale_dtype, BLOCK_ROWS)

    def _with_inputs(self, scale: Any, u: Any, m: Any) -> Any:
        """Scales of sixteen rows times that of a row of activations."""
        of_inputs = self.load(self.x_scales, self.b.add(self.b.mul(self.spans, m), u), self.float)
        return self.b.fmul(scale, self.splat(of_inputs, LANES))

    def _zero(self, u: Any) -> Any:
        """Zero points of sixteen rows."""
        b = self.b
        if self.symmetric:
            return self.floats(2 ** (self.bits - 1))
        return self.bit_fields(self.zeros, b.udiv(b.mul(self._cell(u), self.i64(self.bits)), self.i64(8)), self.bits)

    def _add_tiles(self) -> None:
        b, spans = self.b, self.columns // self.span
        with self.loop(self.tiles) as tile:
            self._decode_tile(tile)
            with self.loop(self.i64(spans)) as part:
                u, column = b.add(b.mul(tile, self.i64(spans)), part), b.mul(part, self.i64(self.span))
                self._add_columns(u, column, self.i64(0), self.span)

    def _decode_tile(self, tile: Any) -> None:
        """Write the codes of a tile of sixteen rows to `turned`."""
        b = self.b
        self._turn_words(tile)
        with self.loop(self.i64(self.planar.tile_words // 2)) as pair:
            for block in range(self.planar.fields):
                place = b.add(pair, self.i64(block * self.planar.tile_words // 2))
                self.store(self._codes(pair, block), self.turned, b.mul(place, self.i64(2 * BLOCK_ROWS)))

    def _turn_words(self, tile: Any) -> None:
        """Write the words of a tile of sixteen rows in the order of `turned_words`."""
        for plane, width in enumerate(self.planar.widths):
            starts = [self.planar.word_places(tile, self._row(r), plane) for r in range(BLOCK_ROWS)]
            for i, memory in enumerate(self.turned_words[plane]):
                lines = [of_row[i] for of_row in starts]
                self._turn(self.planar.planes[plane], lines, self._plane_words(width) // 2, self._put(memory))

    def _row(self, r: int) -> Any:
        return self.b.add(self.first_row, self.i64(r))

    def _codes(self, pair: Any, block: int) -> Any:
        """Two neighbouring columns of sixteen rows as int16, a pair of words of a block of a tile."""
        b, whole = self.b, None
        for plane, width in enumerate(self.planar.widths):
            skipped, field = divmod(block, FIELDS[width])
            place = b.add(pair, self.i64(skipped * self.planar.tile_words // 2))

            def word(i: int, plane: int = plane, place: Any = place) -> Any:
                here = b.mul(place, self.i64(2 * BLOCK_ROWS))
                return self.load(self.turned_words[plane][i], here, self.short, 2 * BLOCK_ROWS)

            part = field_codes(self, width, field, word)
            shift = self.constant(self.short, 2 * BLOCK_ROWS, width)
            whole = part if whole is None else b.or_(b.shl(whole, shift), part)
        return whole

    def _add_tail(self) -> None:
        b = self.b
        with self.loop(self.tail) as tile:
            self._decode_narrow(tile)
            column = b.add(self.whole, b.mul(tile, self.i64(NARROW)))
            u, inside = (operation(column, self.i64(self.span)) for operation in (b.udiv, b.urem))
            self._add_columns(u, self.i64(0), inside, NARROW)

    def _decode_narrow(self, tile: Any) -> None:
        """Write the codes of a tile of the tail of sixteen rows to `turned`."""
        b = self.b
        with self.loop(self.i64(BLOCK_ROWS)) as row:
            codes = self.narrow.codes(tile, b.add(self.first_row, row), 0, NARROW)
            self.store(codes, self.by_row, b.mul(row, self.i64(NARROW)))
        lines = [self.i64(r * NARROW) for r in range(BLOCK_ROWS)]
        self._turn(self.by_row, lines, NARROW // 2, self._put(self.turned))

    def _put(self, memory: Any) -> Put:
        """Return what writes turned pairs to [pairs, rows]."""

        def put(first: Any, j: int, turned: Any) -> None:
            self.store(turned, memory, self.b.mul(self.b.add(first, self.i64(j)), self.i64(BLOCK_ROWS)))

        return put

    def _turn(
        self, given: Any, lines: list[Any], pairs: int, put: Put, arranged: Callable[[Any], Any] = lambda row: row
    ) -> None:
        """Turn sixteen rows of pairs of int16, which begin at `lines` of what is given, and `put` them pair by pair.

        arranged: what is done to the vectors of a row before.
        """
        b, size = self.b, min(self.size, pairs)
        kind = self.vector(self.word, size)
        with self.loop(self.i64(pairs // size)) as i:
            first = b.mul(i, self.i64(size))
            read = [self.at(given, b.add(line, b.mul(first, self.i64(2))), self.short) for line in lines]
            rows = [arranged(b.load(place, typ=kind, align=2)) for place in read]
            turned = [transpose(self, rows[row : row + size]) for row in range(0, BLOCK_ROWS, size)]
            for j, parts in enumerate(zip(*turned, strict=True)):
                whole = parts[0] if len(parts) == 1 else self.shuffled(parts[0], parts[1], range(BLOCK_ROWS))
                put(first, j, whole)

    def _add_columns(self, u: Any, column: Any, inside: Any, count: int) -> None:
        """Add the products of `count` columns, from a decoded column on, which has the number `inside` in its span."""
        b, token, scale = self.b, self.i64(0), self._scale(u)
        for tokens in TOKENS if "avx512f" in llvm.features() else TOKENS_OF_SMALL:
            tiled = b.udiv(b.sub(self.tokens, token), self.i64(tokens))
            with self.loop(tiled) as i:
                m = b.add(token, b.mul(i, self.i64(tokens)))
                for t, total in enumerate(self._sum(u, m, column, inside, count, tokens)):
                    row = b.add(m, self.i64(t))
                    self._add(row, self._with_inputs(scale, u, row), b.sitofp(total, scale.type))
            token = b.add(token, b.mul(tiled, self.i64(tokens)))

    def _sum(self, u: Any, m: Any, column: Any, inside: Any, count: int, tokens: int) -> list[Any]:
        """Return the int32 sums of sixteen rows over `count` columns, for each row of activations from `m` on."""
        b, int32 = self.b, self.vector(self.word, LANES)
        weights = b.mul(column, self.i64(BLOCK_ROWS))
        inputs = b.add(b.mul(b.add(b.mul(u, self.tokens), m), self.i64(self.span)), inside)
        unrolled = max(2, min(SUMS // tokens, 8))  # pairs of columns in a step of the loop
        parts = unrolled if "avx512f" in llvm.features() else 1  # that are summed apart
        totals = [[self.variable(int32) for _ in range(parts)] for _ in range(tokens)]
        for variable in chain.from_iterable(totals):
            b.store(self.constant(self.word, LANES, 0), variable)
        with self.loop(self.i64(count // (2 * unrolled))) as i:
            for part in range(unrolled):
                column = b.add(b.mul(i, self.i64(2 * unrolled)), self.i64(2 * part))
                w = self.load(
                    self.turned, b.add(weights, b.mul(column, self.i64(BLOCK_ROWS))), self.short, 2 * BLOCK_ROWS
                )
                for t, variables in enumerate(totals):
                    x = self.at(self.x16, b.add(b.add(inputs, column), self.i64(self.span * t)), self.short)
                    pair = self.splat(b.load(x, typ=self.word, align=2), LANES)
                    products = self.pair_sums(w, b.bitcast(pair, w.type))
                    b.store(b.add(b.load(variables[part % parts]), products), variables[part % parts])
        return [reduce(b.add, map(b.load, variables)) for variables in totals]

    def _add(self, m: Any, scale: Any, values: Any) -> None:
        """Add values times scales to the sums `m` of sixteen rows."""
        place = self.b.mul(m, self.i64(BLOCK_ROWS))
        held = self.load(self.space, place, self.float, BLOCK_ROWS)
        self.store(self.multiply_add(scale, values, held), self.space, place)

    def _finish(self) -> None:
        """Write the sums of sixteen rows with all rows of activations."""
        b = self.b
        with self.loop(self.tokens) as m:
            sums, shift = (
                self.load(self.space, b.mul(b.add(m, skipped), self.i64(BLOCK_ROWS)), self.float, BLOCK_ROWS)
                for skipped in (self.i64(0), self.tokens)
            )
            self.store(b.fsub(sums, shift), self.out, b.add(b.mul(self.rows, m), self.first_row))


def transpose(e: Emitter, rows: list[Any]) -> list[Any]:
    """Return the columns of n vectors of n int32, 8 or 16: in lanes of four as x86 shuffles them, then these lanes."""
    count = len(rows)

    def unpack(a: Any, b: Any, first: int, width: int) -> Any:
        lane = [first + i + side for i in range(0, 4 // 2, width) for side in (0, count)]
        order = [place + w for place in lane for w in range(width)]
        return e.shuffled(a, b, [at + place for at in range(0, count, 4) for place in order])

    lanes = []  # [rows / 4][4]: a column of each lane, of four rows
    for a, b, c, d in zip(*(rows[i::4] for i in range(4)), strict=True):
        low, high = ([unpack(*pair, first, 1) for first in (0, 2)] for pair in ((a, b), (c, d)))
        lanes.append([unpack(low[half], high[half], first, 2) for half in (0, 1) for first in (0, 2)])
    step = 1
    while step < len(lanes):
        lanes = _exchange(e, lanes, step)
        step *= 2
    return [column for lane in lanes for column in lane]


def _exchange(e: Emitter, lanes: list[list[Any]], step: int) -> list[list[Any]]:
    """Exchange lanes of four int32 between vectors whose numbers differ by `step`."""
    count, new = 4 * len(lanes), [list(lane) for lane in lanes]
    low = [i if i // 4 & step == 0 else count + i - 4 * step for i in range(count)]
    for i in (i for i in range(len(lanes)) if not i & step):
        for j, (a, b) in enumerate(zip(lanes[i], lanes[i + step], strict=True)):
            new[i][j] = e.shuffled(a, b, low)
            new[i + step][j] = e.shuffled(a, b, [place + 4 * step for place in low])
    return new
