"""The low-rank solver against the forms in which others publish it, and against what must be true of any optimum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress.errors import NumericalError
from compress.numerics import linalg
from compress.numerics.linalg import truncate_rank
from helpers import problems

SHAPES = pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32), (1, 7), (7, 1)])


def problem(shape: tuple[int, int], tokens: int = 0) -> tuple[Tensor, Tensor]:
    """A weight and the Hessian of correlated inputs; few tokens make it singular."""
    x = problems.inputs(tokens or 4 * shape[1], shape[1], seed=shape[1])
    return problems.random(*shape, seed=shape[0]), problems.stats(x).hessian


def cut(matrix: Tensor, rank: int) -> Tensor:
    """The best product of this rank in the plain norm, by torch's own SVD."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return left[:, :rank] * values[:rank] @ right[:rank]


def published(matrix: Tensor, hessian: Tensor, rank: int) -> dict[str, Tensor]:
    """The optimum as SVD-LLM, EoRA, QERA and LoRD write it, in float64."""
    m, h = matrix.double(), hessian.double()
    cholesky = torch.linalg.cholesky(h)
    values, vectors = torch.linalg.eigh(h)
    scaled = vectors * values.sqrt()
    root = scaled @ vectors.T
    features = torch.linalg.eigh(m @ h @ m.T).eigenvectors[:, -rank:]
    return {
        "cholesky": cut(m @ cholesky, rank) @ torch.linalg.inv(cholesky),
        "eigenvectors": cut(m @ scaled, rank) @ torch.linalg.inv(scaled),
        "root": cut(m @ root, rank) @ torch.linalg.inv(root),
        "features": features @ (features.T @ m),
    }


def product(found: linalg.Truncation) -> Tensor:
    return found.left.double() @ found.right.double()


@SHAPES
def test_the_published_forms_are_the_same_matrix(shape: tuple[int, int]) -> None:
    matrix, hessian = problem(shape)
    rank = max(1, min(shape) // 3)
    found = product(truncate_rank(matrix, hessian, rank))
    for name, other in published(matrix, hessian, rank).items():
        torch.testing.assert_close(found, other, rtol=0, atol=3e-6, msg=name)


@SHAPES
@pytest.mark.parametrize("tokens", [0, 5])
def test_the_loss_is_the_tail_of_the_eigenvalues(shape: tuple[int, int], tokens: int) -> None:
    matrix, hessian = problem(shape, tokens)
    values = torch.linalg.eigvalsh(matrix.double() @ hessian.double() @ matrix.double().T).flip(0).clamp(min=0)
    full = truncate_rank(matrix, hessian, min(shape))
    whole = values.sum()
    for rank in range(min(shape) + 1):
        found = truncate_rank(matrix, hessian, rank)
        assert found.left.shape == (shape[0], rank) and found.right.shape == (rank, shape[1])
        assert abs(found.losses[rank] - values[rank:].sum()) <= 1e-12 * whole
        real = problems.loss(matrix, product(found), hessian)  # singular in float32: eigenvalues a little below zero
        assert abs(real - values[rank:].sum()) <= (1e-7 if tokens else 1e-9) * whole
        assert torch.equal(full.losses[: rank + 1], found.losses)
    assert full.losses[-1] <= 1e-12 * whole


@SHAPES
def test_the_left_factor_is_orthonormal_and_the_right_its_image(shape: tuple[int, int]) -> None:
    matrix, hessian = problem(shape, 6)  # singular: eigenvalues of zero have eigenvectors, too
    found = truncate_rank(matrix, hessian, min(shape))
    eye = torch.eye(min(shape))
    torch.testing.assert_close(found.left.T @ found.left, eye, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.left.T @ matrix, found.right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_full_rank_is_the_matrix_itself(shape: tuple[int, int]) -> None:
    matrix, hessian = problem(shape, 9)
    if shape[0] <= shape[1]:
        torch.testing.assert_close(product(truncate_rank(matrix, hessian, min(shape))).float(), matrix)
    else:
        torch.testing.assert_close(product(truncate_rank(matrix, hessian, min(shape))).float(), matrix)
        assert truncate_rank(matrix, torch.zeros_like(hessian), 3).losses.tolist() == [0, 0, 0, 0]


@SHAPES
def test_without_a_metric_it_is_the_plain_svd(shape: tuple[int, int]) -> None:
    matrix, _ = problem(shape)
    rank = (min(shape) + 1) // 2
    found = truncate_rank(matrix, None, rank)
    torch.testing.assert_close(product(found), cut(matrix.double(), rank), rtol=0, atol=3e-6)
    tail = torch.linalg.svdvals(matrix.double())[rank:].square().sum()
    torch.testing.assert_close(found.losses[-1], tail, rtol=1e-9, atol=1e-9)


def test_the_inputs_matter() -> None:
    matrix, hessian = problem((48, 48))
    aware = truncate_rank(matrix, hessian, 8)
    scaled = truncate_rank(matrix, hessian.diagonal().diag(), 8)
    plain = truncate_rank(matrix, None, 8)
    losses = [problems.loss(matrix, product(found), hessian) for found in (aware, scaled, plain)]
    assert losses[0] < 0.8 * losses[1] < losses[2], losses


@pytest.mark.parametrize("metric", [True, False])
@pytest.mark.parametrize("shape", [(60, 90), (90, 60)])
def test_the_randomized_form_comes_as_near(shape: tuple[int, int], metric: bool) -> None:
    matrix, hessian = problem(shape)
    h = hessian if metric else None
    exact, found = truncate_rank(matrix, h, 6), truncate_rank(matrix, h, 6, seed=3)
    assert torch.equal(truncate_rank(matrix, h, 6, seed=3).left, found.left)
    real = problems.loss(matrix, product(found), hessian if metric else torch.eye(shape[1]))
    assert abs(found.losses[6] - real) < 1e-6 * found.losses[0], "the loss is that of what was found"
    assert (found.losses >= exact.losses * (1 - 1e-9)).all()
    assert (found.losses <= exact.losses * 1.02).all()


def test_wide_matrices_are_solved_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, hessian = problem((24, 40))
    exact = truncate_rank(matrix, hessian, 9)
    monkeypatch.setattr(linalg, "FLOAT64_COLUMNS", 16)
    narrow = truncate_rank(matrix, hessian, 9)
    assert problems.loss(matrix, product(narrow), hessian) <= exact.losses[9] * (1 + 1e-5)
    assert linalg.truncation_workspace((24, 40)) == 4 * (3 * 24 * 40 + 40 * 40 + 3 * 24 * 24)


@pytest.mark.parametrize("rank", [-1, 25])
def test_ranks_that_cannot_be(rank: int) -> None:
    matrix, hessian = problem((24, 40))
    with pytest.raises(ValueError, match=f"rank {rank} is not between 0 and 24"):
        truncate_rank(matrix, hessian, rank)


def test_numbers_that_are_none() -> None:
    matrix, hessian = problem((24, 40))
    hessian[3, 3] = torch.inf
    with pytest.raises(NumericalError, match="not finite|no eigenvectors"):
        truncate_rank(matrix, hessian, 3)
