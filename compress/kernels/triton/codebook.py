"""The `codebook` format on a GPU: gathered entries become tensor-core operands, for a few rows of activations.

    out^T [n, m] = sum over codes of entry(code) x, times the scale of the codebook

Built for codes of 8 bits and entries of four int8, along the columns ("in") or along the rows ("out"): an entry is one
32-bit word. The entries of two neighbouring codes become eight float16 in four registers of two, without a change of
place. Along the columns the four registers of codes 2c and 2c + 1 are the columns 8c + (0, 1), (2, 3), (4, 5), (6, 7):
four products with activations picked likewise. Along the rows they are the four rows, each of two neighbouring columns:
four products with the same activations.

A gather for every four weights is what limits these kernels: its addresses fall on 8 cache lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compress.formats import codebook as codebook_format
from compress.formats.codebook import Params
from compress.kernels.triton import splits

BLOCKS = {"in": (128, 32), "out": (64, 64)}  # code rows of a program, words of a step at most; a word has two codes
LEAST_WORDS = 16
WARPS = 4
OCCUPANCY = 4  # programs that the shared memory of a multiprocessor holds
OUTLIER_BLOCK = 16
MOST_ROWS = 16


def supports(params: Params, shape: tuple[int, int]) -> bool:
    """One stage of 8-bit codes for entries of four int8, and groups that steps of 16 words can respect."""
    plain = not (params.svd_rank or params.scale_columns) and params.codebook_dtype == "int8"
    if params.bits != (8,) or params.vector_dim != 4 or not plain or params.tile_words < LEAST_WORDS:
        return False
    if params.outliers and (params.axis != "out" or params.outlier_bits != 4):
        return False
    columns, rows = group_codes(params)
    return params.norm == "none" and columns % LEAST_WORDS == 0 and (rows == 0 or rows % LEAST_WORDS == 0)


def most_rows(params: Params, shape: tuple[int, int], dtype: torch.dtype) -> int:
    return MOST_ROWS


def group_codes(params: Params) -> tuple[int, int]:
    """Code columns and code rows that share a codebook; 0: all."""
    columns = 0 if params.group_columns == -1 else params.group_columns // params.width
    return columns, 0 if params.group_rows == -1 else params.group_rows // params.height


def configuration(params: Params, rows: int, shape: tuple[int, int]) -> dict[str, Any]:
    """The kernel's constants but for SPLIT and USE_ASM."""
    columns_of, rows_of = group_codes(params)
    height, words = BLOCKS[params.axis]
    words = min(words, params.tile_words)
    while columns_of and columns_of % words:
        words //= 2
    while rows_of and rows_of % height:
        height //= 2
    columns = codebook_format.padded_shape(params, shape)[1] * params.width
    return {
        "ALONG_ROWS": params.axis == "out", "TILE_WORDS": params.tile_words, "GROUP_COLUMNS": columns_of,
        "GROUP_ROWS": rows_of, "OUTLIERS": params.outliers, "OUTLIER_BLOCK": OUTLIER_BLOCK,
        "BLOCK_N": height, "BLOCK_M": 8 if rows <= 8 else 16, "BLOCK_WORDS": words, "MASKED": columns != shape[1],
    }  # fmt: skip


def entries_text(along_rows: bool) -> str:
    """PTX: $4, $5 are the entries of two neighbouring codes, $0 to $3 their eight numbers in float16."""
    text = "{ .reg .b32 a, b, c, z; mov.b32 c, 0x64646464; mov.b32 z, 0xE480E480; "  # bytes over 1024, and -1152
    if along_rows:
        text += "prmt.b32 a, $4, $5, 0x5140; prmt.b32 b, $4, $5, 0x7362; "
    else:
        text += "mov.b32 a, $4; mov.b32 b, $5; "
    text += "xor.b32 a, a, 0x80808080; xor.b32 b, b, 0x80808080; "
    for i in range(4):
        register = "$" + str(i)
        text += "prmt.b32 " + register + (", a" if i < 2 else ", b") + ", c, " + ("0x4342; " if i % 2 else "0x4140; ")
        text += "add.f16x2 " + register + ", " + register + ", z; "
    return text + "}"


def matmul(x: Tensor, tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> Tensor:
    """x [rows, in], contiguous, times the stored weight [out, in] -> [rows, out] of the type of x."""
    from compress.kernels.triton import _codebook

    rows, (out_features, in_features) = x.shape[0], shape
    constants = configuration(params, rows, shape)
    code_rows, code_columns = codebook_format.padded_shape(params, shape)
    column_groups, row_groups = codebook_format.groups(params, shape)
    blocks, steps = -(-code_rows // constants["BLOCK_N"]), code_columns // (2 * constants["BLOCK_WORDS"])
    slots = splits.properties(x.device).multiprocessors * OCCUPANCY
    size = constants["BLOCK_M"] * constants["BLOCK_N"] * params.height
    parts = splits.count(blocks, steps, slots, size)
    partials, counters = splits.workspace(x.device)
    out = torch.empty(rows, out_features, dtype=x.dtype, device=x.device)
    if params.permuted:
        x = x.index_select(1, tensors["order"].int())
    outliers = [tensors.get(name, x) for name in ("outliers", "outlier_scale", "outlier_index")]
    _codebook.multiply[blocks, parts](
        x, tensors["words8"], tensors["codebook"], tensors["codebook_scales"], *outliers, out, partials, counters,
        rows, in_features, out_features, code_rows, code_columns, column_groups, row_groups, steps, parts,
        SPLIT=parts > 1, USE_ASM=_codebook.COMPILED, num_warps=WARPS, **constants,
    )  # fmt: skip
    return out
