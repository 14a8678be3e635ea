"""Random stored tensors of any format: what a kernel reads, without a method that chose them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compress import formats
from compress.types import PackedWeight, Stored


def random_weight(format: str, params: Any, shape: tuple[int, int], seed: int = 0) -> PackedWeight:
    """Every code, scale and table drawn anew; orders are permutations, scales small and positive."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if name in ("order", "outlier_index"):
            return torch.randperm(shape[1], generator=generator)[: size[0]].to(dtype)
        if dtype.is_floating_point:
            return (0.001 + 0.01 * torch.rand(size, generator=generator)).to(dtype)
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max + 1, size, generator=generator).to(dtype)

    tensors = {name: draw(name, *spec) for name, spec in formats.specs(Stored(format, params), shape).items()}
    return PackedWeight(Stored(format, params), tensors, shape)


def product(x: Tensor, weight: PackedWeight) -> Tensor:
    """x [rows, in] times the decoded weight, in float64."""
    return x.double() @ formats.decode_stored(weight, torch.float64).T
