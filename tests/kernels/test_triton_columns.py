"""Columns stepped through on a GPU, in Triton's interpreter: what a CPU's loops do; machine code without spills."""

from __future__ import annotations

import pytest
import torch

from compress.kernels.loops import columns as column_loops
from compress.kernels.loops import compiler
from compress.numerics.linalg import upper_factor
from helpers import (
    interpreter,  # noqa: F401
    offline,
    problems,
)

SHAPES = [(1, 5), (17, 33), (48, 32)]  # columns, rows
FLOATS = ("weight", "factor", "residual", "pending", "scales", "zeros", "units", "pull", "metric", "inverses", "lows")
POINTERS = dict.fromkeys((*FLOATS, "highs", "moves", "target", "importance", "loss"), "*fp32")
KERNELS = {
    "_round_columns": ["weight", "factor", "residual", "pending", "owner", "scales", "zeros", "codes"],
    "_step_columns": ["units", "pull", "metric", "scales", "inverses", "lows", "highs", "moves"],
    "_grid_loss": ["target", "scales", "lows", "highs", "importance", "loss"],
}

pytestmark = pytest.mark.skipif(not compiler.available(), reason="nothing can be compiled here")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_column_major", [False, True])
def test_columns_are_rounded_as_on_a_cpu(shape: tuple[int, int], is_column_major: bool) -> None:
    from compress.kernels.triton import _columns as triton_columns

    columns, rows = shape
    weight, owner = problems.random(columns, rows, seed=1), torch.arange(columns) % 3
    grid = owner, 0.1 + problems.random(3, rows, seed=4).abs(), torch.full((3, rows), 8.0)
    factor = upper_factor(problems.stats(problems.inputs(3 * columns, columns, seed=3)).hessian, 0.01).upper
    factor = factor.T.contiguous().T if is_column_major else factor.contiguous()
    made = []
    for rounds in (column_loops.round_columns, triton_columns.round_columns):
        residual, pending = torch.full(shape, torch.nan), 0.3 * problems.random(columns, rows, seed=9)
        codes = torch.zeros(shape, dtype=torch.uint8)
        rounds(weight, factor, residual, pending, grid, codes, 15)
        made.append((codes.float(), residual, pending))
    for expected, got in zip(*made, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    assert columns == 1 or made[0][0].unique().numel() > 8


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_are_those_of_a_cpu(shape: tuple[int, int]) -> None:
    from compress.kernels.triton import _columns as triton_columns

    columns, rows = shape
    units = problems.random(columns, rows, seed=1).mul_(4).round_().clamp_(-8, 7)
    pull, scale = problems.random(columns, rows, seed=2), 0.1 + problems.random(rows, seed=5).abs()
    metric = problems.stats(problems.inputs(3 * columns, columns, seed=3)).hessian.T.contiguous()
    grid = scale, 1 / scale, torch.full((rows,), -8.0), torch.full((rows,), 7.0)
    expected, got = units.clone(), units.clone()
    column_loops.step_columns(expected, pull.clone(), metric, grid)
    triton_columns.step_columns(got, pull.clone(), metric, grid)
    assert torch.equal(got, expected) and (columns == 1 or not torch.equal(got, units))


@pytest.mark.parametrize("weighed", [True, False])
def test_losses_are_those_of_a_cpu(weighed: bool) -> None:
    from compress.kernels.triton import _columns as triton_columns

    target, scale = 3 * problems.random(40, 200, seed=7), 0.1 + problems.random(200, seed=5).abs()
    scale[3] = 1e-12  # its numbers are far beyond all levels
    grid = scale, torch.full((200,), -8.0), torch.full((200,), 7.0)
    importance = problems.random(40, seed=8).square() if weighed else None
    expected = column_loops.grid_loss(target, grid, importance)
    torch.testing.assert_close(triton_columns.grid_loss(target, grid, importance), expected)


@pytest.mark.slow
def test_machine_code_spills_nothing() -> None:
    cases = []
    for kernel, names in KERNELS.items():
        kinds = POINTERS | {"owner": "*i64", "codes": "*u8"}
        sizes = ["columns", "rows", *(["down", "right", "top"] if kernel == "_round_columns" else [])]
        constants = {"ROWS": 32} if kernel != "_grid_loss" else {"ROWS": 128, "WEIGHED": True}
        signature = {name: kinds[name] for name in names} | dict.fromkeys(sizes, "i32")
        warps = constants["ROWS"] // 32
        cases.append(offline.Case("compress.kernels.triton._columns", kernel, signature, constants, warps=warps))
    assert all(built.spills == 0 for built in offline.compile_cases(cases))
