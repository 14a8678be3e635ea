"""Name the data types of the grid format, and round to their points."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from compress.formats import grid

TYPES = {  # data type -> how the format stores it
    "nvfp4": grid.Params(grid.E2M1, 16, grid.E4M3, tensor_scale=True),
    "mxfp4": grid.Params(grid.E2M1, 32, grid.E8M0),
    "mxfp8": grid.Params(grid.E4M3, 32, grid.E8M0),
    "fp8": grid.Params(grid.E4M3, -1, "float32", block_rows=-1),
    "fp8-channel": grid.Params(grid.E4M3, -1, "float32"),
    "fp8-block": grid.Params(grid.E4M3, 128, "float32", block_rows=128),
    "nf4": grid.Params(grid.NF4, 64, grid.NESTED),
    "fp4": grid.Params(grid.FP4, 64, grid.NESTED),
    "dynamic8": grid.Params(grid.DYNAMIC8, 256, "float32"),
}


@dataclass(frozen=True)
class TypeConfig:
    """Settings of every method that writes the grid format."""

    type: str = "nvfp4"  # data type: nvfp4, mxfp4, mxfp8, fp8, fp8-channel, fp8-block, nf4, fp4 or dynamic8

    def __post_init__(self) -> None:
        if self.type not in TYPES:
            raise ValueError(f"type {self.type!r} is not one of {', '.join(TYPES)}")


def params(config: TypeConfig, shape: tuple[int, int]) -> grid.Params:
    """Return the format's parameters for a weight [out, in]."""
    return TYPES[config.type]


@cache
def _ascending(values: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes of a table by ascending value, uint8, their values, and the midpoints between these."""
    table = grid.value_table(values)
    order = torch.arange(len(table))[table.isfinite()]
    order = order[table[order].sort(stable=True).indices]
    points = table[order]
    keep = torch.cat((torch.ones(1, dtype=torch.bool), points.diff() > 0))  # of two zeros the first
    order, points = order[keep], points[keep]
    return order.to(torch.uint8), points, (points[1:] + points[:-1]) / 2


def nearest(units: Tensor, values: str) -> Tensor:
    """Return the codes uint8 of the points nearest to `units` of any shape, float32."""
    order, _, midpoints = (tensor.to(units.device) for tensor in _ascending(values))
    return order[torch.bucketize(units.contiguous(), midpoints)]
