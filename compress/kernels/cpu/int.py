"""Multiply with the `int` format on a CPU: take codes of 2 to 8 bits apart in registers, for a few rows of activations.

    y[m, n] = sum over spans u of scale[u, n] x_scale[m, u] (sum_k code[n, k] x16[m, k] - zero[u, n] sum_k x16[m, k])

A span is what a scale and an activation scale have in common: the blocks of TW columns (one field of the words of a
tile, compress/numerics/packing.py) that lie in one group, at most a tile. The tiles of 32 columns behind the whole
tiles of a narrow tail are added one by one, each within a span; the last span may be part of one. Sixteen rows of the
weight at a time: their scales are multiplied with those of the activations once, and the zero points are taken off
sixteen rows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import product as pairs
from typing import Any

import torch
from torch import Tensor

from compress.formats import int as int_format
from compress.formats.int import NARROW, PLANES, Params
from compress.kernels import llvm
from compress.kernels.contract import Decoder, Shape
from compress.kernels.cpu import emitter, int_byte_tiles, int_bytes, int_tiles, small_matmul
from compress.kernels.cpu.emitter import LANES, PRODUCT
from compress.kernels.cpu.int_byte_tiles import IntByteTiles
from compress.kernels.cpu.int_bytes import IntBytes
from compress.kernels.cpu.int_tiles import SHORT, IntTiles
from compress.kernels.cpu.integer_totals import integer_totals
from compress.kernels.cpu.small_matmul import Product, ProductSizes
from compress.kernels.cpu.unpack import SHORTS, NarrowTiles, vector_lanes, whole_tiles, words
from compress.numerics.packing import FIELDS

SCALE_ROWS = int_format.ROW_MULTIPLE  # of the weight, whose scales are read together


def span_blocks(params: Params) -> int:
    """Blocks of TW columns that are summed before they meet their scales; 0: groups that no block fits in."""
    fields = max(FIELDS[w] for w in PLANES[params.bits])
    if params.group_size == -1:
        return fields
    blocks, rest = divmod(params.group_size, params.tile_words)
    if rest:
        return 0
    if blocks % fields == 0:
        return fields
    return blocks if fields % blocks == 0 else 1


def rows_together(span: int, tokens: int) -> int:
    """Return the rows of the weight whose sums with few rows of activations meet their scales together."""
    if "avx512bw" in llvm.features():
        return 4 if span > SHORT and tokens == 1 else 8 // tokens
    return max(1, (2 if span > SHORT else 4) // tokens)


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> Int | None:
    """Return the product with a weight of any width, if its groups are whole blocks of TW columns."""
    return Int(tensors, params, shape) if emitter.worthwhile(shape) and span_blocks(params) else None


def look_up(
    tensors: Mapping[str, Tensor], params: Params, shape: Shape, ids: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Return the rows ids [n] of a table, [n, in]; None for types and groups that no kernel reads."""
    table = prepare(tensors, params, shape)
    if table is None or dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return None
    return table.look_up(ids, dtype)


class Int(Product):
    def __init__(self, tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> None:
        rows, columns = int_format.padded_shape(params, shape)
        span = span_blocks(params) * params.tile_words
        spans, (tiles, tail) = -(-columns // span), params.split(columns)
        zeros = tensors["scales" if params.symmetric else "zeros"]
        vector = vector_lanes(params.tile_words, span)
        space = max(spans, 2) * SCALE_ROWS
        if int_bytes.reads(params.bits, span):
            own = int_bytes.count_floats(params.bits, params.tile_words, span, spans * span, tiles, tail)
            space = max(space, own)
        self._has_tiles, byte_rows = span % SHORTS == 0, int_byte_tiles.find_least_rows(params.bits, span)
        self._has_bytes = byte_rows > 0
        if self._has_bytes:
            space = max(space, int_byte_tiles.count_floats(spans * span))
        tiled_rows = int_tiles.least_tiled(params.tile_words, span) if self._has_tiles else emitter.EVERY
        self._least_tiled = byte_rows or tiled_rows  # rows of activations
        layout = ProductSizes(shape[1], shape[0], spans * span, rows, span, vector, space)
        group = columns if params.group_size == -1 else params.group_size
        stored = {name: tensors[name].data_ptr() for name in (*words(params.bits).split(), "scales")}
        sizes = {"features": shape[1], "spans": spans, "rows": rows, "group": group, "tiles": tiles, "tail": tail}
        super().__init__(tensors, params, shape, layout, stored | {"zeros": zeros.data_ptr()}, sizes)
        self._settings = (params.bits, params.tile_words, span, params.symmetric, params.scale_dtype, tail > 0)

    @property
    def _activations(self) -> tuple[Any, ...]:
        return *super()._activations, self._least_tiled

    def most_rows(self, dtype: torch.dtype) -> int:
        if not emitter.widens(dtype):
            return super().most_rows(dtype)
        return emitter.EVERY if self._has_tiles else emitter.MOST_OF_INTEGERS

    def together(self, tokens: int) -> int:
        return min(tokens, int_tiles.MOST_TILED) if self._is_tiled(tokens) else super().together(tokens)

    def lanes(self, tokens: int) -> int:
        return self.layout.span if self._is_tiled(tokens) else self.layout.lanes

    def kernel(self, tokens: int) -> llvm.Function:
        if self._is_tiled(tokens):
            return llvm.function(IntByteTiles if self._has_bytes else IntTiles, *self._settings)
        bits, tile_words = self.params.bits, self.params.tile_words
        reads = int_bytes.reads(bits, self.layout.span) and int_bytes.is_faster(tile_words, tokens)
        return llvm.function(IntBytes if reads else IntSums, *self._settings, tokens)

    def _is_tiled(self, tokens: int) -> bool:
        return tokens >= self._least_tiled

    def decoder(self, dtype: torch.dtype) -> Decoder:
        function = llvm.function(_IntRows, *self._settings, dtype)
        return small_matmul.in_rows(function, {**self.stored, **self.sizes}, self.shape[1])

    def look_up(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows ids [n] of the weight, [n, in], as bfloat16, float16 or float32; ids must be rows of it."""
        ids = ids.long().contiguous()
        out = torch.empty(len(ids), self.shape[1], dtype=dtype, device="cpu")
        write = llvm.function(_LookUp, *self._settings, dtype)
        values = {**self.stored, **self.sizes, "out": out.data_ptr(), "ids": ids.data_ptr()}
        pointers, sizes = write.signature.around(("first", "last"), values)

        def work(first: int, last: int) -> None:
            write(*pointers, first, last, *sizes)

        llvm.parallel(work, len(ids), -(-small_matmul.WEIGHTS_PER_THREAD // self.shape[1]))
        return out


class IntSums(emitter.Emitter):
    """Sums rows of the weight times few rows of activations."""

    def __init__(
        self, bits: int, tile_words: int, span: int, symmetric: bool, scale_dtype: str, has_tail: bool, tokens: int
    ) -> None:
        super().__init__("product", f"{words(bits)} scales zeros {PRODUCT}", "first last spans rows group tiles tail")
        self.bits, self.tile_words, self.span, self.tokens, self.has_tail = bits, tile_words, span, tokens, has_tail
        self.symmetric, self.scale_dtype = symmetric, getattr(torch, scale_dtype)
        self.planes = self.pointers[: len(PLANES[bits])]
        self.scales, self.zeros, self.x16, self.x_scales, self.x_sums, self.out, self.space = self.pointers[-7:]
        first, last, self.spans, self.rows, self.group, self.tiles, self.tail = self.integers
        self.fields = max(FIELDS[w] for w in PLANES[bits])
        self.floats16 = self.vector(self.float, LANES)
        self.whole = self.b.mul(self.tiles, self.i64(self.fields * tile_words))  # columns of whole tiles
        in_row = self.b.add(self.whole, self.b.mul(self.tail, self.i64(NARROW)))
        self.lanes = vector_lanes(tile_words, span)
        self.width = min(self.lanes, SHORTS if "avx512bw" in llvm.features() else SHORTS // 2)  # of a register
        self.together = rows_together(span, tokens)
        self.read = whole_tiles(self, self.planes, bits, tile_words, in_row, self.lanes, self.together)
        self.narrow = NarrowTiles(self, self.planes, PLANES[bits], NARROW, in_row, self.whole, self.together)
        self.cells = list(pairs(range(self.together), range(tokens)))  # sums of rows and rows of activations
        self.sums = self.variable(self.vector(self.float, len(self.cells)))
        self.shift = [self.variable(self.floats16) for _ in range(tokens)]
        with self.loop(last, first) as block:
            start = self.b.mul(block, self.i64(SCALE_ROWS))
            self._scales(start)
            with self.loop(self.i64(SCALE_ROWS // self.together)) as some:
                self._row(start, self.b.mul(some, self.i64(self.together)))
            self._finish(start)
        self.b.ret_void()

    def _scales(self, start: Any) -> None:
        """Products of both scales for sixteen rows and all spans, and what the zero points take off."""
        b = self.b
        for m in range(self.tokens):
            b.store(self.floats(0.0), self.shift[m])
        with self.loop(self.spans) as u:
            group = b.udiv(b.mul(u, self.i64(self.span)), self.group)
            scale = self.load_floats(self.scales, b.add(b.mul(group, self.rows), start), self.scale_dtype, SCALE_ROWS)
            zero = self._zero(group, start)
            scaled = []
            for m in range(self.tokens):
                cell = b.add(b.mul(self.spans, self.i64(m)), u)
                scaled.append(b.fmul(scale, self.splat(self.load(self.x_scales, cell, self.float), LANES)))
                total = self.splat(self.load(self.x_sums, cell, self.float), LANES)
                b.store(self.multiply_add(b.fmul(scaled[m], zero), total, b.load(self.shift[m])), self.shift[m])
            self.store(self._by_row(scaled), self.space, b.mul(u, self.i64(SCALE_ROWS * self.tokens)))

    def _by_row(self, vectors: list[Any]) -> Any:
        """The elements of one, two or four vectors of sixteen rows, those of a row beside each other."""
        while len(vectors) > 1:
            half, lanes = len(vectors) // 2, vectors[0].type.count
            order = [i + side for i in range(lanes) for side in (0, lanes)]
            vectors = [self.shuffled(vectors[i], vectors[i + half], order) for i in range(half)]
        return vectors[0]

    def _zero(self, group: Any, start: Any) -> Any:
        """Zero points of sixteen rows."""
        b = self.b
        if self.symmetric:
            return self.floats(2 ** (self.bits - 1))
        stream = b.udiv(b.mul(b.add(b.mul(group, self.rows), start), self.i64(self.bits)), self.i64(8))
        return self.bit_fields(self.zeros, stream, self.bits)

    def _row(self, start: Any, row: Any) -> None:
        """The sums of `together` rows of the sixteen, from `row` on."""
        b = self.b
        b.store(self.constant(self.float, len(self.cells), 0.0), self.sums)
        with self.loop(self.tiles) as tile:
            per_tile = self.fields * self.tile_words // self.span
            for part in range(per_tile):
                self._span(tile, b.add(start, row), part, b.add(b.mul(tile, self.i64(per_tile)), self.i64(part)), row)
        if self.has_tail:
            with self.loop(self.tail) as tile:
                self._narrow(tile, b.add(start, row), row)
        sums = b.load(self.sums)
        for i, (r, m) in enumerate(self.cells):
            line = b.add(self._line(m, start), self.i64(r))
            self.store(b.extract_element(sums, self.word(i)), self.out, b.add(line, row))

    def _span(self, tile: Any, number: Any, part: int, u: Any, row: Any) -> None:
        b = self.b
        column = b.mul(tile, self.i64(self.fields * self.tile_words))
        totals = self._no_sums()
        for position in range(part * self.span, (part + 1) * self.span, self.lanes):
            place = b.add(column, self.i64(position))
            self._add(totals, place, number, partial(self._codes, tile, position))
        self._scale(totals, u, row)

    def _narrow(self, tile: Any, number: Any, row: Any) -> None:
        """The sums over a tile of the tail."""
        b, in_span = self.b, min(self.span, NARROW)
        column = b.add(self.whole, b.mul(tile, self.i64(NARROW)))
        for begin in range(0, NARROW, in_span):
            totals = self._no_sums()
            for first in range(begin, begin + in_span, self.lanes):
                place = b.add(column, self.i64(first))
                self._add(totals, place, number, partial(self._narrow_codes, tile, first))
            self._scale(totals, b.udiv(b.add(column, self.i64(begin)), self.i64(self.span)), row)

    def _codes(self, tile: Any, position: int, row: Any) -> Any:
        return self.read(tile, row, position)

    def _narrow_codes(self, tile: Any, first: int, row: Any) -> Any:
        return self.narrow.codes(tile, row, first, self.lanes)

    def _no_sums(self) -> dict[tuple[int, int], Any]:
        self.barrier()
        zeros = self.constant(self.word, self.width // 2, 0)
        return {cell: zeros for cell in self.cells}

    def _add(self, totals: dict[tuple[int, int], Any], column: Any, number: Any, codes: Callable[[Any], Any]) -> None:
        """Add the products of the columns from `column` on with codes(row), a vector, to the sums of all rows."""
        inputs = [self._input(column, m) for m in range(self.tokens)]
        for r in range(self.together):
            vector = codes(self.b.add(number, self.i64(r)))
            for m, first in pairs(range(self.tokens), range(0, self.lanes, self.width)):
                part = range(first, first + self.width)
                a, x = (self.shuffled(each, each, part) for each in (vector, inputs[m]))
                totals[r, m] = self.b.add(totals[r, m], self.pair_sums(a, x))

    def _scale(self, totals: dict[tuple[int, int], Any], u: Any, row: Any) -> None:
        """Add the sums of span `u` times its scales to those of the rows."""
        b = self.b
        cell = b.add(b.mul(u, self.i64(SCALE_ROWS)), row)
        scales = self.load(self.space, b.mul(cell, self.i64(self.tokens)), self.float, len(self.cells))
        sums = b.sitofp(integer_totals(self, list(totals.values())), scales.type)
        b.store(self.multiply_add(sums, scales, b.load(self.sums)), self.sums)

    def _input(self, column: Any, m: int) -> Any:
        offset = self.b.add(self.b.mul(column, self.i64(self.tokens)), self.i64(m * self.lanes))
        return self.load(self.x16, offset, self.short, self.lanes)

    def _finish(self, start: Any) -> None:
        b = self.b
        for m in range(self.tokens):
            line = self._line(m, start)
            self.store(b.fsub(self.load(self.out, line, self.float, SCALE_ROWS), b.load(self.shift[m])), self.out, line)

    def _line(self, m: int, start: Any) -> Any:
        """Where the outputs of a token and sixteen rows are."""
        return self.b.add(self.b.mul(self.rows, self.i64(m)), start)


class _IntRows(emitter.Writer):
    """Writes rows of the weight."""

    def __init__(
        self,
        bits: int,
        tile_words: int,
        span: int,
        symmetric: bool,
        scale_dtype: str,
        has_tail: bool,
        dtype: torch.dtype,
    ) -> None:
        count = len(PLANES[bits])
        super().__init__(*self.arguments(bits), dtype)
        self.bits, self.tile_words, self.span, self.symmetric = bits, tile_words, span, symmetric
        self.scale_dtype = getattr(torch, scale_dtype)
        planes, (self.scales, self.zeros, self.out) = self.pointers[:count], self.pointers[count : count + 3]
        self.features, self.rows, self.group, tiles, tail = self.integers[-5:]
        fields = max(FIELDS[w] for w in PLANES[bits])
        self.columns = fields * tile_words  # of a tile
        self.whole = self.b.mul(tiles, self.i64(self.columns))
        in_row = self.b.add(self.whole, self.b.mul(tail, self.i64(NARROW)))
        self.lanes = vector_lanes(tile_words, span)
        self.read = whole_tiles(self, planes, bits, tile_words, in_row, self.lanes)
        self.narrow = NarrowTiles(self, planes, PLANES[bits], NARROW, in_row, self.whole)
        with self.each_row() as (row, line):
            self.in_chunks(self.smaller(self.features, self.whole), self.columns, partial(self._tile, row, line))
            if has_tail:
                with self.loop(tail) as tile:
                    self._narrow(row, line, tile)
        self.b.ret_void()

    @staticmethod
    def arguments(bits: int) -> tuple[str, str, str]:
        """Return the name, the pointers and the integers of the function."""
        return "decode", f"{words(bits)} scales zeros out", "first last start stop features rows group tiles tail"

    @contextmanager
    def each_row(self) -> Iterator[tuple[Any, Any]]:
        """Loop over the rows that are written: the number of each, and where it begins in `out`."""
        first, last, start, stop = self.integers[:4]
        with self.rows_between(first, last, stop) as row:
            yield row, self.b.mul(self.b.sub(row, start), self.features)

    def _tile(self, row: Any, line: Any, first: Any, rest: Any) -> None:
        """Write the columns of a tile that begin at `first`, only `rest` of them if it is given."""
        b, lanes = self.b, self.lanes
        tile = b.udiv(first, self.i64(self.columns))
        values: Callable[[Any], Any] = self.rounded
        for position in range(0, self.columns, lanes):
            column = b.add(first, self.i64(position))
            if position % self.span == 0:
                values = self._values(row, column)
            weights = values(self.read(tile, row, position))
            left = None if rest is None else b.sub(rest, self.i64(position))
            self.store_some(weights, self.out, b.add(line, column), left)

    def _narrow(self, row: Any, line: Any, tile: Any) -> None:
        """Write the columns of a tile of the tail, without those past the features."""
        b, lanes = self.b, self.lanes
        column = b.add(self.whole, b.mul(tile, self.i64(NARROW)))
        values = self._values(row, column)
        for first in range(0, NARROW, lanes):
            place = b.add(column, self.i64(first))
            weights = values(self.narrow.codes(tile, row, first, lanes))
            self.store_some(weights, self.out, b.add(line, place), b.sub(self.features, place))

    def _values(self, row: Any, column: Any) -> Callable[[Any], Any]:
        """Return what takes vectors of codes in the group of this column to rounded weights.

        Where 2 to 5 bits meet registers of 512, that is a table in one: half of the time.
        """
        lanes = self.lanes
        scale, zero = (self.splat(each, lanes) for each in self._scale_and_zero(row, column))

        def computed(codes: Any) -> Any:
            values = self.b.uitofp(codes, self.vector(self.float, lanes))
            return self.rounded(self.b.fmul(self.b.fsub(values, zero), scale))

        shorts = self.vector(self.short, lanes)
        if self.dtype == torch.float32 or 2**self.bits > lanes or lanes != SHORTS or "avx512bw" not in llvm.features():
            return computed
        table = computed(self.ir.Constant(shorts, [code % 2**self.bits for code in range(lanes)]))
        kind, words = table.type, self.b.bitcast(table, shorts)
        name = "llvm.x86.avx512.permvar.hi.512"
        return lambda codes: self.b.bitcast(self.intrinsic(name, shorts, words, codes), kind)

    def _scale_and_zero(self, row: Any, column: Any) -> tuple[Any, Any]:
        b = self.b
        group = b.udiv(column, self.group)
        cell = b.add(b.mul(group, self.rows), row)
        scale = self.load_floats(self.scales, cell, self.scale_dtype)
        if self.symmetric:
            return scale, self.float(2.0 ** (self.bits - 1))
        return scale, b.uitofp(self.bit_field(self.zeros, cell, self.bits), self.float)


class _LookUp(_IntRows):
    """Writes the rows `ids` of a weight."""

    @staticmethod
    def arguments(bits: int) -> tuple[str, str, str]:
        return "look_up", f"{words(bits)} scales zeros out ids", "first last features rows group tiles tail"

    @contextmanager
    def each_row(self) -> Iterator[tuple[Any, Any]]:
        ids, (first, last) = self.pointers[-1], self.integers[:2]
        with self.loop(last, first) as i:
            yield self.load(ids, i, self.index), self.b.mul(i, self.features)
