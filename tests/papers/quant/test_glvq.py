"""GLVQ: nearest plane and lattices against slow float64 references, bits of groups, layers of all kinds."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.papers.quant import glvq
from compress.quant import descent, feedback, gptq
from compress.types import PackedWeight, Stats, Stored
from helpers import problems


def layer(rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Stats]:
    return problems.random(rows, columns, seed=seed + 40), problems.stats(problems.inputs(4 * columns, columns, seed))


def quantize(weight: Tensor, stats: Stats, **settings: float) -> PackedWeight:
    result = glvq.quantize(weight, stats, glvq.Config(**settings))  # type: ignore[arg-type]
    assert result.notes == ()
    packed = result.weight
    assert packed.params == glvq.plan_params(glvq.Config(**settings), packed.shape)  # type: ignore[arg-type]
    assert packed.nbytes == formats.nbytes(Stored("lattice", packed.params), packed.shape)
    return packed


def loss(weight: Tensor, packed: PackedWeight, stats: Stats) -> float:
    return problems.loss(weight, problems.decoded(packed), stats.hessian)


# Bits of groups.


def problem_with(sizes: list[float], group: int = 16) -> feedback.Layer:
    columns = len(sizes) * group
    x = problems.random(8 * columns, columns, seed=1) * torch.tensor(sizes).sqrt().repeat_interleave(group)
    return feedback.prepare(problems.random(64, columns, seed=2), problems.stats(x), 0.0, 8, group)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0], [2, 2, 2, 2]),
        ([1.0, 100.0, 1.0, 100.0], [1, 3, 1, 3]),
        ([1.0, 9.0, 10.0, 100.0], [1, 2, 2, 3]),
        ([1.0, 10.0, 100.0], [1, 2, 3]),
        ([5.0], [2]),
    ],
)
def test_bits_move_where_they_pay(sizes: list[float], expected: list[int]) -> None:
    problem = problem_with(sizes)
    bits = glvq.group_bits(problem, glvq.Config(), 16)
    natural = bits[torch.argsort(problem.order[::16])].tolist()
    assert natural == expected
    assert sum(natural) == 2 * len(sizes)


def test_groups_are_whole_and_large_inputs_first() -> None:
    problem = problem_with([1.0, 30.0, 5.0])
    assert problem.order[::16].div(16, rounding_mode="floor").tolist() == [1, 2, 0]
    assert sorted(problem.order.tolist()) == list(range(48))
    codes = torch.arange(6)[problem.order[::8] // 8]
    assert problem.natural(codes).tolist() == list(range(6))


def test_mixed_bits_help_where_inputs_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = 64
    x = problems.random(512, columns, seed=3) * torch.tensor([0.1, 1.0, 1.0, 10.0]).repeat_interleave(16)
    weight, stats = problems.random(96, columns, seed=4), problems.stats(x)
    mixed = quantize(weight, stats, group_size=16)
    monkeypatch.setattr(glvq, "group_bits", lambda *_: torch.full((4,), 2, dtype=torch.uint8))
    equal = quantize(weight, stats, group_size=16)
    assert mixed.nbytes == equal.nbytes
    assert mixed.tensors["group_bits"].tolist() == [1, 2, 2, 3]
    assert loss(weight, mixed, stats) < 0.5 * loss(weight, equal, stats)


# Rounding and learning.


def problem(d: int, rows: int, blocks: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Targets [blocks, d, rows], factors [blocks, d, d], a matrix [d, d]."""
    factor = (torch.eye(d) + 0.3 * problems.random(blocks, d, d, seed=4)).triu()
    matrix = torch.eye(d) + 0.2 * problems.random(d, d, seed=5)
    return problems.random(blocks, d, rows, seed=6), factor, matrix


def slow_nearest_plane(target: Tensor, factor: Tensor, matrix: Tensor, bits: int) -> Tensor:
    """One row [d]: coordinates from the last to the first, the rest of the target solved without a factorization."""
    basis, wanted = (factor.T @ matrix).double(), (factor.T @ target).double()
    top, d = (2**bits - 1) / 2, len(target)
    z = torch.zeros(d, dtype=torch.float64)
    for k in range(d - 1, -1, -1):
        left = wanted - basis[:, k + 1 :] @ z[k + 1 :]
        best = torch.linalg.lstsq(basis[:, : k + 1], left[:, None]).solution[k, 0]
        z[k] = ((best - 0.5).round() + 0.5).clamp(-top, top)
    return z


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_nearest_plane(bits: int) -> None:
    target, factor, matrix = problem(8, 40, 2)
    z = glvq.nearest(target, factor, matrix, bits, beam=1)
    expected = torch.stack(
        [
            torch.stack([slow_nearest_plane(target[b, :, r], factor[b], matrix, bits) for r in range(40)], 1)
            for b in range(2)
        ]
    )
    assert torch.equal(z.double(), expected)


def test_a_wide_beam_is_exhaustive() -> None:
    target, factor, matrix = problem(4, 60)
    every = torch.tensor(list(product((-0.5, 0.5), repeat=4)))  # all points of 1 bit
    errors = ((target[0].T[:, None] - every @ matrix.T) @ factor[0]).square().sum(-1)  # row, point
    z = glvq.nearest(target, factor, matrix, 1, beam=16)[0].T
    wide = ((target[0].T - z @ matrix.T) @ factor[0]).square().sum(-1)
    torch.testing.assert_close(wide, errors.amin(1))
    narrow = glvq.nearest(target, factor, matrix, 1, beam=1)[0].T
    assert ((target[0].T - narrow @ matrix.T) @ factor[0]).square().sum() > wide.sum()


def test_refitting_is_least_squares() -> None:
    """Against the normal equations by automatic differentiation of the loss in float64."""
    target, factor, matrix = problem(4, 25, 3)
    matrix = matrix.half().float()
    z = glvq.nearest(target, factor, matrix, 2)
    weight = problems.random(25, seed=7).abs() + 0.1
    mixing = problems.random(12, 12, seed=8)
    hessian = mixing @ mixing.T / 12
    error = target - matrix @ z
    pull = (hessian @ error.flatten(0, 1)).view(error.shape)
    fitted = glvq.refit_lattice(matrix, z, weight, hessian, pull)

    def loss(flat: Tensor) -> Tensor:
        left = ((error.double() - flat.view(4, 4) @ z.double()) * weight.double()).flatten(0, 1)
        return (left * (hessian.double() @ left)).sum()

    start = torch.zeros(16, dtype=torch.float64)
    second = torch.autograd.functional.hessian(loss, start)
    first = torch.autograd.functional.jacobian(loss, start)
    expected = matrix.double() - torch.linalg.solve(second, first).view(4, 4)
    torch.testing.assert_close(fitted.double(), expected, rtol=2e-3, atol=2e-3)


def test_equal_steps() -> None:
    matrix = problems.random(8, 8, seed=9).double() * torch.logspace(0, 3, 8, dtype=torch.float64)
    basis = glvq.equal_steps(matrix)
    torch.testing.assert_close(basis.T @ basis, torch.eye(8, dtype=torch.float64))
    steps = torch.linalg.qr(matrix @ basis).R.diagonal().abs()
    torch.testing.assert_close(steps, steps.log().mean().exp().expand(8), rtol=1e-8, atol=0)


def test_learning_lowers_the_loss_and_keeps_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    real = glvq.nearest
    monkeypatch.setattr(glvq, "nearest", lambda *arguments: real(*arguments, beam=1))
    target, factor, _ = problem(8, 200, 4)
    target = problems.random(8, 8, seed=11) @ target  # correlated
    weight = torch.ones(200)

    def loss(matrix: Tensor) -> float:
        error = target - matrix @ glvq.nearest(target, factor, matrix, 2)
        return (factor.mT @ error).square().sum().item()

    losses = [loss(glvq.learn(target, weight, factor, 2, count)) for count in (0, 1, 4, 8)]
    assert all(after <= before for before, after in zip(losses, losses[1:], strict=False))
    assert losses[-1] < 0.95 * losses[0]


def test_a_learned_lattice_is_never_near_singular() -> None:
    target, factor, _ = problem(8, 100)
    target[:, 3:] = 0  # targets of three dimensions
    matrix = glvq.learn(target, torch.ones(100), factor, 2, 4)
    assert torch.linalg.cond(matrix).item() < 1.1 * glvq.MAX_CONDITION
    assert torch.isfinite(matrix @ glvq.nearest(target, factor, matrix, 2)).all()


# Layers.


def test_each_step_after_the_loop_lowers_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, stats = layer(40, 64)
    config = glvq.Config(group_size=32)
    problem = feedback.prepare(weight, stats, config.damp, 8, 32)
    losses: list[float] = []
    refit, improve = glvq.LatticeRounder.refit, descent.improve_blocks

    def spy_refit(self: glvq.LatticeRounder, problem: feedback.Layer, values: Tensor) -> Tensor:
        values = refit(self, problem, values)
        losses.append(problem.loss(values))
        return values

    def spy_improve(*arguments: object) -> Tensor:
        values = improve(*arguments)  # type: ignore[arg-type]
        losses.append(problem.loss(values))
        return values

    monkeypatch.setattr(glvq.LatticeRounder, "refit", spy_refit)
    monkeypatch.setattr(descent, "improve_blocks", spy_improve)
    packed = glvq.quantize(weight, stats, config).weight
    assert len(losses) == 5
    assert all(after <= before for before, after in zip(losses, losses[1:], strict=False))
    assert losses[-1] < losses[0]
    hessian = problems.damped(stats.hessian, config.damp)
    assert losses[-1] == pytest.approx(problems.loss(weight, problems.decoded(packed), hessian), rel=1e-3)


def test_beats_scalar_gptq_of_more_bits() -> None:
    weight, stats = layer(128, 128, seed=3)
    packed = quantize(weight, stats, group_size=64)
    scalar = gptq.quantize(weight, stats, gptq.Config(bits=2, group_size=64, symmetric=False)).weight
    assert packed.nbytes < scalar.nbytes
    assert loss(weight, packed, stats) < 0.9 * loss(weight, scalar, stats)


def test_more_bits_are_better() -> None:
    weight, stats = layer(64, 64)
    losses = [loss(weight, quantize(weight, stats, bits=bits, group_size=32), stats) for bits in (2, 3, 4)]
    assert losses[1] < 0.5 * losses[0]
    assert losses[2] < 0.5 * losses[1]


@pytest.mark.parametrize("shape", [(64, 64), (24, 50), (96, 32), (5, 3), (1, 1), (33, 130)])
def test_any_shape(shape: tuple[int, int]) -> None:
    weight, stats = layer(*shape)
    value = problems.decoded(quantize(weight, stats, iterations=2, sweeps=1))
    assert value.shape == weight.shape
    assert (value - weight).norm() < weight.norm()


def test_a_zero_weight_stays_zero() -> None:
    _, stats = layer(8, 32)
    assert not problems.decoded(quantize(torch.zeros(8, 32), stats)).any()
    weight = problems.random(8, 32)
    weight[3] = 0
    assert not problems.decoded(quantize(weight, stats))[3].any()


@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_extreme_sizes_are_only_a_scale(size: float) -> None:
    weight, stats = layer(16, 32)
    plain = loss(weight, quantize(weight, stats), stats)
    packed = quantize(weight * size, stats)
    assert problems.loss(weight, problems.decoded(packed) / size, stats.hessian) == pytest.approx(plain, rel=0.05)


def test_unusable_statistics_are_reported() -> None:
    weight = problems.random(16, 32)
    result = glvq.quantize(weight, Stats(torch.zeros(32, 32), 0), glvq.Config())
    assert result.notes == ("no calibration token reached this input: rounded to nearest",)
    assert (problems.decoded(result.weight) - weight).square().mean() < 0.2 * weight.square().mean()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 1}, "bits 1 is not one of"),
        ({"damp": -0.1}, r"damp -0.1 is not in \[0, 1\)"),
        ({"iterations": -1}, "iterations -1 is negative"),
        ({"sweeps": -1}, "sweeps -1 is negative"),
    ],
)
def test_bad_settings(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        glvq.Config(**settings)  # type: ignore[arg-type]
