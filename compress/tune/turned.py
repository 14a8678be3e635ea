"""Turn a stored matrix by the transforms around it, with gradients, as fast as the processor can.

In every step of tuning the dense weight Out M In is made of the stored matrix M, and its gradient is taken back to M.
Orthogonal transforms with nothing to train need nothing kept for that: the gradient of M is Out^T G In^T. On a CPU the
Hadamard transforms are those of compress/kernels/cpu/hadamard.py. PyTorch's own products of small matrices are several
times as slow, most of all where the columns of a matrix are transformed (1536 x 576, one thread: 2 ms in place of 8).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from compress.formats import transforms
from compress.kernels.cpu import hadamard
from compress.types import WeightTransforms

TURNED = {"hadamard": False, "hadamard_transposed": True}  # -> whether it is the transpose of `hadamard.transform`
KEPT = ("signs", *TURNED)  # transforms that are orthogonal and have nothing to train


def effective(matrix: Tensor, ops: WeightTransforms, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return what `transforms.effective` does, float32 [out, in], of a matrix of the same type and size."""
    names = {*ops.input, *ops.output}
    if matrix.device.type != "cpu" or matrix.dtype != torch.float32 or not names <= set(KEPT):
        return transforms.effective(matrix, ops, tensors)
    own = {name: tensors[name] for name in transforms.specs(ops, (matrix.shape[0], matrix.shape[1]))}
    turned: Tensor = _Turned.apply(matrix, ops, own)
    return turned


class _Turned(torch.autograd.Function):
    """M -> Out M In; its gradient G -> Out^T G In^T."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, ops: WeightTransforms, tensors: Mapping[str, Tensor]) -> Tensor:
        ctx.ops, ctx.tensors = ops, tensors
        rows = _turn(matrix, "in", ops.input, tensors, is_transposed=True)  # a row r becomes r In
        return _turn(rows.T, "out", ops.output, tensors, is_transposed=False).T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        rows = _turn(gradient, "in", ctx.ops.input, ctx.tensors, is_transposed=False)
        return _turn(rows.T, "out", ctx.ops.output, ctx.tensors, is_transposed=True).T, None, None


def _turn(x: Tensor, side: str, names: Sequence[str], tensors: Mapping[str, Tensor], *, is_transposed: bool) -> Tensor:
    """Apply transforms to each row of x [rows, n], or their transposes in the other order."""
    for name in reversed(names) if is_transposed else names:
        if name == "signs":
            x = x * transforms.unpack_signs(tensors[f"{side}_signs"], x.shape[-1], x.dtype)
        else:
            x = hadamard.transform(x, is_transposed=TURNED[name] != is_transposed)
    return x
