"""Multiply with the `trellis` format on a GPU: windows become operands of tensor cores in registers, for a few rows.

    out^T [n, m] = sum over columns of code(window of row n) x[m, column], times scale and row scale

Rows that lie 16 apart have the same shift, so that one program takes 16 groups of 16 rows: 16 products, one for each
place in a group, whose left operands are [groups, columns]. Their values are made of the words of two neighbouring
columns at a time by the assembly of `row_text`: the two halves of a register, low and high, are two numbers whose sum
is the value, and meet the same activation. So a byte sum needs no conversion and no subtraction (the half 0x6400 + sum
is 1024 + sum, the other half is -1534), and the halves of `3inst` and `mcg` no addition, which also skips the rounding
of that addition: for those two codes the product is that of the sum before it.

With parts of a bit, groups begin at two or four places in a word: a program takes 16 groups that begin at one place.

Activations are taken as float16, those of other types times a power of two of each row (`_parts.py`).

USE_ASM is off in the interpreter, which knows no inline assembly: there values are made and multiplied in float32.
"""

# ruff: noqa: PLR0913, PLR0917, SIM114 (signatures of kernels, constant conditions)
# mypy: disallow-untyped-defs = False, disable-error-code = "annotation-unchecked,assignment,misc"

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.formats import trellis as trellis_format
from compress.formats.trellis import BYTE_SUMS, HALVES, PARTS, Params
from compress.kernels.contract import Shape
from compress.kernels.triton import products
from compress.kernels.triton._parts import COMPILED, divided, finish, half, row_powers
from compress.kernels.triton.products import GpuProduct, Grid, tile_rows

GROUP = 16  # rows that share their words, and groups of a program: the height of a tensor-core operand
WARPS = 2  # of a program; each takes columns of its own
# Programs of a multiprocessor, for a tile of rows of x. Its registers hold three times as many, but then programs end
# before what they begin with is paid for: one row takes 0.71 (2 bits) and 0.73 (4 bits) of the time with 3 programs of
# 4 warps each (14336 x 4096, H100).
OCCUPANCY = {8: 2, 16: 2}
DECODED = 1024  # columns that a program of the decoder takes
DECODER_WARPS = 4


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> GpuProduct | None:
    """Return the product with computed codes only: a table would be read at random for every weight."""
    return _TrellisOnGpu(tensors, params, shape) if params.code != "hyb" else None


class Code(NamedTuple):
    """A computed code: state * factor + addend, and what becomes of it."""

    factor: int
    addend: int
    divisor: float
    halves: bool  # two float16 numbers, or else four bytes


def computed(code: str) -> Code:
    return Code(*HALVES[code], 1.0, True) if code in HALVES else Code(*BYTE_SUMS[code], False)


def configuration(params: Params, rows: int, shape: tuple[int, int]) -> dict[str, Any]:
    """The kernel's constants but for SPLIT and USE_ASM."""
    block_m = tile_rows(rows)  # 16 rows add a sixteenth to the instructions of a weight, but 64 registers
    block_k = 256 // block_m
    factor, addend, divisor, halves = computed(params.code)
    return {
        "PARTS": int(PARTS * params.bits), "STATE_BITS": params.state_bits, "TILE_GROUPS": params.tile_rows // GROUP,
        "FACTOR": factor, "ADDEND": addend, "DIVISOR": divisor, "HALVES": halves, "ROW_SCALES": params.row_scales,
        "GROUPS": GROUP, "BLOCK_M": block_m, "BLOCK_K": block_k, "WARPS": WARPS,
        "MASKED": shape[1] % (WARPS * block_k) != 0,
    }  # fmt: skip


def decode_constants(params: Params) -> dict[str, Any]:
    """The constants of the decoder but for USE_ASM."""
    factor, addend, divisor, halves = computed(params.code)
    ratio = Fraction(str(divisor))
    return {
        "PARTS": int(PARTS * params.bits), "STATE_BITS": params.state_bits, "TILE_GROUPS": params.tile_rows // GROUP,
        "FACTOR": factor, "ADDEND": addend, "HALVES": halves, "NUMERATOR": ratio.denominator,
        "DENOMINATOR": ratio.numerator, "ROW_SCALES": params.row_scales, "BLOCK": DECODED,
    }  # fmt: skip


class _TrellisOnGpu(GpuProduct):
    def multiply(self, x: Tensor, out: Tensor) -> None:
        params, (outputs, inputs), rows = self.params, self.shape, x.shape[0]
        constants = configuration(params, rows, self.shape)
        block_m, step = constants["BLOCK_M"], WARPS * constants["BLOCK_K"]
        groups = trellis_format.padded_rows(params, outputs) // GROUP
        kinds = len(trellis_format.step_bits(params.bits))  # of groups, by where in a word they begin
        tiles = kinds * -(-groups // (kinds * GROUP))
        grid = Grid(tiles, -(-inputs // step), GROUP * GROUP * block_m, OCCUPANCY[block_m])
        products.launch(
            multiply, (x, *self._pointers(x)), out, (rows, inputs, outputs, groups), grid,
            USE_ASM=COMPILED, num_warps=WARPS, **constants,
        )  # fmt: skip

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in], computed in float32 and rounded once, as formats/trellis.py does; in one pass.

        Byte sums are divided by 1477 / 10 instead of by 147.7, which float32 does not have: the quotients are the same.
        """
        outputs, inputs = self.shape
        out = torch.empty(self.shape, dtype=dtype, device=self.tensors["words"].device)
        decode[-(-inputs // DECODED), -(-outputs // GROUP)](
            *self._pointers(out), out, inputs, outputs, USE_ASM=COMPILED, num_warps=DECODER_WARPS,
            **decode_constants(self.params),
        )  # fmt: skip
        return out

    def _pointers(self, absent: Tensor) -> tuple[Tensor, ...]:
        return self.tensors["words"], self.tensors["scale"], self.stored("row_scales", absent)


# What runs on the device.

PAIR = tl.constexpr("prmt.b32 $0, $2, $2, 0x1010; prmt.b32 $1, $2, $2, 0x3232;")  # each column in both halves


@triton.constexpr_function
def bits_to(row: int, parts: int, start: int) -> int:
    """Bits of a group up to a row and with it, counted from the first word, of which `start` are another group's.

    parts: quarters of a bit of a weight.
    """
    return start + (row + 1) * parts // 4


@triton.constexpr_function
def rows_to(word: int, parts: int, start: int) -> int:
    """Rows of a group whose bits end before a word."""
    return sum(start + (row + 1) * parts // 4 <= 16 * word for row in range(16))


@triton.constexpr_function
def words_of(parts: int, start: int) -> int:
    """Words that hold bits of a group."""
    return (start + 4 * parts + 15) // 16


@triton.constexpr_function
def row_text(end: int, state_bits: int, factor: int, addend: int, halves: bool, summed: bool) -> str:
    """PTX for a row of a group whose bits end at `end`: $2, $3 are the words before and at its last bit, each of two
    neighbouring columns, the first in the low half; $0 and $1 become the halves of the values of the two or, if
    `summed`, $0 their sums.
    """
    shift = -end % 16  # bits of the word below the window
    text = "{ .reg .b32 t, u, v; "
    if halves:
        text += "mov.b32 u, 0x8FFF8FFF; mov.b32 v, 0x3B603B60; "
    else:
        text += "mov.b32 u, 0x01010101; mov.b32 v, 0xE5FE6400; "
    for column in range(2):
        text += "prmt.b32 t, $3, $2, " + ("0x5410; " if column == 0 else "0x7632; ")
        if state_bits == 16:  # bytes, after less than 8 shifts that rows 8 bits apart share
            text += "shr.u32 t, t, " + str(shift % 8) + "; " if shift % 8 else ""
            text += "prmt.b32 t, t, 0, " + ("0x4410; " if shift < 8 else "0x4421; ")
        else:
            text += "shr.u32 t, t, " + str(shift) + "; " if shift else ""
            text += "and.b32 t, t, " + str((1 << state_bits) - 1) + "; "
        text += "mad.lo.u32 t, t, " + str(factor) + ", " + str(addend) + "; "
        if halves:
            text += "lop3.b32 $" + str(column) + ", t, u, v, 0x6A; "  # (t & u) ^ v
        else:
            text += "dp4a.u32.u32 $" + str(column) + ", t, u, v; "
    if summed:
        text += "prmt.b32 t, $0, $1, 0x5410; prmt.b32 u, $0, $1, 0x7632; add.f16x2 $0, t, u; "
    return text + "}"


@triton.jit
def _values(before, word, END: tl.constexpr, STATE_BITS: tl.constexpr, FACTOR: tl.constexpr, ADDEND: tl.constexpr,
            HALVES: tl.constexpr):  # fmt: skip
    """float32 values of a row of each group, whose bits end at END: sums of the halves that `row_text` makes."""
    both = ((before.to(tl.uint32) & 0xFFFF) << 16) | (word.to(tl.uint32) & 0xFFFF)
    shift: tl.constexpr = (16 - END % 16) % 16
    state = (both >> shift) & ((1 << STATE_BITS) - 1)
    random = state * tl.full((1, 1), FACTOR, tl.uint32) + tl.full((1, 1), ADDEND, tl.uint32)
    if HALVES:
        random = (random & tl.full((1, 1), 0x8FFF8FFF, tl.uint32)) ^ 0x3B603B60
        low = (random & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
        high = (random >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
        return low.to(tl.float32) + high.to(tl.float32)
    else:
        total = (random & 0xFF) + ((random >> 8) & 0xFF) + ((random >> 16) & 0xFF) + (random >> 24)
        return total.to(tl.float32) - 510


@triton.jit
def _add(acc, before, word, columns, END: tl.constexpr, STATE_BITS: tl.constexpr, FACTOR: tl.constexpr,
         ADDEND: tl.constexpr, HALVES: tl.constexpr, USE_ASM: tl.constexpr):  # fmt: skip
    """acc [w, groups, m] + the values of a row [w, groups, k], whose bits end at END, times the columns [w, k, m]."""
    if USE_ASM:
        text: tl.constexpr = row_text(END, STATE_BITS, FACTOR, ADDEND, HALVES, False)
        dtype: tl.constexpr = (tl.float16, tl.float16)
        first, second = tl.inline_asm_elementwise(text, "=r,=r,r,r", [before, word], dtype, is_pure=True, pack=2)
        return tl.dot(second, columns[1], tl.dot(first, columns[0], acc))
    else:
        return tl.dot(_values(before, word, END, STATE_BITS, FACTOR, ADDEND, HALVES), columns, acc)


@triton.jit
def _columns(x, k, m, up, rows, in_features, MASKED: tl.constexpr, USE_ASM: tl.constexpr):
    """Activations [w, k, m] as `_add` takes them: those of the first of two neighbours for both, and of the second."""
    if not USE_ASM:
        return _load(x, k, m, up, rows, in_features, MASKED).to(tl.float32)
    elif MASKED:  # rows that do not begin on multiples of 16 bytes need not give a thread neighbours
        first = _load(x, k // 2 * 2, m, up, rows, in_features, MASKED)
        return first, _load(x, k // 2 * 2 + 1, m, up, rows, in_features, MASKED)
    else:
        columns = _load(x, k, m, up, rows, in_features, MASKED)
        dtype: tl.constexpr = (tl.float16, tl.float16)
        return tl.inline_asm_elementwise(PAIR, "=r,=r,r", [columns], dtype, is_pure=True, pack=2)


@triton.jit
def _load(x, k, m, up, rows, in_features, MASKED: tl.constexpr):
    """[w, k, m] float16: the columns k and rows m of x [rows, in_features], times up [m]."""
    mask = (m < rows)[None, None, :]
    if MASKED:
        mask = mask & (k < in_features)[:, :, None]
    return half(tl.load(x + m[None, None, :] * in_features + k[:, :, None], mask=mask, other=0.0), up[None, None, :])


@triton.jit
def _rows(acc):
    """16 accumulators [w, groups, m] -> [m, 16 groups], summed over w."""
    for level in tl.static_range(4):
        joined = ()
        for i in tl.static_range(8 >> level):
            joined = joined + (tl.join(acc[i], acc[i + (8 >> level)]),)
        acc = joined
    total = tl.sum(acc[0], 0)  # group, m, four bits of the row
    groups: tl.constexpr = total.shape[0]
    block_m: tl.constexpr = total.shape[1]
    return tl.reshape(tl.permute(tl.reshape(total, (groups, block_m, 16)), (1, 0, 2)), (block_m, groups * 16))


@triton.jit
def _sums(x, before_at, words_at, k, m, up, rows, in_features, start, stop, START: tl.constexpr,
          PARTS: tl.constexpr, STATE_BITS: tl.constexpr, FACTOR: tl.constexpr, ADDEND: tl.constexpr,
          HALVES: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
          WARPS: tl.constexpr, MASKED: tl.constexpr, USE_ASM: tl.constexpr):  # fmt: skip
    """16 accumulators [w, groups, m], one for each row of a group; START: bits of the first word of another group."""
    zero = tl.zeros((WARPS, GROUPS, BLOCK_M), tl.float32)
    acc = (zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero)
    for _ in range(start, stop):
        mask = (k < in_features)[:, None, :] if MASKED else None
        columns = _columns(x, k, m, up, rows, in_features, MASKED, USE_ASM)
        word = tl.load(before_at, mask=mask, eviction_policy="evict_first")
        new = ()
        for i in tl.static_range(words_of(PARTS, START)):
            before = word
            word = tl.load(words_at + i * in_features, mask=mask, eviction_policy="evict_first")
            for row in tl.static_range(rows_to(i, PARTS, START), rows_to(i + 1, PARTS, START)):
                new = new + (_add(acc[row], before, word, columns, bits_to(row, PARTS, START), STATE_BITS, FACTOR,
                                  ADDEND, HALVES, USE_ASM),)  # fmt: skip
        acc = new
        before_at += WARPS * BLOCK_K
        words_at += WARPS * BLOCK_K
        k += WARPS * BLOCK_K
    return acc


@triton.jit(do_not_specialize=["rows", "groups", "steps", "parts"])
def multiply(x, words, scale, row_scales, out, partials, counters,
             rows, in_features, out_features, groups, steps, parts,
             PARTS: tl.constexpr, STATE_BITS: tl.constexpr, TILE_GROUPS: tl.constexpr,
             FACTOR: tl.constexpr, ADDEND: tl.constexpr, HALVES: tl.constexpr, DIVISOR: tl.constexpr,
             GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr,
             MASKED: tl.constexpr, SPLIT: tl.constexpr, ROW_SCALES: tl.constexpr, USE_ASM: tl.constexpr):  # fmt: skip
    """out [rows, out_features] = x [rows, in_features] W^T; program (GROUPS groups of 16 rows of W, part of columns).

    x and out have one type. Warp w takes columns w * BLOCK_K .. of each step of WARPS * BLOCK_K columns; MASKED: they
    do not fill the last step. With SPLIT, `parts` programs share the steps.
    """
    # Groups of several kinds take turns at parts of a bit, by where in a word they begin.
    KINDS: tl.constexpr = 4 if PARTS % 2 else 2 if PARTS % 4 else 1
    block, part = tl.program_id(0), tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    k = (tl.arange(0, WARPS) * BLOCK_K)[:, None] + tl.arange(0, BLOCK_K)[None, :]
    start, stop = steps * part // parts, steps * (part + 1) // parts
    up, down = row_powers(x, start * WARPS * BLOCK_K, stop * WARPS * BLOCK_K, m, rows, in_features)
    some = block // KINDS * GROUPS + tl.arange(0, GROUPS)
    group = (tl.minimum(some, groups // KINDS - 1) * KINDS + block % KINDS).to(tl.int64)
    k += start * WARPS * BLOCK_K
    end = tl.where(group % TILE_GROUPS == 0, group + TILE_GROUPS, group) * PARTS // 4  # the stream is a circle
    before_at = words + (end - 1)[None, :, None] * in_features + k[:, None, :]
    words_at = words + (group * PARTS // 4)[None, :, None] * in_features + k[:, None, :]
    begin = block % KINDS * PARTS * 4 % 16  # bits of the first words that are another group's
    if PARTS % 4 == 0:
        acc = _sums(x, before_at, words_at, k, m, up, rows, in_features, start, stop, 0, PARTS, STATE_BITS,
                    FACTOR, ADDEND, HALVES, GROUPS, BLOCK_M, BLOCK_K, WARPS, MASKED, USE_ASM)  # fmt: skip
    elif PARTS % 2 == 0:
        if begin == 0:
            acc = _sums(x, before_at, words_at, k, m, up, rows, in_features, start, stop, 0, PARTS, STATE_BITS,
                        FACTOR, ADDEND, HALVES, GROUPS, BLOCK_M, BLOCK_K, WARPS, MASKED, USE_ASM)  # fmt: skip
        else:
            acc = _sums(x, before_at, words_at, k, m, up, rows, in_features, start, stop, 8, PARTS, STATE_BITS,
                        FACTOR, ADDEND, HALVES, GROUPS, BLOCK_M, BLOCK_K, WARPS, MASKED, USE_ASM)  # fmt: skip
    elif begin % 8 == 0:
        if begin == 0:
            acc = _sums(x, before_at, words_at, k, m, up, rows, in_features, start, stop, 0, PARTS, STATE_BITS,
                        FACTOR, ADDEND, HALVES, GROUPS, BLOCK_M, BLOCK_K, WARPS, MASKED, USE_ASM)  # fmt: skip
        else:
            acc = _sums(x, before_at, words_at, k, m, up, rows, in_features, start, stop, 8, PARTS, STATE_BITS,
                        FACTOR, ADDEND, HALVES, GROUPS, BLOCK_M, BLOCK_K, WARPS, MASKED, USE_ASM)  # fmt: skip
    elif begin == 4:
        acc = _sums(x, before_at, words_at, k, m, up, rows, in_features, start, stop, 4, PARTS, STATE_BITS,
                    FACTOR, ADDEND, HALVES, GROUPS, BLOCK_M, BLOCK_K, WARPS, MASKED, USE_ASM)  # fmt: skip
    else:
        acc = _sums(x, before_at, words_at, k, m, up, rows, in_features, start, stop, 12, PARTS, STATE_BITS,
                    FACTOR, ADDEND, HALVES, GROUPS, BLOCK_M, BLOCK_K, WARPS, MASKED, USE_ASM)  # fmt: skip
    total = _rows(acc) * down[:, None]
    row = tl.arange(0, GROUPS * 16)
    n = ((block // KINDS * GROUPS + row // 16) * KINDS + block % KINDS) * 16 + row % 16
    finish(total, tl.load(scale) / DIVISOR, row_scales, out, partials, counters, block, part, parts, n, m, rows,
           out_features, ROW_SCALES, SPLIT)  # fmt: skip


@triton.jit
def _number(before, word, END: tl.constexpr, STATE_BITS: tl.constexpr, FACTOR: tl.constexpr, ADDEND: tl.constexpr,
            HALVES: tl.constexpr, USE_ASM: tl.constexpr):  # fmt: skip
    """The value of a row whose bits end at END, float16, before its division: exact for bytes; of halves, as the
    format rounds it."""
    if USE_ASM:
        text: tl.constexpr = row_text(END, STATE_BITS, FACTOR, ADDEND, HALVES, True)
        dtype: tl.constexpr = (tl.float16, tl.float16)
        return tl.inline_asm_elementwise(text, "=r,=r,r,r", [before, word], dtype, is_pure=True, pack=2)[0]
    else:
        return _values(before, word, END, STATE_BITS, FACTOR, ADDEND, HALVES).to(tl.float16)


@triton.jit
def _write(words, before_at, row_scales, out, k, group, factor, in_features, out_features, START: tl.constexpr,
           PARTS: tl.constexpr, STATE_BITS: tl.constexpr, FACTOR: tl.constexpr, ADDEND: tl.constexpr,
           HALVES: tl.constexpr, NUMERATOR: tl.constexpr, DENOMINATOR: tl.constexpr, ROW_SCALES: tl.constexpr,
           USE_ASM: tl.constexpr):  # fmt: skip
    """Write some columns of a group of rows; START: bits of its first word of another group."""
    known = k < in_features
    word = tl.load(before_at + k, mask=known, other=0)
    for i in tl.static_range(words_of(PARTS, START)):
        before = word
        word = tl.load(words + (group * PARTS // 4 + i) * in_features + k, mask=known, other=0)
        for row in tl.static_range(rows_to(i, PARTS, START), rows_to(i + 1, PARTS, START)):
            value = _number(before, word, bits_to(row, PARTS, START), STATE_BITS, FACTOR, ADDEND, HALVES, USE_ASM)
            value = value.to(tl.float32)
            if not HALVES:
                value = divided(value * NUMERATOR, DENOMINATOR, USE_ASM)
            n = group * 16 + row
            value *= factor
            if ROW_SCALES:
                value *= tl.load(row_scales + n).to(tl.float32)
            tl.store(out + n * in_features + k, value.to(out.dtype.element_ty), mask=known & (n < out_features))


@triton.jit
def decode(words, scale, row_scales, out, in_features, out_features, PARTS: tl.constexpr,
           STATE_BITS: tl.constexpr, TILE_GROUPS: tl.constexpr, FACTOR: tl.constexpr, ADDEND: tl.constexpr,
           HALVES: tl.constexpr, NUMERATOR: tl.constexpr, DENOMINATOR: tl.constexpr, ROW_SCALES: tl.constexpr,
           BLOCK: tl.constexpr, USE_ASM: tl.constexpr):  # fmt: skip
    """out [out_features, in_features]; program (BLOCK columns, group of 16 rows)."""
    group = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    factor = tl.load(scale)
    end = tl.where(group % TILE_GROUPS == 0, group + TILE_GROUPS, group) * PARTS // 4  # the stream is a circle
    before_at = words + (end - 1) * in_features
    begin = group * PARTS * 4 % 16  # bits of the first word that are another group's
    if PARTS % 4 == 0:
        _write(words, before_at, row_scales, out, k, group, factor, in_features, out_features, 0, PARTS,
               STATE_BITS, FACTOR, ADDEND, HALVES, NUMERATOR, DENOMINATOR, ROW_SCALES, USE_ASM)  # fmt: skip
    elif PARTS % 2 == 0:
        if begin == 0:
            _write(words, before_at, row_scales, out, k, group, factor, in_features, out_features, 0, PARTS,
                   STATE_BITS, FACTOR, ADDEND, HALVES, NUMERATOR, DENOMINATOR, ROW_SCALES, USE_ASM)  # fmt: skip
        else:
            _write(words, before_at, row_scales, out, k, group, factor, in_features, out_features, 8, PARTS,
                   STATE_BITS, FACTOR, ADDEND, HALVES, NUMERATOR, DENOMINATOR, ROW_SCALES, USE_ASM)  # fmt: skip
    elif begin % 8 == 0:
        if begin == 0:
            _write(words, before_at, row_scales, out, k, group, factor, in_features, out_features, 0, PARTS,
                   STATE_BITS, FACTOR, ADDEND, HALVES, NUMERATOR, DENOMINATOR, ROW_SCALES, USE_ASM)  # fmt: skip
        else:
            _write(words, before_at, row_scales, out, k, group, factor, in_features, out_features, 8, PARTS,
                   STATE_BITS, FACTOR, ADDEND, HALVES, NUMERATOR, DENOMINATOR, ROW_SCALES, USE_ASM)  # fmt: skip
    elif begin == 4:
        _write(words, before_at, row_scales, out, k, group, factor, in_features, out_features, 4, PARTS,
               STATE_BITS, FACTOR, ADDEND, HALVES, NUMERATOR, DENOMINATOR, ROW_SCALES, USE_ASM)  # fmt: skip
    else:
        _write(words, before_at, row_scales, out, k, group, factor, in_features, out_features, 12, PARTS,
               STATE_BITS, FACTOR, ADDEND, HALVES, NUMERATOR, DENOMINATOR, ROW_SCALES, USE_ASM)  # fmt: skip
