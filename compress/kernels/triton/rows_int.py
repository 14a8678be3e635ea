"""Look rows of an `int` table up on a GPU: one launch reads the packed words of these rows and writes them decoded.

Nothing waits for the device, and nothing is allocated but the result, so that CUDA graphs can capture it. The kernel is
in `_rows_int.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compress.formats.int import Params, padded_shape
from compress.kernels.contract import Shape
from compress.kernels.triton.int import layout, planes

BLOCK = 512  # columns of a program: four for each of its 128 threads


def look_up(
    tensors: Mapping[str, Tensor], params: Params, shape: Shape, ids: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Return rows [n, in] in float16, bfloat16 or float32, None for other types; see `dispatch.rows`.

    An id outside of the table gives a row of NaN: saying more would take a wait for the device.
    """
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return None
    from compress.kernels.triton import _rows_int

    scales, (rows, columns) = tensors["scales"], shape
    whole, narrow = params.split(columns)
    stored_rows, stored = padded_shape(params, shape)
    out = torch.empty(len(ids), columns, dtype=dtype, device=ids.device)
    _rows_int.look_up[len(ids), -(-columns // BLOCK)](
        ids, *planes(tensors, params), scales, tensors.get("zeros", scales), out, rows, columns, stored_rows,
        whole * params.tile_columns, stored, **layout(params), NARROW=narrow > 0, BLOCK=BLOCK,
    )  # fmt: skip
    return out
