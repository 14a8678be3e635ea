"""Improve integer codes and scales by coordinate descent: the clean-up after a first rounding.

Given codes and scales, each group in turn gets the scale that minimizes tr(R H R^T) with all codes fixed (one number a
row, closed form, rounded to its storage type), then each of its columns the code that minimizes it with everything else
fixed: the grid point nearest to q_j + (R H)_j / H_jj. Every accepted step lowers the loss (QuIP#, arXiv 2402.04396,
calls such sweeps tune iterations). Zero points stay. Cost: two m n^2 products a sweep for a weight [m, n].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from compress.formats import int as int_format
from compress.kernels.loops import columns as column_loops
from compress.quant.feedback import Objective
from compress.quant.grid import Grid, storable

# Columns whose codes are updated one by one before the rest of a large group hears of it.
CHUNK = column_loops.MAX_COLUMNS


def improve(
    layer: Objective, codes: Tensor, fitted: Grid, params: int_format.Params, sweeps: int
) -> tuple[Tensor, Grid]:
    """Return better codes [columns, rows] uint8 and grids [groups, rows]. The layer's loss never rises."""
    size = params.group(len(codes))
    state = _OnGrid(layer, codes, fitted.values(codes, size), fitted, params)
    state.sweep(size, sweeps)
    return state.codes, Grid(state.scale, fitted.zero)


class Descent(ABC):
    """The codes, scales and values on the way, and H R: w = scale (code - zero), or what `decoded` says."""

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
        units = self.codes[part].float().sub_(zero)
        scale = self.rescale(index, units, block, pull)
        grid = scale, 1 / scale, -zero, self.top - zero
        for start in range(0, len(units), CHUNK):
            chunk = slice(start, min(start + CHUNK, len(units)))
            old = units[chunk].clone()
            step = column_loops.step_columns if self.is_compiled else _step_columns
            step(units[chunk], pull[chunk], block[chunk, chunk].T.contiguous(), grid)
            if chunk.stop < len(units):
                pull[chunk.stop :].addmm_(block[chunk.stop :, chunk], (old - units[chunk]) * scale)
        self.codes[part] = (units + zero).to(torch.uint8)
        self.decoded(index, units, values)
        change = before - values
        self.pull.addmm_(self.hessian[:, part], change)
        self.pull[part].add_(change, alpha=self.damping)

    @abstractmethod
    def storable(self, index: int, scale: Tensor) -> Tensor:
        """Return scales [rows] of a group, each rounded to a near one that can be stored."""

    def decoded(self, index: int, units: Tensor, out: Tensor) -> None:
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


class _OnGrid(Descent):
    """Integers whose scales are floating-point numbers."""

    def __init__(
        self, layer: Objective, codes: Tensor, values: Tensor, fitted: Grid, params: int_format.Params
    ) -> None:
        super().__init__(layer, codes, values, fitted, params.bits)
        self.dtype = getattr(torch, params.scale_dtype)

    def storable(self, index: int, scale: Tensor) -> Tensor:
        return storable(scale, self.dtype)
