"""Look rows of an `int` table up on a CPU, by a compiled function: see `_LookUp` in compress/kernels/cpu/int.py."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compress.formats.int import Params
from compress.kernels.contract import Shape
from compress.kernels.cpu import int as int_kernel


def look_up(
    tensors: Mapping[str, Tensor], params: Params, shape: Shape, ids: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Return rows [n, in] in float16, bfloat16 or float32; None for other types, and groups that no kernel reads."""
    table = int_kernel.prepare(tensors, params, shape)
    if table is None or dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return None
    return table.look_up(ids, dtype)
