"""Round to the nearest point of a hardware data type or of a fixed table: NVFP4, MXFP4, FP8, NF4 and others.

Scales of blocks are searched (compress/quant/grid_types.py) and rounded to what is stored. Codes are the points nearest
to the weights divided by these. Halves are rounded as hardware does. Tensor scales are equal in linears that read one
input, as engines need it which multiply these as one.

Not done: any use of activations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.formats import grid
from compress.quant import grid_types
from compress.types import PackedWeight, Quantized, Stats, Stored, Work

FORMAT = "grid"
NEEDS = frozenset({"largest_weight"})
INCOHERENCE = False
WEIGHT_STEPS = 200
ROUNDED_WEIGHTS = 1 << 20  # weights that are rounded at a time


@dataclass(frozen=True)
class Config(grid_types.TypeConfig):
    """Settings of round-to-nearest to a data type; see TypeConfig."""


plan_params = grid_types.params


def workspace(config: Config, shape: tuple[int, int]) -> int:
    """Return the bytes needed beside the stored weight: a float32 copy, codes, and those of a few rows at a time."""
    numel, params = shape[0] * shape[1], plan_params(config, shape)
    if params.is_whole:  # its largest weight alone is looked for
        return numel * (4 + 2) + max(numel * 2 * 4, min(numel, ROUNDED_WEIGHTS) * (6 * 4 + 8))
    (high, wide), (down, across) = params.block(shape), params.blocks(shape)
    rows = min(down * high * across * wide, ROUNDED_WEIGHTS + across * wide * high)
    return numel * (4 + 2) + rows * (6 * 4 + 8)


def work(config: Config, shape: tuple[int, int]) -> Work:
    """Return what `quantize` takes."""
    return Work(0, WEIGHT_STEPS * shape[0] * shape[1])


def quantize(weight: Tensor, stats: Stats | None, config: Config, seed: int = 0) -> Quantized:
    """Quantize weight [out, in], any float dtype, finite; of `stats` only `largest_weight` counts. `seed` is unused."""
    shape = (weight.shape[0], weight.shape[1])
    params, target = plan_params(config, shape), weight.float()
    scales = grid_types.BlockScales(
        target, params, config.scale_search, stats.largest_weight if stats is not None else None
    )
    codes = torch.empty(shape, dtype=torch.uint8, device=weight.device)
    (rows, columns), factors = params.block(shape), scales.factors()
    for part in torch.arange(shape[0]).split(max(1, ROUNDED_WEIGHTS // max(1, shape[1]))):
        wide = factors[(part // rows).to(factors.device)].repeat_interleave(columns, 1)[:, : shape[1]]
        some = slice(int(part[0]), int(part[-1]) + 1)
        codes[some] = grid_types.nearest(target[some] / wide, params.values)
    return Quantized(PackedWeight(Stored(FORMAT, params), grid.pack(codes, scales.stored, params), shape))
