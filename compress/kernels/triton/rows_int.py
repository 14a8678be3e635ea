"""Look rows of an `int` table up on a GPU: one launch reads the packed words of these rows and writes them decoded.

Nothing waits for the device, and nothing is allocated but the result, so that CUDA graphs can capture it. A
program makes BLOCK columns of one row, in their order: each column finds the words that hold its code, so that groups
may have any size and a row may end in a narrow tail. Columns that share a word read it together, from the cache.
"""

# ruff: noqa: PLR0913, PLR0917 (signatures of kernels)
# mypy: disallow-untyped-defs = False

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.formats.int import Params, padded_shape
from compress.kernels.contract import Shape
from compress.kernels.triton._int import stored_zero
from compress.kernels.triton.int import layout, planes
from compress.kernels.triton.unpack import fields, narrow_words

BLOCK = 512  # columns of a program: four for each of its 128 threads


def look_up(
    tensors: Mapping[str, Tensor], params: Params, shape: Shape, ids: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Return rows [n, in] in float16, bfloat16 or float32, None for other types; see `dispatch.rows`.

    An id outside of the table gives a row of NaN: saying more would take a wait for the device.
    """
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return None
    scales, (rows, columns) = tensors["scales"], shape
    whole, narrow = params.split(columns)
    stored_rows, stored = padded_shape(params, shape)
    out = torch.empty(len(ids), columns, dtype=dtype, device=ids.device)
    read_rows[len(ids), -(-columns // BLOCK)](
        ids, *planes(tensors, params), scales, tensors.get("zeros", scales), out, rows, columns, stored_rows,
        whole * params.tile_columns, stored, **layout(params), NARROW=narrow > 0, BLOCK=BLOCK,
    )  # fmt: skip
    return out


# What runs on the device.


@triton.jit
def _plane(words, row, c, mask, whole, stored, WIDTH: tl.constexpr, TILE_WORDS: tl.constexpr, NARROW: tl.constexpr):
    """Codes int32 of the columns c of a plane; a row has `stored` columns, those from `whole` on in narrow tiles."""
    F: tl.constexpr = fields(WIDTH)
    field = c // TILE_WORDS % F
    at = c // (TILE_WORDS * F) * TILE_WORDS + c % TILE_WORDS
    if NARROW:
        COUNT: tl.constexpr = narrow_words(WIDTH, 1)
        k = c - whole
        field = tl.where(k < 0, field, k // COUNT % F)
        at = tl.where(k < 0, at, whole // F + k // 32 * COUNT + k % COUNT)
    many = stored // F
    if WIDTH == 3:
        start = words + row * (3 * many) + at
        code = tl.load(start + tl.minimum(field // 5, 2) * many, mask=mask, other=0).to(tl.int32) >> field % 5 * 3 & 7
        last = mask & (field == 15)
        spare = tl.load(start, mask=last, other=0).to(tl.int32) >> 15 & 1
        spare |= tl.load(start + many, mask=last, other=0).to(tl.int32) >> 14 & 2
        spare |= tl.load(start + 2 * many, mask=last, other=0).to(tl.int32) >> 13 & 4
        return tl.where(last, spare, code)
    else:
        word = tl.load(words + row * many + at, mask=mask, other=0).to(tl.int32)
        return word >> field * WIDTH & ((1 << WIDTH) - 1)


@triton.jit
def read_rows(ids, words_a, words_b, words_c, scales, zeros, out, rows, in_features, stored_rows, whole, stored,
              A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr, SYMMETRIC: tl.constexpr,
              TILE_WORDS: tl.constexpr, NARROW: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """out [n, in_features] = the rows ids [n] of scale * (code - zero); program (id, block of columns).

    The weight has `rows` rows, `stored_rows` with padding. An id that is none of them gives a row of NaN.
    """
    i = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < in_features
    row = tl.load(ids + i).to(tl.int64)  # a table may have more than 2**31 words
    is_row = (row >= 0) & (row < rows)
    row = tl.where(is_row, row, 0)
    BITS: tl.constexpr = A + B + C
    code = _plane(words_a, row, c, mask, whole, stored, A, TILE_WORDS, NARROW)
    if B != 0:
        code = code << B | _plane(words_b, row, c, mask, whole, stored, B, TILE_WORDS, NARROW)
    if C != 0:
        code = code << C | _plane(words_c, row, c, mask, whole, stored, C, TILE_WORDS, NARROW)
    if GROUP == 0:
        group = row * 0  # one number: a scale for the whole row
    else:
        group = (tl.minimum(c, in_features - 1) // GROUP).to(tl.int64)
    if SYMMETRIC:
        code -= 1 << (BITS - 1)
    else:
        code -= stored_zero(zeros, group, row, stored_rows, BITS).to(tl.int32)
    scale = tl.load(scales + (group * stored_rows + row)).to(tl.float32)
    value = tl.where(is_row, code.to(tl.float32) * scale, float("nan"))
    tl.store(out + i * in_features + c, value.to(out.dtype.element_ty), mask=mask)
