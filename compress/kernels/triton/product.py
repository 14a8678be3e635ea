"""Multiply a few rows of activations with a stored weight on a GPU: the base of the kernels of the formats."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from compress.kernels.contract import Prepared


class Product(Prepared):
    """A stored weight that a Triton kernel of its format multiplies and decodes."""

    most = 16  # rows of activations: two tiles of 8

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.shape[1])
        out = torch.empty(rows.shape[0], self.shape[0], dtype=x.dtype, device=x.device)
        self.multiply(rows, out)
        return out.view(*x.shape[:-1], self.shape[0])

    @abstractmethod
    def multiply(self, x: Tensor, out: Tensor) -> None:
        """Write x [rows, in], contiguous, times the weight to out [rows, out] of the type of x."""

    def most_rows(self, dtype: torch.dtype) -> int:
        """Return `most`, whatever the type."""
        return self.most

    def stored(self, name: str, absent: Tensor) -> Tensor:
        """Return a stored tensor, `absent` in its place where the weight has none: kernels take a pointer anyway."""
        return self.tensors.get(name, absent)


def tile_rows(rows: int) -> int:
    """Return the rows of activations that a program multiplies: the width of an operand of tensor cores."""
    return 8 if rows <= 8 else 16
