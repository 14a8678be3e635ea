"""Multiply with the `grid` format on a CPU: MXFP4 and NVFP4 as integers, e4m3 in registers, others decoded near.

Points of e2m1 are halves of small integers: bytes of sixteen permuted entries are those integers, -12 to 12. They meet
activations as int16 in products that are summed in pairs, and the sums of a block meet its factor, which is multiplied
by the scale of the activations once for each row of the weight.

A code of e4m3 becomes a float16 of the same bits by a shift and a mask, which is widened and multiplied, and never
written; the power of two between both types meets the factor of the block. That would make a number of NaN: whether a
row has one is seen in its codes, which are read twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compress.formats import grid
from compress.formats.grid import Params
from compress.kernels import llvm
from compress.kernels.contract import Decoder, Prepared, Shape
from compress.kernels.cpu import emitter, small_matmul
from compress.kernels.cpu.decoded import DecodedProduct
from compress.kernels.cpu.emitter import LANES, PRODUCT, Emitter, Writer
from compress.kernels.cpu.grid_rows import HALF_TO_E4M3, NAN_CODE, GridReader, LookUpRows
from compress.kernels.cpu.small_matmul import Product, ProductSizes

COLUMNS = 64  # columns that are written one after another without a loop, and of a scale of the activations
SHORTS = 32  # activations of a vector
SUMMED_BLOCKS = (16, 32)  # columns that share a scale, where weights are integers
HALVES = 2.0  # times a point of e2m1: an integer
LEAST_BLOCK = 32  # columns of a block of e4m3
GROUP = 4  # rows of activations that meet a code of e4m3 while it is in a register


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> Prepared | None:
    """Return the product with a weight whose blocks are whole vectors, or rows."""
    if not emitter.worthwhile(shape) or not _is_read(params, shape):
        return None
    return (_SummedGrid if _is_summed(params, shape) else _DecodedGrid)(tensors, params, shape)


def look_up(
    tensors: Mapping[str, Tensor], params: Params, shape: Shape, ids: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Return the rows ids [n] of a table, [n, in]; None for blocks that no kernel reads."""
    if not (llvm.available() and _is_read(params, shape) and grid.has_rows(params)):
        return None
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return None
    return _DecodedGrid(tensors, params, shape).look_up(ids, dtype)


def _is_read(params: Params, shape: Shape) -> bool:
    _, columns = params.block(shape)
    return columns % LANES == 0 or columns >= shape[1]


def _is_summed(params: Params, shape: Shape) -> bool:
    """Return whether weights are summed as integers, which takes permutations of bytes."""
    is_known = params.values == grid.E2M1 and params.block_columns in SUMMED_BLOCKS
    return is_known and params.scale_type != grid.NESTED and shape[1] % COLUMNS == 0 and "avx2" in llvm.features()


def _is_in_registers(params: Params, shape: Shape) -> bool:
    """Return whether weights are e4m3 in whole blocks of 32 columns, whole 64, or rows."""
    _, block = params.block(shape)
    fits = block >= shape[1] or (shape[1] % block == 0 and (block == LEAST_BLOCK or block % COLUMNS == 0))
    return params.values == grid.E4M3 and params.scale_type != grid.NESTED and shape[1] % COLUMNS == 0 and fits


class _DecodedGrid(DecodedProduct):
    reader = GridReader

    def __init__(self, tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> None:
        blocks = params.blocks(shape)[1]
        sizes = {"blocks": blocks, "row_bytes": -(-shape[1] * params.bits // 8)}
        super().__init__(tensors, params, shape, (params,), sizes, -(-blocks // LANES) * LANES)
        self._is_in_registers = _is_in_registers(params, shape)

    def product(self, dtype: torch.dtype) -> llvm.Function:
        if not self._is_in_registers:
            return super().product(dtype)
        _, columns = self.params.block(self.shape)
        return llvm.function(_GridOctets, self.params, 0 if columns >= self.shape[1] else columns, dtype)

    def look_up(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows ids [n] of the weight, [n, in], as bfloat16, float16 or float32; ids must be rows of it."""
        ids = ids.long().contiguous()
        out = torch.empty(len(ids), self.shape[1], dtype=dtype, device="cpu")
        write = llvm.function(LookUpRows, self.settings, dtype)
        values = {**self.stored, **self.sizes, "out": out.data_ptr(), "ids": ids.data_ptr()}

        def work(first: int, last: int) -> None:
            space = torch.empty(self.space, dtype=torch.float32, device="cpu")
            write(*write.signature.arguments(**values, space=space.data_ptr(), first=first, last=last))

        llvm.parallel(work, len(ids), -(-small_matmul.WEIGHTS_PER_THREAD // self.shape[1]))
        return out


class _SummedGrid(Product):
    """x times a weight of MXFP4 or NVFP4."""

    def __init__(self, tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> None:
        self._decoded = _DecodedGrid(tensors, params, shape)
        rows, blocks = -(-shape[0] // LANES) * LANES, params.blocks(shape)[1]
        pitch = -(-blocks // LANES) * LANES
        layout = ProductSizes(shape[1], shape[0], shape[1], rows, COLUMNS, SHORTS, 2 * pitch)
        sizes = {"blocks": blocks, "pitch": pitch, "rows": rows, "outputs": shape[0], "columns": shape[1]}
        super().__init__(tensors, params, shape, layout, self._decoded.stored, sizes)

    def kernel(self, tokens: int) -> llvm.Function:
        return llvm.function(_GridSums, self.params, tokens)

    def decoder(self, dtype: torch.dtype) -> Decoder:
        return self._decoded.decoder(dtype)


class _GridSums(Emitter):
    """Sums rows of the weight times few rows of activations."""

    def __init__(self, params: Params, tokens: int) -> None:
        pointers, _ = GridReader.arguments(params)
        super().__init__("product", f"{pointers} {PRODUCT}", "first last blocks pitch rows outputs columns")
        self.params, self.tokens = params, tokens
        self.width = SHORTS if "avx512bw" in llvm.features() else SHORTS // 2  # of a register
        self.scales_of = GridReader(self, self.named, params)
        named, b = self.named, self.b
        self.blocks, self.space, self.out = named["blocks"], named["space"], named["out"]
        steps = b.udiv(named["columns"], self.i64(COLUMNS))
        parts = COLUMNS // self.width
        kind = self.vector(self.float, self.width // 2)
        self.sums = [[self.variable(kind) for _ in range(parts)] for _ in range(tokens)]
        self._spread_scales()
        begin, end = (b.mul(named[name], self.i64(LANES)) for name in ("first", "last"))
        with self.loop(self.smaller(end, named["outputs"]), begin) as row:
            self._write_factors(row)
            for variable in (each for variables in self.sums for each in variables):
                b.store(self.constant(self.float, self.width // 2, 0.0), variable)
            line = b.mul(row, b.udiv(named["columns"], self.i64(2)))
            with self.loop(steps) as step:
                self._add(line, step)
            for m, variables in enumerate(self.sums):
                total = b.load(variables[0])
                for variable in variables[1:]:
                    total = b.fadd(total, b.load(variable))
                self.store(self.total(total), self.out, b.add(b.mul(named["rows"], self.i64(m)), row))
        b.ret_void()

    def _place(self, m: int, side: int, block: Any) -> Any:
        """Where the scale (0) of activations or the factor (1) of a block for a row of activations is."""
        return self.b.add(self.b.mul(self.named["pitch"], self.i64(2 * m + side)), block)

    def _spread_scales(self) -> None:
        """Write the scales of the activations for each block of columns."""
        b, spans = self.b, self.b.udiv(self.named["columns"], self.i64(COLUMNS))
        with self.loop(self.blocks) as block:
            span = b.udiv(block, self.i64(COLUMNS // self.params.block_columns))
            for m in range(self.tokens):
                scale = self.load(self.named["x_scales"], b.add(b.mul(spans, self.i64(m)), span), self.float)
                self.store(b.fmul(scale, self.float(1 / HALVES)), self.space, self._place(m, 0, block))

    def _write_factors(self, row: Any) -> None:
        """Write the factors of all blocks of a row, times the scales of the activations."""
        b = self.b
        above = self.scales_of.first_scale(row)

        def some(start: Any, rest: Any) -> None:
            factors = self.scales_of.times_tensor(self.scales_of.scales(b.add(above, start), rest))
            for m in range(self.tokens):
                scales = self.load(self.space, self._place(m, 0, start), self.float, LANES)
                self.store(b.fmul(factors, scales), self.space, self._place(m, 1, start))

        self.in_chunks(self.blocks, LANES, some)

    def _add(self, line: Any, step: Any) -> None:
        """Add the products of COLUMNS columns to the sums."""
        b, width = self.b, self.width
        for start in range(0, COLUMNS, width):
            octets = b.add(line, b.add(b.mul(step, self.i64(COLUMNS // 2)), self.i64(start // 2)))
            weights = self._integers(octets)
            for m, sums in enumerate(self.sums):
                vector, inside = divmod(start, SHORTS)
                first = b.mul(step, self.i64(COLUMNS * self.tokens))
                place = self.i64((vector * self.tokens + m) * SHORTS + inside)
                x = self.load(self.named["x16"], b.add(first, place), self.short, width)
                products = b.sitofp(self.pair_sums(weights, x), self.vector(self.float, width // 2))
                variable = sums[start // width]
                b.store(self.multiply_add(products, self._factors(m, step, start), b.load(variable)), variable)

    def _integers(self, start: Any) -> Any:
        """The integers of `width` weights whose codes begin at a byte, as int16."""
        b, width = self.b, self.width
        shorts = self.vector(self.short, width // 2)
        octets = b.zext(self.load(self.named["codes"], start, self.byte, width // 2), shorts)
        spread = b.or_(octets, b.shl(octets, self.constant(self.short, width // 2, 4)))
        codes = b.and_(spread, self.constant(self.short, width // 2, 0x0F0F))  # a code in each byte, in order
        points = (HALVES * grid.value_table(grid.E2M1)).int().tolist()
        kind = self.vector(self.byte, width)
        table = self.ir.Constant(kind, (points * 2)[:width])
        name = "llvm.x86.avx2.pshuf.b" if width == SHORTS else "llvm.x86.ssse3.pshuf.b.128"
        return b.sext(self.intrinsic(name, kind, table, b.bitcast(codes, kind)), self.vector(self.short, width))

    def _factors(self, m: int, step: Any, start: int) -> Any:
        """The factors of `width` columns, for pairs of columns."""
        b, size, lanes = self.b, self.params.block_columns, self.width // 2
        count = max(1, self.width // size)
        block = b.add(b.mul(step, self.i64(COLUMNS // size)), self.i64(start // size))
        factors = self.load(self.space, self._place(m, 1, block), self.float, count)
        return self.shuffled(factors, factors, [i * count // lanes for i in range(lanes)])


class _GridOctets(Writer):
    """Writes the products of rows of activations, float32 [tokens, columns], with rows of the weight."""

    def __init__(self, params: Params, columns: int, dtype: torch.dtype) -> None:
        """columns: of a block, 0 for whole rows."""
        pointers, integers = GridReader.arguments(params)
        sizes = f"first last outputs columns tokens width {integers}"
        super().__init__("product", f"{pointers} x out space", sizes, dtype)
        named, b = self.named, self.b
        self.block, self.outputs = columns, named["outputs"]
        is_wide = "avx512f" in llvm.features()
        count = 2 if is_wide else 1  # sums of each row of activations, which do not wait for each other
        group = GROUP if is_wide else GROUP // 2
        kind = self.vector(self.float, LANES)
        self.inner, self.sums = ([[self.variable(kind) for _ in range(n)] for _ in range(group)] for n in (count, 1))
        self.seen = self.variable(self.vector(self.byte, COLUMNS))
        reads_scales = GridReader(self, named, params)
        groups = b.udiv(named["tokens"], self.i64(group))
        begin, end = (b.mul(named[name], self.i64(LANES)) for name in ("first", "last"))
        with self.loop(self.smaller(end, self.outputs), begin) as row:
            reads_scales.write_factors(row)
            self.is_bad = self._has_nan(b.mul(row, named["row_bytes"]))
            with self.loop(groups) as m:
                self._tile(row, b.mul(m, self.i64(group)), group)
            with self.loop(named["tokens"], b.mul(groups, self.i64(group))) as m:
                self._tile(row, m, 1)
        b.ret_void()

    def _tile(self, row: Any, m: Any, count: int) -> None:
        """Write the products of a row of the weight with `count` rows of activations from m on."""
        b, named = self.b, self.named
        line = b.mul(row, named["row_bytes"])
        step = min(self.block or COLUMNS, COLUMNS)
        width = self.i64(self.block) if self.block else named["features"]
        for (total,) in self.sums[:count]:
            b.store(self.floats(0.0), total)
        with self.loop(named["blocks"]) as block:
            for inner in self.inner[:count]:
                for each in inner:
                    b.store(self.floats(0.0), each)
            first = b.mul(block, width)
            with self.loop(b.udiv(width, self.i64(step))) as i:
                self._add(line, b.add(first, b.mul(i, self.i64(step))), step, m, count)
            factor = b.fmul(self.load(self.named["space"], block, self.float), self.float(HALF_TO_E4M3))
            for inner, (total,) in zip(self.inner[:count], self.sums, strict=False):
                partial = b.load(inner[0])
                for each in inner[1:]:
                    partial = b.fadd(partial, b.load(each))
                b.store(self.multiply_add(partial, self.splat(factor, LANES), b.load(total)), total)
        for i, (total,) in enumerate(self.sums[:count]):
            value = b.select(self.is_bad, self.float(float("nan")), self.total(b.load(total)))
            place = b.add(b.mul(b.add(m, self.i64(i)), named["width"]), row)
            self.store(self.rounded(self.splat(value, 1)), named["out"], place)

    def _add(self, line: Any, first: Any, count: int, m: Any, tokens: int) -> None:
        """Add the products of `count` columns from `first` on."""
        b, named = self.b, self.named
        for i, position in enumerate(range(0, count, LANES)):
            column = b.add(first, self.i64(position))
            octets = self.load(named["codes"], b.add(line, column), self.byte, LANES)
            shorts = b.sext(octets, self.vector(self.short, LANES))
            moved = b.and_(
                b.shl(shorts, self.constant(self.short, LANES, 7)), self.constant(self.short, LANES, -0x4001)
            )
            weights = b.fpext(b.bitcast(moved, self.vector(self.half, LANES)), self.vector(self.float, LANES))
            for t, sums in enumerate(self.inner[:tokens]):
                place = b.add(b.mul(b.add(m, self.i64(t)), named["columns"]), column)
                variable = sums[i % len(sums)]
                x = self.load(named["x"], place, self.float, LANES)
                b.store(self.multiply_add(weights, x, b.load(variable)), variable)

    def _has_nan(self, line: Any) -> Any:
        """Return whether one of the codes of a row is NaN."""
        b, zeros, nan = self.b, self.constant(self.byte, COLUMNS, 0), self.constant(self.byte, COLUMNS, NAN_CODE)
        b.store(zeros, self.seen)
        with self.loop(b.udiv(self.named["features"], self.i64(COLUMNS))) as i:
            codes = self.load(self.named["codes"], b.add(line, b.mul(i, self.i64(COLUMNS))), self.byte, COLUMNS)
            is_nan = b.sext(b.icmp_unsigned("==", b.and_(codes, nan), nan), zeros.type)
            b.store(b.or_(b.load(self.seen), is_nan), self.seen)
        whole = self.intrinsic(f"llvm.vector.reduce.or.v{COLUMNS}i8", self.byte, b.load(self.seen))
        return b.icmp_unsigned("!=", whole, self.byte(0))
