"""What methods with Hessian feedback do to a Hessian before they factor it."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.types import Stats


def usable(stats: Stats) -> tuple[Tensor, list[str]]:
    """The Hessian [in, in], or the identity (plain rounding) where no token gave one; notes for the report."""
    diagonal = stats.hessian.diagonal()
    if stats.count == 0 or not (diagonal > 0).any():
        reason = "no calibration token reached this input" if stats.count == 0 else "all calibration inputs were zero"
        return torch.eye(diagonal.shape[0], device=diagonal.device), [f"{reason}: rounded to nearest"]
    dead = int((diagonal == 0).sum())
    notes = [f"{dead} input channels were always zero: their weights are rounded to nearest"] if dead else []
    return stats.hessian, notes


def padded(weight: Tensor, hessian: Tensor, multiple: int) -> tuple[Tensor, Tensor]:
    """Weight [in, out] and Hessian [in, in] with `in` padded to a multiple: zero weights, independent mean inputs."""
    columns = weight.shape[0]
    extra = -columns % multiple
    if not extra:
        return weight, hessian
    grown = torch.nn.functional.pad(hessian, (0, extra, 0, extra))
    grown.diagonal()[columns:] = hessian.diagonal().mean()
    return torch.nn.functional.pad(weight, (0, 0, 0, extra)), grown
