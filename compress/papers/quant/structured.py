"""Leave out the rows and columns of least norm: whole channels, in no fewer bits.

After a transform that has made channels zero (papers/transform/clover.py), with its share, nothing is lost, if that is
a whole number of channels of keys and values (a quarter of 64; 0.3 of 128 rounds to one more or fewer here): the
largest ones are kept, and the others are zero. By itself it is structured pruning by size, a baseline at best.

Not in the core: it saves memory and no time, and few bits of all weights lose less (docs/results/low_bit.md).

Not done: a choice by what the inputs are; a compensation in what is kept; products that skip what is left out (the
weight is decoded, zeros and all: memory on disk and at rest is saved, not time).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compress.papers.formats import structured
from compress.types import PackedWeight, Quantized, Stats, Stored

FORMAT = "structured"
NEEDS: frozenset[str] = frozenset()
INCOHERENCE = False


@dataclass(frozen=True)
class Config:
    rows: float = 1.0  # [fraction] of the rows (output channels) that are kept
    columns: float = 1.0  # [fraction] of the columns (input channels) that are kept
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"  # in which the weights that are left are stored

    def __post_init__(self) -> None:
        if not (0 < self.rows <= 1 and 0 < self.columns <= 1):
            raise ValueError(f"rows {self.rows} and columns {self.columns} must be above 0 and at most 1")


def plan_params(config: Config, shape: tuple[int, int]) -> structured.Params:
    """Format parameters for a weight [out_features, in_features]: enough for the exact stored bytes."""
    rows, columns = (
        size - min(size - 1, round((1 - share) * size))
        for size, share in zip(shape, (config.rows, config.columns), strict=True)
    )
    return structured.Params(rows, columns, config.dtype)


def workspace(config: Config, shape: tuple[int, int]) -> int:
    """Bytes needed beside the stored weight: its squares, two copies."""
    return 12 * shape[0] * shape[1]


def quantize(weight: Tensor, stats: Stats | None, config: Config, seed: int = 0) -> Quantized:
    """weight [out, in], any float dtype, finite -> packed weight. `stats` and `seed` are unused."""
    shape = (weight.shape[0], weight.shape[1])
    params = plan_params(config, shape)
    squares = weight.float().square()
    rows, columns = _largest(squares.sum(1), params.rows), _largest(squares.sum(0), params.columns)
    lost = 1 - squares[rows][:, columns].sum(dtype=torch.float64) / squares.sum(dtype=torch.float64).clamp(min=1e-300)
    notes = (f"{100 * lost:.2f}% of the squared norm is left out",) if lost > 1e-6 else ()
    return Quantized(PackedWeight(Stored(FORMAT, params), structured.pack(weight, rows, columns, params), shape), notes)


def _largest(sizes: Tensor, count: int) -> Tensor:
    """The numbers of the `count` largest, ascending; of equal ones the first."""
    return sizes.argsort(descending=True, stable=True)[:count].sort().values
