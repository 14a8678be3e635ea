"""Step through columns of a weight on integer grids in machine code: sixteen rows in the lanes of a vector.

Rows do not depend on each other. What the columns of one call need of sixteen rows stays in the processor's first
cache, where PyTorch passes over all rows several times for each column. `step_columns` gives what PyTorch does to the
bit, the others up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compress.kernels import llvm

LANES = 16
MOST = 128  # columns of a call
LEAST = 1 << 14  # weights that are worth a compiler
THREAD = 1 << 6  # rows that are worth waking a thread
COMPILER = 12 << 20  # bytes that functions take beside the library, and a process keeps; 36 MiB when first compiled


def is_worthwhile(numel: int) -> bool:
    """Return whether code can be compiled here, and a weight of so many numbers is large enough for it."""
    return numel >= LEAST and llvm.available()


def supports(weight: Tensor) -> bool:
    """Return whether the columns of this weight, or of a part with all its rows, are stepped through here."""
    return weight.device.type == "cpu" and is_worthwhile(weight.numel())


def round_columns(
    weight: Tensor, factor: Tensor, residual: Tensor, pending: Tensor, grid: Sequence[Tensor], codes: Tensor, top: int
) -> None:
    """Round at most MOST columns one after the other, each with the errors of those before it.

    weight [columns, rows] float32, contiguous as all others but `factor` [columns, columns] float32, their part of the
    upper factor. pending [columns, rows]: what reaches them from the columns before these; set to target less result.
    residual [columns, rows]: set to weight less result. grid: the group of each column [columns] int64, scales and zero
    points [groups, rows] float32. codes [columns, rows] uint8: set, from 0 to `top`.
    """
    columns, rows = weight.shape
    _check(columns, weight, residual, pending, *grid, codes)
    pointers = [t.data_ptr() for t in (weight, factor, residual, pending, *grid, codes)]
    run = llvm.function(_Rounding, top)
    _in_parallel(lambda held, first, last: run(*pointers, held, first, last, columns, rows, *factor.stride()), rows)


def step_columns(units: Tensor, pull: Tensor, metric: Tensor, grid: Sequence[Tensor]) -> None:
    """Step at most MOST columns one after the other to the best level, given the steps of those before it.

    units [columns, rows] float32: code less zero point; set. pull [columns, rows]: (R H) of the columns before any of
    these steps; of no use afterwards. metric [columns, columns]: their part of H, transposed. grid: scale, its inverse,
    the lowest and the highest level, [rows] each. All float32 and contiguous.
    """
    columns, rows = units.shape
    bent = torch.tensor([1 / curvature for curvature in metric.diagonal().tolist()], dtype=torch.float32, device="cpu")
    _check(columns, units, pull, metric, *grid, bent)
    pointers = [t.data_ptr() for t in (units, pull, metric, *grid, bent)]
    run = llvm.function(_Stepping)
    _in_parallel(lambda held, first, last: run(*pointers, held, first, last, columns, rows), rows)


def grid_loss(target: Tensor, grid: Sequence[Tensor], importance: Tensor | None) -> Tensor:
    """Return the squared errors of rounding to a grid, in steps of the grid, summed over columns: [rows] float32.

    target [columns, rows]. grid: scale, the lowest and the highest level, [rows] each. importance [columns] or None:
    what the squares are multiplied by. All float32 and contiguous.
    """
    columns, rows = target.shape
    loss = torch.empty(rows, dtype=torch.float32, device="cpu")
    weights = torch.ones(columns, dtype=torch.float32, device="cpu") if importance is None else importance.contiguous()
    _check(0, target, *grid)
    pointers = [t.data_ptr() for t in (target, *grid, weights, loss)]
    run = llvm.function(_Losses)
    _in_parallel(lambda held, first, last: run(*pointers, held, first, last, columns, rows), rows)
    return loss


def _check(columns: int, *tensors: Tensor) -> None:
    assert columns <= MOST and all(tensor.is_contiguous() for tensor in tensors)


def _in_parallel(run: Callable[[int, int, int], None], rows: int) -> None:
    """Call run(address of memory, first, last) for rows, on several threads by whole vectors."""

    def work(first: int, last: int) -> None:
        held = torch.empty(MOST * LANES, dtype=torch.float32, device="cpu")
        run(held.data_ptr(), first * LANES, min(last * LANES, rows))

    llvm.parallel(work, -(-rows // LANES), THREAD // LANES)


class _Rows(llvm.Emitter):
    """A function of the rows from `first` to `last`: of vectors of them, then of single ones."""

    def __init__(self, name: str, pointers: int, integers: int) -> None:
        super().__init__(name, pointers, integers)
        first, last, self.columns, self.rows = self.integers[:4]
        self.held = self.pointers[-1]  # memory for numbers of the columns of some rows
        b = self.b
        whole = b.sdiv(b.sub(last, first), self.i64(LANES))
        with self.loop(whole) as group:
            self.steps(b.add(first, b.mul(group, self.i64(LANES))), LANES)
        with self.loop(last, b.add(first, b.mul(whole, self.i64(LANES)))) as row:
            self.steps(row, 0)
        b.ret_void()

    def steps(self, row: Any, lanes: int) -> None:
        """Write the steps of rows from this one on, one row if lanes is 0."""
        raise AssertionError("every function has its own")

    def place(self, column: Any, row: Any) -> Any:
        return self.b.add(self.b.mul(column, self.rows), row)

    def spread(self, value: Any, lanes: int) -> Any:
        return self.splat(value, lanes) if lanes else value

    def keep(self, value: Any, column: Any, lanes: int) -> None:
        self.store(value, self.held, self.b.mul(column, self.i64(max(lanes, 1))))

    def kept(self, column: Any, lanes: int) -> Any:
        return self.load(self.held, self.b.mul(column, self.i64(max(lanes, 1))), self.float, lanes)

    def call(self, name: str, *values: Any) -> Any:
        kind = values[0].type
        name += f".v{kind.count}f32" if hasattr(kind, "count") else ".f32"
        signature = self.ir.FunctionType(kind, [kind] * len(values))
        function = self.module.globals.get(name) or self.ir.Function(self.module, signature, name)
        return self.b.call(function, values)

    def clamped(self, value: Any, low: Any, high: Any) -> Any:
        b = self.b
        value = b.select(b.fcmp_ordered("<", value, low), low, value)
        return b.select(b.fcmp_ordered(">", value, high), high, value)

    def number(self, value: float, lanes: int) -> Any:
        return self.constant(self.float, lanes, value) if lanes else self.float(value)


class _Rounding(_Rows):
    def __init__(self, top: int) -> None:
        self.top = top
        super().__init__("round_columns", 9, 6)

    def steps(self, row: Any, lanes: int) -> None:
        b = self.b
        weight, factor, residual, pending, owner, scales, zeros, codes = self.pointers[:-1]
        pulled = self.variable(self.vector(self.float, lanes) if lanes else self.float)
        with self.loop(self.columns) as column:
            place, group = self.place(column, row), self.place(self.load(owner, column, self.index), row)
            b.store(self.load(pending, place, self.float, lanes), pulled)
            with self.loop(column) as before:
                share = self.load(factor, self.entry(before, column), self.float)
                total = self.call("llvm.fmuladd", self.spread(share, lanes), self.kept(before, lanes), b.load(pulled))
                b.store(total, pulled)
            diagonal = self.load(factor, self.entry(column, column), self.float)
            original = self.load(weight, place, self.float, lanes)
            target = b.fadd(b.fdiv(b.load(pulled), self.spread(diagonal, lanes)), original)
            scale, zero = (self.load(part, group, self.float, lanes) for part in (scales, zeros))
            level = b.fadd(self.call("llvm.rint", b.fdiv(target, scale)), zero)
            code = self.clamped(level, self.number(0, lanes), self.number(self.top, lanes))
            result = b.fmul(b.fsub(code, zero), scale)
            error = b.fsub(original, result)
            self.keep(error, column, lanes)
            self.store(error, residual, place)
            self.store(b.fsub(target, result), pending, place)
            self.store(b.fptoui(code, self.vector(self.byte, lanes) if lanes else self.byte), codes, place)

    def entry(self, row: Any, column: Any) -> Any:
        b, (down, right) = self.b, self.integers[4:]
        return b.add(b.mul(row, down), b.mul(column, right))


class _Stepping(_Rows):
    def __init__(self) -> None:
        super().__init__("step_columns", 9, 4)

    def steps(self, row: Any, lanes: int) -> None:
        b = self.b
        units, pull, metric, *grid, curvature = self.pointers[:-1]
        scale, inverse, low, high = (self.load(part, row, self.float, lanes) for part in grid)
        with self.loop(self.columns) as column:
            self.keep(self.load(pull, self.place(column, row), self.float, lanes), column, lanes)
        with self.loop(self.columns) as column:
            place = self.place(column, row)
            now, bent = self.load(units, place, self.float, lanes), self.load(curvature, column, self.float)
            step = b.fmul(b.fmul(self.spread(bent, lanes), self.kept(column, lanes)), inverse)
            best = self.clamped(self.call("llvm.rint", b.fadd(now, step)), low, high)
            change = b.fsub(best, now)
            self.store(b.fadd(now, change), units, place)
            moved, first = b.fmul(change, scale), b.mul(column, self.columns)
            with self.loop(self.columns, b.add(column, self.i64(1))) as later:
                share = self.spread(self.load(metric, b.add(first, later), self.float), lanes)
                self.keep(b.fsub(self.kept(later, lanes), b.fmul(share, moved)), later, lanes)


class _Losses(_Rows):
    def __init__(self) -> None:
        super().__init__("grid_loss", 7, 4)

    def steps(self, row: Any, lanes: int) -> None:
        b = self.b
        target, *grid, importance, loss = self.pointers[:-1]
        scale, low, high = (self.load(part, row, self.float, lanes) for part in grid)
        total = self.variable(self.vector(self.float, lanes) if lanes else self.float)
        b.store(self.number(0, lanes), total)
        with self.loop(self.columns) as column:
            units = b.fdiv(self.load(target, self.place(column, row), self.float, lanes), scale)
            error = b.fsub(self.clamped(self.call("llvm.rint", units), low, high), units)
            weight = self.spread(self.load(importance, column, self.float), lanes)
            b.store(self.call("llvm.fmuladd", weight, b.fmul(error, error), b.load(total)), total)
        self.store(b.load(total), loss, row)
