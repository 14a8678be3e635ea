"""Choose the input channels of a projection that go, by what the best change of the others leaves of the error.

With H the sum of a a^T over inputs a of a projection W, removing the channels of a unit u and refitting the others
costs tr(W_u [(H^-1)_uu]^-1 W_u^T): the rule of the optimal brain surgeon for several columns. It holds for one unit. So
units are removed in ROUNDS, each time the least of what is left, and W becomes W_k + W_d H_dk H_kk^-1 in between.
`score: size` takes |W_u|^2 tr(H_uu) once, which says nothing of what the others can make up for.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Score = Literal["refit", "size"]
ROUNDS = 8  # [rounds] at most, in each of which the least of the units are removed
DAMP = 1e-4  # times the mean of H's diagonal, so that it has an inverse


def choose_channels(weight: Tensor, hessian: Tensor, size: int, count: int, score: Score) -> Tensor:
    """Return the channels that stay, int64 in ascending order, when `count` units of `size` channels in a row go.

    weight [out, in] and hessian [in, in], float64.
    """
    width = weight.shape[1]
    eye = torch.eye(width, dtype=hessian.dtype, device=hessian.device)
    damped = hessian + DAMP * hessian.diagonal().mean().clamp(min=1e-30) * eye
    left = torch.arange(width, device=weight.device)  # channels
    removed, rounds = 0, 1 if score == "size" else min(ROUNDS, count)
    for number in range(rounds):
        goal = count * (number + 1) // rounds
        part = damped[left][:, left]
        costs = _score(weight, part, size, score)
        order = costs.argsort(stable=True)[: goal - removed]
        gone = torch.zeros(len(costs), dtype=torch.bool, device=weight.device)
        gone[order] = True
        dropped = gone.repeat_interleave(size)
        weight = absorb(weight, part, ~dropped) if number + 1 < rounds else weight
        left, removed = left[~dropped], goal
    return left


def absorb(weight: Tensor, hessian: Tensor, kept: Tensor) -> Tensor:
    """Return W_k + W_d H_dk H_kk^-1 [out, kept]; kept: bool [in]."""
    part = hessian[kept]
    factor = torch.linalg.cholesky(part[:, kept])
    return weight[:, kept] + torch.cholesky_solve(part[:, ~kept] @ weight[:, ~kept].T, factor).T


def _score(weight: Tensor, hessian: Tensor, size: int, score: Score) -> Tensor:
    """Return what the removal of each unit costs, [units]."""
    units = weight.shape[1] // size
    columns = weight.unflatten(1, (units, size)).transpose(0, 1)  # unit, out, channel
    if score == "size":
        return columns.square().sum((1, 2)) * hessian.diagonal().view(units, size).sum(1)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    blocks = inverse.view(units, size, units, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    return (torch.linalg.solve(blocks, columns.transpose(1, 2)) * columns.transpose(1, 2)).sum((1, 2))
