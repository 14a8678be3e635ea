"""Multiply decoded integers with any number of rows of activations: the base of kernels that decode first.

Sixteen rows of the weight are decoded to int16, one span of columns at a time, into memory that stays in the nearest
cache. Tiles of some of these rows times some rows of activations are then summed in registers: int32 for each span,
which meets the scales of the activations, float32 over all spans. Every sum has the same order in tiles of all sizes,
so that a row of activations has the same products to the bit, whatever else is multiplied with it.
"""

from __future__ import annotations

from abc import abstractmethod
from itertools import product as pairs
from typing import Any

from compress.kernels import llvm
from compress.kernels.cpu.emitter import LANES, Writer

ROWS = 16  # of the weight, that are decoded together
CHUNK = 2 * LANES  # columns of one vector of int16
SPACE = ROWS * LANES  # float32 that a thread works in, for one row of activations: sums
ALIGNED = 64  # bytes
# Tiles, rows of the weight times rows of activations, whose sums are in registers of 512 bits, or in smaller ones.
TILES, SMALL_TILES = ((4, 4), (8, 2), (16, 1)), ((2, 2), (4, 1))


class TiledSums(Writer):
    """Writes a kernel (compress/kernels/cpu/small_matmul.py) for any number of rows of activations.

    The sums of a span must stay below 2^31 in each of the 16 lanes that share its columns. `space` begins with the
    sums, [tokens, ROWS, LANES]; what else is in it is `further`.
    """

    x16: Any
    x_scales: Any
    x_sums: Any
    out: Any
    space: Any
    tokens: Any
    spans: Any
    rows: Any
    span: int  # columns that share a scale

    @abstractmethod
    def start_block(self, block: Any) -> None:
        """Find what is needed to know of sixteen rows of the weight."""

    @abstractmethod
    def add_columns(self) -> None:
        """Decode these rows to `decoded` and add what `add_span` gives, part by part."""

    @abstractmethod
    def scale(self, u: Any, row: Any, token: Any) -> Any:
        """Return the scale of a span, a row of the sixteen and a row of activations."""

    @abstractmethod
    def surplus(self, token: Any) -> Any:
        """Return what the sums of the sixteen rows are too large by, a vector."""

    def write(self, first: Any, last: Any, width: int) -> None:
        """Write the loop over blocks of sixteen rows, of which `width` columns at a time are decoded."""
        b, self.width = self.b, width
        with b.goto_block(self._entry):
            self.decoded = b.alloca(self.vector(self.short, CHUNK), ROWS * width // CHUNK)  # row by row
            self.decoded.align = ALIGNED
        with self.loop(last, first) as block:
            self.start_block(block)
            with self.loop(b.mul(self.tokens, self.i64(ROWS))) as i:
                self.store(self.floats(0.0), self.space, b.mul(i, self.i64(LANES)))
            self.add_columns()
            with self.loop(self.tokens) as m:
                self._finish(block, m)
        b.ret_void()

    def further(self, offset: Any) -> Any:
        """Return where in `space` a number lies behind the sums."""
        return self.b.add(self.b.mul(self.tokens, self.i64(ROWS * LANES)), offset)

    def add_span(self, u: Any, column: Any, inside: Any, count: Any) -> None:
        """Add the products over `count` vectors of columns, from a decoded column on, to all sums.

        They are the columns of the span u from number `inside` of it on.
        """
        b = self.b
        token = self.i64(0)
        for size in TILES if "avx512f" in llvm.features() else SMALL_TILES:
            rows, tokens = size
            tiled = b.udiv(b.sub(self.tokens, token), self.i64(tokens))
            with self.loop(tiled) as i, self.loop(self.i64(ROWS // rows)) as j:
                row, m = b.mul(j, self.i64(rows)), b.add(token, b.mul(i, self.i64(tokens)))
                inputs = b.add(b.mul(b.add(b.mul(u, self.tokens), m), self.i64(self.span)), inside)
                totals = self._tile(b.add(b.mul(row, self.i64(self.width)), column), inputs, count, size)
                for (r, t), total in totals.items():
                    self._add(u, b.add(row, self.i64(r)), b.add(m, self.i64(t)), b.load(total))
            token = b.add(token, b.mul(tiled, self.i64(tokens)))

    def _tile(self, weights: Any, inputs: Any, count: Any, size: tuple[int, int]) -> dict[tuple[int, int], Any]:
        """Return the int32 sums over `count` vectors of columns of each row with each row of activations."""
        b, int32, (rows, tokens) = self.b, self.vector(self.word, LANES), size
        totals = {cell: self.variable(int32) for cell in pairs(range(rows), range(tokens))}
        for variable in totals.values():
            b.store(self.constant(self.word, LANES, 0), variable)
        with self.loop(count) as i:
            column = b.mul(i, self.i64(CHUNK))
            lines = [b.add(b.add(inputs, column), self.i64(self.span * m)) for m in range(tokens)]
            x = [self.load(self.x16, line, self.short, CHUNK) for line in lines]
            for r in range(rows):
                place = b.add(b.add(weights, column), self.i64(self.width * r))
                w = self.load(self.decoded, place, self.short, CHUNK)
                for m in range(tokens):
                    b.store(b.add(b.load(totals[r, m]), self.pair_sums(w, x[m])), totals[r, m])
        return totals

    def _add(self, u: Any, row: Any, token: Any, total: Any) -> None:
        """Add the sums of a span times its scale to those of a row."""
        place, scale = self._place(row, token), self.splat(self.scale(u, row, token), LANES)
        held = self.load(self.space, place, self.float, LANES)
        values = self.b.sitofp(total, self.vector(self.float, LANES))
        self.store(self.multiply_add(values, scale, held), self.space, place)

    def _place(self, row: Any, token: Any) -> Any:
        return self.b.mul(self.b.add(self.b.mul(token, self.i64(ROWS)), row), self.i64(LANES))

    def _finish(self, block: Any, token: Any) -> None:
        """Write the sums of sixteen rows with a row of activations."""
        b, rows = self.b, [self._place(self.i64(row), token) for row in range(ROWS)]
        sums = self.totals([self.load(self.space, place, self.float, LANES) for place in rows])
        place = b.add(b.mul(self.rows, token), b.mul(block, self.i64(ROWS)))
        self.store(b.fsub(sums, self.surplus(token)), self.out, place)

    def totals(self, vectors: list[Any]) -> Any:
        """Return the sums of the elements of sixteen vectors, as a vector of sixteen, each in the order of `total`."""
        b, half = self.b, LANES // 2
        # Each step adds the halves of blocks of lanes; the blocks of two vectors become those of one.
        while len(vectors) > 1:
            low = [place for place in range(2 * LANES) if place // half % 2 == 0]
            high = [place + half for place in low]
            neighbours = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [b.fadd(self.shuffled(*pair, low), self.shuffled(*pair, high)) for pair in neighbours]
            half //= 2
        return vectors[0]
