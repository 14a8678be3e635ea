"""Multiply with the `codebook` format by byte permutations (AVX-512 VBMI): one stage, entries of 1, 2 or 4 int8.

Other layouts, and other processors, take rows that are decoded near (compress/kernels/cpu/codebook_rows.py).

For each dimension of a vector the entries of a codebook are a table of 256 bytes, four registers, so that two
permutations look up 64 codes at once. Vectors along the input meet activations that are sorted by dimension first;
vectors along the output give several rows. Blocks of sixteen rows, whose codebooks (of each group of columns) are put
into registers once; outlier columns are a thin product of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from compress.formats import codebook as codebook_format
from compress.formats.codebook import ROW_MULTIPLE, Params
from compress.kernels import llvm
from compress.kernels.calls import ActivationRows, CompiledCall
from compress.kernels.contract import Decoder, Prepared, Shape
from compress.kernels.cpu import codebook_decode, codebook_rows, emitter
from compress.kernels.cpu.codebook_decode import GROUPS, Gather, word_names
from compress.kernels.cpu.emitter import LANES, PRODUCT
from compress.kernels.cpu.small_matmul import Product, ProductSizes
from compress.kernels.cpu.unpack import Planar, lanes
from compress.numerics.packing import plane_fields, plane_widths

REGISTER = 64  # bytes
DIMENSIONS = (1, 2, 4)


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> Prepared | None:
    """Return the product with one stage of int8 entries of DIMENSIONS by permutations; others by their rows."""
    if not emitter.worthwhile(shape):
        return None
    plain = params.codebook_dtype == "int8" and not params.svd_rank and not params.scale_columns
    simple = len(params.bits) == 1 and params.bits[0] <= 8 and params.vector_dim in DIMENSIONS
    rows_fit = params.group_rows == -1 or params.group_rows % ROW_MULTIPLE == 0
    is_plain = plain and simple and rows_fit and params.norm == "none" and span_codes(params) > 0
    if is_plain and "avx512vbmi" in llvm.features():
        return _CodebookProduct(tensors, params, shape)
    return AnyCodebook(tensors, params, shape) if codebook_rows.can_read(params) else None


def span_codes(params: Params) -> int:
    """Codes of a row that are summed before they meet their scales: of one group, in one block; 0: there are none."""
    if params.tile_words < LANES:
        return 0
    if params.group_columns == -1:
        return params.tile_words
    group = params.group_columns // params.width
    if group % params.tile_words == 0:
        return params.tile_words
    return group if params.tile_words % group == 0 and group % min(2 * LANES, params.tile_words) == 0 else 0


class _InOrder(Prepared):
    """A weight whose columns may be stored in an order of their own."""

    def arranged(self, x: Tensor) -> Tensor:
        return codebook_decode.arrange(x, self.tensors.get("order"))


class AnyCodebook(_InOrder, codebook_rows.CodebookRows):
    """The product with a weight of any layout."""


class _CodebookProduct(_InOrder, Product):
    """The product with vectors along the input, an order of columns, and outliers."""

    most = emitter.MOST_OF_CODEBOOKS

    def __init__(self, tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> None:
        code_rows, code_columns = codebook_format.padded_shape(params, shape)
        span, groups, width = span_codes(params), codebook_format.groups(params, shape), params.width
        names = (*word_names(params.bits[0]).split(), "codebook", "codebook_scales")
        stored = {name: tensors[name].data_ptr() for name in names}
        rows, columns, space = code_rows * params.height, code_columns * width, ROW_MULTIPLE * LANES
        layout = ProductSizes(shape[1], shape[0], columns, rows, span * width, lanes(params.tile_words), space)
        sizes = {"spans": code_columns // span, "code_rows": code_rows}
        values = (*codebook_decode.group_codes(params, shape), *groups)
        sizes |= dict(zip(GROUPS.split(), values, strict=True))
        super().__init__(tensors, params, shape, layout, stored, sizes)
        self._settings = (params.bits[0], params.vector_dim, params.axis, params.tile_words, span, groups[0] == 1)
        self.gathers = params.permuted or width > 1

    def kernel(self, tokens: int) -> llvm.Function:
        return llvm.function(_CodebookSums, *self._settings, tokens)

    def decoder(self, dtype: torch.dtype) -> Decoder:
        return codebook_decode.decoder(self.tensors, self.params, self.shape, dtype)

    def decode(self, dtype: torch.dtype) -> Tensor:
        return codebook_decode.in_order(super().decode(dtype), self.tensors.get("order"))

    def gather(self, rows: ActivationRows) -> Iterator[CompiledCall]:
        order = self.tensors["order"] if self.params.permuted else None
        layout, bits = self.layout, 8 * order.element_size() if order is not None else 0
        kernel = llvm.function(Gather, rows.dtype.itemsize, self.params.width, bits)
        address = rows.source if order is None else order.data_ptr()
        sizes = rows.count, layout.inputs, layout.spans, layout.span // self.params.width
        yield CompiledCall(kernel, (rows.source, address, rows.target, *sizes))

    def add(self, rows: ActivationRows, sums: int) -> Iterator[CompiledCall]:
        if not self.params.outliers:
            return
        kernel = llvm.function(_Outliers, self.params.outlier_bits, rows.dtype)
        layout, count = self.layout, self.params.outliers
        names = ("outliers", "outlier_scale", "outlier_index")
        stored = [self.tensors[name].data_ptr() for name in names]
        blocks, least = layout.rows // ROW_MULTIPLE, -(-emitter.THREAD // (ROW_MULTIPLE * count * rows.count))
        sizes = count, layout.rows, rows.count, layout.inputs
        yield CompiledCall(kernel, (*stored, rows.source, sums, 0, blocks, *sizes), blocks, least, len(stored) + 2)


class _CodebookSums(emitter.Emitter):
    """Sums rows of the weight times few rows of activations."""

    def __init__(self, bits: int, dim: int, axis: str, tile_words: int, span: int, single: bool, tokens: int) -> None:
        widths = plane_widths(bits)
        pointers = f"{word_names(bits)} codebook codebook_scales {PRODUCT}"
        super().__init__("product", pointers, f"first last spans code_rows {GROUPS}")
        self.bits, self.dim, self.axis, self.span, self.tokens = bits, dim, axis, span, tokens
        self.width, self.height = (dim, 1) if axis == "in" else (1, dim)
        self.tile_words, self.fields = tile_words, plane_fields(bits)
        self.book, self.book_scales, self.x16, self.x_scales, _, self.out, self.space = self.pointers[-7:]
        first, last, self.spans, self.code_rows, self.group_codes, self.group_rows, *self.groups = self.integers
        per_tile = self.fields * tile_words // span
        tiles = self.b.udiv(self.spans, self.i64(per_tile))
        in_row = self.b.mul(tiles, self.i64(self.fields * tile_words))
        self.planar = Planar(self, self.pointers[: len(widths)], widths, tile_words, in_row)
        self.lanes = self.planar.lanes
        self.kind = self.vector(self.float, self.lanes // 2)
        with self.loop(last, first) as block:
            start = self.b.mul(block, self.i64(ROW_MULTIPLE // self.height))
            self._clear()
            tables = self._tables(start, self.i64(0)) if single else None
            with self.loop(tiles) as tile:
                for part in range(per_tile):
                    u = self.b.add(self.b.mul(tile, self.i64(per_tile)), self.i64(part))
                    self._span(start, tile, part, u, tables)
            self._finish(start)
        self.b.ret_void()

    def _clear(self) -> None:
        with self.loop(self.i64(self.tokens * ROW_MULTIPLE)) as i:
            self.store(self.constant(self.float, LANES, 0.0), self.space, self.b.mul(i, self.i64(LANES)))

    def _group(self, start: Any, u: Any) -> Any:
        """Number of the codebook of a span."""
        b = self.b
        column = b.udiv(b.mul(u, self.i64(self.span)), self.group_codes)
        last = b.sub(self.groups[0], self.i64(1))
        column = b.select(b.icmp_signed("<", column, last), column, last)  # codes of the padding are in the last group
        return b.add(b.mul(column, self.groups[1]), b.udiv(start, self.group_rows))

    def _tables(self, start: Any, u: Any) -> list[list[Any]]:
        """For each dimension the bytes of a codebook's entries, 64 in a register."""
        b, size = self.b, (1 << self.bits) * self.dim
        book = b.mul(self._group(start, u), self.i64(size))
        chunks = []
        for first in range(0, size, REGISTER):
            offset = b.add(book, self.i64(first))
            if size < REGISTER:
                chunks.append(self.load_some(self.book, offset, self.byte, REGISTER, self.i64(size)))
            else:
                chunks.append(self.load(self.book, offset, self.byte, REGISTER))
        return self._by_dimension(chunks, self.dim)

    def _by_dimension(self, chunks: list[Any], dim: int) -> list[list[Any]]:
        if dim == 1:
            return [chunks]
        pairs = [(a, chunks[min(i + 1, len(chunks) - 1)]) for i, a in enumerate(chunks) if i % 2 == 0]
        evens, odds = (
            self._by_dimension([self.shuffled(a, c, list(range(side, 2 * REGISTER, 2))) for a, c in pairs], dim // 2)
            for side in (0, 1)
        )
        return [table for pair in zip(evens, odds, strict=True) for table in pair]

    def _span(self, start: Any, tile: Any, part: int, u: Any, tables: list[list[Any]] | None) -> None:
        b = self.b
        tables = tables or self._tables(start, u)
        scale = b.fpext(self.load(self.book_scales, self._group(start, u), self.half), self.float)
        scales = []
        for m in range(self.tokens):
            cell = b.add(b.mul(self.spans, self.i64(m)), u)
            scales.append(self.splat(b.fmul(scale, self.load(self.x_scales, cell, self.float)), self.lanes // 2))
        with self.loop(self.i64(ROW_MULTIPLE // self.height)) as row:
            sums = self._row(b.add(start, row), tile, part, u, tables)
            for m in range(self.tokens):
                for p in range(self.height):
                    cell = b.mul(self._cell(m, row, p), self.i64(LANES))
                    held = self.load(self.space, cell, self.float, self.lanes // 2)
                    total = self.multiply_add(b.sitofp(sums[m][p], self.kind), scales[m], held)
                    self.store(total, self.space, cell)

    def _cell(self, m: int, row: Any, p: int) -> Any:
        """Number of the sum of a token and a row of the sixteen."""
        return self.b.add(self.b.mul(row, self.i64(self.height)), self.i64(m * ROW_MULTIPLE + p))

    def _row(self, row: Any, tile: Any, part: int, u: Any, tables: list[list[Any]]) -> list[list[Any]]:
        """Integer sums of a span, for each token and each row of a vector."""
        b = self.b
        sums = [[self.constant(self.word, self.lanes // 2, 0) for _ in range(self.height)] for _ in range(self.tokens)]
        first = part * self.span
        for position in range(first, first + self.span, 2 * self.lanes):
            block, inside = divmod(position, self.tile_words)
            vectors = 2 if position + self.lanes < first + self.span else 1
            codes = [self.planar.codes(tile, row, block, inside + i * self.lanes) for i in range(vectors)]
            for p, looked in enumerate(self._look_up(codes, tables)):
                for i, values in enumerate(looked):
                    place = (p % self.width) * self.span + position - first + i * self.lanes
                    for m in range(self.tokens):
                        x = self._input(m, u, place)
                        sums[m][p // self.width] = b.add(sums[m][p // self.width], self.pair_sums(values, x))
        return sums

    def _input(self, m: int, u: Any, place: int) -> Any:
        b = self.b
        column = b.add(b.mul(u, self.i64(self.span * self.width)), self.i64(place))
        offset = b.add(b.mul(column, self.i64(self.tokens)), self.i64(m * self.lanes))
        return self.load(self.x16, offset, self.short, self.lanes)

    def _look_up(self, codes: list[Any], tables: list[list[Any]]) -> list[list[Any]]:
        """For each dimension the entries of one or two vectors of int16 codes, as such vectors."""
        b, eight = self.b, self.constant(self.short, self.lanes, 8)
        octets = self.vector(self.byte, REGISTER)
        index = b.or_(codes[0], b.shl(codes[1], eight)) if len(codes) == 2 else codes[0]
        index = b.bitcast(index, self.vector(self.byte, 2 * self.lanes))
        if 2 * self.lanes < REGISTER:
            index = self.shuffled(index, index, [i % (2 * self.lanes) for i in range(REGISTER)])
        upper = b.icmp_signed("<", index, self.ir.Constant(octets, [0] * REGISTER))
        found = []
        for table in tables:
            looked = self._permuted(table[:2], index)
            if len(table) == 4:
                looked = b.select(upper, self._permuted(table[2:], index), looked)
            if 2 * self.lanes < REGISTER:
                looked = self.shuffled(looked, looked, list(range(2 * self.lanes)))
            both = b.bitcast(looked, self.vector(self.short, self.lanes))
            found.append([b.ashr(b.shl(both, eight), eight), b.ashr(both, eight)][: len(codes)])
        return found

    def _permuted(self, table: list[Any], index: Any) -> Any:
        octets = self.vector(self.byte, REGISTER)
        if len(table) == 1:
            return self.intrinsic("llvm.x86.avx512.permvar.qi.512", octets, table[0], index)
        return self.intrinsic("llvm.x86.avx512.vpermi2var.qi.512", octets, table[0], index, table[1])

    def _finish(self, start: Any) -> None:
        b = self.b
        first = b.mul(start, self.i64(self.height))
        with self.loop(self.i64(ROW_MULTIPLE)) as row:
            for m in range(self.tokens):
                cell = b.add(row, self.i64(m * ROW_MULTIPLE))
                vector = self.load(self.space, b.mul(cell, self.i64(LANES)), self.float, LANES)
                line = b.mul(b.mul(self.code_rows, self.i64(self.height)), self.i64(m))
                self.store(self.total(vector), self.out, b.add(line, b.add(first, row)))


class _Outliers(emitter.Emitter):
    """Adds the integer parts of whole columns to the sums [rows of activations, rows of the weight]."""

    def __init__(self, bits: int, dtype: torch.dtype) -> None:
        super().__init__("outliers", "codes scales index x sums", "first last count rows tokens inputs")
        codes, scales, index, x, sums = self.pointers
        first, last, count, rows_of_weight, tokens, inputs = self.integers
        b = self.b
        held = self.variable(self.vector(self.float, LANES))
        centre = self.floats(2 ** (bits - 1))
        with self.loop(last, first) as block, self.loop(tokens) as m:
            start = b.mul(block, self.i64(ROW_MULTIPLE))
            place = b.add(b.mul(rows_of_weight, m), start)
            b.store(self.load(sums, place, self.float, LANES), held)
            with self.loop(count) as c:
                stream = b.udiv(b.mul(b.add(b.mul(rows_of_weight, c), start), self.i64(bits)), self.i64(8))
                integers = self.bit_fields(codes, stream, bits)
                column = self.clamped(self.load(index, c, self.word), inputs)
                value = self.load_floats(x, b.add(b.mul(m, inputs), column), dtype)
                value = self.splat(b.fmul(value, self.load_floats(scales, c, torch.float16)), LANES)
                b.store(b.fadd(b.load(held), b.fmul(b.fsub(integers, centre), value)), held)
            self.store(b.load(held), sums, place)
        b.ret_void()
