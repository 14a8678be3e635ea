"""Step through columns of a weight on integer grids in machine code: the rows of a block pass each column together.

On a GPU compress/kernels/triton/_columns.py does the same, up to the order of sums.

Rows do not depend on each other. What the columns of one call need of a block of rows stays in the processor's first
caches, where PyTorch passes over all rows several times for each column. `step_columns` gives what PyTorch does to the
bit, the others up to the order of sums.
"""

# mypy: disallow-untyped-defs = False

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from compress.kernels import llvm, processors
from compress.kernels.loops import compiler
from compress.kernels.loops.compiler import Bytes, Floats, Longs, inlined, loop, multiply_add

BLOCK_ROWS = 64
MAX_COLUMNS = 128  # a call takes no more
MIN_WEIGHTS = 1 << 14  # fewer are not worth a compiler
ROWS_PER_THREAD = 1 << 6  # fewer are not worth waking it
LINKED_NBYTES = 12 << 20  # functions from disk take them beside the library
COMPILED_NBYTES = 120 << 20  # functions that are compiled take them, with the compiler, which stays; measured: 107 MiB


def is_worthwhile(numel: int) -> bool:
    """Return whether code can be compiled here, and a weight of so many numbers is large enough for it."""
    return numel >= MIN_WEIGHTS and compiler.available()


def compiler_nbytes() -> int:
    """Return the bytes that the functions of this module take from their first call on."""
    is_on_disk = all(map(compiler.is_on_disk, (_round_columns, _step_columns, _grid_loss)))
    return LINKED_NBYTES if is_on_disk else COMPILED_NBYTES


def supports(weight: Tensor) -> bool:
    """Return whether the columns of this weight, or of a part with all its rows, are stepped through here."""
    if weight.is_cuda:
        return processors.has_triton(processors.processor(weight.device))
    return weight.device.type == "cpu" and is_worthwhile(weight.numel())


def on_device(weight: Tensor) -> Any:
    """Return the loops of a weight's device, with the functions of this module; None on a CPU, where they are here."""
    if not weight.is_cuda:
        return None
    from compress.kernels.triton import _columns as columns

    return columns


def round_columns(
    weight: Tensor, factor: Tensor, residual: Tensor, pending: Tensor, grid: Sequence[Tensor], codes: Tensor, top: int
) -> None:
    """Round at most MAX_COLUMNS columns one after the other, each with the errors of those before it.

    weight [columns, rows] float32, contiguous as all others but `factor` [columns, columns] float32, their part of the
    upper factor. pending [columns, rows]: what reaches them from the columns before these; set to target less result.
    residual [columns, rows]: set to weight less result. grid: the group of each column [columns] int64, scales and zero
    points [groups, rows] float32. codes [columns, rows] uint8: set, from 0 to `top`.
    """
    columns, rows = weight.shape
    _check(columns, weight, residual, pending, *grid, codes)
    if own := on_device(weight):
        own.round_columns(weight, factor, residual, pending, grid, codes, top)
        return
    down, right = factor.stride()
    sizes = {"columns": columns, "rows": rows, "down": down, "right": right, "top": top}
    _in_parallel(_round_columns, rows, (weight, factor, residual, pending, *grid, codes), sizes)


def step_columns(units: Tensor, pull: Tensor, metric: Tensor, grid: Sequence[Tensor]) -> None:
    """Step at most MAX_COLUMNS columns one after the other to the best level, given the steps of those before it.

    units [columns, rows] float32: code less zero point; set. pull [columns, rows]: (R H) of the columns before any of
    these steps; of no use afterwards. metric [columns, columns]: their part of H, transposed. grid: scale, its inverse,
    the lowest and the highest level, [rows] each. All float32 and contiguous.
    """
    columns, rows = units.shape
    _check(columns, units, pull, metric, *grid)
    if own := on_device(units):
        own.step_columns(units, pull, metric, grid)
        return
    inverses = [1 / curvature for curvature in metric.diagonal().tolist()]
    inverse_curvature = torch.tensor(inverses, dtype=torch.float32, device="cpu")
    tensors = units, pull, metric, *grid, inverse_curvature
    _in_parallel(_step_columns, rows, tensors, {"columns": columns, "rows": rows})


def grid_loss(target: Tensor, grid: Sequence[Tensor], importance: Tensor | None) -> Tensor:
    """Return the squared errors of rounding to a grid, in steps of the grid, summed over columns: [rows] float32.

    target [columns, rows]. grid: scale, the lowest and the highest level, [rows] each. importance [columns] or None:
    what the squares are multiplied by. All float32 and contiguous.
    """
    columns, rows = target.shape
    _check(0, target, *grid)
    if own := on_device(target):
        return cast(Tensor, own.grid_loss(target, grid, importance))
    loss = torch.empty(rows, dtype=torch.float32, device="cpu")
    weights = torch.ones(columns, dtype=torch.float32, device="cpu") if importance is None else importance.contiguous()
    _in_parallel(_grid_loss, rows, (target, *grid, weights, loss), {"columns": columns, "rows": rows})
    return loss


def _check(columns: int, *tensors: Tensor) -> None:
    assert columns <= MAX_COLUMNS and all(tensor.is_contiguous() for tensor in tensors)


def _in_parallel(step: Callable[..., None], rows: int, tensors: Sequence[Tensor], sizes: dict[str, int]) -> None:
    """Run a loop over rows on several threads, each with its own `space` and a range from `first` to `last`."""
    run, names = _function_of(step)
    values = {name: each.data_ptr() for name, each in zip(run.signature.pointers, tensors, strict=False)} | sizes
    before, behind = ([values[name] for name in some] for some in names)

    def work(first: int, last: int) -> None:
        space = torch.empty((MAX_COLUMNS + 1) * BLOCK_ROWS, dtype=torch.float32, device="cpu")
        ends = first * BLOCK_ROWS, min(last * BLOCK_ROWS, rows)
        run(*before, space.data_ptr(), *ends, *behind)

    llvm.parallel(work, -(-rows // BLOCK_ROWS), ROWS_PER_THREAD // BLOCK_ROWS)


@cache
def _function_of(step: Callable[..., None]) -> tuple[llvm.Function, list[list[str]]]:
    """Return a loop as a function, and what its arguments before and behind those of a thread are called."""
    run = compiler.compiled(step)
    names = [*run.signature.pointers, *run.signature.integers]
    at = names.index("space")
    return run, [names[:at], names[at + 3 :]]  # ... space, first, last ...


# What follows is compiled. Sums of several columns are taken in one pass, in their order, so that they stay in
# registers. `space` belongs to a thread: a line of sums, then a line for each column, BLOCK_ROWS long.


@loop
def _round_columns(
    weight: Floats, factor: Floats, residual: Floats, pending: Floats, owner: Longs, scales: Floats, zeros: Floats,
    codes: Bytes, space: Floats, first: int, last: int, columns: int, rows: int, down: int, right: int, top: int,
) -> None:  # fmt: skip
    sums, errors, largest = space[:BLOCK_ROWS], space[BLOCK_ROWS:], np.float32(top)
    for row in range(first, last, BLOCK_ROWS):
        count = min(BLOCK_ROWS, last - row)
        for column in range(columns):
            at, group, step = column * rows + row, owner[column] * rows + row, column * right
            original, waiting, scale, zero = weight[at:], pending[at:], scales[group:], zeros[group:]
            for r in range(count):
                sums[r] = waiting[r]
            eights = column // 8 * 8
            for k in range(0, eights, 8):
                f0, f1 = factor[k * down + step], factor[(k + 1) * down + step]
                f2, f3 = factor[(k + 2) * down + step], factor[(k + 3) * down + step]
                f4, f5 = factor[(k + 4) * down + step], factor[(k + 5) * down + step]
                f6, f7 = factor[(k + 6) * down + step], factor[(k + 7) * down + step]
                e = errors[k * BLOCK_ROWS :]
                for r in range(count):
                    total = multiply_add(f1, e[BLOCK_ROWS + r], multiply_add(f0, e[r], sums[r]))
                    total = multiply_add(f3, e[3 * BLOCK_ROWS + r], multiply_add(f2, e[2 * BLOCK_ROWS + r], total))
                    total = multiply_add(f5, e[5 * BLOCK_ROWS + r], multiply_add(f4, e[4 * BLOCK_ROWS + r], total))
                    sums[r] = multiply_add(f7, e[7 * BLOCK_ROWS + r], multiply_add(f6, e[6 * BLOCK_ROWS + r], total))
            for k in range(eights, column):
                share, e = factor[k * down + step], errors[k * BLOCK_ROWS :]
                for r in range(count):
                    sums[r] = multiply_add(share, e[r], sums[r])
            diagonal, left, code_line = factor[column * down + step], residual[at:], codes[at:]
            e = errors[column * BLOCK_ROWS :]
            for r in range(count):
                target = sums[r] / diagonal + original[r]
                code = _clamp(np.rint(target / scale[r]) + zero[r], np.float32(0), largest)
                result = (code - zero[r]) * scale[r]
                e[r] = original[r] - result
                left[r] = original[r] - result
                waiting[r] = target - result
                code_line[r] = np.uint8(code)


@inlined
def _clamp(value, low, high):
    value = low if value < low else value
    return high if value > high else value


@loop
def _step_columns(
    units: Floats, pull: Floats, metric: Floats, scales: Floats, inverses: Floats, lows: Floats, highs: Floats,
    inverse_curvature: Floats, space: Floats, first: int, last: int, columns: int, rows: int,
) -> None:  # fmt: skip
    pulls, moves = space[:BLOCK_ROWS], space[BLOCK_ROWS:]
    for row in range(first, last, BLOCK_ROWS):
        count = min(BLOCK_ROWS, last - row)
        scale, inverse, low, high = scales[row:], inverses[row:], lows[row:], highs[row:]
        for column in range(columns):
            waiting, now = pull[column * rows + row :], units[column * rows + row :]
            for r in range(count):
                pulls[r] = waiting[r]
            fours = column // 4 * 4
            for k in range(0, fours, 4):
                m0, m1 = metric[k * columns + column], metric[(k + 1) * columns + column]
                m2, m3 = metric[(k + 2) * columns + column], metric[(k + 3) * columns + column]
                d = moves[k * BLOCK_ROWS :]
                for r in range(count):
                    total = pulls[r] - m0 * d[r] - m1 * d[BLOCK_ROWS + r]
                    pulls[r] = total - m2 * d[2 * BLOCK_ROWS + r] - m3 * d[3 * BLOCK_ROWS + r]
            for k in range(fours, column):
                share, d = metric[k * columns + column], moves[k * BLOCK_ROWS :]
                for r in range(count):
                    pulls[r] = pulls[r] - share * d[r]
            step, d = inverse_curvature[column], moves[column * BLOCK_ROWS :]
            for r in range(count):
                change = _clamp(np.rint(now[r] + step * pulls[r] * inverse[r]), low[r], high[r]) - now[r]
                now[r] = now[r] + change
                d[r] = change * scale[r]


@loop
def _grid_loss(
    target: Floats, scales: Floats, lows: Floats, highs: Floats, importance: Floats, loss: Floats, space: Floats,
    first: int, last: int, columns: int, rows: int,
) -> None:  # fmt: skip
    for row in range(first, last, BLOCK_ROWS):
        count = min(BLOCK_ROWS, last - row)
        scale, low, high, total = scales[row:], lows[row:], highs[row:], loss[row:]
        for r in range(count):
            total[r] = np.float32(0)
        pairs = columns // 2 * 2
        for column in range(0, pairs, 2):
            a, b = target[column * rows + row :], target[(column + 1) * rows + row :]
            for r in range(count):
                one = _squared_error(a[r], scale[r], low[r], high[r])
                two = _squared_error(b[r], scale[r], low[r], high[r])
                total[r] = multiply_add(importance[column + 1], two, multiply_add(importance[column], one, total[r]))
        for column in range(pairs, columns):
            a = target[column * rows + row :]
            for r in range(count):
                error = _squared_error(a[r], scale[r], low[r], high[r])
                total[r] = multiply_add(importance[column], error, total[r])


@inlined
def _squared_error(value, scale, low, high):
    units = value / scale
    error = _clamp(np.rint(units), low, high) - units
    return error * error
