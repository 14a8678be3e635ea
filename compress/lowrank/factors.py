"""Factor a matrix into a low-rank product: solve for both factors, bring them to the same size, round them.

Both factors get the same norm in every direction. With integers, B is rounded first and A is then solved for again, for
the rounded B: as close as a product with these can come, whatever the metric is. Not done: the rounding of
A with feedback as in GPTQ, which was tried: losses of layers fell by less than 1%.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from compress.formats import lowrank
from compress.numerics.linalg import truncated
from compress.types import Fisher, LowRank, Stats

Kind = Literal["inputs", "sizes", "fisher", "none"]

WIDE = 8192  # of the smaller side, from which on the subspace is found by iteration


class Metric(NamedTuple):
    """The size of an error R [out, in] is tr(D R H R^T D), D the diagonal matrix of `rows`; None: the identity."""

    hessian: Tensor | None = None  # [in, in]
    rows: Tensor | None = None  # [out] float32, positive

    def loss(self, residual: Tensor) -> float:
        weighted = residual if self.rows is None else residual * self.rows[:, None]
        image = weighted if self.hessian is None else weighted @ self.hessian
        return (image * weighted).sum(dtype=torch.float64).item()


class Part(NamedTuple):
    """A low-rank part: its stored tensors as the format `lowrank` names them, how they are stored, what they give."""

    tensors: dict[str, Tensor]
    stored: LowRank
    product: Tensor  # [out, in] float32


def metric(stats: Stats | None, kind: Kind, power: float = 1.0, fisher: Fisher | None = None) -> Metric:
    """Return the metric in which errors are measured.

    inputs: the Hessian of the inputs; sizes: its diagonal to the `power`; fisher: a weight for each row and column.
    none, and where no token tells: the identity.
    """
    if kind == "fisher" and fisher is not None:
        return Metric(fisher.columns.square().diag(), fisher.rows)
    if kind in ("none", "fisher") or stats is None or not (stats.hessian.diagonal() > 0).any():
        return Metric()
    return Metric(stats.hessian if kind == "inputs" else stats.hessian.diagonal().pow(power).diag())


def split(matrix: Tensor, measure: Metric, wanted: LowRank, seed: int) -> Part:
    """Return the low-rank part nearest to a float32 matrix [out, in], its entries rounded.

    Entries are of the type that was asked for, unless float16 cannot hold them.
    """
    shape = (matrix.shape[0], matrix.shape[1])
    weights = torch.ones(shape[0], device=matrix.device) if measure.rows is None else measure.rows
    weighted = matrix if measure.rows is None else matrix * weights[:, None]
    found = truncated(weighted, measure.hessian, wanted.rank, seed if min(shape) >= WIDE else None)
    left = found.left.T / weights
    sizes = (found.right.norm(dim=1, keepdim=True) / left.norm(dim=1, keepdim=True)).sqrt()
    sizes = torch.where(sizes > 0, sizes, 1.0)
    a, b = found.right / sizes, left * sizes
    stored = wanted if lowrank.fits_float16(a, b) else dataclasses.replace(wanted, dtype="bfloat16")
    packed = lowrank.pack_factor("b", b, stored)
    if stored.bits < 16:
        rounded = lowrank.factor("b", packed, stored, shape[0], torch.float64)
        wide = rounded * weights.square()
        a = torch.linalg.pinv(wide @ rounded.T, hermitian=True).float() @ (wide.float() @ matrix)
    tensors = {**lowrank.pack_factor("a", a, stored), **packed}
    return Part(tensors, stored, lowrank.decode(tensors, stored, shape, torch.float32))
