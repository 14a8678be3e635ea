"""Multiply with the `structured` format: the smaller matrix, with the columns that are kept, by PyTorch's operators.

Activations of the kept columns are gathered and outputs of the kept rows written between zeros, so that any number of
rows of activations costs less than the whole weight does.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compress.kernels import dispatch
from compress.kernels.contract import Prepared, Shape
from compress.papers.formats import structured
from compress.papers.formats.structured import Params

MANY = 1 << 40  # rows


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> Prepared | None:
    """Return the product with the stored part of any weight."""
    return _Part(tensors, params, shape)


class _Part(Prepared):
    types = (torch.bfloat16, torch.float16, torch.float32)

    def __call__(self, x: Tensor) -> Tensor:
        if "columns" in self.tensors:
            x = x.index_select(-1, self.tensors["columns"])
        y = dispatch.plain_product(x, self.tensors["weight"].to(x.dtype))
        if "rows" not in self.tensors:
            return y
        return y.new_zeros(*y.shape[:-1], self.shape[0]).index_copy_(-1, self.tensors["rows"].long(), y)

    def most_rows(self, dtype: torch.dtype) -> int:
        return MANY

    def decode(self, dtype: torch.dtype) -> Tensor:
        return structured.decode(self.tensors, self.params, self.shape, dtype)
