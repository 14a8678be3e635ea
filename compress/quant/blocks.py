"""What methods that round blocks of columns share: a layer made ready for the column loop and the sweeps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compress.numerics.linalg import upper_factor
from compress.quant.hessian import padded, usable
from compress.types import Stats


class Problem(NamedTuple):
    """A layer in the order of the loop: whole blocks of columns, those with the largest inputs first."""

    weight: Tensor  # [in, out] float32, `in` padded to whole blocks
    hessian: Tensor  # [in, in] float32, not damped
    damping: float  # to be added to its diagonal
    factor: Tensor  # upper factor of the damped Hessian
    blocks: Tensor  # [in / width] int64: the block of the natural order at each place of the loop's order
    notes: list[str]

    def loss(self, values: Tensor) -> float:
        """tr(R H R^T) of quantized values [in, out], H damped."""
        residual = self.weight - values
        return (self.times_hessian(residual) * residual).sum(dtype=torch.float64).item()

    def times_hessian(self, values: Tensor) -> Tensor:
        """The damped Hessian times [in, out]."""
        return (self.hessian @ values).add_(values, alpha=self.damping)

    def natural(self, codes: Tensor) -> Tensor:
        """Codes [blocks, ...] of the loop's order in the order of the layer."""
        return codes[torch.argsort(self.blocks)]


def prepare(weight: Tensor, stats: Stats, damp: float, width: int, group: int = 0) -> Problem:
    """weight [out, in] of any float type; `damp` is the fraction of the mean diagonal that is added to it.

    Groups of `group` columns, if there are any, stay together and are whole, the last one padded.
    """
    hessian, notes = usable(stats)
    columns, group = weight.shape[1], group or width
    target, hessian = padded(weight.T.float().contiguous(), hessian, group)
    hessian.diagonal()[columns:] = 0  # of padding, which `padded` copied: it must not matter to what is fitted
    sizes = hessian.diagonal().view(-1, group // width, width).mean(2)  # group, block
    within = torch.argsort(sizes, dim=1, descending=True, stable=True)
    first = torch.argsort(sizes.mean(1), descending=True, stable=True)
    blocks = (within + torch.arange(len(sizes), device=within.device)[:, None] * sizes.shape[1])[first].flatten()
    order = (blocks[:, None] * width + torch.arange(width, device=blocks.device)).flatten()
    factor = upper_factor(hessian, damp, order)
    notes += factor.notes
    damping = factor.damp * hessian.diagonal().mean().item()
    hessian = hessian[order][:, order]
    return Problem(target[order], hessian, damping, factor.upper, blocks, notes)
