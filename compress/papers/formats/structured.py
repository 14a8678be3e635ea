"""Store the rows and columns of a weight that are not zero, as a smaller matrix.

Stored tensors:
- `weight` [kept rows, kept columns] of the type `dtype`;
- `rows` int32 [kept rows], ascending, if some are missing; `columns` likewise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.numerics import checks


@dataclass(frozen=True)
class Params:
    rows: int  # [rows] that are stored
    columns: int  # [columns] that are stored
    dtype: str = "bfloat16"  # of the stored values: bfloat16, float16 or float32

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < 1:
            raise ValueError(f"{self.rows} rows and {self.columns} columns: there must be at least one of each")
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"dtype {self.dtype!r} is not bfloat16, float16 or float32")


def specs(params: Params, shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return what is stored for a weight [out, in]; ValueError if that is more than there is."""
    if params.rows > shape[0] or params.columns > shape[1]:
        raise ValueError(f"{params.rows} rows and {params.columns} columns of a weight that is {shape[0]} x {shape[1]}")
    stored: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "weight": ((params.rows, params.columns), getattr(torch, params.dtype))
    }
    for name, kept, size in (("rows", params.rows, shape[0]), ("columns", params.columns, shape[1])):
        if kept < size:
            stored[name] = ((kept,), torch.int32)
    return stored


def check(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> None:
    """Check that kept rows and columns are some of those of the weight, in order; ValueError."""
    for name, size in (("rows", shape[0]), ("columns", shape[1])):
        if name in tensors:
            checks.distinct(name, tensors[name], size)
            checks.ascending(name, tensors[name])


def pack(weight: Tensor, rows: Tensor, columns: Tensor, params: Params) -> dict[str, Tensor]:
    """Return the stored tensors of a weight [out, in]; `rows` and `columns` are the kept ones, int64, ascending."""
    kept = weight[rows][:, columns].to(getattr(torch, params.dtype)).contiguous()
    sides = (("rows", rows, weight.shape[0]), ("columns", columns, weight.shape[1]))
    return {"weight": kept, **{name: index.to(torch.int32) for name, index, size in sides if len(index) < size}}


def decode(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in], rounded once to `dtype`."""
    weight = tensors["weight"].to(dtype)
    for axis, name in enumerate(("rows", "columns")):
        if name in tensors:
            size = list(weight.shape)
            size[axis] = shape[axis]
            weight = weight.new_zeros(size).index_copy_(axis, tensors[name].long(), weight)
    return weight.clone() if weight.data_ptr() == tensors["weight"].data_ptr() else weight


def cut(
    tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], rows: range, columns: range
) -> tuple[Params, dict[str, Tensor]]:
    """Return some rows and columns of a weight; compress/formats/__init__.py has the contract."""
    weight, kept = tensors["weight"], {}
    for axis, (name, wanted) in enumerate((("rows", rows), ("columns", columns))):
        index = tensors[name].long() if name in tensors else torch.arange(shape[axis], device=weight.device)
        inside = (index >= wanted.start) & (index < wanted.stop)
        weight = weight.index_select(axis, inside.nonzero()[:, 0])
        kept[name] = index[inside] - wanted.start
    chosen = Params(weight.shape[0], weight.shape[1], params.dtype)  # ValueError where nothing is left
    sides = ((name, len(wanted)) for name, wanted in (("rows", rows), ("columns", columns)))
    stored = {name: kept[name].to(torch.int32) for name, size in sides if len(kept[name]) < size}
    return chosen, {"weight": weight, **stored}
