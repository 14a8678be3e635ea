"""The upper factor against an independent float64 construction, and its failures."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from compress.errors import NumericalError
from compress.numerics import linalg
from compress.numerics.linalg import RETRIES, upper_factor
from helpers import problems


def hessian(columns: int) -> Tensor:
    return problems.stats(problems.inputs(4 * columns, columns)).hessian


def mismatch(factor: linalg.Factor, expected: Tensor) -> float:
    """Largest entry of C C^T - H, H scaled to a unit diagonal. The factor is unique: upper, positive diagonal."""
    upper, size = factor.upper.double(), expected.diagonal().sqrt()
    assert factor.upper.dtype == torch.float32
    assert torch.equal(upper, upper.triu()) and (upper.diagonal() > 0).all()
    return ((upper @ upper.T - expected) / torch.outer(size, size)).abs().max().item()


@pytest.mark.parametrize("columns", [1, 2, 17, 64])
@pytest.mark.parametrize("damp", [0.0, 0.01, 0.5])
def test_factor_of_the_damped_hessian(columns: int, damp: float) -> None:
    h = hessian(columns)
    before = h.clone()
    factor = upper_factor(h, damp)
    assert factor.damp == damp and factor.retries == 0
    assert mismatch(factor, problems.damped(h, damp)) < 1e-6
    assert torch.equal(h, before), "the Hessian was modified"


def test_order_takes_rows_and_columns_together() -> None:
    h = hessian(33)
    before = h.clone()
    order = torch.randperm(33, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(order.argsort(), order)  # its inverse would give another factor
    factor = upper_factor(h, 0.02, order)
    assert mismatch(factor, problems.damped(h, 0.02)[order][:, order]) < 1e-6
    assert torch.equal(h, before), "the Hessian was modified"
    assert torch.equal(upper_factor(h, 0.02, torch.arange(33)).upper, upper_factor(h, 0.02).upper)


def test_damping_is_relative_to_the_mean_diagonal() -> None:
    h = hessian(24)
    small, large = upper_factor(h, 0.01), upper_factor(h * 2**20, 0.01)
    assert torch.equal(small.upper * 2**10, large.upper)


def indefinite(lowest: float) -> Tensor:
    """Symmetric, mean diagonal 1, smallest eigenvalue `lowest`."""
    basis = torch.linalg.qr(problems.random(12, 12).double()).Q
    values = torch.full((12,), (12 - lowest) / 11, dtype=torch.float64)
    values[0] = lowest
    return ((basis * values) @ basis.T).float()


def test_retries_double_the_damping_and_are_reported() -> None:
    h = indefinite(-0.05)
    before = h.clone()
    factor = upper_factor(h, 0.01)
    assert factor.retries == 3 and factor.damp == pytest.approx(0.08)  # .01, .02 and .04 do not lift -.05 above zero
    assert mismatch(factor, problems.damped(h, 0.08)) < 1e-6
    assert torch.equal(h, before)


def test_a_singular_hessian_without_damping_gets_a_little() -> None:
    h = torch.diag(torch.tensor([3.0, 0.0, 3.0]))
    factor = upper_factor(h, 0.0)
    assert factor.retries == 1 and 0 < factor.damp < 1e-4
    assert mismatch(factor, problems.damped(h, factor.damp)) < 1e-6


def test_hopeless_matrices_are_refused_with_the_damping_that_was_tried() -> None:
    with pytest.raises(NumericalError, match=rf"not positive definite even with damping {0.01 * 2**RETRIES:.3g}"):
        upper_factor(indefinite(-11.0), 0.01)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    on, off = hessian(6), hessian(6)
    on[2, 2] = value
    off[4, 1] = off[1, 4] = value
    for h in (on, off):
        with pytest.raises(NumericalError):
            upper_factor(h, 0.01)


@pytest.mark.parametrize("h", [torch.zeros(4, 4), -torch.eye(4)], ids=["zero", "negative"])
def test_a_mean_diagonal_that_is_not_positive_is_refused(h: Tensor) -> None:
    with pytest.raises(NumericalError, match="mean diagonal"):
        upper_factor(h, 0.01)


def test_a_factor_that_is_not_finite_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some libraries report success for a matrix with NaN."""
    monkeypatch.setattr(
        torch.linalg, "cholesky_ex", lambda matrix: (matrix * math.nan, torch.zeros((), dtype=torch.int32))
    )
    with pytest.raises(NumericalError, match="not positive definite"):
        upper_factor(hessian(4), 0.01)


def test_float32_only_above_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []
    cholesky = torch.linalg.cholesky_ex

    def spy(matrix: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(matrix.dtype)
        return cholesky(matrix)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", spy)
    monkeypatch.setattr(linalg, "FLOAT64_COLUMNS", 32)
    below, above = hessian(32), hessian(33)
    kept = above.clone()
    assert mismatch(upper_factor(below, 0.01), problems.damped(below, 0.01)) < 1e-6
    assert mismatch(upper_factor(above, 0.01), problems.damped(above, 0.01)) < 1e-5
    assert seen == [torch.float64, torch.float32]
    assert torch.equal(above, kept), "the Hessian was modified"


@pytest.mark.parametrize("setting", ["highest", "high", "medium", "tf32"])
def test_float32_is_multiplied_in_full_and_the_setting_comes_back(setting: str) -> None:
    products = torch.backends.cuda.matmul
    try:
        if setting == "tf32":
            products.fp32_precision = setting
        else:
            torch.set_float32_matmul_precision(setting)
        before = products.fp32_precision
        with pytest.raises(RuntimeError, match="a reason"), linalg.full_float32():
            assert products.fp32_precision == "ieee" and torch.get_float32_matmul_precision() == "highest"
            raise RuntimeError("a reason")
        assert products.fp32_precision == before
        assert setting == "tf32" or torch.get_float32_matmul_precision() == setting
    finally:
        torch.set_float32_matmul_precision("highest")
        products.fp32_precision = "none"
