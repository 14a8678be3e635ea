"""The kernel of compress/kernels/triton/codebook.py: imported at the first launch, because it needs triton.

USE_ASM is off in the interpreter, which knows no inline assembly.
"""

# ruff: noqa: PLR0913, PLR0917, ANN001, ANN202 (signatures of kernels)
# mypy: ignore-errors

import triton
import triton.language as tl

from compress.kernels.triton._parts import COMPILED, columns_of, finish, powers, row_powers  # noqa: F401


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
