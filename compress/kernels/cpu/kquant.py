"""Multiply with the `kquant` format, the grids of llama.cpp's K-quants, on a CPU: rows decoded near; not IQ4_XS.

Scales and minima of sixteen rows are made of their codes and steps at once, and wait in the memory of the thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compress.formats import kquant
from compress.formats.kquant import LAYOUTS, SUPER_BLOCK, Params
from compress.kernels.contract import Prepared, Shape
from compress.kernels.cpu import emitter
from compress.kernels.cpu.decoded import DecodedProduct, Put, RowReader
from compress.kernels.cpu.emitter import LANES
from compress.kernels.cpu.unpack import Planar
from compress.numerics.packing import plane_widths


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> Prepared | None:
    """Return the product with a weight of any width; None for types whose codes stand for levels of a table."""
    if params.layout.levels or not emitter.worthwhile(shape):
        return None
    return _KquantProduct(tensors, params, shape)


class _KquantReader(RowReader):
    """Reads super-blocks: codes times the scale of their group, less its minimum."""

    def __init__(self, e: emitter.Emitter, named: Mapping[str, Any], type: str, step_dtype: str) -> None:
        super().__init__(e, named)
        self.layout, self.step_dtype = LAYOUTS[type], getattr(torch, step_dtype)
        widths = plane_widths(self.layout.bits)
        planes = [named[f"words{width}"] for width in widths]
        self.planar = Planar(e, planes, widths, self.layout.tile_words, named["stored_columns"])
        self.blocks = e.b.udiv(named["stored_columns"], e.i64(SUPER_BLOCK))
        self.groups = e.b.mul(self.blocks, e.i64(self.layout.groups))
        self.kinds = [("scales", "steps", self.layout.scale_zero)]
        if self.layout.has_minima:
            self.kinds.append(("minima", "minimum_steps", 0))

    @staticmethod
    def arguments(type: str, step_dtype: str) -> tuple[str, str]:
        layout = LAYOUTS[type]
        words = " ".join(f"words{width}" for width in plane_widths(layout.bits))
        minima = " minima minimum_steps" if layout.has_minima else ""
        return f"{words} scales steps{minima}", "features stored_columns rows"

    def begin(self, start: Any) -> None:
        """Write the scales of sixteen rows to the space, [kinds, groups, 16]."""
        e, b, layout = self.e, self.b, self.layout
        rows = self.named["rows"]
        for number, (codes, steps, zero) in enumerate(self.kinds):
            with e.loop(self.blocks) as block, e.loop(e.i64(layout.groups)) as i:
                step = e.load_floats(self.named[steps], b.add(b.mul(block, rows), start), self.step_dtype, LANES)
                group = b.add(b.mul(block, e.i64(layout.groups)), i)
                stream = b.udiv(b.mul(b.add(b.mul(group, rows), start), e.i64(layout.scale_bits)), e.i64(8))
                integers = e.bit_fields(self.named[codes], stream, layout.scale_bits)
                e.store(b.fmul(b.fsub(integers, e.floats(zero)), step), self.space, self._place(number, group))

    def _place(self, number: int, group: Any) -> Any:
        e, b = self.e, self.b
        return b.mul(b.add(b.mul(self.groups, e.i64(number)), group), e.i64(LANES))

    def write(self, row: Any, features: Any, put: Put) -> None:
        def block(first: Any, rest: Any) -> None:
            self._block(row, first, rest, put)

        self.e.in_chunks(features, SUPER_BLOCK, block)

    def _block(self, row: Any, first: Any, rest: Any, put: Put) -> None:
        """The columns of a super-block."""
        e, b, layout = self.e, self.b, self.layout
        tile = b.udiv(first, e.i64(SUPER_BLOCK))
        lanes = self.planar.lanes
        factors: list[Any] = []
        for position in range(0, SUPER_BLOCK, lanes):
            codes = self.planar.codes(tile, row, *divmod(position, layout.tile_words))
            for part in range(0, lanes, LANES):
                column = position + part
                if column % layout.group_size == 0:
                    group = b.add(b.mul(tile, e.i64(layout.groups)), e.i64(column // layout.group_size))
                    factors = self._factors(row, group)
                some = codes if lanes == LANES else e.shuffled(codes, codes, range(part, part + LANES))
                values = b.uitofp(some, e.vector(e.float, LANES))
                if layout.zero:
                    values = b.fsub(values, e.floats(layout.zero))
                values = b.fmul(values, factors[0])
                if layout.has_minima:
                    values = b.fsub(values, factors[1])
                left = None if rest is None else b.sub(rest, e.i64(column))
                put(0, b.add(first, e.i64(column)), values, left)

    def _factors(self, row: Any, group: Any) -> list[Any]:
        """The scale of a group, and its minimum, in all lanes."""
        e, b = self.e, self.b
        inside = b.and_(row, e.i64(LANES - 1))
        places = [b.add(self._place(number, group), inside) for number in range(len(self.kinds))]
        return [e.splat(e.load(self.space, place, e.float), LANES) for place in places]


class _KquantProduct(DecodedProduct):
    reader = _KquantReader

    def __init__(self, tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> None:
        rows, columns = kquant.padded_shape(shape)
        sizes = {"stored_columns": columns, "rows": rows}
        space = (1 + params.layout.has_minima) * columns // params.layout.group_size * LANES
        super().__init__(tensors, params, shape, (params.type, params.step_dtype), sizes, space)
