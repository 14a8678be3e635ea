"""Multiply with the `grid` format on a CPU: points of its tables are looked up in registers, and rows decoded near.

A table of 16 points is multiplied by the factor of a block once, and permuted by the codes: one instruction for 16
weights with AVX-512, two or three for 8 with AVX2. e4m3 is turned into float16 by shifts and widened. Tables of 256
points, and processors without such permutations, look one weight up after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

import torch
from torch import Tensor

from compress.formats import grid
from compress.formats.grid import Params
from compress.kernels import llvm
from compress.kernels.contract import Prepared, Shape
from compress.kernels.cpu import emitter, small_matmul
from compress.kernels.cpu.decoded import DecodedProduct, Put, RowReader
from compress.kernels.cpu.emitter import LANES, Emitter, Writer

CHUNK = 64  # columns that are written one after another without a loop
EIGHT = 8  # float32 of a register of AVX2
NEGATIVE = 0x80000000  # sign of a float32
NAN_CODE = 0x7F  # e4m3, without its sign
HALF_TO_E4M3 = 256.0  # exponents of float16 have another bias


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> Prepared | None:
    """Return the product with a weight whose blocks are whole vectors, or rows."""
    return _GridProduct(tensors, params, shape) if emitter.worthwhile(shape) and _is_read(params, shape) else None


def look_up(
    tensors: Mapping[str, Tensor], params: Params, shape: Shape, ids: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Return the rows ids [n] of a table, [n, in]; None for blocks that no kernel reads."""
    if not (llvm.available() and _is_read(params, shape) and grid.has_rows(params)):
        return None
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return None
    return _GridProduct(tensors, params, shape).look_up(ids, dtype)


def _is_read(params: Params, shape: Shape) -> bool:
    _, columns = params.block(shape)
    return columns % LANES == 0 or columns >= shape[1]


class _GridReader(RowReader):
    """Reads points of a table times the factor of their block."""

    def __init__(self, e: Emitter, named: Mapping[str, Any], params: Params) -> None:
        super().__init__(e, named)
        self.params = params

    @staticmethod
    def arguments(params: Params) -> tuple[str, str]:
        nested = " scale_sizes scale_mean" if params.scale_type == grid.NESTED else ""
        return f"codes scales{nested}{' tensor_scale' if params.tensor_scale else ''}", "features blocks row_bytes"

    def write(self, row: Any, features: Any, put: Put) -> None:
        self._write_factors(row)
        line = self.b.mul(row, self.named["row_bytes"])

        def chunk(first: Any, rest: Any) -> None:
            self._chunk(line, first, rest, put)

        self.e.in_chunks(features, CHUNK, chunk)

    def _chunk(self, line: Any, first: Any, rest: Any, put: Put) -> None:
        """Write CHUNK columns from `first` on, only `rest` of them if it is given."""
        e, b, width = self.e, self.b, self.params.block_columns
        factor = scaled = None
        for position in range(0, CHUNK, LANES):
            column = b.add(first, e.i64(position))
            if position % (CHUNK if width == -1 else gcd(width, CHUNK)) == 0:
                factor = self._factor(column)
                scaled = self._scaled_table(factor)
            left = None if rest is None else b.sub(rest, e.i64(position))
            values = (
                self._octets(line, column, left, factor)
                if self.params.bits == 8
                else self._nibbles(line, column, left, scaled)
            )
            put(0, column, values, left)

    # ------------------------------------------------------------ factors

    def _factor(self, column: Any) -> Any:
        """The factor of the block of a column, a value."""
        e, b, width = self.e, self.b, self.params.block_columns
        block = e.i64(0) if width == -1 else e.clamped(b.udiv(column, e.i64(width)), self.named["blocks"])
        return e.load(self.space, block, e.float)

    def _write_factors(self, row: Any) -> None:
        """Write the factors of all blocks of a row to the space."""
        e, b, params, count = self.e, self.b, self.params, self.named["blocks"]
        above = e.i64(0) if params.block_rows == -1 else b.udiv(row, e.i64(params.block_rows))
        first = b.mul(above, count)
        if params.scale_type == grid.NESTED:
            with e.loop(count) as i:
                e.store(self._times_tensor(self._read_nested(b.add(first, i))), self.space, i)
            return

        def some(start: Any, rest: Any) -> None:
            e.store(self._times_tensor(self._scales(b.add(first, start), rest)), self.space, start)

        e.in_chunks(count, LANES, some)

    def _times_tensor(self, scales: Any) -> Any:
        if not self.params.tensor_scale:
            return scales
        factor = self.e.load(self.named["tensor_scale"], self.e.i64(0), self.e.float)
        return self.b.fmul(scales, factor if scales.type == self.e.float else self.e.splat(factor, LANES))

    def _read_nested(self, index: Any) -> Any:
        """The scale `index` of all that are nested."""
        e, b, named = self.e, self.b, self.named
        point = self._point(e.load(named["scales"], index, e.byte), grid.DYNAMIC8)
        size = e.load(named["scale_sizes"], b.udiv(index, e.i64(grid.SCALES_PER_SIZE)), e.float)
        return b.fadd(b.fmul(point, size), e.load(named["scale_mean"], e.i64(0), e.float))

    def _scales(self, first: Any, rest: Any) -> Any:
        """Sixteen stored scales as float32."""
        e, b, kind, at = self.e, self.b, self.params.scale_type, self.named["scales"]
        if kind not in (grid.E8M0, grid.E4M3):
            return e.load_floats(at, first, getattr(torch, kind), LANES, rest)
        octets = e.load_some(at, first, e.byte, LANES, rest)
        if kind == grid.E4M3:
            return self._from_e4m3(octets)
        words = b.shl(b.zext(octets, e.vector(e.word, LANES)), e.constant(e.word, LANES, 23))
        least = e.constant(e.word, LANES, 1 << 22)  # 2^-127 is no normal number
        words = b.select(b.icmp_unsigned("==", words, e.constant(e.word, LANES, 0)), least, words)
        return b.bitcast(words, e.vector(e.float, LANES))

    # ------------------------------------------------------------ points

    def _octets(self, line: Any, column: Any, left: Any, factor: Any) -> Any:
        """Sixteen weights of 8 bits."""
        e, b = self.e, self.b
        codes = e.load_some(self.named["codes"], b.add(line, column), e.byte, LANES, left)
        if self.params.values == grid.E4M3:
            points = self._from_e4m3(codes)
        else:
            points = self._points_in_turn(codes)
        return b.fmul(points, e.splat(factor, LANES))

    def _from_e4m3(self, octets: Any) -> Any:
        """Numbers of e4m3 as float32: those of float16 with the same bits, times 2^8."""
        e, b = self.e, self.b
        shorts = b.sext(octets, e.vector(e.short, LANES))
        moved = b.and_(b.shl(shorts, e.constant(e.short, LANES, 7)), e.constant(e.short, LANES, -0x4001))
        wide = b.fpext(b.bitcast(moved, e.vector(e.half, LANES)), e.vector(e.float, LANES))
        magnitude = b.and_(octets, e.constant(e.byte, LANES, NAN_CODE))
        is_nan = b.icmp_unsigned("==", magnitude, e.constant(e.byte, LANES, NAN_CODE))
        return b.select(is_nan, e.floats(float("nan")), b.fmul(wide, e.floats(HALF_TO_E4M3)))

    def _scaled_table(self, factor: Any) -> list[Any]:
        """The table of 16 points times a factor, in registers; empty where codes are looked up in turn."""
        e, features = self.e, llvm.features()
        if self.params.bits == 8 or "avx2" not in features:
            return []
        points = grid.value_table(self.params.values).tolist()
        if "avx512f" in features:
            return [self.b.fmul(e.ir.Constant(e.vector(e.float, LANES), points), e.splat(factor, LANES))]
        halves = [points[:EIGHT]] if self._is_symmetric() else [points[:EIGHT], points[EIGHT:]]
        return [self.b.fmul(e.ir.Constant(e.vector(e.float, EIGHT), half), e.splat(factor, EIGHT)) for half in halves]

    def _is_symmetric(self) -> bool:
        """Whether bit 3 of a code is the sign."""
        return self.params.values in (grid.E2M1, grid.FP4)

    def _nibbles(self, line: Any, column: Any, left: Any, tables: Any) -> Any:
        """Sixteen weights of 4 bits."""
        e, b = self.e, self.b
        start = b.add(line, b.udiv(column, e.i64(2)))
        count = None if left is None else b.sdiv(b.add(left, e.i64(1)), e.i64(2))
        octets = e.load_some(self.named["codes"], start, e.byte, LANES // 2, count)
        words = b.bitcast(octets, e.vector(e.word, 2))  # eight codes each, the first in the lowest bits
        places = e.ir.Constant(e.vector(e.word, LANES), [4 * (i % EIGHT) for i in range(LANES)])
        spread = e.shuffled(words, words, [i // EIGHT for i in range(LANES)])
        codes = b.lshr(spread, places)
        if not tables:
            low = b.and_(codes, e.constant(e.word, LANES, 15))
            factor = e.splat(self._factor(column), LANES)
            return b.fmul(self._points_in_turn(low), factor)
        if len(tables) == 1 and tables[0].type.count == LANES:
            return e.intrinsic("llvm.x86.avx512.permvar.sf.512", tables[0].type, tables[0], codes)
        halves = [self._permute(e.shuffled(codes, codes, range(i, i + EIGHT)), tables) for i in (0, EIGHT)]
        return e.shuffled(halves[0], halves[1], range(LANES))

    def _permute(self, codes: Any, tables: list[Any]) -> Any:
        """Eight weights by permutations of registers."""
        e, b = self.e, self.b
        looked = [e.intrinsic("llvm.x86.avx2.permps", table.type, table, codes) for table in tables]
        top = b.shl(codes, e.constant(e.word, EIGHT, 28))  # bit 3 of the code is the sign
        if len(looked) == 2:
            return b.select(b.icmp_signed("<", top, e.constant(e.word, EIGHT, 0)), looked[1], looked[0])
        sign = b.and_(top, e.constant(e.word, EIGHT, NEGATIVE))
        return b.bitcast(b.xor(b.bitcast(looked[0], sign.type), sign), looked[0].type)

    def _points_in_turn(self, codes: Any) -> Any:
        """Points by a table in memory, one after the other."""
        e, b = self.e, self.b
        result = e.vector(e.float, LANES)(e.ir.Undefined)
        for i in range(LANES):
            point = self._point(b.extract_element(codes, e.word(i)), self.params.values)
            result = b.insert_element(result, point, e.word(i))
        return result

    def _point(self, code: Any, values: str) -> Any:
        """The point of a code, a value."""
        e = self.e
        known = e.module.globals.get(values)
        if known is None:
            points = grid.value_table(values).tolist()
            known = e.ir.GlobalVariable(e.module, e.ir.ArrayType(e.float, len(points)), values)
            known.global_constant, known.linkage = True, "internal"
            known.initializer = e.ir.Constant(known.value_type, points)
        return e.load(known, self.b.zext(code, e.index), e.float)


class _GridProduct(DecodedProduct):
    reader = _GridReader

    def __init__(self, tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> None:
        blocks = params.blocks(shape)[1]
        sizes = {"blocks": blocks, "row_bytes": -(-shape[1] * params.bits // 8)}
        super().__init__(tensors, params, shape, (params,), sizes, -(-blocks // LANES) * LANES)

    def look_up(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows ids [n] of the weight, [n, in], as bfloat16, float16 or float32; ids must be rows of it."""
        ids = ids.long().contiguous()
        out = torch.empty(len(ids), self.shape[1], dtype=dtype, device="cpu")
        write = llvm.function(_LookUpRows, self.settings, dtype)
        values = {**self.stored, **self.sizes, "out": out.data_ptr(), "ids": ids.data_ptr()}

        def work(first: int, last: int) -> None:
            space = torch.empty(self.space, dtype=torch.float32, device="cpu")
            write(*write.signature.arguments(**values, space=space.data_ptr(), first=first, last=last))

        llvm.parallel(work, len(ids), -(-small_matmul.WEIGHTS_PER_THREAD // self.shape[1]))
        return out


class _LookUpRows(Writer):
    """Writes the rows `ids` of a weight."""

    def __init__(self, settings: tuple[Any, ...], dtype: torch.dtype) -> None:
        pointers, integers = _GridReader.arguments(*settings)
        super().__init__("look_up", f"{pointers} space out ids", f"first last {integers}", dtype)
        named, b = self.named, self.b
        reads = _GridReader(self, named, *settings)
        with self.loop(named["last"], named["first"]) as i:
            line = b.mul(i, named["features"])

            def put(_: int, column: Any, values: Any, left: Any) -> None:
                self.store_some(self.rounded(values), named["out"], b.add(line, column), left)

            reads.write(self.load(named["ids"], i, self.index), named["features"], put)
        b.ret_void()
