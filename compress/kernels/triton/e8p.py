"""Multiply with the `e8p` format on a GPU: lattice points become operands of tensor cores in registers, for a few rows.

    out^T [n, m] = sum over codes of point(code) x, times scale and row scale

One word is looked up for eight weights: a nibble of it is 8 + 2 v, v being an absolute value before the shift, an odd
number (-v where the table's sum is odd, coordinate 7). Exclusive or with 14 changes the sign of 2 v, and with 1 takes
one off: so with the signs and the parity p of the code spread over the nibbles, a nibble is 8 + 2 v - p, and the
weight, v + (1 - 2 p) / 4, is (nibble - 7.5) / 2. Residual points of 3 bits need no signs: their nibbles are 8 + 2 v.

Two nibbles 16 bits apart are a pair of float16 after a mask: a number that small is itself the fraction of a subnormal
float16, which tensor cores multiply exactly. The nibbles in bits 4 to 7 count sixteenfold and are summed apart. The
offset is taken off in the same way, as a constant operand that meets all activations.

The pairs of a code are the columns (0, 2), (1, 3), (4, 6), (5, 7): what a multiplication that spreads four bits gives.

USE_ASM is off in the interpreter, which knows no inline assembly: there products are those of float32.
"""

# ruff: noqa: PLR0913, PLR0917 (signatures of kernels)
# mypy: disallow-untyped-defs = False, disable-error-code = "annotation-unchecked,assignment,misc"

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.formats import e8p as e8p_format
from compress.formats.e8p import DIM, RHO, Params
from compress.kernels.contract import Shape
from compress.kernels.triton import products
from compress.kernels.triton._parts import COMPILED, columns_of, divided, finish, row_powers
from compress.kernels.triton.products import GpuProduct, Grid, tile_rows

BLOCK_ROWS = 64
BLOCK_CODES = {8: 32, 16: 16}  # of a step, for a tile of rows of x: 256 or 128 columns
WARPS = 2
OCCUPANCY = 5  # programs that a multiprocessor holds
NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # of the coordinates
DECODED = (4, 64)  # rows, and codes of each, of a program of the decoder


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> GpuProduct:
    """Return the product with a weight of any width."""
    return _E8pOnGpu(tensors, params, shape)


@cache
def tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The 256 magnitudes and the 256 short vectors, int32 [256] each, as the head of this file says."""
    signed = 2 * e8p_format.magnitudes()
    signed[:, -1] *= torch.where(e8p_format.odd_sum(), -1, 1)
    shifts = 4 * torch.tensor(NIBBLES)
    packed = [((8 + values).long() << shifts).sum(1) for values in (signed, 2 * e8p_format.ball())]
    first, second = (torch.where(words < 1 << 31, words, words - (1 << 32)).int().to(device) for words in packed)
    return first, second


def configuration(params: Params, rows: int, shape: tuple[int, int]) -> dict[str, Any]:
    """The kernel's constants but for SPLIT and USE_ASM."""
    block_m = tile_rows(rows)
    codes = BLOCK_CODES[block_m]
    return {
        "BITS": params.bits, "RHO": RHO.get(params.bits, 1.0), "ROW_SCALES": params.row_scales,
        "BLOCK_N": BLOCK_ROWS, "BLOCK_M": block_m, "BLOCK_CODES": codes, "MASKED": shape[1] % (DIM * codes) != 0,
    }  # fmt: skip


def decode_constants(params: Params) -> dict[str, Any]:
    """Return the constants of the decoder but for USE_ASM."""
    rows, columns = DECODED
    return {
        "BITS": params.bits, "RHO": RHO.get(params.bits, 1.0), "ROW_SCALES": params.row_scales,
        "BLOCK_N": rows, "BLOCK_CODES": columns,
    }  # fmt: skip


class _E8pOnGpu(GpuProduct):
    def multiply(self, x: Tensor, out: Tensor) -> None:
        constants, codes = configuration(self.params, x.shape[0], self.shape), self.tensors["codes"]
        stored_rows, code_columns = codes.shape
        tiles, steps = -(-stored_rows // BLOCK_ROWS), -(-code_columns // constants["BLOCK_CODES"])
        products.launch(
            multiply,
            (x, *self._pointers(x)), out, (x.shape[0], *self.shape[::-1], stored_rows, code_columns // DIM),
            Grid(tiles, steps, constants["BLOCK_M"] * BLOCK_ROWS, OCCUPANCY),
            USE_ASM=COMPILED, num_warps=WARPS, **constants,
        )  # fmt: skip

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in], computed in float32 and rounded once, as formats/e8p.py does; in one pass."""
        code_columns, (rows, columns) = self.tensors["codes"].shape[1], DECODED
        out = torch.empty(self.shape, dtype=dtype, device=self.tensors["codes"].device)
        decode[-(-code_columns // columns), -(-self.shape[0] // rows)](
            *self._pointers(out), out, *self.shape[::-1], code_columns // DIM, USE_ASM=COMPILED, num_warps=WARPS,
            **decode_constants(self.params),
        )  # fmt: skip
        return out

    def _pointers(self, absent: Tensor) -> tuple[Tensor, ...]:
        """Return codes, residuals, both tables, the scale and the scales of rows."""
        codes = self.tensors["codes"]
        residual, row_scales = self.stored("residual", codes), self.stored("row_scales", absent)
        return codes, residual, *tables(codes.device), self.tensors["scale"], row_scales


# What runs on the device.

MIX = tl.constexpr("prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;")
SUBNORMAL_STEP = tl.constexpr(2.0**-24)  # of subnormal float16 numbers


@triton.constexpr_function
def point_text(signed: bool) -> str:
    """PTX: $8, $9 are the words looked up for two neighbouring codes, $10 the codes, the first in the low half (not
    for residuals of 3 bits, which have no signs); $0 to $3 are the pairs of the first, $4 to $7 those of the second.
    """
    text = "{ .reg .b32 c, p, t, u, v; "
    for code in range(2):
        text += "mov.b32 v, $" + str(8 + code) + "; "
        if signed:
            text += "shr.u32 c, $10, 16; " if code else "mov.b32 c, $10; "
            text += "and.b32 t, c, 0x0F; mul.lo.u32 t, t, 0x00204081; and.b32 t, t, 0x01010101; "  # bit i to 8 i
            text += "and.b32 u, c, 0xF0; mul.lo.u32 u, u, 0x00204081; "  # bit 4 + i to 4 + 8 i, and elsewhere
            text += "mov.b32 c, 0x10101010; lop3.b32 t, u, c, t, 0xEA; "  # (u & c) | t
            text += "mul.lo.u32 p, t, 0x88888888; shr.s32 p, p, 31; mul.lo.u32 t, t, 14; "  # p: all bits the parity
            text += "mov.b32 c, 0x1111111F; lop3.b32 v, p, c, v, 0x6A; xor.b32 v, v, t; "  # (p & c) ^ v
        for half in range(2):
            register = 4 * code + 2 * half
            text += "and.b32 $" + str(register) + ", v, 0x000F000F; "
            text += "and.b32 $" + str(register + 1) + ", v, 0x00F000F0; "
            text += "shr.u32 v, v, 8; " if half == 0 else ""
    return text + "}"


@triton.jit
def _pair(word):
    """Bits 0 to 15 and 16 to 31 of words [n, j], neighbours in [n, 2 j], as float16."""
    low = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    high = (word >> 16 & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.reshape(tl.join(low, high), (word.shape[0], 2 * word.shape[1]))


@triton.jit
def _signs(code):
    """What is exclusively added to the word of a code [n, j] int32."""
    parity = code & 0xFF
    parity ^= parity >> 4
    parity ^= parity >> 2
    parity = (parity ^ parity >> 1) & 1
    low = ((code ^ parity) & 0x0F) * 0x00204081 & 0x01010101
    high = (code & 0xF0) * 0x00204081 & 0x10101010
    return (low | high).to(tl.uint32) * 14 + parity.to(tl.uint32) * 0x11111111


@triton.jit
def _values(word, code, SIGNED: tl.constexpr, USE_ASM: tl.constexpr):
    """Words and codes [n, j] -> the eight tensors [n, j] float16 of `point_text`."""
    if USE_ASM:
        text: tl.constexpr = point_text(SIGNED)
        dtype: tl.constexpr = (tl.float16,) * 8
        if SIGNED:
            return tl.inline_asm_elementwise(text, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r", [word, code], dtype, is_pure=True,
                                             pack=2)  # fmt: skip
        else:
            return tl.inline_asm_elementwise(text, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", [word], dtype, is_pure=True, pack=2)
    else:
        word = word.to(tl.uint32, bitcast=True)
        if SIGNED:
            word ^= _signs(code.to(tl.int32) & 0xFFFF)
        first, second = tl.split(tl.reshape(word, (word.shape[0], word.shape[1] // 2, 2)))
        return (_pair(first & 0x000F000F), _pair(first & 0x00F000F0),
                _pair(first >> 8 & 0x000F000F), _pair(first >> 8 & 0x00F000F0),
                _pair(second & 0x000F000F), _pair(second & 0x00F000F0),
                _pair(second >> 8 & 0x000F000F), _pair(second >> 8 & 0x00F000F0))  # fmt: skip


@triton.jit
def _mix(a, b, USE_ASM: tl.constexpr):
    """[k, m] float16 with the columns (0, 1) and (2, 3) of a code in neighbouring rows -> (0, 2) and (1, 3)."""
    if USE_ASM:
        dtype: tl.constexpr = (tl.float16, tl.float16)
        return tl.inline_asm_elementwise(MIX, "=r,=r,r,r", [a, b], dtype, is_pure=True, pack=2)
    else:
        k: tl.constexpr = a.shape[0]
        m: tl.constexpr = a.shape[1]
        a0, a1 = tl.split(tl.permute(tl.reshape(a, (k // 2, 2, m)), (0, 2, 1)))
        b0, b1 = tl.split(tl.permute(tl.reshape(b, (k // 2, 2, m)), (0, 2, 1)))
        even = tl.reshape(tl.permute(tl.join(a0, b0), (0, 2, 1)), (k, m))
        odd = tl.reshape(tl.permute(tl.join(a1, b1), (0, 2, 1)), (k, m))
        return even, odd


@triton.jit
def _dot(a, b, acc, USE_ASM: tl.constexpr):
    if USE_ASM:
        return tl.dot(a, b, acc)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)


@triton.jit
def _add(ones, sixteens, values, columns, OFFSET: tl.constexpr, USE_ASM: tl.constexpr):
    """The sums of nibbles that count once and sixteen times + the products; the latter less OFFSET of every column."""
    offset = tl.full(values[0].shape, -16 * OFFSET * SUBNORMAL_STEP, tl.float16)
    for i in tl.static_range(4):
        ones = _dot(values[2 * i], columns[2 * i], ones, USE_ASM)
        sixteens = _dot(values[2 * i + 1], columns[2 * i + 1], sixteens, USE_ASM)
        sixteens = _dot(offset, columns[2 * i], sixteens, USE_ASM)
        sixteens = _dot(offset, columns[2 * i + 1], sixteens, USE_ASM)
    return ones, sixteens


@triton.jit(do_not_specialize=["rows", "stored_rows", "steps", "parts"])
def multiply(x, codes, residual, magnitudes, ball, scale, row_scales, out, partials, counters,
             rows, in_features, out_features, stored_rows, code_groups, steps, parts,
             BITS: tl.constexpr, RHO: tl.constexpr, ROW_SCALES: tl.constexpr, BLOCK_N: tl.constexpr,
             BLOCK_M: tl.constexpr, BLOCK_CODES: tl.constexpr, MASKED: tl.constexpr, SPLIT: tl.constexpr,
             USE_ASM: tl.constexpr):  # fmt: skip
    """out [rows, out_features] = x [rows, in_features] W^T; program (BLOCK_N rows of W, part of the columns).

    x and out have one type; MASKED: the columns of x do not fill the last step. With SPLIT, `parts` programs share the
    steps.
    """
    block, part = tl.program_id(0), tl.program_id(1)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    j = tl.arange(0, BLOCK_CODES)
    code_columns = code_groups * 8  # so the compiler knows that rows of codes lie on multiples of 16 bytes
    row = tl.minimum(n, stored_rows - 1).to(tl.int64)[:, None] * code_columns
    ones = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    sixteens, ones2, sixteens2 = ones, ones, ones
    start, end = steps * part // parts, steps * (part + 1) // parts
    up, down = row_powers(x, start * BLOCK_CODES * 8, end * BLOCK_CODES * 8, m, rows, in_features)
    for step in range(start, end):
        at = step * BLOCK_CODES + j[None, :]
        mask = at < code_columns if MASKED else None
        pair = step * BLOCK_CODES * 8 + j // 2 * 16 + j % 2  # column of a code's first pair, for the first of two codes
        columns = ()
        for i in tl.static_range(4):
            a = columns_of(x, pair + 4 * i, m, up, rows, in_features, MASKED)
            b = columns_of(x, pair + 4 * i + 2, m, up, rows, in_features, MASKED)
            columns = columns + _mix(a, b, USE_ASM)
        # (0, 2), (4, 6), (1, 3), (5, 7) of the first code and of the second
        columns = (columns[0], columns[2], columns[1], columns[3], columns[4], columns[6], columns[5], columns[7])
        code = tl.load(codes + row + at, mask=mask, eviction_policy="evict_first")
        word = tl.load(magnitudes + (code.to(tl.uint16, bitcast=True) >> 8))
        ones, sixteens = _add(ones, sixteens, _values(word, code, True, USE_ASM), columns, 7.5, USE_ASM)
        if BITS == 3:
            word = tl.load(ball + tl.load(residual + row + at, mask=mask, eviction_policy="evict_first").to(tl.int32))
            values = _values(word, code, False, USE_ASM)
            ones2, sixteens2 = _add(ones2, sixteens2, values, columns, 8.0, USE_ASM)
        if BITS == 4:
            code = tl.load(residual + row + at, mask=mask, eviction_policy="evict_first")
            word = tl.load(magnitudes + (code.to(tl.uint16, bitcast=True) >> 8))
            values = _values(word, code, True, USE_ASM)
            ones2, sixteens2 = _add(ones2, sixteens2, values, columns, 7.5, USE_ASM)
    total = ones + sixteens / 16
    if BITS != 2:
        total += (ones2 + sixteens2 / 16) / RHO
    total = tl.trans(total) * (down * (0.5 / SUBNORMAL_STEP))[:, None]
    finish(total, tl.load(scale), row_scales, out, partials, counters, block, part, parts, n, m, rows, out_features,
           ROW_SCALES, SPLIT)  # fmt: skip


@triton.jit
def _coordinates(word, i):
    """The nibbles float32 [n, j, 8] that words [n, j] have for the coordinates i, as the head of e8p.py says."""
    shift = (i % 4 * 2 + i // 4) * 4
    return (word[:, :, None] >> shift & 15).to(tl.float32)


@triton.jit
def _points(code, magnitudes, i):
    """Points float32 [n, j, 8] of codes int16 [n, j]."""
    code = code.to(tl.int32) & 0xFFFF
    word = tl.load(magnitudes + (code >> 8)).to(tl.uint32, bitcast=True) ^ _signs(code)
    return (_coordinates(word, i) - 7.5) * 0.5


@triton.jit
def decode(codes, residual, magnitudes, ball, scale, row_scales, out, in_features, out_features, code_groups,
           BITS: tl.constexpr, RHO: tl.constexpr, ROW_SCALES: tl.constexpr, BLOCK_N: tl.constexpr,
           BLOCK_CODES: tl.constexpr, USE_ASM: tl.constexpr):  # fmt: skip
    """out [out_features, in_features]; program (BLOCK_CODES codes of BLOCK_N rows)."""
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.program_id(0) * BLOCK_CODES + tl.arange(0, BLOCK_CODES)
    i = tl.arange(0, 8)[None, None, :]
    code_columns = code_groups * 8
    known = (n < out_features)[:, None] & (j < code_columns)[None, :]
    at = n.to(tl.int64)[:, None] * code_columns + j[None, :]
    value = _points(tl.load(codes + at, mask=known, other=0), magnitudes, i)
    if BITS == 3:
        word = tl.load(ball + tl.load(residual + at, mask=known, other=0).to(tl.int32))
        value += divided((_coordinates(word, i) - 8) * 0.5, RHO, USE_ASM)
    if BITS == 4:
        value += divided(_points(tl.load(residual + at, mask=known, other=0), magnitudes, i), RHO, USE_ASM)
    factor = tl.load(scale)
    if ROW_SCALES:
        factor *= tl.load(row_scales + n, mask=n < out_features, other=0.0).to(tl.float32)
        value *= factor[:, None, None]
    else:
        value *= factor
    k = j[None, :, None] * 8 + i
    mask = (n < out_features)[:, None, None] & (k < in_features)
    tl.store(out + n.to(tl.int64)[:, None, None] * in_features + k, value.to(out.dtype.element_ty), mask=mask)
