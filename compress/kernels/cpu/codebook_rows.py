"""Multiply with the `codebook` format by rows that are decoded near: every layout, on any processor.

The codes of a row are unpacked to memory; eight of them at a time fetch their entries, as they are stored, which
become float32 and meet the scale of their codebook. Vectors of 2 and 4 rows give so many rows at once, longer ones
give each row by itself. Layouts of earlier versions that hold factors (`svd_rank`, `scale_columns`) are only decoded:
tables that torch makes for each decoding stand for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compress.formats import codebook as codebook_format
from compress.formats.codebook import Params, stage_prefix
from compress.kernels.contract import Decoder, Shape
from compress.kernels.cpu import codebook_decode, emitter
from compress.kernels.cpu.codebook_decode import GROUPS
from compress.kernels.cpu.decoded import DecodedProduct, Put, RowReader
from compress.kernels.cpu.emitter import LANES
from compress.kernels.cpu.unpack import Planar
from compress.numerics.packing import WIDE, plane_fields, plane_widths

UNROLLED = 8  # codes that are looked up together
TOGETHER = (2, 4)  # rows of a vector that are read together


def can_read(params: Params) -> bool:
    """Return whether eight codes at a time never belong to two codebooks."""
    return params.group_columns == -1 or params.group_columns // params.width % UNROLLED == 0


class CodebookReader(RowReader):
    """Reads rows of codes: `entries` is the type of the tables, float32 where torch has made them, with all scales."""

    is_direct = False

    def __init__(self, e: emitter.Emitter, named: Mapping[str, Any], params: Params, entries: str, order: int) -> None:
        super().__init__(e, named)
        self.params, self.dim = params, params.vector_dim
        self.is_across = params.axis == "out"
        self.height = self.dim if self.is_across and self.dim in TOGETHER else 1
        self.kind = {"int8": e.byte, "float16": e.half, "float32": e.float}[entries]
        self.is_scaled = entries == "int8"
        self.code_columns = named["code_columns"]
        # int16 of the codes of a stage in the space, whole float32
        self.pitch = e.b.and_(e.b.add(self.code_columns, e.i64(2 * UNROLLED + 1)), e.i64(-2))
        self.outliers_at = e.at(self.space, e.b.mul(self.pitch, e.i64(len(params.bits))), e.short)
        self.places = named.get("outlier_index")  # columns of the outliers
        if order:
            self.places = e.at(self.outliers_at, e.i64(params.outliers * LANES), e.float)
            self._find_places(order)

    @staticmethod
    def arguments(params: Params, entries: str, order: int) -> tuple[str, str]:
        names = []
        for stage, bits in enumerate(params.bits):
            prefix = stage_prefix(stage)
            names += [f"{prefix}words{width}" for width in plane_widths(bits)] + [f"{prefix}codebook"]
            names += [f"{prefix}codebook_scales"] * (entries == "int8")
        names += ["scales", "levels"] * (params.scale_columns > 0)
        names += ["norm_scale"] * (params.norm != "none") + ["norm_bias"] * params.bias
        names += ["outliers", "outlier_scale", "outlier_index"] * (params.outliers > 0) + ["order"] * (order > 0)
        return " ".join(names), f"features code_columns rows {GROUPS}"

    def begin(self, start: Any) -> None:
        """Write the integer parts of sixteen rows to the space, [outliers, 16]."""
        e, b, bits = self.e, self.b, self.params.outlier_bits
        if not self.params.outliers:
            return
        with e.loop(e.i64(self.params.outliers)) as c:
            stream = b.udiv(b.mul(b.add(b.mul(self.named["rows"], c), start), e.i64(bits)), e.i64(8))
            integers = b.fsub(e.bit_fields(self.named["outliers"], stream, bits), e.floats(2 ** (bits - 1)))
            scale = e.splat(e.load_floats(self.named["outlier_scale"], c, torch.float16), LANES)
            e.store(b.fmul(integers, scale), self.outliers_at, b.mul(c, e.i64(LANES)))

    def _find_places(self, bits: int) -> None:
        """Write where the columns of the outliers are stored, given an order of so many bits, to the space."""
        e, b, features = self.e, self.b, self.named["features"]
        with e.loop(e.i64(self.params.outliers)) as c:
            wanted = e.clamped(e.load(self.named["outlier_index"], c, e.word), features)
            e.store(e.word(0), self.places, c)
            with e.loop(features) as place:
                column = e.clamped(e.load(self.named["order"], place, e.ir.IntType(bits)), features)
                with b.if_then(b.icmp_signed("==", column, wanted)):
                    e.store(b.trunc(place, e.word), self.places, c)

    def write(self, row: Any, features: Any, put: Put) -> None:
        e, b = self.e, self.b
        code_row, place = row, e.i64(0)
        if self.is_across:
            code_row = b.udiv(row, e.i64(self.dim))
            place = b.urem(row, e.i64(self.dim))
        for stage, bits in enumerate(self.params.bits):
            self._unpack(stage, bits, code_row)
        group_codes, group_rows, column_groups, row_groups = (self.named[name] for name in GROUPS.split())
        one, unrolled = e.i64(1), e.i64(UNROLLED)
        with e.loop(column_groups) as group:
            book = b.add(b.mul(group, row_groups), e.clamped(b.udiv(code_row, group_rows), row_groups))
            first, following = (b.mul(i, group_codes) for i in (group, b.add(group, one)))
            is_last = b.icmp_signed("==", b.add(group, one), column_groups)  # codes of the padding are in the last one
            stop = b.select(is_last, b.add(self.code_columns, e.i64(UNROLLED - 1)), following)
            scales = [self._scale(stage, book) for stage in range(len(self.params.bits))]
            with e.loop(b.udiv(stop, unrolled), b.udiv(first, unrolled)) as i:
                self._some(b.mul(i, unrolled), book, scales, place, put)

    def _unpack(self, stage: int, bits: int, row: Any) -> None:
        """The codes of a row, int16, to the space, and zeros behind them."""
        e, b = self.e, self.b
        prefix, widths = stage_prefix(stage), plane_widths(bits)
        planes = [self.named[f"{prefix}words{width}"] for width in widths]
        codes_at = e.at(self.space, b.mul(self.pitch, e.i64(stage)), e.short)
        if bits == WIDE:
            with e.loop(self.code_columns) as i:
                e.store(e.load(planes[0], b.add(b.mul(row, self.code_columns), i), e.short), codes_at, i)
        else:
            planar = Planar(e, planes, widths, self.params.tile_words, self.code_columns)
            size = planar.fields * self.params.tile_words
            with e.loop(b.udiv(self.code_columns, e.i64(size))) as tile:
                for position in range(0, size, planar.lanes):
                    codes = planar.codes(tile, row, *divmod(position, self.params.tile_words))
                    e.store(codes, codes_at, b.add(b.mul(tile, e.i64(size)), e.i64(position)))
        e.store(e.constant(e.short, UNROLLED, 0), codes_at, self.code_columns)

    def _scale(self, stage: int, book: Any) -> Any:
        if not self.is_scaled:
            return None
        return self.e.load_floats(self.named[f"{stage_prefix(stage)}codebook_scales"], book, torch.float16)

    def _some(self, first: Any, book: Any, scales: list[Any], place: Any, put: Put) -> None:
        """The weights of eight codes of each stage."""
        e, b, dim = self.e, self.b, self.dim
        is_alone = self.is_across and self.height == 1  # one weight of each entry
        place = place if is_alone else e.i64(0)
        sums: list[Any] = []
        for stage, bits in enumerate(self.params.bits):
            table = e.at(self.named[f"{stage_prefix(stage)}codebook"], b.mul(book, e.i64(dim << bits)), self.kind)
            looked = []
            for i in range(UNROLLED):
                at = b.add(b.add(b.mul(self.pitch, e.i64(stage)), first), e.i64(i))
                offset = b.mul(b.zext(e.load(self.space, at, e.short), e.index), e.i64(dim))
                looked.append(e.load(table, b.add(offset, place), self.kind, 1 if is_alone else dim))
            while len(looked) > 1:  # one vector of all
                size = 2 * looked[0].type.count
                looked = [e.shuffled(x, y, range(size)) for x, y in zip(looked[::2], looked[1::2], strict=True)]
            (entries,) = looked
            if self.height > 1:
                of_rows = [e.shuffled(entries, entries, range(p, UNROLLED * dim, dim)) for p in range(dim)]
            else:
                of_rows = [entries]
            values = [self._floats(each, scales[stage]) for each in of_rows]
            sums = [b.fadd(x, y) for x, y in zip(sums, values, strict=True)] if sums else values
        column = first if self.is_across else b.mul(first, e.i64(dim))
        for p, values_of_row in enumerate(sums):
            put(p, column, values_of_row, None)

    def _floats(self, entries: Any, scale: Any) -> Any:
        e, b, lanes = self.e, self.b, entries.type.count
        kind = e.vector(e.float, lanes)
        if self.kind == e.float:
            return entries
        if self.kind == e.half:
            return b.fpext(entries, kind)
        return b.fmul(b.sitofp(entries, kind), e.splat(scale, lanes))

    def finish(self, row: Any, features: Any, line: Any) -> None:
        e, params = self.e, self.params
        if params.scale_columns or params.norm != "none":
            with e.loop(features) as column:
                self._scale_column(row, column, line)
        if params.outliers:
            with e.loop(e.i64(params.outliers)) as c:
                self._add_outlier(row, c, features, line)

    def _scale_column(self, row: Any, column: Any, line: Any) -> None:
        e, b, params = self.e, self.b, self.params
        value = e.load(line, column, e.float)
        if params.scale_columns:
            block = b.udiv(column, e.i64(params.scale_columns))
            code = e.bit_field(self.named["scales"], b.add(b.mul(block, self.named["rows"]), row), 4)
            level = b.add(b.mul(block, e.i64(codebook_format.SCALE_LEVELS)), b.zext(code, e.index))
            value = b.fmul(value, e.load(self.named["levels"], level, e.float))
        along = row if params.norm == "rows" else column
        if params.norm != "none":
            value = b.fmul(value, e.load_floats(self.named["norm_scale"], along, torch.float16))
        if params.bias:
            value = b.fadd(value, e.load_floats(self.named["norm_bias"], along, torch.float16))
        e.store(value, line, column)

    def _add_outlier(self, row: Any, c: Any, features: Any, line: Any) -> None:
        e, b = self.e, self.b
        inside = b.and_(row, e.i64(LANES - 1))
        added = e.load(self.outliers_at, b.add(b.mul(c, e.i64(LANES)), inside), e.float)
        column = e.clamped(e.load(self.places, c, e.word), features)
        e.store(b.fadd(e.load(line, column, e.float), added), line, column)


class CodebookRows(DecodedProduct):
    """x times a weight of any layout."""

    reader = CodebookReader

    def __init__(self, tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> None:
        code_rows, code_columns = codebook_format.padded_shape(params, shape)
        groups = (*codebook_decode.group_codes(params, shape), *codebook_format.groups(params, shape))
        sizes = {"code_columns": code_columns, "rows": code_rows * params.height}
        sizes |= dict(zip(GROUPS.split(), groups, strict=True))
        entries = "float32" if params.svd_rank else params.codebook_dtype
        space = len(params.bits) * (code_columns // 2 + UNROLLED + 1) + params.outliers * (LANES + 1)
        bits = 8 * tensors["order"].element_size() if params.permuted else 0
        super().__init__(tensors, params, shape, (params, entries, bits if params.outliers else 0), sizes, space)
        self.order_bits = bits
        self.arranges = params.permuted

    def most_rows(self, dtype: torch.dtype) -> int:
        return 0 if self.params.svd_rank or self.params.scale_columns else super().most_rows(dtype)

    def decoder(self, dtype: torch.dtype) -> Decoder:
        """Return what writes rows of the weight, columns in the order in which they are stored."""
        if _is_simple(self.params):
            return codebook_decode.decoder(self.tensors, self.params, self.shape, dtype)
        return self.decoder_with(self._tables(), dtype)

    def _tables(self) -> dict[str, Tensor]:
        """What torch makes of tensors that are not read as they are stored."""
        params, made = self.params, {}
        if params.svd_rank:
            made["codebook"] = codebook_format.entries(self.tensors, params, 0).contiguous()
        if params.scale_columns:
            grid = self.tensors["scale_grid"]
            codes = torch.arange(codebook_format.SCALE_LEVELS, device="cpu").expand(len(grid), -1)
            made["levels"] = codebook_format.block_factors(codes.T, grid).T.contiguous()
        return made

    def decode(self, dtype: torch.dtype) -> Tensor:
        return codebook_decode.in_order(super().decode(dtype), self.tensors.get("order"))


def _is_simple(params: Params) -> bool:
    """Return whether the tables of compress/kernels/cpu/codebook_decode.py hold what a code stands for."""
    plain = len(params.bits) == 1 and params.bits[0] < WIDE and params.norm == "none" and not params.scale_columns
    whole = plane_fields(params.bits[0]) * params.tile_words % UNROLLED == 0
    return plain and whole and (params.height == 1 or codebook_format.ROW_MULTIPLE % params.height == 0)
