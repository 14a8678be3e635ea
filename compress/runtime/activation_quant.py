"""Quantize the inputs of a linear, as `Activations` (compress/types.py) says.

    q = round(clamp(x / s, -Q, Q))        x ~ s q

Q is 2^(bits - 1) - 1, or 448 with numbers of fp8 in place of integers. s is clip max|x| / Q of each token, so that a
token's q depend on nothing but the token, or the stored `in_scale`, float32 [1], for which `LargestInput` runs over the
calibration data. A token that holds a NaN or an infinity has the scale NaN: so have its outputs, and no others.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compress.errors import NumericalError
from compress.types import Activations

FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0
FP8_HALF_STEP = 16.0  # half the distance of its two largest numbers
TINY = torch.finfo(torch.float32).tiny  # the scale of a token of zeros


def largest(activations: Activations) -> float:
    """Return Q, the largest magnitude of a quantized input."""
    return FP8_LARGEST if activations.dtype == "fp8" else 2.0 ** (activations.bits - 1) - 1


def quantize(x: Tensor, activations: Activations, in_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize x [..., n] of any floating type: q float32 [..., n], always finite, and s float32 [..., 1].

    `in_scale` is needed where the scale is static.
    """
    unit, scale = _unit(x.detach(), activations, in_scale)
    return _round(unit, activations), scale


def split(x: Tensor, activations: Activations, in_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize as `quantize`, but q is scaled down to less than 2 and of the type of x, and s scaled up in return.

    Exact in any type: an integer of 8 bits, and a number of fp8, is one of bfloat16 and of float16. Gradients pass
    straight through the rounding, not through what is clipped; scales have none.
    """
    power = 256.0 if activations.dtype == "fp8" else 2.0 ** (activations.bits - 2)
    unit, scale = _unit(x, activations, in_scale)
    q = _round(unit.detach(), activations)
    if x.requires_grad and torch.is_grad_enabled():
        limit = largest(activations) + (FP8_HALF_STEP if activations.dtype == "fp8" else 0.5)
        unit = torch.where(unit.abs() <= limit, unit, 0)  # a largest input that rounds beyond Q is not clipped
        q = q + (unit - unit.detach())
    return (q / power).to(x.dtype), scale * power


def fake_quantize(x: Tensor, activations: Activations, in_scale: Tensor | None = None) -> Tensor:
    """Return s q for x [..., n], rounded to the type of x once; gradients as `split`."""
    q, scale = split(x, activations, in_scale)
    return (q * scale).to(x.dtype)


def _unit(x: Tensor, activations: Activations, in_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return x / s in float32 [..., n], and s [..., 1]; NaN in tokens that are not finite; s has no gradient."""
    wide = x.float()
    top = wide.detach().abs().amax(-1, keepdim=True)  # ten times as fast as vector_norm
    if activations.scale == "tensor":
        assert in_scale is not None, "static scales are stored: the caller has them"
        scale = in_scale.float().expand_as(top)
    else:
        scale = (activations.clip * top / largest(activations)).clamp_min(TINY)
    scale = torch.where(top.isfinite(), scale, torch.nan)
    return wide / scale, scale


def _round(unit: Tensor, activations: Activations) -> Tensor:
    """Return the nearest quantized numbers, 0 for NaN."""
    top = largest(activations)
    clamped = unit.clamp(-top, top).nan_to_num_(0.0)
    return clamped.to(FP8).float() if activations.dtype == "fp8" else clamped.round_()


class LargestInput:
    """The largest magnitude of all inputs that were added, for a static scale."""

    def __init__(self) -> None:
        self.top: Tensor | None = None  # float32, on the device of the inputs: nothing waits for it

    def add(self, x: Tensor) -> None:
        """Add x [..., n] of any floating type; no tokens are no harm."""
        if x.numel():
            top = x.detach().abs().amax().float()
            self.top = top if self.top is None else torch.maximum(self.top, top.to(self.top.device))

    def in_scale(self, activations: Activations, where: str) -> Tensor:
        """Return `in_scale`, float32 [1] on the CPU, 1 if all inputs were zeros.

        Raises NumericalError without inputs, or for inputs that are not finite.
        """
        if self.top is None:
            raise NumericalError(f"{where}: no calibration token reached it, so it has no scale; use scale: token")
        top = float(self.top)
        if not math.isfinite(top):
            raise NumericalError(
                f"{where}: its inputs are not finite; quantize with --dtype float32, or check the weights"
            )
        scale = activations.clip * top / largest(activations)
        return torch.tensor([scale if scale > TINY else 1.0], dtype=torch.float32)


def describe(activations: Activations) -> str:
    """Return the settings in a word or two, such as "int8 inputs" or "static fp8 inputs"."""
    dtype = "fp8" if activations.dtype == "fp8" else f"int{activations.bits}"
    return f"{'static ' if activations.scale == 'tensor' else ''}{dtype} inputs"
