"""Factor matrices with the precision rules that quantization needs.

Hessians are damped by a fraction of their mean diagonal before they are factored; a failed factorization is repeated
with twice the damping, and the number of retries is reported, never hidden. Matrices up to FLOAT64_COLUMNS columns
are factored in float64 (a few seconds at most), larger ones in float32: three float64 copies of a 16k x 16k matrix
are 6 GiB. `truncate_rank` solves every low-rank problem of the project, in the same precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from compress.errors import NumericalError

FLOAT64_COLUMNS = 4096
RETRIES = 10
OVERSAMPLING = 16  # vectors of a subspace beside those that are wanted
SUBSPACE_ITERATIONS = 4


@contextmanager
def full_float32() -> Iterator[None]:
    """Multiply float32 matrices as such while this is active, on GPUs too: no TF32. The caller's setting comes back.

    Hessians and the errors that are fed back lose what they are made for where factors have 10 bits.
    """
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    try:
        older: str | None = torch.get_float32_matmul_precision()
    except RuntimeError:  # the caller has set the newer of torch's two settings alone
        older = None
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older)
        products.fp32_precision = before


class Factor(NamedTuple):
    """The upper factor of a damped Hessian: upper @ upper.T = hessian + damp * mean(diag) * I."""

    upper: Tensor  # [n, n] float32, upper triangular
    damp: float  # the fraction that was needed
    retries: int

    @property
    def notes(self) -> list[str]:
        """Return the lines for the report."""
        note = f"damping raised to {self.damp:.3g} of the mean diagonal to factor the Hessian"
        return [note] if self.retries else []


def squares(n: int, count: int) -> int:
    """Return the bytes of `count` n x n matrices in the precision in which Hessians of this size are factored."""
    return (8 if n <= FLOAT64_COLUMNS else 4) * count * n * n


def upper_factor(hessian: Tensor, damp: float, order: Tensor | None = None) -> Factor:
    """Return an upper-triangular C with C C^T = H + damp * mean(diag H) * I, rows and columns taken in `order`.

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
        fraction = damp * 2**attempt
        diagonal += (fraction - added) * mean
        added = fraction
        lower, info = torch.linalg.cholesky_ex(matrix)
        if not info and torch.isfinite(lower.diagonal()).all():
            del matrix, diagonal
            return Factor(lower.to(torch.float32).flip(0, 1), fraction, attempt)
        del lower  # before the next one is made
        damp = damp or 1e-6  # undamped and singular: start from a small fraction
    raise NumericalError(f"the Hessian is not positive definite even with damping {added:.3g} of its mean diagonal")


class Truncation(NamedTuple):
    """The product left @ right of rank k that is nearest to a matrix in the metric of its inputs."""

    left: Tensor  # [m, k] float32, orthonormal columns, the most important first
    right: Tensor  # [k, n] float32: left.T @ matrix
    losses: Tensor  # [k + 1] float64: tr(R H R^T) that the first 0, 1, ... k of them leave


def truncate_rank(matrix: Tensor, hessian: Tensor | None, rank: int, seed: int | None = None) -> Truncation:
    """Minimize tr((M - L) H (M - L)^T) over L of rank k; M [m, n], H [n, n] >= 0, maybe singular; None: the identity.

    L = V V^T M with V the first eigenvectors of M H M^T (LoRD, arXiv 2309.14021): no root and no inverse of H is
    needed, and what is left is the sum of the other eigenvalues, so that `losses` is exact for every rank on the way.
    For m > n the same in the basis of the columns of M, M = Q R: the eigenvectors are those of R H R^T, times Q.
    SVD-LLM (M times a Cholesky factor of H), EoRA (its eigenvectors) and QERA (its root) find the same L.

    `seed`: by randomized subspace iteration, for matrices that are too wide for an eigen-decomposition; losses are
    those of what was found. Raises ValueError for a rank below 0 or above min(m, n); NumericalError if not finite.
    """
    least = min(matrix.shape)
    if not 0 <= rank <= least:
        raise ValueError(f"rank {rank} is not between 0 and {least}, the smaller side of {list(matrix.shape)}")
    wide = torch.float64 if max(matrix.shape) <= FLOAT64_COLUMNS else torch.float32
    original = matrix.to(wide)
    metric = None if hessian is None else hessian.to(wide)
    if seed is None:
        basis, values = _principal(original, metric)
        values, total = values[:rank], values.sum(dtype=torch.float64)
    else:
        basis, values = _subspace(original, metric, rank, seed)
        total = _inner(original, metric)
    if not (torch.isfinite(total) and torch.isfinite(values).all()):
        raise NumericalError("the weight or the Hessian is not finite: no low-rank part can be found")
    left = basis[:, :rank]
    kept = torch.cat((values.new_zeros(1), values[:rank])).double().cumsum(0)
    return Truncation(left.float(), (left.T @ original).float(), (total - kept).clamp(min=0))


def truncation_workspace(shape: tuple[int, int]) -> int:
    """Return the bytes that `truncate_rank` takes beside the matrix and the Hessian, an upper bound."""
    rows, columns = shape
    least, item = min(shape), 8 if max(shape) <= FLOAT64_COLUMNS else 4
    return item * (3 * rows * columns + columns * columns + 3 * least * least)


def _principal(matrix: Tensor, metric: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return eigenvectors [m, min(m, n)] and eigenvalues of M H M^T, largest first."""
    tall = matrix.shape[0] > matrix.shape[1]
    outer, inner = torch.linalg.qr(matrix) if tall else (None, matrix)
    image = inner if metric is None else inner @ metric
    gram = image @ inner.T
    try:
        values, vectors = torch.linalg.eigh((gram + gram.T) / 2)
    except torch.linalg.LinAlgError as error:
        raise NumericalError(f"no eigenvectors for a low-rank part ({error})") from error
    vectors = vectors.flip(1) if outer is None else outer @ vectors.flip(1)
    return vectors, values.flip(0).clamp(min=0)


def _subspace(matrix: Tensor, metric: Tensor | None, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the first `rank` of `_principal` by subspace iteration with M H M^T (Halko et al., arXiv 0909.4061)."""

    def multiply(vectors: Tensor) -> Tensor:
        inner = matrix.T @ vectors
        return matrix @ (inner if metric is None else metric @ inner)

    width = min(rank + OVERSAMPLING, *matrix.shape)
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(matrix.shape[1], width, generator=generator).to(matrix)
    basis = torch.linalg.qr(matrix @ (start if metric is None else metric @ start)).Q
    for _ in range(SUBSPACE_ITERATIONS):
        basis = torch.linalg.qr(multiply(basis)).Q
    gram = basis.T @ multiply(basis)
    values, vectors = torch.linalg.eigh((gram + gram.T) / 2)
    return (basis @ vectors.flip(1))[:, :rank], values.flip(0).clamp(min=0)[:rank]


def _inner(matrix: Tensor, metric: Tensor | None) -> Tensor:
    """Return tr(M H M^T)."""
    image = matrix if metric is None else matrix @ metric
    return (image * matrix).sum(dtype=torch.float64)
