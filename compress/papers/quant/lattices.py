"""Learn the lattice of a group of columns and round to it: the maths of compress/papers/quant/glvq.py.

A group's targets t [blocks, d, rows] become expand(G z), z odd multiples of 1/2 of limited size, measured by ||C^T (t -
value)||^2 with a factor C [blocks, d, d] for each block. expand is the identity or a mu-law curve; with a curve
everything is linearized where the value is expected, with `slope` = d expand / dy.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compress.papers.formats.lattice import expand

TINY = 1e-30
RIDGE = 1e-6  # pull towards the former matrix, relative to the mean diagonal of the normal equations
CONDITION = 1e3  # largest ratio of singular values of a lattice
CURVES = (0.5, 1.0, 10.0)  # values of mu that are tried
# The step of uniform levels at odd multiples of 1/2 that suits N(0, 1) best, by bits.
STEP = {1: 1.596, 2: 0.9957, 3: 0.586, 4: 0.3352, 5: 0.1881}


class Curve(NamedTuple):
    """A mu-law curve; mu and limit are 0-dim float32 tensors that float16 can hold."""

    mu: Tensor
    limit: Tensor

    def compress(self, values: Tensor) -> Tensor:
        """Return the values' images under the inverse of `expand`."""
        bent = torch.log1p(values.abs() * (self.mu / self.limit)) / torch.log1p(self.mu)
        return torch.copysign(bent, values)

    def slope(self, y: Tensor) -> Tensor:
        """Return d expand / dy."""
        rate = torch.log1p(self.mu)
        return torch.exp(y.abs() * rate) * (rate * self.limit / self.mu)


class Lattice(NamedTuple):
    """A generation matrix [d, d] float32, rounded to float16, and perhaps a curve."""

    matrix: Tensor
    curve: Curve | None

    def values(self, z: Tensor) -> Tensor:
        """Return the values [..., d, rows] of coordinates."""
        y = self.matrix @ z
        return y if self.curve is None else expand(y, self.curve.mu, self.curve.limit)

    def slope(self, z: Tensor) -> Tensor | None:
        return None if self.curve is None else self.curve.slope(self.matrix @ z)


class Effort(NamedTuple):
    """The work spent on learning a lattice."""

    iterations: int
    beam: int  # of the nearest-plane search
    compand: bool  # whether curves are tried, instead of none


def nearest(target: Tensor, factor: Tensor, lattice: Lattice, bits: int, beam: int) -> Tensor:
    """Return coordinates z [blocks, d, rows] near the targets [blocks, d, rows] in the metric of factor [blocks, d, d].

    Nearest plane: with C^T G = Q R, coordinates are decided from the last to the first, each clamped to the levels of
    `bits`; the `beam` best beginnings are kept.
    """
    top = (2**bits - 1) / 2
    if lattice.curve is None:
        q, r = torch.linalg.qr(factor.mT @ lattice.matrix)
        y = q.mT @ (factor.mT @ target)
        r = r[..., None]  # block, d, d, one for all rows
    else:
        bent = lattice.curve.compress(target).clamp_(-1.5, 1.5)
        slope = lattice.curve.slope(bent).mT[..., None]  # block, row, d, 1
        q, r = torch.linalg.qr(factor.mT[:, None] @ (slope * lattice.matrix))
        y = q.mT @ (factor.mT[:, None] @ (slope * bent.mT[..., None]))  # block, row, d, 1
        y, r = y[..., 0].mT, r.permute(0, 2, 3, 1)
    blocks, d, rows = target.shape
    z = torch.zeros(blocks, 1, d, rows, device=target.device)
    cost = torch.zeros(blocks, 1, rows, device=target.device)
    for k in range(d - 1, -1, -1):
        exact = y[:, None, k] - (r[:, None, k, k + 1 :] * z[:, :, k + 1 :]).sum(2)  # block, beam, row
        pivot = r[:, None, k, k]
        exact = exact / pivot
        first = (exact - 0.5).round_().add_(0.5).clamp_(-top, top)
        if beam > 1:
            z, cost, first = _extend(z, cost, exact, first, pivot, top, beam)
        z[:, :, k] = first
    best = cost.argmin(1)[:, None, None].expand(blocks, 1, d, rows)
    return z.gather(1, best)[:, 0]


def _extend(
    z: Tensor, cost: Tensor, exact: Tensor, first: Tensor, pivot: Tensor, top: float, beam: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best beginnings when each goes on with its nearest or second level: z, costs, the level chosen."""
    side = torch.where(exact > first, 1.0, -1.0)
    second = first + torch.where((first + side).abs() > top, -side, side)
    costs = [cost + ((exact - level) * pivot).square() for level in (first, second)]
    cost, at = torch.cat(costs, 1).topk(min(beam, 2 * z.shape[1]), 1, largest=False)
    level = torch.cat([first, second], 1).gather(1, at)
    source = (at % z.shape[1])[:, :, None].expand(-1, -1, z.shape[2], -1)
    return z.gather(1, source), cost, level


def learn(target: Tensor, weight: Tensor, factor: Tensor, bits: int, effort: Effort) -> Lattice:
    """Learn the best lattice for targets [blocks, d, rows], rows weighted by `weight` [rows].

    Alternates coordinates and the matrix that is best for them, and keeps the best pair seen.
    """
    iterations, beam, compand = effort
    factor = factor / factor.square().mean().sqrt()
    hessian = torch.block_diag(*(factor @ factor.mT))
    tried: list[tuple[float, Lattice]] = []
    for curve in _curves(target) if compand else [None]:
        lattice = _initial(target, factor, STEP[bits], curve)
        for step in range(iterations + 1):
            z = nearest(target, factor, lattice, bits, beam)
            error = target - lattice.values(z)
            loss = (factor.mT @ error).mul_(weight).square_().sum().item()
            tried.append((loss, lattice))
            if step < iterations:
                pull = (hessian @ error.flatten(0, 1)).view(error.shape)
                lattice = refitted(lattice, z, weight, hessian, pull)
    return min(tried, key=lambda pair: pair[0])[1]


def _curves(target: Tensor) -> list[Curve | None]:
    """Return the curves to try, each with its limit at the largest target."""
    limit = target.abs().amax().clamp(2.0**-14, 6e4).half().float()
    return [Curve(torch.tensor(mu, device=target.device), limit) for mu in CURVES]


def _initial(target: Tensor, factor: Tensor, step: float, curve: Curve | None) -> Lattice:
    """Return a matrix that whitens the (bent) targets, turned so that nearest plane takes equal steps everywhere."""
    metric = (factor @ factor.mT).mean(0).double()
    if curve is not None:
        target = curve.compress(target)
        slope = curve.slope(target).double()
        metric = metric * torch.einsum("bir,bjr->ij", slope, slope) / (slope.shape[0] * slope.shape[2])
    cov = torch.einsum("bir,bjr->ij", target.double(), target.double()) / (target.shape[0] * target.shape[2])
    eye = torch.eye(len(cov), dtype=cov.dtype, device=cov.device)
    lower = torch.linalg.cholesky(cov + eye * (1e-4 * cov.diagonal().mean()).clamp(min=1e-6))
    inner = torch.linalg.cholesky(metric + eye * 1e-6 * metric.diagonal().mean())
    return _rounded(lower @ equal_steps(inner.mT @ lower) * step, curve)


def equal_steps(matrix: Tensor) -> Tensor:
    """Return the orthogonal V for which the triangular factor of matrix @ V, [d, d], has an equal diagonal.

    The geometric mean decomposition: starting from the singular values, rotations in a plane set one diagonal entry
    after the other to the geometric mean of all.
    """
    d = len(matrix)
    _, sizes, vt = torch.linalg.svd(matrix)
    basis, sizes = vt.mT.clone(), sizes.tolist()
    mean = torch.tensor(sizes, dtype=torch.float64).log().mean().exp().item()
    for k in range(d - 1):
        order = sorted(range(k, d), key=lambda i: sizes[i])
        high, low = order[-1], order[0]
        if not sizes[low] < mean < sizes[high]:
            continue
        rest = [i for i in range(k, d) if i not in (high, low)]
        places = [*range(k), high, low, *rest]
        basis, sizes = basis[:, places], [sizes[i] for i in places]
        a, b = sizes[k], sizes[k + 1]
        cos = min(max((mean**2 - b**2) / (a**2 - b**2), 0.0), 1.0) ** 0.5
        sin = (1 - cos**2) ** 0.5
        turn = torch.tensor([[cos, -sin], [sin, cos]], dtype=basis.dtype, device=basis.device)
        basis[:, k : k + 2] = basis[:, k : k + 2] @ turn
        sizes[k], sizes[k + 1] = mean, a * b / mean
    return basis


def refitted(lattice: Lattice, z: Tensor, weight: Tensor, hessian: Tensor, pull: Tensor) -> Lattice:
    """Return the lattice that is best for coordinates z [blocks, d, rows] (with a curve: by one Gauss-Newton step).

    The loss is tr(E^T hessian E), E [blocks * d, rows] the errors of the group times `weight` [rows];
    pull = hessian @ E, without the weights, [blocks, d, rows].
    """
    blocks, d, rows = z.shape
    slope = lattice.slope(z)
    weighted = z * weight
    metric = hessian.view(blocks, d, blocks, d)
    if slope is None:
        gram = (weighted.flatten(0, 1) @ weighted.flatten(0, 1).T).view(blocks, d, blocks, d)
        normal = torch.einsum("iajb,icjd->acbd", metric.double(), gram.double())
        right = (pull * weight).double() @ weighted.double().mT  # block, d, d
    else:
        features = (slope[:, :, None] * weighted[:, None]).flatten(1, 2)  # block, (d d), row
        normal = torch.zeros(d, d, d, d, dtype=torch.float64, device=z.device)
        for i in range(blocks):
            gram = torch.matmul(features, features[i].T).view(blocks, d, d, d, d)  # other block, b, d, a, c
            normal += torch.einsum("ajb,jbdac->acbd", metric[i], gram).double()
        right = (pull * slope * weight).double() @ weighted.double().mT
    normal = normal.reshape(d * d, d * d)
    normal.diagonal().add_(RIDGE * normal.diagonal().mean().clamp(min=TINY))
    step = torch.linalg.solve(normal, right.sum(0).flatten()).view(d, d)
    return _rounded(lattice.matrix.double() + step, lattice.curve)


def _rounded(matrix: Tensor, curve: Curve | None) -> Lattice:
    """Clip the singular values to a range of CONDITION and round to float16 precision."""
    left, sizes, right = torch.linalg.svd(matrix)
    matrix = left @ (sizes.clamp(min=sizes.amax().item() / CONDITION)[:, None] * right)
    return Lattice(matrix.clamp(-6e4, 6e4).half().float(), curve)
