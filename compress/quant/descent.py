"""Coordinate descent on integer codes and scales: the clean-up after a first rounding.

Given codes and scales, each group in turn gets the scale that minimizes tr(R H R^T) with all codes fixed (one number a
row, closed form, rounded to its storage type), then each of its columns the code that minimizes it with everything else
fixed: the grid point nearest to q_j + (R H)_j / H_jj. Every accepted step lowers the loss (QuIP#, arXiv 2402.04396,
calls such sweeps tune iterations). Zero points stay. Cost: two m n^2 products a sweep for a weight [m, n].
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.formats import int as int_format
from compress.quant.grid import Grid, storable

CHUNK = 128  # columns whose codes are updated one by one before the rest of a large group hears of it


def improve(
    target: Tensor,
    hessian: Tensor,
    damping: Tensor,
    codes: Tensor,
    fitted: Grid,
    params: int_format.Params,
    sweeps: int,
) -> tuple[Tensor, Grid]:
    """Better codes [columns, rows] uint8 and grid [groups, rows] for target [columns, rows] float32.

    The loss is tr(R H R^T) with H = hessian + damping * I, and never rises.
    """
    columns = target.shape[0]
    size = params.group(columns)
    state = _Descent(target, hessian, damping, codes, fitted, params)
    for _ in range(sweeps):
        for index, start in enumerate(range(0, columns, size)):
            state.group(index, slice(start, min(start + size, columns)))
    return state.codes, Grid(state.scale, fitted.zero)


class _Descent:
    def __init__(
        self, target: Tensor, hessian: Tensor, damping: Tensor, codes: Tensor, fitted: Grid, params: int_format.Params
    ) -> None:
        columns = target.shape[0]
        self.hessian, self.damping, self.top = hessian, damping, 2**params.bits - 1
        self.dtype = getattr(torch, params.scale_dtype)
        self.codes, self.scale, self.zero = codes.clone(), fitted.scale.clone(), fitted.zero
        size = params.group(columns)
        owner = torch.arange(columns, device=target.device) // size
        self.values = codes.float().sub_(self.zero[owner]).mul_(self.scale[owner])  # Q, [columns, rows]
        residual = target - self.values
        self.pull = (hessian @ residual).add_(residual, alpha=float(damping))  # H R, [columns, rows]

    def group(self, index: int, part: slice) -> None:
        """One scale step, one code step for each column of the group; H R of the other columns follows at the end."""
        values, zero = self.values[part], self.zero[index]
        before = values.clone()
        block = self.hessian[part, part].clone()
        block.diagonal().add_(self.damping)
        pull = self.pull[part].clone()
        units = self.codes[part].float().sub_(zero)
        scale = self._rescale(index, units, block, pull)
        low, high, inverse = -zero, self.top - zero, 1 / scale
        curvature = block.diagonal().tolist()
        for start in range(0, len(units), CHUNK):
            chunk = slice(start, min(start + CHUNK, len(units)))
            old, local, metric = units[chunk].clone(), pull[chunk], block[chunk, chunk]
            for j in range(chunk.stop - start):
                now = units[start + j]
                wanted = torch.addcmul(now, local[j], inverse, value=1 / curvature[start + j])
                change = wanted.round_().clamp_(low, high).sub_(now)
                now += change
                local.addr_(metric[:, j], change.mul_(scale), alpha=-1)
            if chunk.stop < len(units):
                pull[chunk.stop :].addmm_(block[chunk.stop :, chunk], (old - units[chunk]) * scale)
        self.codes[part] = (units + zero).to(torch.uint8)
        torch.mul(units, scale, out=values)
        change = before - values
        self.pull.addmm_(self.hessian[:, part], change)
        self.pull[part].add_(change, alpha=float(self.damping))

    def _rescale(self, index: int, units: Tensor, block: Tensor, pull: Tensor) -> Tensor:
        """The group's new scales [rows]; updates `pull` [columns, rows] in place."""
        old = self.scale[index]
        product = block @ units
        curvature = (units * product).sum(0)
        slope = (units * pull).sum(0)
        step = torch.where(curvature > 0, slope / curvature.clamp_min(torch.finfo(torch.float32).tiny), 0.0)
        new = storable(old + step, self.dtype)
        moved = new - old
        # Rounding to the storage type may overshoot: keep the step only if it lowers the loss.
        new = torch.where(2 * moved * slope - moved.square() * curvature > 0, new, old)
        pull.sub_(product * (new - old))
        self.scale[index] = new
        return new
