"""HQQ: zero points that are no integers, fitted to the weights alone by half-quadratic splitting (no paper).

Half-Quadratic Quantization (Badri and Shaji 2023, the report and code of mobiusml/hqq) takes the scale of a group from
its range and looks for the zero point z that minimizes sum |w - q|^p, p = 0.7, which large errors of few weights matter
little to. Errors are split into a sparse part and the rest, in turn:

    code = clamp(round(w / s + z));  e = shrink(w - s (code - z));  z = mean(code - (w - e) / s)

with shrink(x) = sign(x) max(0, |x| - |x|^(p-1) / beta), beta = 10. It takes no calibration text.

Differences from the code: each group keeps the best of its zero points, by the mean of |w - q|, and stops by itself
(there a whole matrix does both); only a group of equal weights has no range (there one below 0.0001, too); minima in
place of zero points, -s z, are rounded to 16 bits, and codes are chosen for what is stored.

Not in the core: on the bundled model it has KL 0.0040 at 4.500 bits a weight, as `rtn` with a searched range has at
4.313; 0.0174 at 3.500 (docs/results/low_bit.md).

Not done: scales and zero points of 8 bits; any use of activations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.papers.formats import affine
from compress.papers.quant import affine_grid
from compress.types import Quantized, Stats

FORMAT = "affine"
NEEDS: frozenset[str] = frozenset()
INCOHERENCE = False
NORM = 0.7  # p
BETA = 10.0
MAX_ITERATIONS = 20


@dataclass(frozen=True)
class Config(affine_grid.AffineConfig):
    """Settings of HQQ; see AffineConfig."""


def plan_params(config: Config, shape: tuple[int, int]) -> affine.Params:
    """Return the format's parameters for a weight [out, in]: enough for the exact stored bytes."""
    return affine_grid.params(config, shape)


def workspace(config: Config, shape: tuple[int, int]) -> int:
    """Return a bound for the bytes needed beside the stored weight: a float32 copy, codes, their packing."""
    return shape[0] * shape[1] * 6 * 4 + 16 * 4 * affine_grid.WEIGHTS_AT_A_TIME


def quantize(weight: Tensor, stats: Stats | None, config: Config, seed: int = 0) -> Quantized:
    """Quantize weight [out, in], any float dtype, finite. `stats` and `seed` are unused."""
    target = weight.float()
    params = affine_grid.params(
        config, (weight.shape[0], weight.shape[1]), affine_grid.scale_dtype(target, config.bits)
    )
    fitted = affine_grid.fit_groups(
        target, params.group(weight.shape[1]), lambda groups: fit(groups, 2**config.bits - 1)
    )
    scales, minima = affine_grid.storable(*fitted, params.scale_dtype)
    codes = affine_grid.nearest(target, scales, minima, params)
    return Quantized(affine_grid.pack(codes, scales, minima, params))


def fit(groups: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return scales and minima [rows, groups] of groups [rows, groups, columns] float32, codes up to `top`."""
    low, high = groups.aminmax(dim=2, keepdim=True)
    scale = torch.where(high > low, (high - low) / top, torch.ones_like(low))
    zero = -low / scale
    best, least = zero, torch.full_like(zero, torch.inf)
    for _ in range(MAX_ITERATIONS):
        codes = (groups / scale + zero).round_().clamp_(0, top)
        error = groups - (codes - zero) * scale
        mean = error.abs().mean(2, keepdim=True)
        is_better = mean < least
        if not is_better.any():
            break
        best, least = torch.where(is_better, zero, best), torch.where(is_better, mean, least)
        sparse = error.sign() * (error.abs() - error.abs().pow(NORM - 1) / BETA).clamp_(min=0)
        fitted = (codes - (groups - sparse) / scale).mean(2, keepdim=True)
        zero = torch.where(is_better, fitted, zero)  # the others have stopped
    return scale[..., 0], (-best * scale)[..., 0]
