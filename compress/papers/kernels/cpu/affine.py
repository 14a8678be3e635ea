"""Multiply with the `affine` format on a CPU: rows are decoded near."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

import torch
from torch import Tensor

from compress.kernels.contract import Prepared, Shape
from compress.kernels.cpu import emitter
from compress.kernels.cpu.decoded import DecodedProduct, Put, RowReader
from compress.kernels.cpu.emitter import LANES
from compress.kernels.cpu.unpack import Planar
from compress.numerics.packing import plane_fields, plane_widths
from compress.papers.formats import affine
from compress.papers.formats.affine import Params


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> Prepared | None:
    """Return the product with a weight whose groups are whole vectors."""
    is_whole = params.group_size == -1 or params.group_size % LANES == 0
    return _AffineProduct(tensors, params, shape) if emitter.worthwhile(shape) and is_whole else None


class _AffineReader(RowReader):
    """Reads codes times the scale of their group, plus its minimum, times the factor of their column."""

    def __init__(self, e: emitter.Emitter, named: Mapping[str, Any], params: Params) -> None:
        super().__init__(e, named)
        self.params, self.dtype = params, getattr(torch, params.scale_dtype)
        widths = plane_widths(params.bits)
        planes = [named[f"words{width}"] for width in widths]
        self.columns = params.tile_words * plane_fields(params.bits)  # of a tile
        self.planar = Planar(e, planes, widths, params.tile_words, named["stored_columns"])
        self.lanes = min(self.planar.lanes, LANES)

    @staticmethod
    def arguments(params: Params) -> tuple[str, str]:
        words = " ".join(f"words{width}" for width in plane_widths(params.bits))
        factors = " column_scales" if params.column_scales else ""
        return f"{words} scales minima{factors}", "features stored_columns groups"

    def write(self, row: Any, features: Any, put: Put) -> None:
        def tile(first: Any, rest: Any) -> None:
            self._tile(row, first, rest, put)

        self.e.in_chunks(features, self.columns, tile)

    def _tile(self, row: Any, first: Any, rest: Any, put: Put) -> None:
        e, b, params = self.e, self.b, self.params
        number = b.udiv(first, e.i64(self.columns))
        shared = self.columns if params.group_size == -1 else gcd(params.group_size, self.columns)
        grid: list[Any] = []
        for position in range(0, self.columns, self.planar.lanes):
            codes = self.planar.codes(number, row, *divmod(position, params.tile_words))
            for part in range(0, self.planar.lanes, self.lanes):
                column = b.add(first, e.i64(position + part))
                if (position + part) % shared == 0:
                    grid = self._grid(row, column)
                some = codes
                if self.lanes < self.planar.lanes:
                    some = e.shuffled(codes, codes, range(part, part + self.lanes))
                left = None if rest is None else b.sub(rest, e.i64(position + part))
                values = b.uitofp(some, e.vector(e.float, self.lanes))
                values = b.fadd(b.fmul(values, grid[0]), grid[1])
                if params.column_scales:
                    values = b.fmul(values, self._factors(column, left))
                put(0, column, values, left)

    def _grid(self, row: Any, column: Any) -> list[Any]:
        """The scale of the group of a column, and its minimum, in all lanes."""
        e, b = self.e, self.b
        place = b.mul(row, self.named["groups"])
        if self.params.group_size != -1:
            group = e.clamped(b.udiv(column, e.i64(self.params.group_size)), self.named["groups"])
            place = b.add(place, group)
        numbers = (e.load_floats(self.named[name], place, self.dtype) for name in ("scales", "minima"))
        return [e.splat(number, self.lanes) for number in numbers]

    def _factors(self, column: Any, left: Any) -> Any:
        """The factors of columns from `column` on, as many as are left."""
        return self.e.load_floats(self.named["column_scales"], column, torch.float16, self.lanes, left)


class _AffineProduct(DecodedProduct):
    reader = _AffineReader

    def __init__(self, tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> None:
        sizes = {"stored_columns": affine.padded_columns(params, shape[1]), "groups": params.groups(shape[1])}
        super().__init__(tensors, params, shape, (params,), sizes)
