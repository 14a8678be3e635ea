"""Read codes of numerics/packing.py on the device, at any columns: for kernels that gather, in no order of fields."""

# ruff: noqa: PLR0913, PLR0917, ANN001, ANN202 (signatures of kernels)
# mypy: ignore-errors

import triton
import triton.language as tl

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
