"""Multiply with the `nf` format on a CPU: levels are looked up in registers, and rows decoded near."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

import torch
from torch import Tensor

from compress.kernels import llvm
from compress.kernels.contract import Prepared, Shape
from compress.kernels.cpu import emitter
from compress.kernels.cpu.decoded import DecodedProduct, Put, RowReader
from compress.kernels.cpu.emitter import LANES
from compress.kernels.cpu.unpack import Planar
from compress.numerics.packing import plane_fields, plane_widths
from compress.papers.formats import nf
from compress.papers.formats.nf import Params

EIGHT = 8  # float32 of a register of AVX2


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> Prepared | None:
    """Return the product with a weight whose blocks are whole vectors."""
    return _NfProduct(tensors, params, shape) if emitter.worthwhile(shape) and params.block_size % LANES == 0 else None


class _NfReader(RowReader):
    """Reads levels of codes times the size of their block."""

    def __init__(self, e: emitter.Emitter, named: Mapping[str, Any], params: Params) -> None:
        super().__init__(e, named)
        self.params = params
        widths = plane_widths(params.bits)
        planes = [named[f"words{width}"] for width in widths]
        self.columns = params.tile_words * plane_fields(params.bits)  # of a tile
        self.planar = Planar(e, planes, widths, params.tile_words, named["stored_columns"])
        self.lanes = min(self.planar.lanes, LANES)

    @staticmethod
    def arguments(params: Params) -> tuple[str, str]:
        words = " ".join(f"words{width}" for width in plane_widths(params.bits))
        return f"{words} scale_codes steps mean", "features stored_columns blocks"

    def write(self, row: Any, features: Any, put: Put) -> None:
        def tile(first: Any, rest: Any) -> None:
            self._tile(row, first, rest, put)

        self.e.in_chunks(features, self.columns, tile)

    def _tile(self, row: Any, first: Any, rest: Any, put: Put) -> None:
        e, b, params = self.e, self.b, self.params
        number, shared = b.udiv(first, e.i64(self.columns)), gcd(params.block_size, self.columns)
        size = None
        for position in range(0, self.columns, self.planar.lanes):
            codes = self.planar.codes(number, row, *divmod(position, params.tile_words))
            for part in range(0, self.planar.lanes, self.lanes):
                column = b.add(first, e.i64(position + part))
                if (position + part) % shared == 0:
                    size = e.splat(self._size(row, column), self.lanes)
                some = codes
                if self.lanes < self.planar.lanes:
                    some = e.shuffled(codes, codes, range(part, part + self.lanes))
                left = None if rest is None else b.sub(rest, e.i64(position + part))
                put(0, column, b.fmul(self._levels(some), size), left)

    def _size(self, row: Any, column: Any) -> Any:
        """The size of the block of a column."""
        e, b, params = self.e, self.b, self.params
        count = self.named["blocks"]
        block = e.clamped(b.udiv(column, e.i64(params.block_size)), count)
        index = b.add(b.mul(row, count), block)
        code = b.sub(
            e.bit_field(self.named["scale_codes"], index, params.scale_bits), e.word(2 ** (params.scale_bits - 1))
        )
        step = b.udiv(index, e.i64(params.scale_block))
        scaled = b.fmul(
            e.load_floats(self.named["steps"], step, getattr(torch, params.scale_dtype)), b.sitofp(code, e.float)
        )
        size = b.fadd(e.load(self.named["mean"], e.i64(0), e.float), scaled)
        return b.select(b.fcmp_ordered("<", size, e.float(0.0)), e.float(0.0), size)

    def _levels(self, codes: Any) -> Any:
        """The levels of codes, float32."""
        e, b, bits = self.e, self.b, self.params.bits
        table, lanes = nf.levels(bits).tolist(), self.lanes
        index = b.zext(codes, e.vector(e.word, lanes))
        if lanes == LANES and bits <= 4 and "avx512f" in llvm.features():
            values = e.ir.Constant(e.vector(e.float, LANES), [table[i % len(table)] for i in range(LANES)])
            return e.intrinsic("llvm.x86.avx512.permvar.sf.512", values.type, values, index)
        if lanes % EIGHT == 0 and bits <= 4 and "avx2" in llvm.features():
            halves = [
                self._permute(e.shuffled(index, index, range(i, i + EIGHT)), table) for i in range(0, lanes, EIGHT)
            ]
            return halves[0] if len(halves) == 1 else e.shuffled(halves[0], halves[1], range(lanes))
        return self._look_up(index, table)

    def _permute(self, index: Any, table: list[float]) -> Any:
        """Levels of eight codes by permutations of registers."""
        e, b = self.e, self.b
        looked = []
        for first in range(0, len(table), EIGHT):
            values = e.ir.Constant(e.vector(e.float, EIGHT), [table[(first + i) % len(table)] for i in range(EIGHT)])
            looked.append(e.intrinsic("llvm.x86.avx2.permps", values.type, values, index))
        if len(looked) == 1:
            return looked[0]
        return b.select(b.icmp_unsigned("<", index, e.constant(e.word, EIGHT, EIGHT)), *looked)

    def _look_up(self, index: Any, table: list[float]) -> Any:
        """Levels by a table in memory, one after the other."""
        e, b = self.e, self.b
        kind = e.vector(e.float, self.lanes)
        known = e.module.globals.get("levels")
        if known is None:
            values = e.ir.ArrayType(e.float, len(table))
            known = e.ir.GlobalVariable(e.module, values, "levels")
            known.global_constant, known.linkage = True, "internal"
            known.initializer = e.ir.Constant(values, table)
        result = kind(e.ir.Undefined)
        for i in range(self.lanes):
            at = b.zext(b.extract_element(index, e.word(i)), e.index)
            result = b.insert_element(result, e.load(known, at, e.float), e.word(i))
        return result


class _NfProduct(DecodedProduct):
    reader = _NfReader

    def __init__(self, tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> None:
        tile = params.tile_words * plane_fields(params.bits)
        sizes = {"stored_columns": -(-shape[1] // tile) * tile, "blocks": -(-shape[1] // params.block_size)}
        super().__init__(tensors, params, shape, (params,), sizes)
