"""Define the bases that a model can be rotated into, and find the rows of a linear that make its values."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.formats import transforms
from compress.model.graph import Attention
from compress.numerics import hadamard


class Orthogonal:
    """An orthogonal matrix Q [n, n], given as such; None: the identity."""

    def __init__(self, matrix: Tensor | None = None) -> None:
        self.matrix = matrix

    def forward(self, x: Tensor) -> Tensor:
        """Return Q x for x [..., n], float32 or float64."""
        return x if self.matrix is None else x @ self.matrix.to(x).T

    def transpose(self, x: Tensor) -> Tensor:
        """Return Q^T x for x [..., n]."""
        return x if self.matrix is None else x @ self.matrix.to(x)

    def dense(self, size: int) -> Tensor:
        """Return Q [size, size], float64."""
        return self.forward(torch.eye(size, dtype=torch.float64)).T


class Basis(Orthogonal):
    """A random orthogonal matrix: signs, a Hadamard transform and, with keep_mean, a reflection so that Q 1 = 1."""

    def __init__(self, size: int, seed: int, keep_mean: bool = False) -> None:
        super().__init__()
        self.keep_mean = keep_mean
        generator = torch.Generator().manual_seed(seed)
        self.signs = 1.0 - 2.0 * torch.randint(2, (size,), generator=generator).double()
        self.normal: Tensor | None = None  # of the reflection, of length 1
        if keep_mean:
            ones = torch.full((size,), size**-0.5, dtype=torch.float64)
            normal = self.forward(ones) - ones
            length = normal.norm()
            self.normal = normal / length if length > 1e-9 else None

    def forward(self, x: Tensor) -> Tensor:
        return self._reflect(hadamard.transform(x * self.signs.to(x)))

    def transpose(self, x: Tensor) -> Tensor:
        return hadamard.transpose(self._reflect(x)) * self.signs.to(x)

    def undoing(self) -> dict[str, Tensor | None]:
        """Return the transforms at run time whose product is Q^T: name -> what is stored of it, in their order."""
        normal = torch.zeros_like(self.signs) if self.normal is None else self.normal
        reflection: dict[str, Tensor | None] = {"reflection": normal.float()} if self.keep_mean else {}
        return {**reflection, "hadamard_transposed": None, "signs": transforms.pack_signs(self.signs < 0)}

    def _reflect(self, x: Tensor) -> Tensor:
        if self.normal is None:
            return x
        normal = self.normal.to(x)
        return x - 2 * (x @ normal)[..., None] * normal


def value_rows(attention: Attention) -> Tensor:
    """Return the rows of the linear that makes the values, int64 [key/value heads, head_dim]."""
    heads = torch.arange(attention.key_value_heads)[:, None] * attention.head_step
    return attention.first + heads + torch.arange(attention.head_dim) * attention.step
