"""The kernel of compress/kernels/triton/nested.py; imported when it is first launched, because it needs triton."""

# ruff: noqa: ANN001, ANN202, PLR0913, PLR0917
# mypy: ignore-errors

import triton
import triton.language as tl

from compress.kernels.triton._int import sum_columns
from compress.kernels.triton._parts import sum_parts
from compress.kernels.triton.unpack import fields


@triton.jit
def _add(acc, x, words_a, words_b, words_c, scales, zeros, n, m, rows, stored_rows, tiles, part, splits,
         A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr, SYMMETRIC: tl.constexpr,
         TILE_WORDS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_WORDS: tl.constexpr,
         NARROW: tl.constexpr, BF16: tl.constexpr, USE_ASM: tl.constexpr):  # fmt: skip
    """acc [n, m] plus the products with one plane, of the columns of one of `splits` programs."""
    F: tl.constexpr = fields(C if C != 0 else (B if B != 0 else A))
    steps = tiles * (TILE_WORDS // BLOCK_WORDS)
    in_row = tiles * (F * TILE_WORDS) + NARROW * 32
    return sum_columns(acc, x, m[None, :] * in_row, m < rows, words_a, words_b, words_c, scales, zeros,
                       tl.minimum(n, stored_rows - 1), stored_rows, tiles, steps * part // splits,
                       steps * (part + 1) // splits, NARROW * part // splits, NARROW * (part + 1) // splits,
                       A, B, C, GROUP, not SYMMETRIC, TILE_WORDS, BLOCK_N, BLOCK_M, BLOCK_WORDS, NARROW, BF16,
                       USE_ASM)  # fmt: skip


@triton.jit(do_not_specialize=["rows", "splits"])
def multiply(x, words_a, words_b, words_c, scales, zeros, words_a_2, words_b_2, words_c_2, scales_2, zeros_2,
             out, partials, counters, rows, out_features, stored_rows, tiles, tiles_2, splits,
             A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr, SYMMETRIC: tl.constexpr,
             TILE_WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr, NARROW: tl.constexpr,
             A_2: tl.constexpr, B_2: tl.constexpr, C_2: tl.constexpr, GROUP_2: tl.constexpr,
             SYMMETRIC_2: tl.constexpr, TILE_WORDS_2: tl.constexpr, BLOCK_WORDS_2: tl.constexpr,
             NARROW_2: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, SPLIT: tl.constexpr,
             BF16: tl.constexpr, USE_ASM: tl.constexpr):  # fmt: skip
    """out [rows, out_features] = x [rows, stored columns] (W_1 + W_2)^T; program (rows of W, part of the columns).

    The arguments are those of `_int.multiply`, for each plane; a program sums both over its own part of the columns of
    each, so that activations are read by one launch and a split is added up once.
    """
    pid, part = tl.program_id(0), tl.program_id(1)
    n = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    acc = _add(acc, x, words_a, words_b, words_c, scales, zeros, n, m, rows, stored_rows, tiles, part, splits,
               A, B, C, GROUP, SYMMETRIC, TILE_WORDS, BLOCK_N, BLOCK_M, BLOCK_WORDS, NARROW, BF16,
               USE_ASM)  # fmt: skip
    acc = _add(acc, x, words_a_2, words_b_2, words_c_2, scales_2, zeros_2, n, m, rows, stored_rows, tiles_2, part,
               splits, A_2, B_2, C_2, GROUP_2, SYMMETRIC_2, TILE_WORDS_2, BLOCK_N, BLOCK_M, BLOCK_WORDS_2, NARROW_2,
               BF16, USE_ASM)  # fmt: skip
    mask = (n < out_features)[:, None] & (m < rows)[None, :]
    if SPLIT:
        last, acc = sum_parts(acc, partials, counters, pid, part, splits, (m < rows)[None, :] & (n >= 0)[:, None])
        if last:
            tl.store(out + m[None, :] * out_features + n[:, None], acc.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(out + m[None, :] * out_features + n[:, None], acc.to(out.dtype.element_ty), mask=mask)
