"""Factorizations with the precision rules that quantization needs.

Hessians are damped by a fraction of their mean diagonal before they are factored; a failed factorization is repeated
with twice the damping, and the number of retries is reported, never hidden. Matrices up to FLOAT64_COLUMNS columns
are factored in float64 (a few seconds at most), larger ones in float32: three float64 copies of a 16k x 16k matrix
are 6 GiB.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compress.errors import NumericalError

FLOAT64_COLUMNS = 4096
RETRIES = 10


class Factor(NamedTuple):
    """Upper factor of a damped Hessian: upper @ upper.T = hessian + damp * mean(diag) * I."""

    upper: Tensor  # [n, n] float32, upper triangular
    damp: float  # the fraction that was needed
    retries: int

    @property
    def notes(self) -> list[str]:
        """What the report should say."""
        said = f"damping raised to {self.damp:.3g} of the mean diagonal to factor the Hessian"
        return [said] if self.retries else []


def squares(n: int, count: int) -> int:
    """Bytes of `count` n x n matrices in the precision in which Hessians of this size are factored."""
    return (8 if n <= FLOAT64_COLUMNS else 4) * count * n * n


def upper_factor(hessian: Tensor, damp: float, order: Tensor | None = None) -> Factor:
    """Upper-triangular C with C C^T = H + damp * mean(diag H) * I, rows and columns taken in `order`.

    hessian: [n, n] float32, symmetric, not modified. order: permutation [n] or None. No inverse is formed: both axes
    are flipped, a lower Cholesky factor is taken and flipped back.
    Raises NumericalError if H is not finite or stays indefinite after RETRIES doublings of the damping.
    """
    n = hessian.shape[0]
    dtype = torch.float64 if n <= FLOAT64_COLUMNS else torch.float32
    flipped = torch.arange(n - 1, -1, -1, device=hessian.device) if order is None else order.flip(0)
    matrix = hessian.index_select(0, flipped).index_select(1, flipped).to(dtype)
    diagonal = matrix.diagonal()
    mean = diagonal.mean().item()
    if not 0 < mean < float("inf"):
        raise NumericalError(f"the Hessian has a mean diagonal of {mean}")
    added = 0.0
    for attempt in range(RETRIES + 1):
        wanted = damp * 2**attempt
        diagonal += (wanted - added) * mean
        added = wanted
        lower, info = torch.linalg.cholesky_ex(matrix)
        if not info and torch.isfinite(lower.diagonal()).all():
            del matrix, diagonal
            return Factor(lower.to(torch.float32).flip(0, 1), wanted, attempt)
        damp = damp or 1e-6  # undamped and singular: start from a small fraction
    raise NumericalError(f"the Hessian is not positive definite even with damping {added:.3g} of its mean diagonal")
