"""Multiply the `int` format with many rows of activations: decode sixteen rows of the weight, multiply them in tiles.

The codes of a tile of words are decoded to int16 and turned, so that a vector holds two neighbouring columns of sixteen
rows. It is multiplied with two columns of a row of activations, which are copied to all lanes: each lane sums for its
own row of the weight, so that a span's sum meets its scales once for sixteen rows, however short the span is. The sums
of a span are exact, and are added in the order of spans, as those of int.py, to the bit.
"""

from __future__ import annotations

from typing import Any

import torch

from compress.formats.int import NARROW, PLANES
from compress.kernels import llvm
from compress.kernels.cpu.emitter import LANES, PRODUCT, Emitter, Writer
from compress.kernels.cpu.unpack import SHORTS, NarrowTiles, whole_tiles, words
from compress.numerics.packing import FIELDS

ROWS = 16  # rows of the weight that are decoded together
ALIGNED = 64  # bytes
# Rows of activations whose sums are in registers at once: of sixteen sums each, in one register of 512 bits or in two.
TOKENS, TOKENS_OF_SMALL = (8, 4, 2, 1), (4, 2, 1)
UNROLLED = 2  # pairs of columns in a step of the inner loop


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
        self.read = whole_tiles(self, planes, bits, tile_words, in_row, SHORTS)
        self.narrow = NarrowTiles(self, planes, PLANES[bits], NARROW, in_row, self.whole)
        self.shift = self.variable(self.floats(0.0).type)
        self.size = ROWS if "avx512f" in llvm.features() else ROWS // 2  # of the squares that are turned
        with b.goto_block(self._entry):  # codes row by row, and two columns of all rows at a time
            self.by_row = self._codes(self.vector(self.short, SHORTS), 1)
            self.turned = self._codes(self.vector(self.word, self.size), 2)
        with self.loop(last, first) as block:
            self._start(b.mul(block, self.i64(ROWS)))
            self._add_tiles()
            if has_tail:
                self._add_tail()
            self._finish()
        b.ret_void()

    def _codes(self, kind: Any, shorts: int) -> Any:
        """Take memory for the codes of a tile of sixteen rows, in vectors of elements of so many codes."""
        memory = self.b.alloca(kind, ROWS * self.columns // (kind.count * shorts))
        memory.align = ALIGNED
        return memory

    def _start(self, first_row: Any) -> None:
        """Set the sums of sixteen rows to zero, and sum what zero points take off."""
        b = self.b
        self.first_row = first_row
        with self.loop(self.tokens) as m:
            b.store(self.floats(0.0), self.shift)
            with self.loop(self.spans) as u:
                both = self._scale(u, m)
                total = self.splat(self.load(self.x_sums, b.add(b.mul(self.spans, m), u), self.float), LANES)
                b.store(self.multiply_add(b.fmul(both, self._zero(u)), total, b.load(self.shift)), self.shift)
            self.store(self.floats(0.0), self.space, b.mul(m, self.i64(ROWS)))
            self.store(b.load(self.shift), self.space, b.mul(b.add(self.tokens, m), self.i64(ROWS)))

    def _cell(self, u: Any) -> Any:
        """Where the scales of a span and sixteen rows are."""
        group = self.b.udiv(self.b.mul(u, self.i64(self.span)), self.group)
        return self.b.add(self.b.mul(group, self.rows), self.first_row)

    def _scale(self, u: Any, m: Any) -> Any:
        """The scales of sixteen rows times that of a row of activations."""
        b = self.b
        scale = self.load_floats(self.scales, self._cell(u), self.scale_dtype, ROWS)
        return b.fmul(scale, self.splat(self.load(self.x_scales, b.add(b.mul(self.spans, m), u), self.float), LANES))

    def _zero(self, u: Any) -> Any:
        """Zero points of sixteen rows."""
        b = self.b
        if self.symmetric:
            return self.floats(2 ** (self.bits - 1))
        return self.bit_fields(self.zeros, b.udiv(b.mul(self._cell(u), self.i64(self.bits)), self.i64(8)), self.bits)

    def _add_tiles(self) -> None:
        b, spans = self.b, self.columns // self.span
        with self.loop(self.tiles) as tile:
            with self.loop(self.i64(ROWS)) as row:
                for column in range(0, self.columns, SHORTS):
                    self._keep(self.read(tile, b.add(self.first_row, row), column), row, column)
            self._turn(self.columns)
            with self.loop(self.i64(spans)) as part:
                u, column = b.add(b.mul(tile, self.i64(spans)), part), b.mul(part, self.i64(self.span))
                self._add_columns(u, column, self.i64(0), self.span)

    def _add_tail(self) -> None:
        b = self.b
        with self.loop(self.tail) as tile:
            with self.loop(self.i64(ROWS)) as row:
                self._keep(self.narrow.codes(tile, b.add(self.first_row, row), 0, NARROW), row, 0)
            self._turn(NARROW)
            column = b.add(self.whole, b.mul(tile, self.i64(NARROW)))
            u, inside = (operation(column, self.i64(self.span)) for operation in (b.udiv, b.urem))
            self._add_columns(u, self.i64(0), inside, NARROW)

    def _keep(self, codes: Any, row: Any, column: int) -> None:
        self.store(codes, self.by_row, self.b.add(self.b.mul(row, self.i64(self.columns)), self.i64(column)))

    def _turn(self, columns: int) -> None:
        """Write [pairs of columns, rows] of the codes that are kept row by row."""
        b, size = self.b, self.size
        with self.loop(self.i64(columns // 2 // size)) as i:
            first = b.mul(i, self.i64(size))
            for row in range(0, ROWS, size):
                lines = [b.add(first, self.i64((row + r) * self.columns // 2)) for r in range(size)]
                turned = transpose(self, [self.load(self.by_row, line, self.word, size) for line in lines])
                for j, pairs in enumerate(turned):
                    self.store(pairs, self.turned, b.add(b.mul(first, self.i64(ROWS)), self.i64(j * ROWS + row)))

    def _add_columns(self, u: Any, column: Any, inside: Any, count: int) -> None:
        """Add the products of `count` columns, from a decoded column on, which has the number `inside` in its span."""
        b, token = self.b, self.i64(0)
        for tokens in TOKENS if "avx512f" in llvm.features() else TOKENS_OF_SMALL:
            tiled = b.udiv(b.sub(self.tokens, token), self.i64(tokens))
            with self.loop(tiled) as i:
                m = b.add(token, b.mul(i, self.i64(tokens)))
                inputs = b.add(b.mul(b.add(b.mul(u, self.tokens), m), self.i64(self.span)), inside)
                for t, total in enumerate(self._sum(b.mul(column, self.i64(ROWS)), inputs, count, tokens)):
                    self._add(u, b.add(m, self.i64(t)), b.load(total))
            token = b.add(token, b.mul(tiled, self.i64(tokens)))

    def _sum(self, weights: Any, inputs: Any, count: int, tokens: int) -> list[Any]:
        """Return the int32 sums of sixteen rows over `count` columns, for each row of activations."""
        b, int32 = self.b, self.vector(self.word, LANES)
        totals = [self.variable(int32) for _ in range(tokens)]
        for variable in totals:
            b.store(self.constant(self.word, LANES, 0), variable)
        with self.loop(self.i64(count // (2 * UNROLLED))) as i:
            for part in range(UNROLLED):
                column = b.add(b.mul(i, self.i64(2 * UNROLLED)), self.i64(2 * part))
                w = self.load(self.turned, b.add(weights, b.mul(column, self.i64(ROWS))), self.short, 2 * ROWS)
                for m, variable in enumerate(totals):
                    x = self.at(self.x16, b.add(b.add(inputs, column), self.i64(self.span * m)), self.short)
                    pair = self.splat(b.load(x, typ=self.word, align=2), LANES)
                    b.store(b.add(b.load(variable), self.pair_sums(w, b.bitcast(pair, w.type))), variable)
        return totals

    def _add(self, u: Any, m: Any, total: Any) -> None:
        """Add the sums of a span times its scales to those of the rows."""
        place = self.b.mul(m, self.i64(ROWS))
        held, values = self.load(self.space, place, self.float, ROWS), self.b.sitofp(total, self.floats(0.0).type)
        self.store(self.multiply_add(values, self._scale(u, m), held), self.space, place)

    def _finish(self) -> None:
        """Write the sums of sixteen rows with all rows of activations."""
        b = self.b
        with self.loop(self.tokens) as m:
            sums, shift = (
                self.load(self.space, b.mul(b.add(m, skipped), self.i64(ROWS)), self.float, ROWS)
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
