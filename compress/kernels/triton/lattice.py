"""The `lattice` format on a GPU: products with the lattice's coordinates, for a few rows of activations.

    x . (G z) = (G^T x) . z

So a first, small kernel multiplies the activations of each group with its matrix, and what is left is a product with
plain small integers and one factor a row. The results of the first kernel are float16 times a power of two for each
row and group, which no size of activations leaves. A weight costs about 5 instructions in groups of 1 and 2 bits and 9
in those of 3, whose sixteenth field is spread over three words.

With a curve on the values this is not so: their matrix products must be made for every weight, more than a few rows of
activations are worth. Such weights are decoded (and rare: the curve is off by default, compress/quant/glvq.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compress.formats import lattice as lattice_format
from compress.formats.lattice import Params
from compress.kernels.triton import split_k

BLOCK_ROWS = 64
LONGEST = 128  # columns of a step, of which a group has a whole number
MOST_STEPS = 8
WARPS = 4
OCCUPANCY = 4  # programs that a multiprocessor holds
DECODED = 16  # rows of a program of the decoder
MOST_ROWS = 16


CENTRES = {1: "0xB800B800", 2: "0xBE00BE00", 3: "0xC300C300", 4: "0xC780C780"}  # -(2**bits - 1) / 2 in float16, twice


def coordinate_text(bits: int) -> str:
    """PTX: $1 are the words of two columns, the first in the low half, $2 and $3 where in them their codes of `bits`
    bits stand; $0 becomes their coordinates.
    """
    mask = "0x" + ("000" + str((1 << bits) - 1) if bits < 4 else "000F") * 2
    text = "{ .reg .b32 t, u, c; shr.u32 t, $1, $2; shr.u32 u, $1, $3; prmt.b32 t, t, u, 0x7610; "
    text += "lop3.b32 t, t, " + mask + ", 0x64006400, 0xEA; "  # 1024 + code
    text += "mov.b32 c, 0xE400E400; add.f16x2 t, t, c; "
    return text + "mov.b32 c, " + CENTRES[bits] + "; add.f16x2 $0, t, c; }"


def spare_text() -> str:
    """PTX: $0 becomes the coordinates whose bits are the top ones of the words $1, $2 and $3, each of two columns."""
    text = "{ .reg .b32 t, u, c; shr.u32 t, $1, 15; lop3.b32 t, t, 0x00010001, 0x64006400, 0xEA; "
    text += "shr.u32 u, $2, 14; lop3.b32 t, u, 0x00020002, t, 0xEA; "
    text += "shr.u32 u, $3, 13; lop3.b32 t, u, 0x00040004, t, 0xEA; "
    text += "mov.b32 c, 0xE400E400; add.f16x2 t, t, c; mov.b32 c, " + CENTRES[3] + "; add.f16x2 $0, t, c; "
    return text + "}"


def supports(params: Params, shape: tuple[int, int]) -> bool:
    """Groups of few steps: their code is unrolled."""
    return params.group_size <= MOST_STEPS * _step(params)


def most_rows(params: Params, shape: tuple[int, int], dtype: torch.dtype) -> int:
    return 0 if params.compand else MOST_ROWS


def configuration(params: Params, rows: int, shape: tuple[int, int]) -> dict[str, Any]:
    """The product's constants but for SPLIT and USE_ASM."""
    return _layout(params, shape) | {"BLOCK_N": BLOCK_ROWS, "BLOCK_M": 8 if rows <= 8 else 16}


def decode_constants(params: Params, shape: tuple[int, int]) -> dict[str, Any]:
    """The decoder's constants."""
    known = {"DIM": params.dim, "SIDE": max(16, params.dim), "COMPAND": params.compand, "BLOCK_N": DECODED}
    return _layout(params, shape) | known


def transform_constants(params: Params) -> dict[str, Any]:
    """The constants of the transform of the activations."""
    blocks = params.group_size // params.dim
    return {"GROUP": params.group_size, "BLOCKS": 1 << (blocks - 1).bit_length(), "DIM": params.dim}


def matmul(x: Tensor, tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> Tensor:
    """x [rows, in], contiguous, times the stored weight [out, in] -> [rows, out] of the type of x."""
    from compress.kernels.triton import _lattice

    assert not params.compand, "curved weights are decoded"
    rows, groups, words = x.shape[0], lattice_format.groups(params, shape), tensors["words"]
    constants = configuration(params, rows, shape)
    blocks = -(-words.shape[0] // BLOCK_ROWS)
    slots = split_k.properties(x.device).multiprocessors * OCCUPANCY
    parts = split_k.count(blocks, groups, slots, BLOCK_ROWS * constants["BLOCK_M"])
    partials, counters = split_k.workspace(x.device)
    columns = groups * params.group_size
    turned = torch.empty(rows, columns, dtype=torch.float16, device=x.device)
    factors = torch.empty(groups, rows, dtype=torch.float32, device=x.device)
    out = torch.empty(rows, shape[0], dtype=x.dtype, device=x.device)
    _lattice.transform[groups, rows](
        x, tensors["lattices"], turned, factors, rows, shape[1], columns, **transform_constants(params)
    )
    _lattice.multiply[blocks, parts](
        turned, factors, words, tensors["group_bits"], tensors["scale"], tensors.get("row_scales", factors), out,
        partials, counters, rows, columns, shape[0], words.shape[0], groups, parts,
        SPLIT=parts > 1, USE_ASM=_lattice.COMPILED, num_warps=WARPS, **constants,
    )  # fmt: skip
    return out


def decode(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The dequantized weight [out, in] as in formats/lattice.py, in one pass; sums in another order, rounded once."""
    from compress.kernels.triton import _lattice

    words, curves = tensors["words"], tensors["lattices"]
    if params.compand:
        mu, limit = tensors["curves"].float().unbind(1)
        curves = torch.stack([torch.log1p(mu), limit / mu], 1)
    out = torch.empty(shape, dtype=dtype, device=words.device)
    groups = lattice_format.groups(params, shape)
    _lattice.decode[groups, -(-shape[0] // DECODED)](
        words, tensors["group_bits"], tensors["lattices"], curves, tensors["scale"], tensors.get("row_scales", out),
        out, shape[1], shape[0], groups, num_warps=WARPS, **decode_constants(params, shape),
    )  # fmt: skip
    return out


def _layout(params: Params, shape: tuple[int, int]) -> dict[str, Any]:
    size = params.group_size
    return {
        "BITS": params.bits, "GROUP": size, "GROUPS": 1 << (lattice_format.groups(params, shape) - 1).bit_length(),
        "ROW_SCALES": params.row_scales, "BLOCK_K": _step(params),
    }  # fmt: skip


def _step(params: Params) -> int:
    """Columns that a step takes of a group, a power of two."""
    return min(LONGEST, params.group_size & -params.group_size)
