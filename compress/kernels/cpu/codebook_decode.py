"""Decode the `codebook` format on a CPU: look entries up in tables, a row of codes at a time.

A lookup is one load and one store of a whole vector, which needs no instruction that only some processors have. The
tables are of the type that is asked for, or float32 where outliers are added before rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.formats import codebook as codebook_format
from compress.formats.codebook import ROW_MULTIPLE, Params
from compress.kernels import llvm
from compress.kernels.contract import Decoder, Shape
from compress.kernels.cpu import emitter, small_matmul
from compress.kernels.cpu.unpack import Planar
from compress.numerics.packing import plane_fields, plane_widths

UNROLLED = 8  # codes; groups of columns have a multiple of sixteen
STORED = 2 * emitter.LANES  # weights that are rounded together


GROUPS = "group_codes group_rows column_groups row_groups"  # arguments


def word_names(bits: int) -> str:
    """Return the arguments that are planes of words."""
    return " ".join(f"words{width}" for width in plane_widths(bits))


def decoder(tensors: Mapping[str, Tensor], params: Params, shape: Shape, dtype: torch.dtype) -> Decoder:
    """Return what writes rows of the decoded weight as bfloat16, float16 or float32, the format's own to the bit.

    For weights that the kernel of the format supports; the columns are in the order in which they are stored.
    """
    code_rows, code_columns = codebook_format.padded_shape(params, shape)
    entries = codebook_format.entries(tensors, params, 0).to(torch.float32 if params.outliers else dtype).contiguous()
    codes = (params.bits[0], params.vector_dim, params.axis, params.tile_words)
    kernel = llvm.function(_CodebookRows, codes, params.outlier_bits if params.outliers else 0, dtype)
    words = [tensors[name] for name in word_names(params.bits[0]).split()]
    outliers = _outliers(tensors, params) if params.outliers else [entries] * 3
    held = (*words, *outliers, entries)  # some of them live no longer than this decoder
    groups = (*group_codes(params, shape), *codebook_format.groups(params, shape))
    values = dict(zip(GROUPS.split(), groups, strict=True)) | {"features": shape[1], "code_columns": code_columns}
    values |= {"outliers": params.outliers, "rows": code_rows * params.height}
    space = code_columns * (1 + params.vector_dim)  # int16 codes and weights of up to 32 bits

    addresses = dict(zip(kernel.signature.pointers, (t.data_ptr() for t in held), strict=False))
    decode = small_matmul.in_rows(kernel, addresses | values, shape[1], space)

    def write(out: Tensor, start: int, _: object = held) -> None:
        decode(out, start)

    return write


def group_codes(params: Params, shape: Shape) -> tuple[int, int]:
    """Return the columns and the rows of codes that share a codebook."""
    rows, columns = codebook_format.padded_shape(params, shape)
    return (
        columns if params.group_columns == -1 else params.group_columns // params.width,
        rows if params.group_rows == -1 else params.group_rows // params.height,
    )


def in_order(weight: Tensor, order: Tensor | None) -> Tensor:
    """Return a weight [out, in] whose columns are as they are stored in the order of the model; None: they are."""
    return weight if order is None else torch.empty_like(weight).index_copy_(1, order.long(), weight)


def arrange(x: Tensor, order: Tensor | None) -> Tensor:
    """Return x [..., in] with its columns in the order in which those of a weight are stored."""
    if order is None:
        return x
    x = x.contiguous()
    out, inputs = torch.empty_like(x), x.shape[-1]
    kernel = llvm.function(Gather, x.element_size(), 1, 8 * order.element_size())

    def work(first: int, last: int) -> None:
        skip = first * inputs * x.element_size()
        kernel(x.data_ptr() + skip, order.data_ptr(), out.data_ptr() + skip, last - first, inputs, 1, inputs)

    llvm.parallel(work, x.numel() // inputs, -(-small_matmul.WEIGHTS_PER_THREAD // inputs))
    return out


def _outliers(tensors: Mapping[str, Tensor], params: Params) -> list[Tensor]:
    """Codes and scales of the outliers, and their columns in the order of the stored ones, int32."""
    place = tensors["outlier_index"]
    if params.permuted:
        place = torch.argsort(tensors["order"].long())[place.long()].int()
    return [tensors["outliers"], tensors["outlier_scale"], place]


class Gather(emitter.Emitter):
    """Writes activations in the order in which the kernel meets them: span, dimension, code; 0 past the last."""

    def __init__(self, size: int, width: int, order_bits: int) -> None:
        super().__init__("gather", "x order out", "rows inputs spans codes")
        x, order, out = self.pointers
        count, inputs, spans, codes = self.integers
        b, kind = self.b, self.ir.IntType(8 * size)
        span = b.mul(codes, self.i64(width))
        with self.loop(count) as row, self.loop(spans) as u, self.loop(self.i64(width)) as p, self.loop(codes) as i:
            first = b.mul(u, span)
            stored = b.add(first, b.add(b.mul(i, self.i64(width)), p))
            column = self.clamped(stored, inputs)
            if order_bits:
                column = self.clamped(self.load(order, column, self.ir.IntType(order_bits)), inputs)
            value = self.load(x, b.add(b.mul(row, inputs), column), kind)
            value = b.select(b.icmp_signed("<", stored, inputs), value, kind(0))
            line = b.mul(row, b.mul(spans, span))
            self.store(value, out, b.add(b.add(line, first), b.add(b.mul(p, codes), i)))
        b.ret_void()


class _CodebookRows(emitter.Writer):
    """Writes rows of the weight."""

    def __init__(self, codes: tuple[int, int, str, int], outlier_bits: int, dtype: torch.dtype) -> None:
        self.bits, self.dim, axis, self.tile_words = codes
        widths = plane_widths(self.bits)
        pointers = f"{word_names(self.bits)} outlier_codes outlier_scale outlier_index entries space out"
        integers = f"first last start stop features code_columns {GROUPS} outliers rows"
        super().__init__("decode", pointers, integers, dtype)
        self.height = self.dim if axis == "out" else 1
        self.outlier_bits = outlier_bits
        kinds = {torch.bfloat16: self.short, torch.float16: self.half, torch.float32: self.float}
        self.kind = self.float if outlier_bits else kinds[dtype]  # of entries and of the weights in the space
        *self.outliers, self.entries, self.space, self.out = self.pointers[len(widths) :]
        first, last, self.start, self.stop, self.features, self.code_columns, *self.groups = self.integers[:10]
        self.count, self.rows = self.integers[10:]
        b = self.b
        self.tile_codes = plane_fields(self.bits) * self.tile_words
        tiles = b.udiv(self.code_columns, self.i64(self.tile_codes))
        self.planar = Planar(self, self.pointers[: len(widths)], widths, self.tile_words, self.code_columns)
        self.weights = self.at(self.space, self.code_columns, self.float)  # behind the codes
        self.columns = b.mul(self.code_columns, self.i64(self.dim // self.height))
        per_block = self.i64(ROW_MULTIPLE // self.height)
        with self.loop(b.mul(last, per_block), b.mul(first, per_block)) as row:
            with self.loop(tiles) as tile:
                self._unpack(row, tile)
            self._look_up(row)
            for p in range(self.height):
                number = b.add(b.mul(row, self.i64(self.height)), self.i64(p))
                with b.if_then(b.icmp_signed("<", number, self.stop)):
                    self._finish(number, self.at(self.weights, b.mul(self.columns, self.i64(p)), self.kind))
        b.ret_void()

    def _unpack(self, row: Any, tile: Any) -> None:
        """The codes of a row, int16, to the beginning of the space."""
        lanes = self.planar.lanes
        for position in range(0, self.tile_codes, lanes):
            codes = self.planar.codes(tile, row, *divmod(position, self.tile_words))
            place = self.b.add(self.b.mul(tile, self.i64(self.tile_codes)), self.i64(position))
            self.store(codes, self.space, place)

    def _look_up(self, row: Any) -> None:
        """The entries of a row of codes, one row of weights behind the other."""
        b, (group_codes, group_rows, column_groups, row_groups) = self.b, self.groups
        one = self.i64(1)
        with self.loop(column_groups) as group:
            book = b.add(b.mul(group, row_groups), b.udiv(row, group_rows))
            table = self.at(self.entries, b.mul(book, self.i64(self.dim << self.bits)), self.kind)
            first, following = (b.mul(i, group_codes) for i in (group, b.add(group, one)))
            is_last = b.icmp_signed("==", b.add(group, one), column_groups)  # codes of the padding are in the last one
            stop = b.select(is_last, self.code_columns, following)
            unrolled = self.i64(UNROLLED)
            with self.loop(b.udiv(stop, unrolled), b.udiv(first, unrolled)) as i:
                self._some(table, b.mul(i, unrolled))

    def _some(self, table: Any, first: Any) -> None:
        b, dim = self.b, self.dim
        found = []
        for i in range(UNROLLED):
            code = b.zext(self.load(self.space, b.add(first, self.i64(i)), self.short), self.index)
            found.append(self.load(table, b.mul(code, self.i64(dim)), self.kind, dim))
        while len(found) > 1:  # one vector of all
            size = 2 * found[0].type.count
            found = [self.shuffled(x, y, range(size)) for x, y in zip(found[::2], found[1::2], strict=True)]
        if self.height == 1:
            self.store(found[0], self.weights, b.mul(first, self.i64(dim)))
            return
        for p in range(dim):
            of_row = self.shuffled(found[0], found[0], range(p, UNROLLED * dim, dim))
            self.store(of_row, self.weights, b.add(b.mul(self.columns, self.i64(p)), first))

    def _finish(self, row: Any, weights: Any) -> None:
        """A row of weights with outliers, to `out`."""
        b = self.b
        if self.outlier_bits:
            with self.loop(self.count) as c:
                self._add_outlier(row, c, weights)
        line = b.mul(b.sub(row, self.start), self.features)
        self.in_chunks(self.features, STORED, partial(self._write, weights, line))

    def _write(self, weights: Any, line: Any, column: Any, rest: Any) -> None:
        values = self.load_some(weights, column, self.kind, STORED, rest)
        if self.outlier_bits:
            values = self.rounded(values)
        self.store_some(values, self.out, self.b.add(line, column), rest)

    def _add_outlier(self, row: Any, c: Any, weights: Any) -> None:
        b, (codes, scales, index) = self.b, self.outliers
        code = self.bit_field(codes, b.add(b.mul(c, self.rows), row), self.outlier_bits)
        centred = b.sitofp(b.sub(code, self.word(2 ** (self.outlier_bits - 1))), self.float)
        added = b.fmul(centred, self.load_floats(scales, c, torch.float16))
        column = self.clamped(self.load(index, c, self.word), self.features)
        self.store(b.fadd(self.load(weights, column, self.float), added), weights, column)
