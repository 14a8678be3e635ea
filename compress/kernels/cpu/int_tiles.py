"""Multiply with the `int` format on a CPU, with more rows of activations than the kernel of few rows is good for.

A tile of the words of sixteen rows is decoded at a time. The sums and their order are those of int.py beside this file,
to the bit.
"""

from __future__ import annotations

from typing import Any

import torch

from compress.formats.int import NARROW, PLANES
from compress.kernels.cpu.emitter import LANES
from compress.kernels.cpu.tiled_sums import ROWS, TiledSums
from compress.kernels.cpu.unpack import SHORTS, NarrowTiles, whole_tiles
from compress.numerics.packing import FIELDS


class IntTiles(TiledSums):
    """void product(words..., scales, zeros, x16, x_scales, x_sums, out, space, first, last, spans, rows, group, tiles,
    tail, rows of activations)."""

    def __init__(
        self, bits: int, tile_words: int, span: int, symmetric: bool, scale_dtype: str, has_tail: bool
    ) -> None:
        super().__init__("product", len(PLANES[bits]) + 7, 8, torch.float32)
        self.bits, self.span, self.has_tail, self.symmetric = bits, span, has_tail, symmetric
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
        self.shift = [self.variable(self.floats(0.0).type)]
        self.write(first, last, self.columns)

    def start_block(self, block: Any) -> None:
        """Multiply the scales of sixteen rows with those of the activations, and sum what zero points take off."""
        b = self.b
        self.first_row = b.mul(block, self.i64(ROWS))
        with self.loop(self.tokens) as m:
            (shift,) = self.shift
            b.store(self.floats(0.0), shift)
            with self.loop(self.spans) as u:
                group = b.udiv(b.mul(u, self.i64(self.span)), self.group)
                offset = b.add(b.mul(group, self.rows), self.first_row)
                scale = self.load_floats(self.scales, offset, self.scale_dtype, ROWS)
                cell = b.add(b.mul(self.spans, m), u)
                both = b.fmul(scale, self.splat(self.load(self.x_scales, cell, self.float), LANES))
                self.store(both, self.space, self._scales_place(u, m))
                total = self.splat(self.load(self.x_sums, cell, self.float), LANES)
                b.store(self.multiply_add(b.fmul(both, self._zero(offset)), total, b.load(shift)), shift)
            self.store(b.load(shift), self.space, self.further(b.mul(m, self.i64(ROWS))))

    def _zero(self, offset: Any) -> Any:
        """Zero points of sixteen rows."""
        b = self.b
        if self.symmetric:
            return self.floats(2 ** (self.bits - 1))
        return self.bit_fields(self.zeros, b.udiv(b.mul(offset, self.i64(self.bits)), self.i64(8)), self.bits)

    def add_columns(self) -> None:
        b, spans = self.b, self.columns // self.span
        with self.loop(self.tiles) as tile:
            with self.loop(self.i64(ROWS)) as row:
                for column in range(0, self.columns, SHORTS):
                    codes = self.read(tile, b.add(self.first_row, row), column)
                    self._keep(codes, row, column)
            with self.loop(self.i64(spans)) as part:
                u = b.add(b.mul(tile, self.i64(spans)), part)
                column = b.mul(part, self.i64(self.span))
                self.add_span(u, column, self.i64(0), self.i64(self.span // SHORTS))
        if self.has_tail:
            with self.loop(self.tail) as tile:
                with self.loop(self.i64(ROWS)) as row:
                    self._keep(self.narrow.codes(tile, b.add(self.first_row, row), 0, NARROW), row, 0)
                column = b.add(self.whole, b.mul(tile, self.i64(NARROW)))
                u, inside = (operation(column, self.i64(self.span)) for operation in (b.udiv, b.urem))
                self.add_span(u, self.i64(0), inside, self.i64(1))

    def _keep(self, codes: Any, row: Any, column: int) -> None:
        self.store(codes, self.decoded, self.b.add(self.b.mul(row, self.i64(self.width)), self.i64(column)))

    def scale(self, u: Any, row: Any, token: Any) -> Any:
        return self.load(self.space, self.b.add(self._scales_place(u, token), row), self.float)

    def surplus(self, token: Any) -> Any:
        return self.load(self.space, self.further(self.b.mul(token, self.i64(ROWS))), self.float, ROWS)

    def _scales_place(self, u: Any, token: Any) -> Any:
        b = self.b
        cell = b.add(b.mul(self.spans, token), u)
        return self.further(b.mul(b.add(cell, self.tokens), self.i64(ROWS)))
