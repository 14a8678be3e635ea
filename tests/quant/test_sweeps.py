"""The clean-up sweeps where a block of the Hessian cannot be factored in float32."""

from __future__ import annotations

import torch
from torch import Tensor

import problems
from compress.numerics.linalg import upper_factor
from compress.quant import feedback, sweeps


class Nearest(feedback.Rounder):
    """Nearest integers, two columns at a time."""

    width, unit_rows = 2, 1

    def __init__(self, columns: int, rows: int) -> None:
        self.codes = torch.zeros(columns // 2, rows, 2, dtype=torch.int32)

    def round_block(self, target: Tensor, metric: Tensor, start: int) -> Tensor:
        self.codes[start // 2] = target.round().T
        return target.round()


def test_equal_columns_without_damping_keep_their_codes() -> None:
    x = problems.inputs(200, 12)
    x[:, 5] = x[:, 4]
    hessian, weight = problems.stats(x).hessian, 3 * problems.random(12, 16)
    hessian[4, 5] = hessian[5, 4] = hessian[4, 4] * (1 + 1e-6)  # what rounding makes of equal columns
    rounder = Nearest(12, 16)
    values = weight - feedback.run(weight, upper_factor(hessian, 1e-3).upper, rounder).residual
    before = rounder.codes.clone()
    better = sweeps.improve(feedback.Objective(weight, hessian, 0.0), values, rounder, 3)
    assert torch.equal(better.view(6, 2, 16).transpose(1, 2), rounder.codes.float())
    assert torch.equal(rounder.codes[2], before[2]) and not torch.equal(rounder.codes, before)
    assert problems.loss(weight.T, better.T, hessian) < problems.loss(weight.T, values.T, hessian)
