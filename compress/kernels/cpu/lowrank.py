"""The `lowrank` format on any device: two thin products, by PyTorch's own operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.formats import lowrank
from compress.formats.lowrank import Params

TYPES = (torch.bfloat16, torch.float16, torch.float32)
MANY = 1 << 40  # rows


def supports(params: Params, shape: tuple[int, int]) -> bool:
    """Where the factors are smaller than their product."""
    return params.rank * sum(shape) < shape[0] * shape[1]


def most_rows(params: Params, shape: tuple[int, int], dtype: torch.dtype) -> int:
    return MANY


def matmul(x: Tensor, tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> Tensor:
    """x [rows, in] of a type in TYPES -> [rows, out] of the same type."""
    return bind(tensors, params, shape)(x)


def bind(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> Any:
    """`matmul`, as long as these tensors stay where they are."""

    def product(x: Tensor) -> Tensor:
        a, b = lowrank.factors(tensors, params, shape, x.dtype)
        return F.linear(F.linear(x, a), b.T)

    return product
