"""The `e8p` format on a GPU: lattice points become tensor-core operands in registers, for a few rows of activations.

    out^T [n, m] = sum over codes of point(code) x, times scale and row scale

One word is looked up for eight weights: a nibble of it is 8 + 2 v, v being an absolute value before the shift, an odd
number (-v where the table's sum is odd, coordinate 7). Exclusive or with 14 changes the sign of 2 v, and with 1 takes
one off: so with the signs and the parity p of the code spread over the nibbles, a nibble is 8 + 2 v - p, and the
weight, v + (1 - 2 p) / 4, is (nibble - 7.5) / 2. Residual points of 3 bits need no signs: their nibbles are 8 + 2 v.

Two nibbles 16 bits apart are a pair of float16 after a mask: a number that small is itself the fraction of a subnormal
float16, which tensor cores multiply exactly. The nibbles in bits 4 to 7 count sixteenfold and are summed apart. The
offset is taken off in the same way, as a constant operand that meets all activations.

The pairs of a code are the columns (0, 2), (1, 3), (4, 6), (5, 7): what a multiplication that spreads four bits gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from compress.formats import e8p as e8p_format
from compress.formats.e8p import DIM, RHO, Params
from compress.kernels.triton import split_k

BLOCK_ROWS = 64
BLOCK_CODES = {8: 32, 16: 16}  # of a step, for a tile of rows of x: 256 or 128 columns
WARPS = 2
OCCUPANCY = 5  # programs that a multiprocessor holds
NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # of the coordinates
DECODED = (4, 64)  # rows, and codes of each, of a program of the decoder
MOST_ROWS = 16


def supports(params: Params, shape: tuple[int, int]) -> bool:
    return True


def most_rows(params: Params, shape: tuple[int, int], dtype: torch.dtype) -> int:
    return MOST_ROWS


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
    block_m = 8 if rows <= 8 else 16
    codes = BLOCK_CODES[block_m]
    return {
        "BITS": params.bits, "RHO": RHO.get(params.bits, 1.0), "ROW_SCALES": params.row_scales,
        "BLOCK_N": BLOCK_ROWS, "BLOCK_M": block_m, "BLOCK_CODES": codes, "MASKED": shape[1] % (DIM * codes) != 0,
    }  # fmt: skip


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


def decode(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The dequantized weight [out, in], computed in float32 and rounded once, as formats/e8p.py does; in one pass."""
    from compress.kernels.triton import _e8p

    codes = tensors["codes"]
    out = torch.empty(shape, dtype=dtype, device=codes.device)
    rows, columns = DECODED
    _e8p.decode[-(-codes.shape[1] // columns), -(-shape[0] // rows)](
        codes, tensors.get("residual", codes), *tables(codes.device), tensors["scale"], tensors.get("row_scales", out),
        out, shape[1], shape[0], codes.shape[1] // 8, USE_ASM=_e8p.COMPILED, num_warps=WARPS,
        **decode_constants(params),
    )  # fmt: skip
    return out


def decode_constants(params: Params) -> dict[str, Any]:
    """The constants of the decoder but for USE_ASM."""
    rows, columns = DECODED
    return {
        "BITS": params.bits, "RHO": RHO.get(params.bits, 1.0), "ROW_SCALES": params.row_scales,
        "BLOCK_N": rows, "BLOCK_CODES": columns,
    }  # fmt: skip


def matmul(x: Tensor, tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> Tensor:
    """x [rows, in], contiguous, times the stored weight [out, in] -> [rows, out] of the type of x."""
    from compress.kernels.triton import _e8p

    rows, (out_features, in_features) = x.shape[0], shape
    constants = configuration(params, rows, shape)
    stored_rows, code_columns = tensors["codes"].shape
    blocks, steps = -(-stored_rows // BLOCK_ROWS), -(-code_columns // constants["BLOCK_CODES"])
    slots = split_k.properties(x.device).multiprocessors * OCCUPANCY
    parts = split_k.count(blocks, steps, slots, constants["BLOCK_M"] * BLOCK_ROWS)
    partials, counters = split_k.workspace(x.device)
    out = torch.empty(rows, out_features, dtype=x.dtype, device=x.device)
    _e8p.multiply[blocks, parts](
        x, tensors["codes"], tensors.get("residual", tensors["codes"]), *tables(x.device), tensors["scale"],
        tensors.get("row_scales", x), out, partials, counters,
        rows, in_features, out_features, stored_rows, code_columns // 8, steps, parts,
        SPLIT=parts > 1, USE_ASM=_e8p.COMPILED, num_warps=WARPS, **constants,
    )  # fmt: skip
    return out
