"""Multiply a few tokens whose small inputs are left out, and read only the columns of the weight that are in use."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from compress.kernels import dispatch
from compress.types import PackedWeight

MOST_ROWS = 4  # tokens whose kept columns are read together


def product(x: Tensor, weight: PackedWeight, threshold: Tensor) -> Tensor | None:
    """Return W (x * mask) for x [1 to 4, in] and a weight [out, in] without what lies around its matrix: [rows, out].

    mask: |x_j| >= threshold_j; threshold float32 [1] or [in]. Columns are read that are kept in any of the rows. None:
    no kernel fits, or there is a gradient to pass back.
    """
    kernel = dispatch.prepare(x, weight.tensors, weight.format, weight.params, weight.shape)
    return None if kernel is None else product_with(x, kernel, threshold)


def product_with(x: Tensor, kernel: Any, threshold: Tensor) -> Tensor | None:
    """Return the same for a kernel that was prepared before."""
    fits = hasattr(kernel, "sparse") and x.dtype in kernel.types and x.dim() == 2 and x.shape[1] == kernel.shape[1]
    if not fits or not 0 < len(x) <= MOST_ROWS or threshold.numel() not in (1, x.shape[1]) or x.requires_grad:
        return None
    with dispatch.current(x.device):
        return kernel.sparse(x.contiguous(), threshold.float().contiguous())
