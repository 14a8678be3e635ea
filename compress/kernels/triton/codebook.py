"""The `codebook` format on a GPU: gathered entries become tensor-core operands, for a few rows of activations.

    out^T [n, m] = sum over codes of entry(code) x, times the scale of the codebook

Built for codes of 8 bits and entries of four int8, along the columns ("in") or along the rows ("out"): an entry is one
32-bit word. The entries of two neighbouring codes become eight float16 in four registers of two, without a change of
place. Along the columns the four registers of codes 2c and 2c + 1 are the columns 8c + (0, 1), (2, 3), (4, 5), (6, 7):
four products with activations picked likewise. Along the rows they are the four rows, each of two neighbouring columns:
four products with the same activations.

A gather for every four weights is what limits these kernels: its addresses fall on 8 cache lines.

Other widths, lengths, types and stages, with scales, norms and any outliers, take the general kernels of `_gather.py`,
which look up every entry by itself and round the weights to float16. A weight then costs 4 instructions (d = 4,
float16) to 15 (d = 2, or two stages of int8), as many as an H200 has time for while it would read bfloat16, and 25 for
3 bits of d = 1: still less than to decode and multiply. They decode all codebooks.

Permuted weights are decoded in the stored order, and meet permuted activations: whatever the number of rows, that is
less than to write the weight in its own order, two bytes at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.formats import codebook as codebook_format
from compress.formats.codebook import Params
from compress.kernels.triton import split_k
from compress.numerics.packing import plane_fields, plane_widths

BLOCKS = {"in": (128, 32), "out": (64, 64)}  # code rows of a program, words of a step at most; a word has two codes
LEAST_WORDS = 16
WARPS = 4
OCCUPANCY = 4  # programs that the shared memory of a multiprocessor holds
OUTLIER_BLOCK = 16
MOST_ROWS = 16  # of activations that a program multiplies

# Of the general kernels.
STAGES, PLANES, LONGEST = 2, 3, 32
TILE = (64, 64)  # rows and columns of the weight in a step of the product
DECODED = {"in": (4, 512), "out": (16, 128)}  # and in a program of the decoder


def supports(params: Params, shape: tuple[int, int]) -> bool:
    """One or two stages of codes that lie in up to three planes, for entries of up to 32."""
    few = len(params.bits) <= STAGES and all(len(plane_widths(bits)) <= PLANES for bits in params.bits)
    return few and params.vector_dim <= LONGEST


def most_rows(params: Params, shape: tuple[int, int], dtype: torch.dtype) -> int:
    return sys.maxsize if params.permuted else MOST_ROWS


def four_bytes(params: Params) -> bool:
    """Whether the kernel of `_codebook.py` can take it: groups are those that steps of 16 words can respect."""
    plain = not (params.svd_rank or params.scale_columns) and params.codebook_dtype == "int8"
    if params.bits != (8,) or params.vector_dim != 4 or not plain or params.tile_words < LEAST_WORDS:
        return False
    if params.outliers and (params.axis != "out" or params.outlier_bits != 4):
        return False
    columns, rows = group_codes(params)
    return params.norm == "none" and columns % LEAST_WORDS == 0 and (rows == 0 or rows % LEAST_WORDS == 0)


def group_codes(params: Params) -> tuple[int, int]:
    """Code columns and code rows that share a codebook; 0: all."""
    columns = 0 if params.group_columns == -1 else params.group_columns // params.width
    return columns, 0 if params.group_rows == -1 else params.group_rows // params.height


def configuration(params: Params, rows: int, shape: tuple[int, int]) -> dict[str, Any]:
    """The constants of `_codebook.multiply` but for SPLIT and USE_ASM."""
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
    if params.permuted:
        x = x.index_select(1, tensors["order"].int())
    if x.shape[0] > MOST_ROWS:
        return F.linear(x, _decoded(tensors, params, shape, x.dtype, ordered=False))
    return _four_bytes(x, tensors, params, shape) if four_bytes(params) else _gathered(x, tensors, params, shape)


def decode(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The dequantized weight [out, in], computed in float32 and rounded once, as formats/codebook.py does."""
    return _decoded(tensors, params, shape, dtype, ordered=params.permuted)


def _four_bytes(x: Tensor, tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> Tensor:
    from compress.kernels.triton import _codebook

    rows, (out_features, in_features) = x.shape[0], shape
    constants = configuration(params, rows, shape)
    code_rows, code_columns = codebook_format.padded_shape(params, shape)
    column_groups, row_groups = codebook_format.groups(params, shape)
    blocks, steps = -(-code_rows // constants["BLOCK_N"]), code_columns // (2 * constants["BLOCK_WORDS"])
    slots = split_k.properties(x.device).multiprocessors * OCCUPANCY
    size = constants["BLOCK_M"] * constants["BLOCK_N"] * params.height
    parts = split_k.count(blocks, steps, slots, size)
    partials, counters = split_k.workspace(x.device)
    out = torch.empty(rows, out_features, dtype=x.dtype, device=x.device)
    outliers = [tensors.get(name, x) for name in ("outliers", "outlier_scale", "outlier_index")]
    _codebook.multiply[blocks, parts](
        x, tensors["words8"], tensors["codebook"], tensors["codebook_scales"], *outliers, out, partials, counters,
        rows, in_features, out_features, code_rows, code_columns, column_groups, row_groups, steps, parts,
        SPLIT=parts > 1, USE_ASM=_codebook.COMPILED, num_warps=WARPS, **constants,
    )  # fmt: skip
    return out


def _gathered(x: Tensor, tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> Tensor:
    from compress.kernels.triton import _gather

    rows, (out_features, in_features) = x.shape[0], shape
    code_rows, code_columns = codebook_format.code_shape(params, shape)
    constants = multiply_constants(params, rows, shape)
    blocks, steps = -(-code_rows // constants["BLOCK_N"]), -(-code_columns // constants["BLOCK_C"])
    slots = split_k.properties(x.device).multiprocessors * OCCUPANCY
    size = constants["BLOCK_M"] * constants["BLOCK_N"] * (constants["PADDED"] if params.axis == "out" else 1)
    parts = split_k.count(blocks, steps, slots, size)
    partials, counters = split_k.workspace(x.device)
    out = torch.empty(rows, out_features, dtype=x.dtype, device=x.device)
    _gather.multiply[blocks, parts](
        x, *_pointers(tensors, params, shape), out, partials, counters, rows, *_sizes(params, shape), in_features,
        out_features, steps, parts, SPLIT=parts > 1, num_warps=WARPS, **constants,
    )  # fmt: skip
    return out


def _decoded(
    tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], dtype: torch.dtype, *, ordered: bool
) -> Tensor:
    """The weight [out, in], its columns in their own or in the stored order."""
    from compress.kernels.triton import _gather

    pointers = _pointers(tensors, params, shape)
    out = torch.empty(shape, dtype=dtype, device=pointers[0].device)
    constants = decode_constants(params, ordered=ordered)
    code_rows, code_columns = codebook_format.code_shape(params, shape)
    _gather.decode[-(-code_columns // constants["BLOCK_C"]), -(-code_rows // constants["BLOCK_N"])](
        *pointers, tensors["order"] if ordered else out, out, *_sizes(params, shape), shape[1], shape[0],
        num_warps=WARPS, enable_fp_fusion=False, **constants,
    )  # fmt: skip
    return out


def general(params: Params) -> dict[str, Any]:
    """What the constants of the general kernels have in common."""
    columns, rows = group_codes(params)
    return {
        "BITS": params.bits[0], "BITS2": params.bits[1] if len(params.bits) > 1 else 0, "DIM": params.vector_dim,
        "PADDED": _power(params.vector_dim), "ALONG_ROWS": params.axis == "out", "TILE_WORDS": params.tile_words,
        "GROUP_COLUMNS": columns, "GROUP_ROWS": rows, "SCALED": params.codebook_dtype == "int8" and not params.svd_rank,
        "SCALE_COLUMNS": params.scale_columns, "NORM": params.norm, "BIAS": params.bias,
        "OUTLIERS": params.outlier_bits if params.outliers else 0,
    }  # fmt: skip


def multiply_constants(params: Params, rows: int, shape: tuple[int, int]) -> dict[str, Any]:
    """The constants of `_gather.multiply` but for SPLIT."""
    cut = block(params, *TILE)
    masked = shape[1] % (cut["BLOCK_C"] * params.width) != 0
    return general(params) | cut | {"BLOCK_M": 8 if rows <= 8 else 16, "MASKED": masked}


def decode_constants(params: Params, *, ordered: bool) -> dict[str, Any]:
    """The constants of `_gather.decode`."""
    return general(params) | block(params, *DECODED[params.axis]) | {"ORDERED": ordered}


def block(params: Params, rows: int, columns: int) -> dict[str, int]:
    """Code rows and columns of a block of `rows` x `columns` weights, less broad where a tile of words is narrow."""
    size = _power(params.vector_dim)
    along_rows = params.axis == "out"
    most = columns if along_rows else columns // size
    narrow = min(most, params.tile_words) if params.tile_words >= LEAST_WORDS else most  # one field of each word
    rows = max(1, rows // size) if along_rows else rows
    return {"BLOCK_N": rows * (most // narrow), "BLOCK_C": narrow}


def _power(size: int) -> int:
    """The least power of two from `size` on."""
    return 1 << (size - 1).bit_length()


def _sizes(params: Params, shape: tuple[int, int]) -> tuple[int, ...]:
    """Stored code rows, tiles of code columns, groups of columns and of rows, blocks with a scale."""
    blocks = -(-shape[1] // params.scale_columns) if params.scale_columns else 0
    rows, columns = codebook_format.padded_shape(params, shape)
    tiles = columns // (params.tile_words * max(plane_fields(bits) for bits in params.bits))
    return (rows, tiles, *codebook_format.groups(params, shape), blocks)


def _pointers(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> list[Tensor]:
    """What the general kernels read, in order; another tensor in place of what there is not."""
    stages = []
    for stage, bits in enumerate(params.bits):
        prefix = f"stage{stage}_" if stage else ""
        planes = [tensors[f"{prefix}words{width}"] for width in plane_widths(bits)]
        if params.svd_rank:
            book = codebook_format.entries(tensors, params, stage)
        else:
            book = tensors[f"{prefix}codebook"]
        stages += [*(planes + planes[:1] * PLANES)[:PLANES], book, tensors.get(f"{prefix}codebook_scales", book)]
    stages = (stages * STAGES)[: STAGES * (PLANES + 2)]
    absent = stages[0]
    factors, slots = absent, absent
    if params.scale_columns:
        every = torch.arange(codebook_format.SCALE_LEVELS, device=absent.device)[:, None]
        factors = codebook_format.block_factors(every, tensors["scale_grid"])
    if params.outliers:
        slots = _slots(tensors, params, shape[1])
    stored = [tensors.get(name, absent) for name in ("scales", "norm_scale", "norm_bias", "outliers", "outlier_scale")]
    return [*stages, stored[0], factors, *stored[1:3], slots, *stored[3:]]


def _slots(tensors: Mapping[str, Tensor], params: Params, columns: int) -> Tensor:
    """Which outlier each stored column is, int32 [in]; -1: none."""
    index = tensors["outlier_index"].long()
    slots = torch.full((columns,), -1, dtype=torch.int32, device=index.device)
    slots[index] = torch.arange(len(index), dtype=torch.int32, device=index.device)
    return slots[tensors["order"].long()] if params.permuted else slots
