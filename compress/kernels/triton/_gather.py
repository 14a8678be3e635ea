"""The general kernels of compress/kernels/triton/codebook.py: imported at the first launch, because they need triton.

Every entry is looked up by itself and every weight is made in float32, as compress/formats/codebook.py makes it, by
`_values`; the decoder writes it, the product rounds it to float16. Tensors are [code rows n, code columns j, i], i
being the place in an entry; entries whose length is no power of two repeat the last. Codes are read at any columns, in
no order of fields.
"""

# ruff: noqa: PLR0913, PLR0917, ANN001, ANN202 (signatures of kernels)
# mypy: ignore-errors

import triton
import triton.language as tl

from compress.kernels.triton._parts import columns_of, finish, row_powers
from compress.numerics import packing
from compress.numerics.packing import WIDE, plane_widths

FIELDS = {**packing.FIELDS, WIDE: 1}  # codes that a word (three words for width 3) holds
WIDTHS = {bits: (*plane_widths(bits), 0, 0)[:3] for bits in range(1, 17)}  # of planes; only 15 bits have a fourth
FIVES = tl.constexpr(5)  # fields of width 3 in each of three words


@triton.constexpr_function
def width(bits: int, plane: int) -> int:
    """Of plane 0, 1 or 2 of codes of `bits` bits; 0 if there is none."""
    return WIDTHS[bits][plane]


@triton.constexpr_function
def fields(width: int) -> int:
    return FIELDS[width]


@triton.constexpr_function
def most_fields(*bits: int) -> int:
    """Of the planes of codes of these bits (0: none): columns are stored in multiples of so many words of a tile."""
    return max(FIELDS[width] for b in bits if b for width in WIDTHS[b] if width)


@triton.jit
def _third(start, field, many, mask):
    """Field 0 to 14 of width 3, below other bits; `many` words lie between the three words that belong together."""
    return tl.load(start + tl.minimum(field // FIVES, 2) * many, mask=mask).to(tl.int32) >> field % FIVES * 3


@triton.jit
def _spare(start, many, mask):
    """Field 15: a bit of each of the three words."""
    code = tl.load(start, mask=mask).to(tl.int32) >> 15 & 1
    code |= tl.load(start + many, mask=mask).to(tl.int32) >> 14 & 2
    return code | tl.load(start + 2 * many, mask=mask).to(tl.int32) >> 13 & 4


@triton.jit
def plane(start, first, tiles, WIDTH: tl.constexpr, UNIT: tl.constexpr, TILE_WORDS: tl.constexpr, BLOCK: tl.constexpr,
          MASKED: tl.constexpr):  # fmt: skip
    """Codes int32 [n, BLOCK] of a plane from column `first` on, a multiple of BLOCK; start [n, 1]: where rows of
    `tiles` * UNIT columns begin, in tiles of TILE_WORDS words. MASKED: BLOCK need not divide them.
    """
    F: tl.constexpr = fields(WIDTH)
    j = tl.arange(0, BLOCK)[None, :]
    many = tiles * (UNIT // F)
    if BLOCK <= TILE_WORDS:  # one field, and a whole number of blocks in a row
        field = first // TILE_WORDS % F
        skipped = first // BLOCK % (TILE_WORDS // BLOCK) * BLOCK  # so the compiler knows that it is a multiple
        at = start + (first // (TILE_WORDS * F) * TILE_WORDS + skipped) + j
        if WIDTH == 3:
            if field == 3 * FIVES:
                code = _spare(at, many, None)
            else:
                code = _third(at, field, many, None) & 7
            return code
        else:
            return tl.load(at).to(tl.int32) >> field * WIDTH & ((1 << WIDTH) - 1)
    else:
        c = first + j
        mask = c < tiles * UNIT if MASKED else None
        field = c // TILE_WORDS % F
        at = start + (c // (TILE_WORDS * F) * TILE_WORDS + c % TILE_WORDS)
        if WIDTH == 3:
            last = field == 3 * FIVES
            code = _spare(at, many, last & mask if MASKED else last)
            return tl.where(last, code, _third(at, field, many, mask) & 7)
        else:
            return tl.load(at, mask=mask).to(tl.int32) >> field * WIDTH & ((1 << WIDTH) - 1)


@triton.jit
def codes(words_a, words_b, words_c, row, first, tiles, BITS: tl.constexpr, UNIT: tl.constexpr,
          TILE_WORDS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Codes int32 [n, BLOCK] of the rows [n, 1] int64 of planes with `tiles` * UNIT columns, from column `first` on."""
    A: tl.constexpr = width(BITS, 0)
    B: tl.constexpr = width(BITS, 1)
    C: tl.constexpr = width(BITS, 2)
    code = plane(words_a + row * (tiles * (UNIT * A // 16)), first, tiles, A, UNIT, TILE_WORDS, BLOCK, True)
    if B != 0:
        low = plane(words_b + row * (tiles * (UNIT * B // 16)), first, tiles, B, UNIT, TILE_WORDS, BLOCK, True)
        code = code << B | low
    if C != 0:
        low = plane(words_c + row * (tiles * (UNIT * C // 16)), first, tiles, C, UNIT, TILE_WORDS, BLOCK, True)
        code = code << C | low
    return code


@triton.jit
def _entries(stage, row, first, tiles, book, i, BITS: tl.constexpr, DIM: tl.constexpr, UNIT: tl.constexpr,
             TILE_WORDS: tl.constexpr, SCALED: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    """float32 [n, j, i] of the codes of one stage; book: which codebook, a number or [n, j, 1]."""
    words_a, words_b, words_c, codebook, scales = stage
    code = codes(words_a, words_b, words_c, row, first, tiles, BITS, UNIT, TILE_WORDS, BLOCK_C)[:, :, None]
    value = tl.load(codebook + book * (DIM << BITS) + code * DIM + i).to(tl.float32)
    if SCALED:
        value *= tl.load(scales + book).to(tl.float32)
    return value


@triton.jit
def _group(first, offsets, count, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Groups of the places first + offsets, of which there are BLOCK: one number where they share a group."""
    if GROUP == 0:
        return count * 0
    elif GROUP % BLOCK == 0:
        return tl.minimum(first // GROUP, count - 1)
    else:
        return tl.minimum((first + offsets) // GROUP, count - 1)


@triton.jit
def _nibble(codes, line, half_rows, row, mask):
    """4-bit code of a row in a line of `half_rows` bytes."""
    return tl.load(codes + line * half_rows + row // 2, mask=mask).to(tl.int32) >> row % 2 * 4 & 15


@triton.jit
def _side(value, side, row, column, rows, blocks, SCALE_COLUMNS: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
          OUTLIERS: tl.constexpr):  # fmt: skip
    """Block scales, norms and outliers; `row` and `column` of the stored matrix broadcast to the shape of value."""
    scales, factors, norm_scale, norm_bias, slots, outliers, outlier_scale = side
    if SCALE_COLUMNS != 0:
        block = column // SCALE_COLUMNS
        value *= tl.load(factors + _nibble(scales, block, rows // 2, row, None) * blocks + block)
    if NORM != "none":
        line = row if NORM == "rows" else column
        value *= tl.load(norm_scale + line).to(tl.float32)
        if BIAS:
            value += tl.load(norm_bias + line).to(tl.float32)
    if OUTLIERS != 0:
        slot = tl.load(slots + column)
        mask = slot >= 0
        if OUTLIERS == 4:
            code = _nibble(outliers, slot, rows // 2, row, mask)
        else:
            code = tl.load(outliers + slot * rows + row, mask=mask, other=0).to(tl.int32)
        added = (code - (1 << (OUTLIERS - 1))).to(tl.float32)
        value += tl.where(mask, added * tl.load(outlier_scale + slot, mask=mask, other=0.0).to(tl.float32), 0.0)
    return value


@triton.jit
def _values(stages, side, above, first, sizes, BITS: tl.constexpr, BITS2: tl.constexpr, DIM: tl.constexpr,
            PADDED: tl.constexpr, ALONG_ROWS: tl.constexpr, TILE_WORDS: tl.constexpr, GROUP_COLUMNS: tl.constexpr,
            GROUP_ROWS: tl.constexpr, SCALED: tl.constexpr, SCALE_COLUMNS: tl.constexpr, NORM: tl.constexpr,
            BIAS: tl.constexpr, OUTLIERS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    """Weights float32 [BLOCK_N, BLOCK_C, PADDED] from code row `above` and code column `first` on, stored order."""
    code_rows, tiles, column_groups, row_groups, blocks, in_features = sizes
    UNIT: tl.constexpr = TILE_WORDS * most_fields(BITS, BITS2)
    n = tl.minimum(above + tl.arange(0, BLOCK_N), code_rows - 1)
    c = first + tl.arange(0, BLOCK_C)
    i = tl.arange(0, PADDED)[None, None, :]
    if PADDED != DIM:
        i = tl.minimum(i, DIM - 1)
    book = _group(first, tl.arange(0, BLOCK_C)[None, :, None], column_groups, GROUP_COLUMNS, BLOCK_C) * row_groups
    book += _group(above, tl.arange(0, BLOCK_N)[:, None, None], row_groups, GROUP_ROWS, BLOCK_N)
    row = n.to(tl.int64)[:, None]
    value = _entries(stages[0], row, first, tiles, book, i, BITS, DIM, UNIT, TILE_WORDS, SCALED, BLOCK_C)
    if BITS2 != 0:
        value += _entries(stages[1], row, first, tiles, book, i, BITS2, DIM, UNIT, TILE_WORDS, SCALED, BLOCK_C)
    row, column = n[:, None, None], c[None, :, None]
    if ALONG_ROWS:
        row = row * DIM + i
    else:
        column = column * DIM + i
    rows = code_rows * (DIM if ALONG_ROWS else 1)
    if SCALE_COLUMNS != 0 or NORM == "columns" or OUTLIERS != 0:
        column = tl.minimum(column, in_features - 1)  # what padding gives is dropped
    return _side(value, side, row, column, rows, blocks, SCALE_COLUMNS, NORM, BIAS, OUTLIERS)


@triton.jit(do_not_specialize=["tiles", "column_groups", "row_groups", "blocks"])
def decode(words_a, words_b, words_c, codebook, codebook_scales, words2_a, words2_b, words2_c, codebook2,
           codebook_scales2, scales, factors, norm_scale, norm_bias, slots, outliers, outlier_scale, order, out,
           code_rows, tiles, column_groups, row_groups, blocks, in_features, out_features,
           BITS: tl.constexpr, BITS2: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, ALONG_ROWS: tl.constexpr,
           TILE_WORDS: tl.constexpr, GROUP_COLUMNS: tl.constexpr, GROUP_ROWS: tl.constexpr, SCALED: tl.constexpr,
           SCALE_COLUMNS: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, OUTLIERS: tl.constexpr,
           ORDERED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    """out [out_features, in_features]; program (BLOCK_C code columns, BLOCK_N code rows).

    ORDERED: stored column k is column order[k] of out.
    """
    above, left = tl.program_id(1) * BLOCK_N, tl.program_id(0) * BLOCK_C
    first = words_a, words_b, words_c, codebook, codebook_scales
    second = words2_a, words2_b, words2_c, codebook2, codebook_scales2
    side = scales, factors, norm_scale, norm_bias, slots, outliers, outlier_scale
    sizes = code_rows, tiles, column_groups, row_groups, blocks, in_features
    value = _values((first, second), side, above, left, sizes, BITS, BITS2, DIM, PADDED, ALONG_ROWS, TILE_WORDS,
                    GROUP_COLUMNS, GROUP_ROWS, SCALED, SCALE_COLUMNS, NORM, BIAS, OUTLIERS, BLOCK_N,
                    BLOCK_C)  # fmt: skip
    n, c = above + tl.arange(0, BLOCK_N), left + tl.arange(0, BLOCK_C)
    i = tl.arange(0, PADDED)[None, None, :]
    row, column = n[:, None, None], c[None, :, None]
    if ALONG_ROWS:
        row = row * DIM + i
    else:
        column = column * DIM + i
    known = column < in_features
    place = tl.load(order + column, mask=known, other=0).to(tl.int32) if ORDERED else column
    mask = known & (row < out_features) & (i < DIM)
    tl.store(out + row.to(tl.int64) * in_features + place, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "steps", "parts", "tiles", "column_groups", "row_groups", "blocks"])
def multiply(x, words_a, words_b, words_c, codebook, codebook_scales, words2_a, words2_b, words2_c, codebook2,
             codebook_scales2, scales, factors, norm_scale, norm_bias, slots, outliers, outlier_scale, out, partials,
             counters, rows, code_rows, tiles, column_groups, row_groups, blocks, in_features, out_features,
             steps, parts, BITS: tl.constexpr, BITS2: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
             ALONG_ROWS: tl.constexpr, TILE_WORDS: tl.constexpr, GROUP_COLUMNS: tl.constexpr,
             GROUP_ROWS: tl.constexpr, SCALED: tl.constexpr, SCALE_COLUMNS: tl.constexpr, NORM: tl.constexpr,
             BIAS: tl.constexpr, OUTLIERS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
             BLOCK_C: tl.constexpr, MASKED: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """out [rows, out_features] = x [rows, in_features] W^T, x in the stored order; program (BLOCK_N code rows, part of
    the columns). With SPLIT, `parts` programs share the steps of BLOCK_C code columns.
    """
    block, part = tl.program_id(0), tl.program_id(1)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    first = words_a, words_b, words_c, codebook, codebook_scales
    second = words2_a, words2_b, words2_c, codebook2, codebook_scales2
    side = scales, factors, norm_scale, norm_bias, slots, outliers, outlier_scale
    sizes = code_rows, tiles, column_groups, row_groups, blocks, in_features
    i = tl.arange(0, PADDED)
    width: tl.constexpr = BLOCK_C * (1 if ALONG_ROWS else DIM)  # columns of a step
    height: tl.constexpr = BLOCK_N * (PADDED if ALONG_ROWS else 1)
    start, end = steps * part // parts, steps * (part + 1) // parts
    up, down = row_powers(x, start * width, end * width, m, rows, in_features)
    acc = tl.zeros((height, BLOCK_M), tl.float32)
    for step in range(start, end):
        c = step * BLOCK_C + tl.arange(0, BLOCK_C)
        value = _values((first, second), side, block * BLOCK_N, step * BLOCK_C, sizes, BITS, BITS2, DIM, PADDED,
                        ALONG_ROWS, TILE_WORDS, GROUP_COLUMNS, GROUP_ROWS, SCALED, SCALE_COLUMNS, NORM, BIAS, OUTLIERS,
                        BLOCK_N, BLOCK_C)  # fmt: skip
        if ALONG_ROWS:
            value = tl.reshape(tl.permute(value, (0, 2, 1)), (height, BLOCK_C))
            k = c
        else:
            if PADDED == DIM:
                k = step * width + tl.arange(0, width)
            else:
                k = tl.reshape(c[:, None] * DIM + i[None, :], (BLOCK_C * PADDED,))
                value = tl.where((i < DIM)[None, None, :], value, 0.0)
            value = tl.reshape(value, (height, BLOCK_C * PADDED))
        acc = tl.dot(value.to(tl.float16), columns_of(x, k, m, up, rows, in_features, MASKED), acc)
    if ALONG_ROWS:
        n = tl.reshape(tl.where((i < DIM)[None, :], n[:, None] * DIM + i[None, :], out_features), (height,))
    finish(tl.trans(acc * down[None, :]), 1.0, x, out, partials, counters, block, part, parts, n, m, rows, out_features,
           False, SPLIT)  # fmt: skip
