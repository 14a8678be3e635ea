"""The `codebook` format on a CPU with byte permutations (AVX-512 VBMI): one stage, int8 entries of 1, 2 or 4 weights.

For each dimension of a vector the entries of a codebook are a table of 256 bytes, four registers, so that two
permutations look up 64 codes at once. Vectors along the input meet activations that are sorted by dimension first;
vectors along the output give several rows. Blocks of sixteen rows, whose codebooks (of each group of columns) are put
into registers once; outlier columns are a thin product of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from compress import jit
from compress.formats import codebook as codebook_format
from compress.formats.codebook import ROW_MULTIPLE, Params
from compress.kernels.cpu import rows
from compress.kernels.cpu.planar import Planar, lanes
from compress.kernels.cpu.rows import LANES
from compress.packing import plane_fields, plane_widths

REGISTER = 64  # bytes
DIMENSIONS = (1, 2, 4)


def supports(params: Params, shape: tuple[int, int]) -> bool:
    if not rows.worthwhile(shape) or "avx512vbmi" not in jit.features():
        return False
    plain = params.codebook_dtype == "int8" and not params.svd_rank and not params.scale_columns
    simple = len(params.bits) == 1 and params.bits[0] <= 8 and params.vector_dim in DIMENSIONS
    rows_fit = params.group_rows == -1 or params.group_rows % ROW_MULTIPLE == 0
    return plain and simple and rows_fit and params.norm == "none" and span_codes(params) > 0


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


def most_rows(params: Params, shape: tuple[int, int], dtype: torch.dtype) -> int:
    return rows.MOST


def matmul(x: Tensor, tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> Tensor:
    """x [rows, in] of any floating type times the stored weight [out, in] -> float32 [rows, out]."""
    code_rows, code_columns = codebook_format.padded_shape(params, shape)
    span, spans = span_codes(params), code_columns // span_codes(params)
    inputs = _inputs(x, tensors, params, code_columns)
    out = torch.empty(x.shape[0], code_rows * params.height, dtype=torch.float32, device="cpu")
    groups = codebook_format.groups(params, shape)
    words = [tensors[f"words{width}"].data_ptr() for width in plane_widths(params.bits[0])]
    books = [tensors["codebook"].data_ptr(), tensors["codebook_scales"].data_ptr()]
    columns = code_columns if params.group_columns == -1 else params.group_columns // params.width
    per_group = code_rows if params.group_rows == -1 else params.group_rows // params.height

    def product(tokens: int, given: list[int]) -> None:
        single = groups[0] == 1
        kernel = _compiled(params.bits[0], params.vector_dim, params.axis, params.tile_words, span, single, tokens)

        def work(first: int, last: int) -> None:
            space = torch.empty(tokens * ROW_MULTIPLE * LANES, dtype=torch.float32, device="cpu")
            sizes = (first, last, spans, code_rows, columns, per_group, groups[0], groups[1])
            kernel(*words, *books, *given, space.data_ptr(), *sizes)

        blocks = code_rows * params.height // ROW_MULTIPLE
        jit.parallel(work, blocks, rows.blocks_of_a_thread(shape[1], tokens))

    rows.by_tokens(inputs, inputs.shape[1], span * params.width, lanes(params.tile_words), out, product)
    if params.outliers:
        _add_outliers(out, x, tensors, params)
    return out[:, : shape[0]]


def _inputs(x: Tensor, tensors: Mapping[str, Tensor], params: Params, code_columns: int) -> Tensor:
    """Activations in the order in which the kernel meets them: span, dimension, code."""
    if params.permuted:
        x = x.index_select(1, tensors["order"].int())
    x = torch.nn.functional.pad(x, (0, code_columns * params.width - x.shape[1]))
    if params.width == 1:
        return x
    return x.view(x.shape[0], -1, span_codes(params), params.width).transpose(2, 3).reshape(x.shape)


@cache
def _compiled(*settings: Any) -> Any:
    return jit.compiled(_Product(*settings))


class _Product(rows.Emitter):
    """void product(words..., codebook, codebook_scales, x16, x_scales, x_sums, out, space, first, last, spans, code
    rows, codes of a column group, code rows of a row group, column groups, row groups)."""

    def __init__(self, bits: int, dim: int, axis: str, tile_words: int, span: int, single: bool, tokens: int) -> None:
        widths = plane_widths(bits)
        super().__init__("product", len(widths) + 7, 8)
        self.bits, self.dim, self.axis, self.span, self.tokens = bits, dim, axis, span, tokens
        self.width, self.height = (dim, 1) if axis == "in" else (1, dim)
        self.tile_words, self.fields = tile_words, plane_fields(bits)
        self.book, self.book_scales, self.x16, self.x_scales, _, self.out, self.space = self.pointers[-7:]
        first, last, self.spans, self.code_rows, self.group_codes, self.group_rows, *self.groups = self.integers
        per_tile = self.fields * tile_words // span
        tiles = self.b.udiv(self.spans, self.i64(per_tile))
        self.planar = Planar(self, self.pointers[: len(widths)], widths, tile_words, tiles)
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


def _add_outliers(out: Tensor, x: Tensor, tensors: Mapping[str, Tensor], params: Params) -> None:
    """The integer parts of whole columns, added to out [rows, padded out]."""
    chosen = x.index_select(1, tensors["outlier_index"]).float() * tensors["outlier_scale"].float()
    kernel, codes = _compiled_outliers(params.outlier_bits), tensors["outliers"].data_ptr()
    count, size = chosen.shape[1], out.shape[1]

    def work(first: int, last: int) -> None:
        kernel(codes, chosen.data_ptr(), out.data_ptr(), first, last, count, size, len(out))

    jit.parallel(work, size // ROW_MULTIPLE, rows.blocks_of_a_thread(count, len(out)))


@cache
def _compiled_outliers(bits: int) -> Any:
    return jit.compiled(_Outliers(bits))


class _Outliers(rows.Emitter):
    """void outliers(codes, x, out, first, last, count, rows of the weight, rows of activations)."""

    def __init__(self, bits: int) -> None:
        super().__init__("outliers", 3, 5)
        codes, x, out = self.pointers
        first, last, count, rows_of_weight, tokens = self.integers
        b = self.b
        held = self.variable(self.vector(self.float, LANES))
        centre = self.floats(2 ** (bits - 1))
        with self.loop(last, first) as block, self.loop(tokens) as m:
            start = b.mul(block, self.i64(ROW_MULTIPLE))
            place = b.add(b.mul(rows_of_weight, m), start)
            b.store(self.load(out, place, self.float, LANES), held)
            with self.loop(count) as c:
                stream = b.udiv(b.mul(b.add(b.mul(rows_of_weight, c), start), self.i64(bits)), self.i64(8))
                integers = self.bit_fields(codes, stream, bits)
                value = self.splat(self.load(x, b.add(b.mul(m, count), c), self.float), LANES)
                b.store(b.fadd(b.load(held), b.fmul(b.fsub(integers, centre), value)), held)
            self.store(b.load(held), out, place)
        b.ret_void()
