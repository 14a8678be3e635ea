"""Coordinate descent against a search that recomputes the whole loss for every code, in float64."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

from compress.formats import int as int_format
from compress.numerics.linalg import upper_factor
from compress.quant import descent, feedback
from compress.quant.feedback import Objective
from compress.quant.grid import Grid
from helpers import problems

ROWS, COLUMNS = 6, 20


def start(bits: int, group: int, symmetric: bool, dtype: str = "float16") -> tuple[Tensor, Tensor, Tensor, Grid]:
    """Target [columns, rows], Hessian, and codes and grid that are far from the best."""
    target = problems.random(COLUMNS, ROWS, seed=bits)
    hessian = problems.stats(problems.inputs(60, COLUMNS, seed=3)).hessian
    size = COLUMNS if group == -1 else group
    count, half = -(-COLUMNS // size), 2 ** (bits - 1)
    scale = (2.5 / half * (1 + 0.2 * problems.random(count, ROWS, seed=1))).to(getattr(torch, dtype)).float()
    scale[0, 1:3] *= -1 if symmetric else 1
    zero = torch.full((count, ROWS), float(half)) if symmetric else half + torch.arange(ROWS).expand(count, -1) % 2.0
    owner = torch.arange(COLUMNS) // size
    codes = ((target / scale[owner]).round() + zero[owner]).clamp(0, 2**bits - 1).to(torch.uint8)
    return target, hessian, codes, Grid(scale, zero)


def values(codes: Tensor, grid: Grid, group: int) -> Tensor:
    """Q [columns, rows] float64."""
    owner = torch.arange(COLUMNS) // (COLUMNS if group == -1 else group)
    return grid.scale.double()[owner] * (codes.double() - grid.zero.double()[owner])


def test_how_scales_are_stored_has_to_be_said() -> None:
    assert inspect.isabstract(descent.Descent)


def slow_sweep(
    target: Tensor,
    hessian: Tensor,
    codes: list[int],
    scales: list[float],
    zeros: list[float],
    params: int_format.Params,
) -> None:
    """One sweep over a row, in place: each group its scale, then each of its columns the best of all codes."""
    size = COLUMNS if params.group_size == -1 else params.group_size

    def loss() -> float:
        levels = [scales[j // size] * (code - zeros[j // size]) for j, code in enumerate(codes)]
        residual = target - torch.tensor(levels, dtype=torch.float64)
        return (residual @ hessian @ residual).item()

    for g in range(len(scales)):
        columns = range(g * size, min(g * size + size, COLUMNS))
        before, old = loss(), scales[g]
        units = torch.zeros(COLUMNS, dtype=torch.float64)
        units[columns] = torch.tensor([codes[j] - zeros[g] for j in columns], dtype=torch.float64)
        scales[g] = 0.0
        others = [scales[j // size] * (code - zeros[j // size]) for j, code in enumerate(codes)]
        left = target - torch.tensor(others, dtype=torch.float64)
        scales[g] = ((units @ hessian @ left) / (units @ hessian @ units)).to(getattr(torch, params.scale_dtype)).item()
        if not loss() < before:
            scales[g] = old
        for j in columns:
            losses = []
            for code in range(2**params.bits):
                codes[j] = code
                losses.append(loss())
            codes[j] = losses.index(min(losses))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize(("bits", "group"), [(2, -1), (2, 8), (3, 5), (4, 20)])
def test_equals_trying_all_codes(bits: int, group: int, symmetric: bool, dtype: str) -> None:
    target, hessian, codes, grid = start(bits, group, symmetric, dtype)
    params = int_format.Params(bits, group, symmetric, 16, dtype)
    damping = 0.01 * hessian.diagonal().mean().item()
    exact = problems.damped(hessian, 0.01)
    slow_codes, slow_scales = codes.clone(), grid.scale.double()
    for sweeps in (1, 2):
        for row in range(ROWS):
            row_codes, row_scales = slow_codes[:, row].tolist(), slow_scales[:, row].tolist()
            zeros = grid.zero[:, row].tolist()
            slow_sweep(target[:, row].double(), exact, row_codes, row_scales, zeros, params)
            slow_codes[:, row] = torch.tensor(row_codes)
            slow_scales[:, row] = torch.tensor(row_scales)
        better, fitted = descent.improve_grid(Objective(target, hessian, damping), codes, grid, params, sweeps)
        differ = (better != slow_codes).any(0) | (fitted.scale.double() != slow_scales).any(0)
        assert differ.sum() <= 1, "more rows differ than float32 ties explain"
        assert torch.equal(fitted.zero, grid.zero)
        assert not torch.equal(better, codes) and not torch.equal(fitted.scale, grid.scale)


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("group", [-1, 7])
@pytest.mark.parametrize("bits", [2, 3, 8])
def test_ends_where_no_single_code_helps(bits: int, group: int, symmetric: bool) -> None:
    target, hessian, codes, grid = start(bits, group, symmetric)
    params = int_format.Params(bits, group, symmetric, 16)
    exact = problems.damped(hessian, 0.01)
    damping = 0.01 * hessian.diagonal().mean().item()
    first = problems.loss(target.T, values(codes, grid, group).T, exact)
    found, fitted = descent.improve_grid(Objective(target, hessian, damping), codes, grid, params, 30)
    last = problems.loss(target.T, values(found, fitted, group).T, exact)
    assert last < first and found.max().item() < 2**bits
    assert torch.equal(fitted.scale, fitted.scale.half().float()) and (fitted.scale != 0).all()
    for j in range(COLUMNS):
        for change in (-1, 1):
            tried = found.to(torch.int64)
            tried[j] = (tried[j] + change).clamp(0, 2**bits - 1)
            moved = target.T.double() - values(tried, fitted, group).T
            stayed = target.T.double() - values(found, fitted, group).T
            gain = ((stayed @ exact) * stayed - (moved @ exact) * moved).sum(1)  # of each row
            assert (gain <= 1e-5 * ((stayed @ exact) * stayed).sum(1)).all()


@pytest.mark.parametrize("group", [-1, 8])
def test_column_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    target, hessian, codes, grid = start(3, group, True)
    params = int_format.Params(3, group, True, 16)
    whole, fitted = descent.improve_grid(Objective(target, hessian, 1.0), codes, grid, params, 3)
    for chunk in (1, 3, 7):
        monkeypatch.setattr(descent, "GRID_COLUMNS", chunk)
        found, other = descent.improve_grid(Objective(target, hessian, 1.0), codes, grid, params, 3)
        differ = (found != whole).any(0) | (other.scale != fitted.scale).any(0)
        assert differ.sum() <= 1, "more rows differ than float32 ties explain"


def test_a_scale_that_cannot_be_stored_is_not_taken() -> None:
    """The best scale for these codes is 0, which would be stored as 1 and round all of the weights to 0."""
    target = torch.tensor([0.01, -0.01] * (COLUMNS // 2))[:, None]
    grid = Grid(torch.full((1, 1), 0.005).half().float(), torch.full((1, 1), 4.0))
    codes = torch.full((COLUMNS, 1), 5, dtype=torch.uint8)
    params = int_format.Params(3, -1, True, 16)
    found, fitted = descent.improve_grid(Objective(target, torch.eye(COLUMNS), 0.01), codes, grid, params, 1)
    assert torch.equal(fitted.scale, grid.scale)
    assert found[:, 0].tolist() == [6, 2] * (COLUMNS // 2)


def test_no_sweeps_change_nothing_and_inputs_are_not_written() -> None:
    target, hessian, codes, grid = start(3, 8, False)
    params = int_format.Params(3, 8, False, 16)
    given = [target, hessian, codes, grid.scale, grid.zero]
    kept = [tensor.clone() for tensor in given]
    same, fitted = descent.improve_grid(Objective(target, hessian, 1.0), codes, grid, params, 0)
    assert torch.equal(same, codes) and torch.equal(fitted.scale, grid.scale)
    descent.improve_grid(Objective(target, hessian, 1.0), codes, grid, params, 2)
    assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True))


def test_zero_weights_do_not_move() -> None:
    _, hessian, codes, grid = start(3, 8, True)
    params = int_format.Params(3, 8, True, 16)
    target = torch.zeros(COLUMNS, ROWS)
    found, fitted = descent.improve_grid(Objective(target, hessian, 1.0), torch.full_like(codes, 4), grid, params, 2)
    assert (found == 4).all() and torch.equal(fitted.scale, grid.scale)


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
    better = descent.improve_blocks(Objective(weight, hessian, 0.0), values, rounder, 3)
    assert torch.equal(better.view(6, 2, 16).transpose(1, 2), rounder.codes.float())
    assert torch.equal(rounder.codes[2], before[2]) and not torch.equal(rounder.codes, before)
    assert problems.loss(weight.T, better.T, hessian) < problems.loss(weight.T, values.T, hessian)
