"""Share what trained integer codes have in common: a real number behind each code, rounded by straight-through.

Trits are such codes, of three levels with the zero point 1.

Rounding has the gradient of what is rounded (Bengio et al. 2013, arXiv 1308.3432). A code is

    code = clamp(round(latent) + round(zero), 0, 2**bits - 1),    weight = scale * (code - round(zero))

with `latent` in steps of the grid, so that a scale can move and codes stay. It starts within the cell of the stored
code, so that the weight is the stored one to the bit: in the middle of the cell ("codes"), or as near as MARGIN allows
to the weight that was quantized ("weights").
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from compress.formats import int as int_format
from compress.formats import ternary
from compress.tune.trained import TrainedWeight, add_surroundings, strip_surroundings
from compress.types import PackedWeight

MARGIN = 0.02  # [steps of the grid] from the latent to the wall of its cell, at least


def straight(x: Tensor, rounded: Tensor) -> Tensor:
    """Return `rounded` with the gradient of x."""
    return x + (rounded - x).detach()


class Rounded(torch.autograd.Function):
    """Decode latents [out, groups, columns], with scales and whole zero points [out, groups, 1].

    The gradient passes straight through the rounding and stops where the range of codes ends. It is written out because
    a byte for each weight is all that has to be kept for it.
    """

    @staticmethod
    def forward(ctx: Any, latent: Tensor, scales: Tensor, zeros: Tensor, top: int) -> Tensor:
        codes = latent.round().add_(zeros).clamp_(-1, top + 1)
        ctx.save_for_backward(codes.to(torch.int16 if top > 126 else torch.int8), scales, zeros)
        ctx.top = top
        return codes.clamp_(0, top).sub_(zeros).mul_(scales)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        kept, scales, zeros = ctx.saved_tensors
        top = ctx.top
        inside = (kept >= 0) & (kept <= top)
        of_scales = (gradient * kept.clamp(0, top).float().sub_(zeros)).sum(-1, keepdim=True)
        whole = gradient * scales
        of_latent = whole * inside
        return of_latent, of_scales, (of_latent - whole).sum(-1, keepdim=True), None


class Latent(TrainedWeight):
    """One weight of the format `int` or `ternary`, codes as [out, groups, columns of a group]."""

    def __init__(self, packed: PackedWeight, target: Tensor, start: str) -> None:
        super().__init__(packed)
        self.trained.pop("scales")
        self.beside = dict(self.trained)  # low-rank factors, and what transforms store
        params, shape = packed.params, packed.shape
        codes, scales, self.zeros, self.top = _integers(packed)
        self.group = params.group(shape[1])
        self.scales = scales.float()[..., None]  # [out, groups, 1]
        self.centre = self._in_groups(codes.float()) - self.zeros  # [out, groups, columns]
        matrix = strip_surroundings(target, packed) if start == "weights" else None
        self.latent = self.centre if matrix is None else self._near(self._in_groups(matrix))

    def _near(self, matrix: Tensor) -> Tensor:
        """Return the numbers in the cells of the codes that are nearest to a matrix."""
        wanted = torch.where(self.scales == 0, self.centre, matrix / self.scales)
        reach = 0.5 - MARGIN
        return torch.clamp(wanted, self.centre - reach, self.centre + reach)

    def _in_groups(self, matrix: Tensor) -> Tensor:
        """[out, in] -> [out, groups, columns], zeros behind the last column."""
        return torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % self.group)).unflatten(1, (-1, self.group))

    def _dense(self, latent: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        """Return the matrix [out, in] of latents [out, groups, columns]; scales and zeros [out, groups, 1]."""
        zeros = straight(zeros, zeros.round().clamp(0, self.top))
        values: Tensor = Rounded.apply(latent, scales, zeros, self.top)
        return values.flatten(1)[:, : self.packed.shape[1]]

    def clip_grid(self, high: Tensor, low: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return scales and zero points with factors [out, groups, 1] of the two ends of each range, with gradients.

        low: None where codes are symmetric, whose ends have one factor.
        """
        if low is None:
            return self._as_stored(self.scales * high), self.zeros
        below, above = self.zeros * low, (self.top - self.zeros) * high  # in stored steps
        factor = (below + above) / self.top
        zeros = torch.where(factor.detach() > 0, below / factor.clamp(min=1e-3), self.zeros)
        return self._as_stored(self.scales * factor), zeros

    @staticmethod
    def safe(scales: Tensor) -> Tensor:
        """Return scales to divide by: 1 where they are 0."""
        return torch.where(scales == 0, torch.ones_like(scales), scales)

    def _as_stored(self, scales: Tensor) -> Tensor:
        """Return scales rounded to their stored type, with gradients."""
        dtype = getattr(torch, self.packed.params.scale_dtype)
        return straight(scales, scales.detach().to(dtype).float())

    def _around(self, matrix: Tensor) -> Tensor:
        own = {name: each.value() for name, each in self.beside.items()}
        return add_surroundings(matrix, self.packed, {**self.packed.tensors, **own})

    @torch.no_grad()
    def _pack_latent(self, latent: Tensor, scales: Tensor, zeros: Tensor) -> PackedWeight:
        """Return the packed weight of these latents."""
        params, columns = self.packed.params, self.packed.shape[1]
        zeros = zeros.round().clamp(0, self.top)
        codes = (latent.round() + zeros).clamp(0, self.top).to(torch.uint8).flatten(1)[:, :columns]
        stored = self._as_stored(scales)[..., 0].to(getattr(torch, params.scale_dtype))
        if self.packed.format == "ternary":
            return self._pack_with(ternary.pack(codes.to(torch.int8) - 1, stored, params))
        whole = None if params.symmetric else zeros[..., 0].to(torch.uint8)
        return self._pack_with(int_format.pack(codes, stored, whole, params))

    def shift(self, latent: Tensor) -> float:
        """Return the share of codes that are not what they were."""
        return float((latent.detach().round() != self.centre).float().mean())


def _integers(packed: PackedWeight) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return codes [out, in], scales [out, groups], zero points float32 [out, groups, 1], and the largest code."""
    if packed.format == "ternary":
        trits, scales = ternary.unpack(packed.tensors, packed.params, packed.shape)
        return trits + 1, scales, torch.ones_like(scales, dtype=torch.float32)[..., None], 2
    codes, scales, zeros = int_format.unpack(packed.tensors, packed.params, packed.shape)
    bits = packed.params.bits
    middle = torch.full_like(scales, 2 ** (bits - 1)) if zeros is None else zeros
    return codes, scales, middle.float()[..., None], 2**bits - 1
