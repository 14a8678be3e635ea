"""Improve codes by coordinate descent over blocks of columns, for any rounding, after the column loop.

With all other columns fixed, the loss tr(R H R^T) of column block k is least at Q_k + (R H)_k H_kk^-1, measured in the
plain block H_kk (in the loop it is the conditional one). Each block in turn is rounded again to that target, and a unit
of rows takes its new codes only where they lower the loss, so that the loss never rises whatever the rounding does
(QuIP#, arXiv 2402.04396, calls such sweeps tune iterations). Cost of a sweep: m n^2 for a weight [m, n], and the
rounding of all its blocks. `compress/quant/descent.py` is the form for integer grids, which also refits scales.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from compress.quant.feedback import Objective, Rounder

CHUNK = 128  # columns that hear of each other's changes at once; the rest hears of them in one product


class Revisable(Rounder, Protocol):
    """A rounder whose codes can be taken back."""

    unit_rows: int  # rows whose codes are taken or rejected together
    codes: Tensor  # [blocks, code units along the rows, ...]; `round_block` sets codes[start // width]


def improve(layer: Objective, values: Tensor, rounder: Revisable, sweeps: int) -> Tensor:
    """Return better quantized values [in, out] and leave their codes in `rounder.codes`.

    Stops early when a sweep changes nothing.
    """
    columns, hessian, values = len(layer.weight), layer.hessian, values.clone()
    pull = layer.times_hessian(layer.weight - values)  # H R, [in, out]
    size = max(CHUNK // rounder.width, 1) * rounder.width
    for _ in range(sweeps):
        changed: bool | Tensor = False
        for start in range(0, columns, size):
            part = slice(start, min(start + size, columns))
            before = values[part].clone()
            changed = _chunk(layer, values, pull, rounder, part) | changed
            moved = before.sub_(values[part])  # change of R
            rest = torch.cat([hessian[:start, part], hessian[part.stop :, part]])
            update = rest @ moved
            pull[:start] += update[:start]
            pull[part.stop :] += update[start:]
        if not changed:
            break
    return values


def _chunk(layer: Objective, values: Tensor, pull: Tensor, rounder: Revisable, part: slice) -> bool | Tensor:
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
        gain = _loss(target - old, metric) - _loss(target - new, metric)  # [out]
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


class _Step(NamedTuple):
    """Where a block of columns wants to go, in the metric of its part of the Hessian."""

    factor: Tensor  # [width, width], upper
    change: Tensor  # [width, out]
    is_sound: Tensor | None = None  # whether there is a factor, where that is not known yet


def _newton_step(block: Tensor, damping: float, pull: Tensor) -> _Step | None:
    """Return the upper factor of the damped block of the Hessian, and its inverse times pull [width, out].

    None if the block is singular in float32, as with columns that are nearly equal and no damping. A GPU is not waited
    for: the step of such a block is zero there, and is not to be taken.
    """
    if len(block) == 1:
        curvature = block + damping
        return _Step(curvature.sqrt(), pull / curvature)
    damped = block + damping * torch.eye(len(block), dtype=block.dtype, device=block.device)
    lower, info = torch.linalg.cholesky_ex(damped.flip(0, 1))
    if block.is_cuda:
        is_sound = info == 0
        lower = torch.where(is_sound, lower, torch.eye(len(block), dtype=block.dtype, device=block.device))
        change = torch.cholesky_solve(pull.flip(0), lower).flip(0)
        return _Step(lower.flip(0, 1), torch.where(is_sound, change, 0.0), is_sound)
    if info:
        return None
    return _Step(lower.flip(0, 1), torch.cholesky_solve(pull.flip(0), lower).flip(0))


def _loss(error: Tensor, metric: Tensor) -> Tensor:
    """Return ||C^T error||^2 of each row: error [width, out], metric C upper [width, width]."""
    return (metric.T @ error).square_().sum(0)
