"""Step through columns of a weight on integer grids on a GPU: what compress/kernels/loops/columns.py does on a CPU.

A program takes some rows and passes the columns one by one, so that a call is one launch where PyTorch launches several
kernels for each column. A row belongs to one thread, which reads back what it has stored itself: nothing is waited for.
Products are added up in the order of the columns, in float32; divisions are those of IEEE 754.
"""

# ruff: noqa: PLR0913, PLR0917 (signatures of kernels)
# mypy: disallow-untyped-defs = False, disable-error-code = "annotation-unchecked,assignment,misc"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAM_ROWS = 32  # one for each thread of a warp
LOSS_ROWS = 128
LOSS_WARPS = 4


def round_columns(
    weight: Tensor, factor: Tensor, residual: Tensor, pending: Tensor, grid: Sequence[Tensor], codes: Tensor, top: int
) -> None:
    """Round columns in turn, each with the errors of those before it; arguments as of the loops of a CPU."""
    columns, rows = weight.shape
    owner, scales, zeros = grid
    _round_columns[(triton.cdiv(rows, PROGRAM_ROWS),)](
        weight, factor, residual, pending, owner.to(weight.device), scales, zeros, codes, columns, rows,
        *factor.stride(), top, ROWS=PROGRAM_ROWS, num_warps=1,
    )  # fmt: skip


def step_columns(units: Tensor, pull: Tensor, metric: Tensor, grid: Sequence[Tensor]) -> None:
    """Step columns one after the other to the best level; arguments as in the loops of a CPU."""
    columns, rows = units.shape
    moves = torch.empty_like(units)
    _step_columns[(triton.cdiv(rows, PROGRAM_ROWS),)](
        units, pull, metric, *grid, moves, columns, rows, ROWS=PROGRAM_ROWS, num_warps=1
    )  # fmt: skip


def grid_loss(target: Tensor, grid: Sequence[Tensor], importance: Tensor | None) -> Tensor:
    """Return the squared errors of rounding to a grid, in steps of the grid, summed over columns: [rows] float32."""
    columns, rows = target.shape
    loss = torch.empty(rows, dtype=torch.float32, device=target.device)
    _grid_loss[(triton.cdiv(rows, LOSS_ROWS),)](
        target, *grid, loss if importance is None else importance.contiguous(), loss, columns, rows,
        WEIGHED=importance is not None, ROWS=LOSS_ROWS, num_warps=LOSS_WARPS,
    )  # fmt: skip
    return loss


@triton.jit
def _nearest(x):
    """Round to the nearest integer, ties to even; |x| at most 2^22, or what lies beyond every level."""
    SHIFT: tl.constexpr = 12582912.0  # 1.5 * 2^23
    x = tl.minimum(tl.maximum(x, -4194304.0), 4194304.0)
    return (x + SHIFT) - SHIFT


@triton.jit(do_not_specialize=["columns", "rows", "down", "right", "top"])
def _round_columns(
    weight, factor, residual, pending, owner, scales, zeros, codes, columns, rows, down, right, top, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    held = row < rows
    at = row.to(tl.int64)  # in this column
    for column in range(columns):
        group = tl.load(owner + column) * rows + row
        total = tl.load(pending + at, mask=held, other=0.0)
        before, share = residual + row, factor + column * right
        for _ in range(column):
            total += tl.load(share) * tl.load(before, mask=held, other=0.0)
            before += rows
            share += down
        original = tl.load(weight + at, mask=held, other=0.0)
        scale, zero = tl.load(scales + group, mask=held, other=1.0), tl.load(zeros + group, mask=held, other=0.0)
        target = tl.math.div_rn(total, tl.load(share) + tl.zeros((ROWS,), tl.float32)) + original
        code = _nearest(tl.math.div_rn(target, scale)) + zero
        code = tl.minimum(tl.maximum(code, 0.0), top.to(tl.float32))
        result = (code - zero) * scale
        tl.store(residual + at, original - result, mask=held)
        tl.store(pending + at, target - result, mask=held)
        tl.store(codes + at, code.to(tl.uint8), mask=held)
        at += rows


@triton.jit(do_not_specialize=["columns", "rows"])
def _step_columns(units, pull, metric, scales, inverses, lows, highs, moves, columns, rows, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    held = row < rows
    scale, inverse = tl.load(scales + row, mask=held, other=1.0), tl.load(inverses + row, mask=held, other=1.0)
    low, high = tl.load(lows + row, mask=held, other=0.0), tl.load(highs + row, mask=held, other=0.0)
    at = row.to(tl.int64)  # in this column
    for column in range(columns):
        total = tl.load(pull + at, mask=held, other=0.0)
        before, share = moves + row, metric + column
        for _ in range(column):
            total -= tl.load(share) * tl.load(before, mask=held, other=0.0)
            before += rows
            share += columns
        now = tl.load(units + at, mask=held, other=0.0)
        step = tl.math.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.load(share) + tl.zeros((ROWS,), tl.float32))
        change = tl.minimum(tl.maximum(_nearest(now + step * total * inverse), low), high) - now
        tl.store(units + at, now + change, mask=held)
        tl.store(moves + at, change * scale, mask=held)
        at += rows


@triton.jit(do_not_specialize=["columns", "rows"])
def _grid_loss(target, scales, lows, highs, importance, loss, columns, rows, WEIGHED: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    held = row < rows
    scale = tl.load(scales + row, mask=held, other=1.0)
    low, high = tl.load(lows + row, mask=held, other=0.0), tl.load(highs + row, mask=held, other=0.0)
    total = tl.zeros((ROWS,), tl.float32)
    at = row.to(tl.int64)
    for column in range(columns):
        units = tl.math.div_rn(tl.load(target + at, mask=held, other=0.0), scale)
        error = tl.minimum(tl.maximum(_nearest(units), low), high) - units
        square = error * error
        if WEIGHED:
            square *= tl.load(importance + column)
        total += square
        at += rows
    tl.store(loss + row, total, mask=held)
