"""The kernel of compress/kernels/triton/grouped.py: a product of `_int.py` for a block of rows of one expert."""

# ruff: noqa: ANN001, ANN202, PLR0913, PLR0915, PLR0917
# mypy: ignore-errors

import triton
import triton.language as tl

from compress.kernels.triton._int import sum_columns
from compress.kernels.triton.unpack import fields, narrow_words


@triton.jit
def _plane(words, expert, stored_rows, tiles, WIDTH: tl.constexpr, F: tl.constexpr, TILE_WORDS: tl.constexpr,
           NARROW: tl.constexpr):  # fmt: skip
    """Where the words of an expert begin in a plane of fields of WIDTH bits; a row is WIDTH == 3 three rows of them."""
    TAIL: tl.constexpr = narrow_words(WIDTH, NARROW)
    ROWS: tl.constexpr = 3 if WIDTH == 3 else 1
    return words + expert * (stored_rows * ROWS * (tiles * (F // fields(WIDTH)) * TILE_WORDS + TAIL))


@triton.jit(do_not_specialize=["pairs", "per"])
def multiply(x, words_a, words_b, words_c, scales, zeros, slots, owners, out,
             pairs, per, experts, out_features, stored_rows, tiles, width,
             A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr, SYMMETRIC: tl.constexpr,
             TILE_WORDS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_WORDS: tl.constexpr,
             NARROW: tl.constexpr, BF16: tl.constexpr, USE_ASM: tl.constexpr):  # fmt: skip
    """out[pair, part * out_features + n] = x[pair // per] W[part, expert]^T; program (rows of W, block, part).

    slots [blocks, BLOCK_M]: pairs, `pairs` for none; owners [blocks]: the block's expert, `experts` for none. Weights
    lie behind each other, those of all experts for each part.
    """
    block, part = tl.program_id(1), tl.program_id(2)
    owner = tl.load(owners + block)
    if owner >= experts:
        return
    expert = (part * experts + owner).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = tl.load(slots + block * BLOCK_M + tl.arange(0, BLOCK_M))
    known = pair < pairs
    stored = tl.minimum(n, stored_rows - 1)
    F: tl.constexpr = fields(C if C != 0 else (B if B != 0 else A))
    BITS: tl.constexpr = A + B + C
    in_row = tiles * (F * TILE_WORDS) + NARROW * 32
    groups = tl.cdiv(in_row, GROUP) if GROUP != 0 else 1
    words_a = _plane(words_a, expert, stored_rows, tiles, A, F, TILE_WORDS, NARROW)
    if B != 0:
        words_b = _plane(words_b, expert, stored_rows, tiles, B, F, TILE_WORDS, NARROW)
    if C != 0:
        words_c = _plane(words_c, expert, stored_rows, tiles, C, F, TILE_WORDS, NARROW)
    scales += expert * (groups * stored_rows)
    zeros += expert * (groups * (stored_rows // 8 * BITS))
    offsets = (tl.where(known, pair, 0) // per).to(tl.int64)[None, :] * in_row
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    acc = sum_columns(acc, x, offsets, known, words_a, words_b, words_c, scales, zeros, stored, stored_rows, tiles,
                      0, tiles * (TILE_WORDS // BLOCK_WORDS), 0, NARROW, A, B, C, GROUP, not SYMMETRIC, TILE_WORDS,
                      BLOCK_N, BLOCK_M, BLOCK_WORDS, NARROW, BF16, USE_ASM)  # fmt: skip
    mask = (n < out_features)[:, None] & known[None, :]
    place = out + (pair.to(tl.int64)[None, :] * width + (part * out_features + n)[:, None])
    tl.store(place, acc.to(out.dtype.element_ty), mask=mask)
