"""BitNet b1.58: one scale for the whole weight, its mean or median magnitude, times -1, 0 or 1 (arXiv 2402.17764).

    scale = mean |w| or median |w|            w = scale * clamp(round(w / scale), -1, 1)

The median is that of BitNet b1.58 Reloaded (arXiv 2407.09527). A model has to be trained so: another one loses most of
what it has learned. compress/papers/tune/bitnet.py trains, from a checkpoint or from random weights, and puts the
result in the place of what this file writes.

Of normal weights this rounding loses 0.264 of the square (mean) and 0.318 (median), where the best scale and threshold
lose 0.190 (compress/papers/quant/ternary.py).

Differences: the scale is rounded to a number of float16, which blocks of three values in GGUF files hold. Where more
than half of the weights are 0, and so is the median, the mean takes its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compress.formats import ternary
from compress.types import PackedWeight, Quantized, Stats, Stored

FORMAT = "ternary"
NEEDS: frozenset[str] = frozenset()
INCOHERENCE = False

Scale = Literal["mean", "median"]


@dataclass(frozen=True)
class Config:
    """Settings of BitNet's rounding."""

    scale: Scale = "median"  # of magnitudes: the scale of a weight
    packing: str = "base3"  # base3 (1.6 bits), or planar (2 bits, the same weights)

    def __post_init__(self) -> None:
        if self.packing not in (ternary.BASE3, ternary.PLANAR):
            raise ValueError(f"packing {self.packing!r} is not {ternary.BASE3} or {ternary.PLANAR}")


def plan_params(config: Config, shape: tuple[int, int]) -> ternary.Params:
    """Return the format's parameters for a weight [out, in]."""
    return ternary.Params(config.packing, -1, "float32", tensor_scale=True)


def workspace(config: Config, shape: tuple[int, int]) -> int:
    """Return the bytes needed beside the stored weight: magnitudes, sorted, the quotient, and trits as they are packed.

    Rows and columns are padded while they are packed.
    """
    return 32 * (shape[0] + 16) * (shape[1] + 20)


def quantize(weight: Tensor, stats: Stats | None, config: Config, seed: int = 0) -> Quantized:
    """Quantize weight [out, in], any float dtype, finite; `stats` and `seed` are unused."""
    trits, scale = to_trits(weight.float(), config.scale)
    params = plan_params(config, (weight.shape[0], weight.shape[1]))
    return Quantized(as_packed(trits, scale, Stored(FORMAT, params)), ())


def to_trits(weight: Tensor, scale: Scale) -> tuple[Tensor, Tensor]:
    """Return the nearest of -1, 0 and 1 for a weight [out, in] float32 over its scale, as float32, and the scale []."""
    sizes = weight.detach().abs()
    size = sizes.mean() if scale == "mean" else sizes.flatten().median()
    size = torch.where(size > 0, size, sizes.mean()).clamp(min=torch.finfo(torch.float32).tiny)
    half = size.half().float()
    size = torch.where((half >= torch.finfo(torch.float16).tiny) & half.isfinite(), half, size)
    return (weight / size).round().clamp(-1, 1), size


def as_packed(trits: Tensor, scale: Tensor, stored: Stored) -> PackedWeight:
    """Return a weight [out, in] of trits, any type, and one scale, any shape."""
    tensors = ternary.pack(trits.to(torch.int8), scale.detach().reshape(1, 1).float(), stored.params)
    return PackedWeight(stored, tensors, (trits.shape[0], trits.shape[1]))
