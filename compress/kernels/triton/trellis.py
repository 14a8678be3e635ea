"""The `trellis` format on a GPU: windows become tensor-core operands in registers, for a few rows of activations.

    out^T [n, m] = sum over columns of code(window of row n) x[m, column], times scale and row scale

Rows that lie 16 apart have the same shift, so that one program takes 16 groups of 16 rows: 16 products, one for each
place in a group, whose left operands are [groups, columns]. Their values are made of the words of two neighbouring
columns at a time by the assembly of `row_text`: the two halves of a register, low and high, are two numbers whose sum
is the value, and meet the same activation. So a byte sum needs no conversion and no subtraction (the half 0x6400 + sum
is 1024 + sum, the other half is -1534), and the halves of `3inst` and `mcg` no addition, which also skips the rounding
of that addition: for those two codes the product is that of the sum before it.

Activations are taken as float16, those of other types times a power of two of each row (`_parts.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.formats import trellis as trellis_format
from compress.formats.trellis import BYTE_SUMS, HALVES, Params
from compress.kernels.triton import split_k

GROUP = 16  # rows that share their words, and groups of a program: the height of a tensor-core operand
WARPS = 4  # of a program; each takes columns of its own
OCCUPANCY = {8: 3, 16: 2}  # for a tile of rows of x: programs that the registers of a multiprocessor hold
DECODED = 1024  # columns that a program of the decoder takes
MOST_ROWS = 16  # two tiles of 8; each adds a sixteenth to the instructions of a weight, but 64 registers


def supports(params: Params, shape: tuple[int, int]) -> bool:
    """Computed codes only: a table would be read at random for every weight."""
    return params.code != "hyb"


def most_rows(params: Params, shape: tuple[int, int], dtype: torch.dtype) -> int:
    return MOST_ROWS


def row_text(bits: int, state_bits: int, row: int, factor: int, addend: int, halves: bool, summed: bool) -> str:
    """PTX for row `row` of a group: $2, $3 are the words before and at its last bit, each of two neighbouring columns,
    the first in the low half; $0 and $1 become the halves of the values of the two or, if `summed`, $0 their sums.
    """
    shift = -(row + 1) * bits % 16  # bits of the word below the window
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
    block_m, block_k = (8, 32) if rows <= 8 else (16, 16)
    factor, addend, divisor, halves = computed(params.code)
    return {
        "BITS": params.bits, "STATE_BITS": params.state_bits, "TILE_GROUPS": params.tile_rows // GROUP,
        "FACTOR": factor, "ADDEND": addend, "DIVISOR": divisor, "HALVES": halves, "ROW_SCALES": params.row_scales,
        "GROUPS": GROUP, "BLOCK_M": block_m, "BLOCK_K": block_k, "WARPS": WARPS,
        "MASKED": shape[1] % (WARPS * block_k) != 0,
    }  # fmt: skip


def decode(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The dequantized weight [out, in], computed in float32 and rounded once, as formats/trellis.py does; in one pass.

    Byte sums are divided by 1477 / 10 instead of by 147.7, which float32 does not have: the quotients are the same.
    """
    from compress.kernels.triton import _trellis

    out = torch.empty(shape, dtype=dtype, device=tensors["words"].device)
    _trellis.decode[-(-shape[1] // DECODED), -(-shape[0] // GROUP)](
        tensors["words"], tensors["scale"], tensors.get("row_scales", out), out, shape[1], shape[0],
        USE_ASM=_trellis.COMPILED, num_warps=WARPS, **decode_constants(params),
    )  # fmt: skip
    return out


def decode_constants(params: Params) -> dict[str, Any]:
    """The constants of the decoder but for USE_ASM."""
    factor, addend, divisor, halves = computed(params.code)
    ratio = Fraction(str(divisor))
    return {
        "BITS": params.bits, "STATE_BITS": params.state_bits, "TILE_GROUPS": params.tile_rows // GROUP,
        "FACTOR": factor, "ADDEND": addend, "HALVES": halves, "NUMERATOR": ratio.denominator,
        "DENOMINATOR": ratio.numerator, "ROW_SCALES": params.row_scales, "BLOCK": DECODED,
    }  # fmt: skip


def matmul(x: Tensor, tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> Tensor:
    """x [rows, in], contiguous, times the stored weight [out, in] -> [rows, out] of the type of x."""
    from compress.kernels.triton import _trellis

    rows, (out_features, in_features) = x.shape[0], shape
    constants = configuration(params, rows, shape)
    block_m, step = constants["BLOCK_M"], WARPS * constants["BLOCK_K"]
    groups = trellis_format.padded_rows(params, out_features) // GROUP
    blocks, steps = -(-groups // GROUP), -(-in_features // step)
    slots = split_k.properties(x.device).multiprocessors * OCCUPANCY[block_m]
    parts = split_k.count(blocks, steps, slots, GROUP * GROUP * block_m)
    partials, counters = split_k.workspace(x.device)
    out = torch.empty(rows, out_features, dtype=x.dtype, device=x.device)
    _trellis.multiply[blocks, parts](
        x, tensors["words"], tensors["scale"], tensors.get("row_scales", x), out, partials, counters,
        rows, in_features, out_features, groups, steps, parts,
        SPLIT=parts > 1, USE_ASM=_trellis.COMPILED, num_warps=WARPS, **constants,
    )  # fmt: skip
    return out
