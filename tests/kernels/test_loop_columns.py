"""Compiled steps through the columns of a weight against the same steps in PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.kernels import llvm
from compress.kernels.loops import columns as column_loops
from compress.kernels.loops import compiler
from compress.numerics.linalg import upper_factor
from compress.quant import descent, feedback, gptq, grid
from compress.types import Stats
from helpers import problems

pytestmark = pytest.mark.skipif(not compiler.available(), reason="nothing can be compiled here")
SHAPES = [(17, 9), (32, 16), (128, 45)]  # columns, rows: whole vectors, single rows, both


def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_loops, "supports", lambda _: False)


def stats(columns: int) -> Stats:
    return problems.stats(problems.inputs(3 * columns, columns, seed=3))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_column_major", [False, True])
def test_columns_are_rounded_as_one_by_one(shape: tuple[int, int], is_column_major: bool) -> None:
    columns, rows = shape
    weight, owner = problems.random(columns, rows, seed=1), torch.arange(columns) % 3
    scale, zero = 0.1 + problems.random(3, rows, seed=4).abs(), torch.full((3, rows), 8.0)
    factor = upper_factor(stats(columns).hessian, 0.01).upper
    factor = factor.T.contiguous().T if is_column_major else factor.contiguous()

    class Single(feedback.Rounder):
        width, group = 1, 0

        def __init__(self) -> None:
            self.codes = torch.empty(shape, dtype=torch.uint8)

        def round_block(self, target: Tensor, metric: Tensor, start: int) -> Tensor:
            code = grid.codes(target, scale[owner[start]], zero[owner[start]], 4)
            self.codes[start] = code[0]
            return (code - zero[owner[start]]) * scale[owner[start]]

    expected = Single()
    loop = feedback._Loop(weight, factor, expected, leaf=columns)
    loop.round_leaf(0, columns)
    residual, pending = torch.empty(shape), torch.zeros(shape)
    codes = torch.empty(shape, dtype=torch.uint8)
    column_loops.round_columns(weight, factor, residual, pending, (owner, scale, zero), codes, 15)
    assert (codes == expected.codes).float().mean() > 0.999  # sums of errors may be taken in another order
    torch.testing.assert_close(residual, loop.residual, atol=1e-4, rtol=0)
    torch.testing.assert_close(pending, loop.pending, atol=1e-4, rtol=0)
    assert codes.unique().numel() > 8


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_are_those_of_pytorch_to_the_bit(shape: tuple[int, int]) -> None:
    columns, rows = shape
    units = problems.random(columns, rows, seed=1).mul_(4).round_().clamp_(-8, 7)
    pull, scale = problems.random(columns, rows, seed=2), 0.1 + problems.random(rows, seed=5).abs()
    metric = stats(columns).hessian.T.contiguous()
    steps = scale, 1 / scale, torch.full((rows,), -8.0), torch.full((rows,), 7.0)
    expected, got = units.clone(), units.clone()
    descent._step_columns(expected, pull.clone(), metric, steps)
    column_loops.step_columns(got, pull.clone(), metric, steps)
    assert torch.equal(got, expected) and not torch.equal(got, units)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("weighed", [True, False])
def test_grids_are_fitted_alike(monkeypatch: pytest.MonkeyPatch, symmetric: bool, weighed: bool) -> None:
    target = problems.random(128, 200, seed=7)
    importance = problems.random(128, seed=8).square() if weighed else None
    config = grid.GridConfig(bits=4, symmetric=symmetric)
    got = grid.fit(target, importance, config, torch.float16)
    uncompiled(monkeypatch)
    expected = grid.fit(target, importance, config, torch.float16)
    assert (got.scale == expected.scale).float().mean() > 0.98 and got.scale.unique().numel() > 100


def test_gptq_is_the_same_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, config = problems.random(150, 160, seed=2), gptq.Config(group_size=32)
    assert column_loops.supports(weight)
    got = gptq.quantize(weight, stats(160), config)
    uncompiled(monkeypatch)
    expected = gptq.quantize(weight, stats(160), config)
    same = [(got.weight.tensors[name] == other).float().mean() for name, other in expected.weight.tensors.items()]
    assert min(same) > 0.98


@pytest.mark.parametrize("numel", [column_loops.MIN_WEIGHTS - 1, column_loops.MIN_WEIGHTS])
def test_small_weights_need_no_compiler(numel: int) -> None:
    assert column_loops.is_worthwhile(numel) == (numel >= column_loops.MIN_WEIGHTS)


def test_what_has_to_be_compiled_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler takes more than functions from disk: both are counted before a run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert column_loops.compiler_nbytes() == column_loops.COMPILED_NBYTES
    for loop in (column_loops._round_columns, column_loops._step_columns, column_loops._grid_loss):
        assert not compiler.is_on_disk(loop)
        llvm.store_object(compiler._key(loop), b"code")
    assert column_loops.compiler_nbytes() == column_loops.LINKED_NBYTES
