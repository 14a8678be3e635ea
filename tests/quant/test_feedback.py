"""The column loop against GPTQ as published and against the definition of the best vector code, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compress.numerics.linalg import upper_factor
from compress.quant import feedback
from helpers import problems

ROWS = 5


class Scalar:
    """Columns rounded to multiples of a scale; a group's scale depends on every number that `fit_group` is given."""

    width = 1

    def __init__(self, group: int = 0) -> None:
        self.group = group
        self.scale = torch.full((ROWS,), 0.4, dtype=torch.float64)
        self.fitted: list[tuple[int, int]] = []  # start and length of each group
        self.rounded: list[int] = []

    def fit_group(self, targets: Tensor, metric: Tensor, start: int) -> None:
        self.fitted.append((start, len(targets)))
        self.scale = (metric.T @ targets).norm(dim=0) / metric.norm() * 0.7

    def round_block(self, target: Tensor, metric: Tensor, start: int) -> Tensor:
        self.rounded.append(start)
        return (target / self.scale).round().clamp(-4, 3) * self.scale


class Vector:
    """Nearest of a few random vectors in the metric of C_BB; with groups, the vectors are scaled."""

    def __init__(self, width: int, group: int = 0) -> None:
        self.width, self.group = width, group
        self.codebook = problems.random(12, width, seed=9).double()  # [codes, width]
        self.scale = torch.ones(ROWS, dtype=torch.float64)

    def fit_group(self, targets: Tensor, metric: Tensor, start: int) -> None:
        self.scale = targets.norm(dim=0) / len(targets) ** 0.5

    def round_block(self, target: Tensor, metric: Tensor, start: int) -> Tensor:
        choices = self.codebook.T[:, None] * self.scale[:, None]  # width, row, code
        distance = torch.einsum("wv,wrc->vrc", metric, target[..., None] - choices).norm(dim=0)
        best = distance.argmin(-1)  # row
        return choices.gather(2, best.expand(self.width, -1)[..., None]).squeeze(-1)


def problem(columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weight [ROWS, columns] and a damped Hessian."""
    x = problems.inputs(3 * columns, columns, seed=seed)
    return problems.random(ROWS, columns, seed=seed + 7).double(), problems.damped(problems.stats(x).hessian, 0.01)


def check_loss(result: feedback.Result, weight: Tensor, hessian: Tensor, tolerance: float) -> None:
    expected = problems.loss(weight, weight - result.residual.T, hessian)
    assert result.loss == pytest.approx(expected, rel=tolerance) and expected > 0


@pytest.mark.parametrize("group", [0, 1, 4, 16, 20, 33, 64])
@pytest.mark.parametrize("columns", [1, 33, 64])
def test_equals_gptq_column_by_column(columns: int, group: int) -> None:
    weight, hessian = problem(columns)
    reference = Scalar()

    def fit(targets: Tensor, metric: Tensor, start: int) -> None:
        reference.fit_group(targets.T, metric, start)

    def round_column(target: Tensor, column: int) -> Tensor:
        return reference.round_block(target[None], torch.ones(1, 1), column)[0]

    expected = problems.right_looking(weight, hessian, group, fit, round_column)
    rounder = Scalar(group)
    result = feedback.run(weight.T.contiguous(), problems.upper(hessian), rounder, leaf=8)
    assert torch.allclose(weight - result.residual.T, expected, rtol=0, atol=1e-9)
    assert rounder.rounded == list(range(columns))
    starts = range(0, columns, group) if group else ()
    assert rounder.fitted == reference.fitted == [(start, min(group, columns - start)) for start in starts]
    check_loss(result, weight, hessian, 1e-10)


def slow_vectors(weight: Tensor, hessian: Tensor, codebook: Tensor) -> Tensor:
    """In each block the code that leaves the least loss if all later columns could repair it with real numbers."""
    rows, columns = weight.shape
    width = codebook.shape[1]
    residual = torch.zeros_like(weight)
    for b in range(0, columns, width):
        end = b + width
        schur = hessian[:end, :end]
        if end < columns:
            schur = schur - hessian[:end, end:] @ torch.linalg.solve(hessian[end:, end:], hessian[end:, :end])
        for row in range(rows):
            tried = residual[row, :end].repeat(len(codebook), 1)  # code, column
            tried[:, b:] = weight[row, b:end] - codebook
            residual[row, :end] = tried[((tried @ schur) * tried).sum(1).argmin()]
    return weight - residual


@pytest.mark.parametrize("columns", [4, 24, 48])
@pytest.mark.parametrize("width", [2, 4])
def test_vectors_take_the_best_code(width: int, columns: int) -> None:
    weight, hessian = problem(columns, seed=1)
    rounder = Vector(width)
    result = feedback.run(weight.T.contiguous(), problems.upper(hessian), rounder, leaf=16)
    expected = slow_vectors(weight, hessian, rounder.codebook)
    assert torch.allclose(weight - result.residual.T, expected, rtol=0, atol=1e-9)
    check_loss(result, weight, hessian, 1e-10)


ROUNDERS: dict[str, Callable[[], feedback.Rounder]] = {
    "scalar": Scalar,
    "groups of 8": lambda: Scalar(8),
    "groups of 20": lambda: Scalar(20),
    "one group": lambda: Scalar(48),
    "vectors of 2": lambda: Vector(2),
    "vectors of 4, groups of 20": lambda: Vector(4, 20),
    "vectors of 16": lambda: Vector(16),
}


@pytest.mark.parametrize("name", ROUNDERS)
def test_leaf_does_not_matter(name: str) -> None:
    weight, hessian = problem(48, seed=2)
    factor = problems.upper(hessian)
    whole = feedback.run(weight.T.contiguous(), factor, ROUNDERS[name](), leaf=1000)
    for leaf in (1, 7, 32, 47):
        result = feedback.run(weight.T.contiguous(), factor, ROUNDERS[name](), leaf=leaf)
        assert torch.allclose(result.residual, whole.residual, rtol=0, atol=1e-9)
        check_loss(result, weight, hessian, 1e-10)


@pytest.mark.parametrize("group", [0, 16, 24])
def test_loss_in_float32(group: int) -> None:
    weight, hessian = problem(64, seed=3)
    factor = upper_factor(hessian.float(), 0.0).upper
    rounder = Scalar(group)
    rounder.scale = rounder.scale.float()
    result = feedback.run(weight.T.float().contiguous(), factor, rounder)
    assert result.residual.dtype == torch.float32
    check_loss(result, weight, hessian, 1e-5)


def test_a_diagonal_hessian_needs_no_feedback() -> None:
    weight, _ = problem(40, seed=4)
    factor = torch.diag(torch.rand(40, generator=torch.Generator().manual_seed(0)).double() + 0.1)
    rounder = Scalar()
    result = feedback.run(weight.T.contiguous(), factor, rounder)
    plain = rounder.round_block(weight.T, factor, 0)
    assert torch.equal(result.residual, weight.T - plain)
    assert result.loss == pytest.approx(((weight.T - plain) * factor.diagonal()[:, None]).square().sum().item())


def test_inputs_are_not_written() -> None:
    weight, hessian = problem(40, seed=5)
    columns, factor = weight.T.contiguous(), problems.upper(hessian)
    kept = columns.clone(), factor.clone()
    feedback.run(columns, factor, Scalar(16), leaf=4)
    assert torch.equal(columns, kept[0]) and torch.equal(factor, kept[1])


def test_feedback_lowers_the_loss_of_rounding() -> None:
    weight, hessian = problem(64, seed=6)
    result = feedback.run(weight.T.contiguous(), problems.upper(hessian), Scalar())
    plain = Scalar().round_block(weight.T, hessian, 0).T
    assert result.loss < 0.75 * problems.loss(weight, plain, hessian)


def test_columns_must_be_whole_blocks() -> None:
    with pytest.raises(AssertionError, match="multiple of the block width"):
        feedback.run(torch.zeros(6, 2), torch.eye(6), Vector(4))
