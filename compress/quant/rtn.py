"""Round to nearest: each weight becomes the nearest point of its group's grid, without calibration data.

The baseline of every comparison, and at 8 bits all that is needed. The grid is found by the clip search of
compress/quant/grid.py (plain squared error); `clip_search: false` gives the classical min-max grid. Symmetric grids
use the full signed range, where most tools leave one level unused.

Not done: any use of activations; the error of one column is not compensated by the others (that is gptq).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.formats import int as int_format
from compress.quant import grid
from compress.types import Quantized, Stats

FORMAT = "int"
NEEDS: frozenset[str] = frozenset()
INCOHERENCE = False


@dataclass(frozen=True)
class Config(grid.GridConfig):
    """Settings of round-to-nearest; see GridConfig."""


def plan_params(config: Config, shape: tuple[int, int]) -> int_format.Params:
    """Format parameters for a weight [out_features, in_features]: enough for the exact stored bytes."""
    return grid.params(config, shape)


def workspace(config: Config, shape: tuple[int, int]) -> int:
    """Bytes needed beside the stored weight: float32 copy (transposed), its magnitudes, codes, packing."""
    return shape[0] * shape[1] * (4 + 4 + 1 + 4)


def quantize(weight: Tensor, stats: Stats | None, config: Config, seed: int = 0) -> Quantized:
    """weight [out, in], any float dtype, finite -> packed weight. `stats` and `seed` are unused."""
    shape = (weight.shape[0], weight.shape[1])
    target = weight.T.float().contiguous()
    params = grid.params(config, shape, int_format.scale_dtype(target.abs().amax(0), config.bits))
    group = params.group(shape[1])
    fitted = grid.fit_all(target, None, config, getattr(torch, params.scale_dtype), group)
    codes = torch.empty(target.shape, dtype=torch.uint8, device=target.device)
    for index, start in enumerate(range(0, shape[1], group)):
        scale, zero = fitted.scale[index], fitted.zero[index]
        part = target[start : start + group]
        codes[start : start + group] = (part / scale).round_().add_(zero).clamp_(0, 2**config.bits - 1)
    return Quantized(grid.pack(codes, fitted, params, shape))
