"""Multiply with the `codebook` format on a GPU: gathered entries become operands of tensor cores, for a few rows.

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

USE_ASM is off in the interpreter, which knows no inline assembly.
"""

# ruff: noqa: PLR0913, PLR0917 (signatures of kernels)
# mypy: disallow-untyped-defs = False, disable-error-code = "annotation-unchecked,assignment,misc"

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.formats import codebook as codebook_format
from compress.formats.codebook import Params
from compress.kernels.contract import Shape
from compress.kernels.triton import _gather, products
from compress.kernels.triton._parts import COMPILED, columns_of, finish, powers, row_powers
from compress.kernels.triton.products import GpuProduct, Grid, tile_rows
from compress.numerics.packing import plane_fields, plane_widths

BLOCKS = {"in": (128, 32), "out": (64, 64)}  # code rows of a program, words of a step at most; a word has two codes
LEAST_WORDS = 16
WARPS = 4
OCCUPANCY = 4  # programs that the shared memory of a multiprocessor holds
OUTLIER_BLOCK = 16

# Of the general kernels.
STAGES, PLANES, LONGEST = 2, 3, 32
TILE = (64, 64)  # rows and columns of the weight in a step of the product
DECODED = {"in": (4, 512), "out": (16, 128)}  # and in a program of the decoder


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> GpuProduct | None:
    """Return the product with one or two stages of codes in up to three planes, for entries of up to 32."""
    few = len(params.bits) <= STAGES and all(len(plane_widths(bits)) <= PLANES for bits in params.bits)
    return _Codebook(tensors, params, shape) if few and params.vector_dim <= LONGEST else None


def four_bytes(params: Params) -> bool:
    """Return whether the kernel of `py` can take it, in groups that steps of 16 words can respect."""
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
    """The constants of `multiply` but for SPLIT and USE_ASM."""
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
        "BLOCK_N": height, "BLOCK_M": tile_rows(rows), "BLOCK_WORDS": words, "MASKED": columns != shape[1],
    }  # fmt: skip


class _Codebook(GpuProduct):
    def most_rows(self, dtype: torch.dtype) -> int:
        """Return any number for permuted weights: more than `most` rows meet the weight decoded in the stored order."""
        return sys.maxsize if self.params.permuted else self.most

    def multiply(self, x: Tensor, out: Tensor) -> None:
        if self.params.permuted:
            x = x.index_select(1, self.tensors["order"].int())
        if x.shape[0] > self.most:
            torch.mm(x, self._decode(x.dtype, ordered=False).T, out=out)
        elif four_bytes(self.params):
            self._four_bytes(x, out)
        else:
            self._multiply_general(x, out)

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in], computed in float32 and rounded once, as formats/codebook.py does."""
        return self._decode(dtype, ordered=self.params.permuted)

    def _four_bytes(self, x: Tensor, out: Tensor) -> None:
        params, tensors, (outputs, inputs), rows = self.params, self.tensors, self.shape, x.shape[0]
        constants = configuration(params, rows, self.shape)
        code_rows, code_columns = codebook_format.padded_shape(params, self.shape)
        tiles, steps = -(-code_rows // constants["BLOCK_N"]), code_columns // (2 * constants["BLOCK_WORDS"])
        grid = Grid(tiles, steps, constants["BLOCK_M"] * constants["BLOCK_N"] * params.height, OCCUPANCY)
        outliers = [self.stored(name, x) for name in ("outliers", "outlier_scale", "outlier_index")]
        products.launch(
            multiply, (x, tensors["words8"], tensors["codebook"], tensors["codebook_scales"], *outliers), out,
            (rows, inputs, outputs, code_rows, code_columns, *codebook_format.groups(params, self.shape)), grid,
            USE_ASM=COMPILED, num_warps=WARPS, **constants,
        )  # fmt: skip

    def _multiply_general(self, x: Tensor, out: Tensor) -> None:
        params, rows = self.params, x.shape[0]
        constants = multiply_constants(params, rows, self.shape)
        code_rows, code_columns = codebook_format.code_shape(params, self.shape)
        tiles, steps = -(-code_rows // constants["BLOCK_N"]), -(-code_columns // constants["BLOCK_C"])
        height = constants["PADDED"] if params.axis == "out" else 1
        grid = Grid(tiles, steps, constants["BLOCK_M"] * constants["BLOCK_N"] * height, OCCUPANCY)
        sizes = (rows, *_sizes(params, self.shape), *self.shape[::-1])
        pointers = (x, *_pointers(self.tensors, params, self.shape))
        products.launch(_gather.multiply, pointers, out, sizes, grid, num_warps=WARPS, **constants)

    def _decode(self, dtype: torch.dtype, *, ordered: bool) -> Tensor:
        """Return the weight [out, in], its columns in their own or in the stored order."""
        params, (outputs, inputs) = self.params, self.shape
        pointers = _pointers(self.tensors, params, self.shape)
        out = torch.empty(self.shape, dtype=dtype, device=pointers[0].device)
        constants = decode_constants(params, ordered=ordered)
        code_rows, code_columns = codebook_format.code_shape(params, self.shape)
        _gather.decode[-(-code_columns // constants["BLOCK_C"]), -(-code_rows // constants["BLOCK_N"])](
            *pointers, self.tensors["order"] if ordered else out, out, *_sizes(params, self.shape), inputs, outputs,
            num_warps=WARPS, enable_fp_fusion=False, **constants,
        )  # fmt: skip
        return out


def general(params: Params) -> dict[str, Any]:
    """Return the constants that the general kernels have in common."""
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
    return general(params) | cut | {"BLOCK_M": tile_rows(rows), "MASKED": masked}


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
    """Return the tensors that the general kernels read, in order; another one in place of what there is not."""
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


# What runs on the device.


@triton.constexpr_function
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


@triton.jit
def _byte(entry, I: tl.constexpr):
    return (entry << (24 - 8 * I) >> 24).to(tl.float16)


@triton.jit
def _values(entry, ALONG_ROWS: tl.constexpr, USE_ASM: tl.constexpr):
    """Entries [n, j] int32 -> four tensors [n, j] float16, as the head of codebook.py says."""
    if USE_ASM:
        text: tl.constexpr = entries_text(ALONG_ROWS)
        dtype: tl.constexpr = (tl.float16, tl.float16, tl.float16, tl.float16)
        return tl.inline_asm_elementwise(text, "=r,=r,=r,=r,r,r", [entry], dtype, is_pure=True, pack=2)
    elif ALONG_ROWS:
        return _byte(entry, 0), _byte(entry, 1), _byte(entry, 2), _byte(entry, 3)
    else:
        n: tl.constexpr = entry.shape[0]
        j: tl.constexpr = entry.shape[1]
        even, odd = tl.split(tl.reshape(entry, (n, j // 2, 2)))
        first = tl.reshape(tl.join(_byte(even, 0), _byte(even, 1)), (n, j))
        second = tl.reshape(tl.join(_byte(even, 2), _byte(even, 3)), (n, j))
        third = tl.reshape(tl.join(_byte(odd, 0), _byte(odd, 1)), (n, j))
        fourth = tl.reshape(tl.join(_byte(odd, 2), _byte(odd, 3)), (n, j))
        return first, second, third, fourth


@triton.jit
def _add(acc, value, scale, x, column, m, up, rows, in_features, ALONG_ROWS: tl.constexpr, BLOCK_WORDS: tl.constexpr,
         MASKED: tl.constexpr):  # fmt: skip
    """acc + the products of the values of the codes from `column` on, times the scale of their codebook."""
    j = tl.arange(0, BLOCK_WORDS)
    if ALONG_ROWS:
        columns = columns_of(x, column + j, m, up, rows, in_features, MASKED)
        new = ()
        for i in tl.static_range(4):
            new = new + (acc[i] + tl.dot(value[i], columns) * scale,)
        return new
    else:
        total = tl.zeros(acc[0].shape, tl.float32)
        for i in tl.static_range(4):
            k = 4 * column + j // 2 * 8 + 2 * i + j % 2
            total = tl.dot(value[i], columns_of(x, k, m, up, rows, in_features, MASKED), total)
        return (acc[0] + total * scale,)


@triton.jit
def _outliers(acc, x, outliers, scales, index, n, m, step, rows, in_features, code_rows, COUNT: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    """acc + the integers of some outlier columns times their activations: four rows of a code row are 16 bits."""
    j = step * BLOCK + tl.arange(0, BLOCK)
    stored = tl.minimum(j, COUNT - 1)
    mask = (j < COUNT)[:, None] & (m < rows)[None, :]
    columns = tl.load(x + m[None, :] * in_features + tl.load(index + stored)[:, None], mask=mask, other=0.0)
    columns = columns.to(tl.float32) * tl.load(scales + stored).to(tl.float32)[:, None]
    up, down = powers(tl.max(tl.abs(columns), 0))
    columns = (columns * up[None, :]).to(tl.float16)
    words = tl.load(outliers.to(tl.pointer_type(tl.int16)) + stored[None, :] * code_rows + n[:, None])
    new = ()
    for i in tl.static_range(4):
        value = (((words >> (4 * i)) & 15) - 8).to(tl.float16)
        new = new + (acc[i] + tl.dot(value, columns) * down[None, :],)
    return new


@triton.jit(do_not_specialize=["rows", "steps", "parts", "code_rows", "column_groups", "row_groups"])
def multiply(x, words, codebook, scales, outliers, outlier_scale, outlier_index, out, partials, counters,
             rows, in_features, out_features, code_rows, code_columns, column_groups, row_groups, steps, parts,
             ALONG_ROWS: tl.constexpr, TILE_WORDS: tl.constexpr, GROUP_COLUMNS: tl.constexpr,
             GROUP_ROWS: tl.constexpr, OUTLIERS: tl.constexpr, OUTLIER_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
             BLOCK_M: tl.constexpr, BLOCK_WORDS: tl.constexpr, MASKED: tl.constexpr, SPLIT: tl.constexpr,
             USE_ASM: tl.constexpr):  # fmt: skip
    """out [rows, out_features] = x [rows, in_features] W^T; program (BLOCK_N code rows, part of the columns).

    x and out have one type. GROUP_*: code columns and code rows of a codebook, 0: all; MASKED: x has fewer columns than
    the codes. With SPLIT, `parts` programs share the steps.
    """
    block, part = tl.program_id(0), tl.program_id(1)
    n = tl.minimum(block * BLOCK_N + tl.arange(0, BLOCK_N), code_rows - 1)
    m = tl.arange(0, BLOCK_M)
    j = tl.arange(0, BLOCK_WORDS)
    words_at = words + n.to(tl.int64)[:, None] * (code_columns // 2) + j[None, :]
    row_group = block * BLOCK_N // GROUP_ROWS if GROUP_ROWS != 0 else 0
    row_group = tl.minimum(row_group, row_groups - 1)
    entries = codebook.to(tl.pointer_type(tl.int32))
    zero = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    acc = (zero, zero, zero, zero) if ALONG_ROWS else (zero,)
    start, end = steps * part // parts, steps * (part + 1) // parts
    tiles: tl.constexpr = TILE_WORDS * (2 if ALONG_ROWS else 8)  # columns of a tile
    first, stop = start * BLOCK_WORDS // TILE_WORDS, tl.cdiv(end * BLOCK_WORDS, TILE_WORDS)
    up, down = row_powers(x, first * tiles, stop * tiles, m, rows, in_features)
    for step in range(start, end):
        word = tl.load(words_at + step * BLOCK_WORDS, eviction_policy="evict_first").to(tl.int32)
        tile = step * BLOCK_WORDS // TILE_WORDS
        for field in tl.static_range(2):
            column = (2 * tile + field) * TILE_WORDS + step * BLOCK_WORDS % TILE_WORDS  # of the first code
            group = column // GROUP_COLUMNS if GROUP_COLUMNS != 0 else 0
            book = tl.minimum(group, column_groups - 1) * row_groups + row_group
            entry = tl.load(entries + book * 256 + ((word >> (8 * field)) & 255))
            value = _values(entry, ALONG_ROWS, USE_ASM)
            scale = tl.load(scales + book).to(tl.float32)
            acc = _add(acc, value, scale, x, column, m, up, rows, in_features, ALONG_ROWS, BLOCK_WORDS, MASKED)
    scaled = ()
    for i in tl.static_range(4 if ALONG_ROWS else 1):
        scaled = scaled + (acc[i] * down[None, :],)
    acc = scaled
    if OUTLIERS != 0:
        count: tl.constexpr = (OUTLIERS + OUTLIER_BLOCK - 1) // OUTLIER_BLOCK
        for step in range(count * part // parts, count * (part + 1) // parts):
            acc = _outliers(acc, x, outliers, outlier_scale, outlier_index, n, m, step, rows, in_features, code_rows,
                            OUTLIERS, OUTLIER_BLOCK)  # fmt: skip
    if ALONG_ROWS:
        total = tl.join(tl.join(acc[0], acc[2]), tl.join(acc[1], acc[3]))
        total = tl.reshape(tl.permute(total, (1, 0, 2, 3)), (BLOCK_M, BLOCK_N * 4))
        n = block * BLOCK_N * 4 + tl.arange(0, BLOCK_N * 4)
    else:
        total = tl.trans(acc[0])
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    finish(total, 1.0, x, out, partials, counters, block, part, parts, n, m, rows, out_features, False, SPLIT)
