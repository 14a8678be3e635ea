"""Store a weight as it is, unquantized.

Used where a linear must travel through the packed path without being quantized, for example one expert that a rule
keeps in a block whose other experts are packed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Params:
    dtype: str = "bfloat16"  # of the stored values: float32, float16 or bfloat16

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "float16", "bfloat16"):
            raise ValueError(f"dtype {self.dtype!r} is not float32, float16 or bfloat16")


def specs(params: Params, shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {"values": (shape, getattr(torch, params.dtype))}


def pack(weight: Tensor, params: Params) -> dict[str, Tensor]:
    """weight [out_features, in_features] -> the stored tensor."""
    return {"values": weight.to(getattr(torch, params.dtype)).contiguous()}


def decode(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`."""
    return tensors["values"].to(dtype, copy=True)


def decode_rows(
    tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], rows: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the rows [n] int64 of the weight, [n, in]."""
    return tensors["values"][rows].to(dtype)


def join_rows(parts: Sequence[Mapping[str, Tensor]], params: Params) -> dict[str, Tensor]:
    """Return the tensors of a weight whose rows were stored in parts."""
    return {"values": torch.cat([part["values"] for part in parts])}


def cut(
    tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], rows: range, columns: range
) -> tuple[Params, dict[str, Tensor]]:
    """Return some rows and columns of a weight; compress/formats/__init__.py has the contract."""
    return params, pack(tensors["values"][rows.start : rows.stop, columns.start : columns.stop], params)
