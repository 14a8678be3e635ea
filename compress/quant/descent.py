"""Improve codes by coordinate descent: the clean-up after a first rounding.

With all other columns fixed, the loss tr(R H R^T) of column block k is least at Q_k + (R H)_k H_kk^-1, measured in the
plain block H_kk (in the column loop it is the conditional one). Every accepted step lowers the loss (QuIP#, arXiv
2402.04396, calls such sweeps tune iterations). Arrays are transposed, [in, out], as in the column loop.

- `improve_blocks` serves any rounding: each block is rounded again to that target, and a unit of rows takes its new
  codes only where they lower the loss. Cost of a sweep: m n^2 for a weight [m, n], and the rounding of all its blocks.
- `improve_grid` serves integers: each group in turn gets the scale that minimizes the loss with all codes fixed (one
  number a row, closed form, rounded to its storage type), then each of its columns the nearest grid point. Zero points
  stay. Cost: two m n^2 products a sweep.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from compress.formats import int as int_format
from compress.kernels.loops import columns as column_loops
from compress.quant.feedback import Objective, Rounder
from compress.quant.grid import Grid, storable

BLOCK_COLUMNS = 128  # these hear of each other's changes at once; the rest hears of them in one product
# Columns whose codes are updated one by one before the rest of a large group hears of it.
GRID_COLUMNS = column_loops.MAX_COLUMNS


class Revisable(Rounder, Protocol):
    """A rounder whose codes can be taken back."""

    unit_rows: int  # rows whose codes are taken or rejected together
    codes: Tensor  # [blocks, code units along the rows, ...]; `round_block` sets codes[start // width]


def improve_blocks(layer: Objective, values: Tensor, rounder: Revisable, sweeps: int) -> Tensor:
    """Return better quantized values [in, out] and leave their codes in `rounder.codes`.

    Stops early when a sweep changes nothing.
    """
    columns, hessian, values = len(layer.weight), layer.hessian, values.clone()
    pull = layer.times_hessian(layer.weight - values)  # H R, [in, out]
    size = max(BLOCK_COLUMNS // rounder.width, 1) * rounder.width
    for _ in range(sweeps):
        changed: bool | Tensor = False
        for start in range(0, columns, size):
            part = slice(start, min(start + size, columns))
            before = values[part].clone()
            changed = _improve_chunk(layer, values, pull, rounder, part) | changed
            moved = before.sub_(values[part])  # change of R
            rest = torch.cat([hessian[:start, part], hessian[part.stop :, part]])
            update = rest @ moved
            pull[:start] += update[:start]
            pull[part.stop :] += update[start:]
        if not changed:
            break
    return values


def _improve_chunk(layer: Objective, values: Tensor, pull: Tensor, rounder: Revisable, part: slice) -> bool | Tensor:
    """Take one step for each block of a chunk; `pull` is kept up to date for the chunk's own columns.

    Return whether a code has changed. A GPU is not waited for: there that is a tensor, and nothing is left out.
    """
    hessian, damping, local = layer.hessian, layer.damping, pull[part]
    changed: bool | Tensor = False
    for start in range(part.start, part.stop, rounder.width):
        block = slice(start, start + rounder.width)
        inside = slice(start - part.start, start - part.start + rounder.width)
        step = _newton_step(hessian[block, block], damping, local[inside])
        if step is None:
            continue
        metric, target = step.factor, values[block] + step.change
        index = start // rounder.width
        old_codes, old = rounder.codes[index].clone(), values[block]
        new = rounder.round_block(target, metric, start)
        gain = _errors(target - old, metric) - _errors(target - new, metric)  # [out]
        units = torch.nn.functional.pad(gain, (0, -len(gain) % rounder.unit_rows)).view(-1, rounder.unit_rows)
        better = units.sum(1) > 0 if step.is_sound is None else (units.sum(1) > 0) & step.is_sound
        per_code = len(gain) / old_codes.shape[0]
        code_rows = (torch.arange(old_codes.shape[0], device=better.device) * per_code).long() // rounder.unit_rows
        keep = better[code_rows].view(-1, *(1,) * (old_codes.dim() - 1))
        rounder.codes[index] = torch.where(keep, rounder.codes[index], old_codes)
        change = torch.where(better.repeat_interleave(rounder.unit_rows)[: len(gain)], new - old, 0.0)  # [width, out]
        if change.is_cuda:
            changed = change.any() | changed
        elif change.any():
            changed = True
        else:
            continue
        values[block] += change
        local.addmm_(hessian[part, block], change, alpha=-1)
        local[inside].add_(change, alpha=-damping)
    return changed


class _NewtonStep(NamedTuple):
    """Where a block of columns wants to go, in the metric of its part of the Hessian."""

    factor: Tensor  # [width, width], upper
    change: Tensor  # [width, out]
    is_sound: Tensor | None = None  # whether there is a factor, where that is not known yet


def _newton_step(block: Tensor, damping: float, pull: Tensor) -> _NewtonStep | None:
    """Return the upper factor of the damped block of the Hessian, and its inverse times pull [width, out].

    None if the block is singular in float32, as with columns that are nearly equal and no damping. A GPU is not waited
    for: the step of such a block is zero there, and is not to be taken.
    """
    if len(block) == 1:
        curvature = block + damping
        return _NewtonStep(curvature.sqrt(), pull / curvature)
    damped = block + damping * torch.eye(len(block), dtype=block.dtype, device=block.device)
    lower, info = torch.linalg.cholesky_ex(damped.flip(0, 1))
    if block.is_cuda:
        is_sound = info == 0
        lower = torch.where(is_sound, lower, torch.eye(len(block), dtype=block.dtype, device=block.device))
        change = torch.cholesky_solve(pull.flip(0), lower).flip(0)
        return _NewtonStep(lower.flip(0, 1), torch.where(is_sound, change, 0.0), is_sound)
    if info:
        return None
    return _NewtonStep(lower.flip(0, 1), torch.cholesky_solve(pull.flip(0), lower).flip(0))


def _errors(error: Tensor, metric: Tensor) -> Tensor:
    """Return ||C^T error||^2 of each row: error [width, out], metric C upper [width, width]."""
    return (metric.T @ error).square_().sum(0)


def improve_grid(
    layer: Objective, codes: Tensor, fitted: Grid, params: int_format.Params, sweeps: int
) -> tuple[Tensor, Grid]:
    """Return better codes [columns, rows] uint8 and grids [groups, rows]. The layer's loss never rises."""
    size = params.group(len(codes))
    state = OnGrid(layer, codes, fitted.values(codes, size), fitted, params)
    state.sweep(size, sweeps)
    return state.codes, Grid(state.scale, fitted.zero)


class Descent(ABC):
    """The codes, scales and values on the way, and H R: w = scale (code - zero), or what `write_values` writes."""

    def __init__(self, layer: Objective, codes: Tensor, values: Tensor, fitted: Grid, bits: int) -> None:
        self.hessian, self.damping, self.top = layer.hessian, layer.damping, 2**bits - 1
        self.codes, self.scale, self.zero = codes.clone(), fitted.scale.clone(), fitted.zero
        self.values = values  # Q, [columns, rows]
        self.is_compiled = column_loops.supports(values)
        self.pull = layer.times_hessian(layer.weight - self.values)  # H R, [columns, rows]

    def sweep(self, size: int, sweeps: int) -> None:
        """Step all groups of `size` columns in turn, `sweeps` times."""
        columns = len(self.codes)
        for _ in range(sweeps):
            for index, start in enumerate(range(0, columns, size)):
                self.group(index, slice(start, min(start + size, columns)))

    def group(self, index: int, part: slice) -> None:
        """Step the group's scales, then the code of each of its columns; H R elsewhere follows at the end."""
        values, zero = self.values[part], self.zero[index]
        before = values.clone()
        block = self.hessian[part, part].clone()
        block.diagonal().add_(self.damping)
        pull = self.pull[part].clone()
        units = self.units(self.codes[part], zero)
        scale = self.rescale(index, units, block, pull)
        grid = scale, 1 / scale, -zero, self.top - zero
        for start in range(0, len(units), GRID_COLUMNS):
            chunk = slice(start, min(start + GRID_COLUMNS, len(units)))
            old = units[chunk].clone()
            self.step(units[chunk], pull[chunk], block[chunk, chunk].T.contiguous(), grid)
            if chunk.stop < len(units):
                pull[chunk.stop :].addmm_(block[chunk.stop :, chunk], (old - units[chunk]) * scale)
        self.codes[part] = self.encode(units, zero)
        self.write_values(index, units, values)
        change = before - values
        self.pull.addmm_(self.hessian[:, part], change)
        self.pull[part].add_(change, alpha=self.damping)

    def units(self, codes: Tensor, zero: Tensor) -> Tensor:
        """Return what codes [columns, rows] stand for in units of their scales."""
        return codes.float().sub_(zero)

    def encode(self, units: Tensor, zero: Tensor) -> Tensor:
        """Return the codes uint8 of units, the inverse of `units`."""
        return (units + zero).to(torch.uint8)

    def step(self, units: Tensor, pull: Tensor, metric: Tensor, grid: Sequence[Tensor]) -> None:
        """Set one column of units after the other to the best, and keep the pull of those to come up to date."""
        step = column_loops.step_columns if self.is_compiled else _step_columns
        step(units, pull, metric, grid)

    @abstractmethod
    def storable(self, index: int, scale: Tensor) -> Tensor:
        """Return scales [rows] of a group, each rounded to a near one that can be stored."""

    def write_values(self, index: int, units: Tensor, out: Tensor) -> None:
        """Write the values of a group's codes less its zero points, [columns, rows]."""
        torch.mul(units, self.scale[index], out=out)

    def rescale(self, index: int, units: Tensor, block: Tensor, pull: Tensor) -> Tensor:
        """Return the group's new scales [rows]; updates `pull` [columns, rows] in place."""
        old = self.scale[index]
        product = block @ units
        curvature = (units * product).sum(0)
        slope = (units * pull).sum(0)
        step = torch.where(curvature > 0, slope / curvature.clamp_min(torch.finfo(torch.float32).tiny), 0.0)
        new = self.storable(index, old + step)
        moved = new - old
        # Rounding to what can be stored may overshoot: keep the step only if it lowers the loss.
        new = torch.where(2 * moved * slope - moved.square() * curvature > 0, new, old)
        pull.sub_(product * (new - old))
        self.scale[index] = new
        return new


def _step_columns(units: Tensor, pull: Tensor, metric: Tensor, grid: Sequence[Tensor]) -> None:
    """Do what `column_loops.step_columns` does, to the bit."""
    scale, inverse, low, high = grid
    for j, curvature in enumerate(metric.diagonal().tolist()):
        now = units[j]
        best = torch.addcmul(now, pull[j], inverse, value=1 / curvature)
        change = best.round_().clamp_(low, high).sub_(now)
        now += change
        pull[j + 1 :].addr_(metric[j, j + 1 :], change.mul_(scale), alpha=-1)  # the others have been read


class OnGrid(Descent):
    """Integers whose scales are floating-point numbers."""

    def __init__(
        self, layer: Objective, codes: Tensor, values: Tensor, fitted: Grid, params: int_format.Params
    ) -> None:
        super().__init__(layer, codes, values, fitted, params.bits)
        self.dtype = getattr(torch, params.scale_dtype)

    def storable(self, index: int, scale: Tensor) -> Tensor:
        return storable(scale, self.dtype)
