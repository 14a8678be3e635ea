"""Correct a layer's target for its inputs' quantization (GPTAQ, arXiv 2504.02692; Qronos, arXiv 2505.11695).

Behind a quantized prefix a linear reads x where it reads y in the full-precision model, and should still give W y. The
loss of a quantized weight Q is then sum over tokens of |W y - Q x|^2 = tr[(V - Q) H (V - Q)^T] + const, with H = sum x
x^T and the least-squares target V = W (sum y x^T) H^-1. So a method is given the target V in place of W, and needs no
change. The papers call this asymmetric calibration.

Differences from the papers: the whole correction V - W is applied (GPTAQ keeps a strictly triangular part of it), for
every method and before any change of basis; H is damped by DAMP_FRACTION of its mean diagonal, and the sum of y x^T by
the same number, so that V = W + W D H^-1 with the drift D = sum (y - x) x^T (Qronos damps less). Where x and y agree, D
is zero, and the weight stays as it is, to the bit.

A fitted target follows the noise of a small sample. So only the share `alpha` of the correction is applied, and less
where an input has fewer than TOKENS_PER_INPUT tokens for each of its dimensions. The best layers do not make the best
model, either: drift in the residual stream goes on past every layer. KL on tests/models/books-8m at alpha 0, 0.25, 0.5
and 1: 0.0521, 0.0486, 0.0499, 0.0742 (int2), 0.0105, 0.0099, 0.0099, 0.0143 (int3); standard errors 0.0008 and 0.0002.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.numerics.linalg import FLOAT64_COLUMNS
from compress.types import LinearSpec, Stats

DAMP_FRACTION = 0.01  # mean diagonal's share, as in the loop that rounds to the target
TOKENS_PER_INPUT = 10  # a least-squares target over-fits fewer
ROWS_PER_SOLVE = 1024


def correction(stats: Stats, alpha: float, tokens: int) -> tuple[Tensor | None, str | None]:
    """Return alpha D H^-1 [in, in] float32 for all linears that read this input, None for the plain target; and a note.

    tokens: those of the whole stream, all of which must have been paired. The memory of the drift is used up.
    """
    if stats.count == 0:
        return None, None  # what else is wrong with such an input is the method's to say
    if stats.drift is None or stats.count != tokens:
        return None, "other tokens reach this input in the full-precision model: calibrated on its own inputs alone"
    columns = stats.hessian.shape[0]
    share = min(1.0, stats.count / (TOKENS_PER_INPUT * columns))
    solved = _solve(stats.drift, stats.hessian)
    if solved is None:
        return None, "no target could be solved for from the full-precision inputs: calibrated on its own inputs alone"
    note = f"{stats.count} calibration tokens for {columns} inputs: only {share:.2f} of the target correction applies"
    return solved.mul_(alpha * share), note if share < 1 else None


def target(weight: Tensor, matrix: Tensor) -> Tensor:
    """Return the target [out, in] float32 that a method is given in place of a weight, by the input's `correction`."""
    original = weight.float()
    return torch.addmm(original, original, matrix)


def solve_workspace(columns: int) -> int:
    """Return an upper bound of the bytes that `correction` takes beside the statistics."""
    item = 8 if columns <= FLOAT64_COLUMNS else 4
    return item * columns * (3 * columns + 3 * min(columns, ROWS_PER_SOLVE))


def target_workspace(spec: LinearSpec) -> int:
    """Return the bytes that `target` takes: a float32 copy and the result."""
    return 8 * spec.numel


def _solve(drift: Tensor, hessian: Tensor) -> Tensor | None:
    """Return drift (hessian + damping)^-1, in the place of `drift`; None if it cannot be had in finite numbers."""
    mean = hessian.diagonal().mean().item()
    if mean == 0:  # all inputs zero
        return drift.zero_()
    matrix = hessian.to(torch.float64 if hessian.shape[0] <= FLOAT64_COLUMNS else torch.float32, copy=True)
    matrix.diagonal().add_(DAMP_FRACTION * mean)
    lower, info = torch.linalg.cholesky_ex(matrix)
    del matrix
    if info or not torch.isfinite(lower.diagonal()).all():
        return None
    for rows in drift.split(ROWS_PER_SOLVE):
        rows.copy_(torch.cholesky_solve(rows.T.to(lower.dtype), lower).T)
    return drift if torch.isfinite(drift).all() else None
