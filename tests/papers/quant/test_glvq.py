"""GLVQ: bits of groups, lattices learned in the loop, and layers of all kinds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import problems
from compress import formats
from compress.papers.quant import glvq
from compress.quant import descent, feedback, gptq
from compress.types import PackedWeight, Stats, Stored


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
    assert glvq.group_bits(problem, glvq.Config(mixed_bits=False), 16).tolist() == [2] * len(sizes)


def test_groups_are_whole_and_large_inputs_first() -> None:
    problem = problem_with([1.0, 30.0, 5.0])
    assert problem.order[::16].div(16, rounding_mode="floor").tolist() == [1, 2, 0]
    assert sorted(problem.order.tolist()) == list(range(48))
    codes = torch.arange(6)[problem.order[::8] // 8]
    assert problem.natural(codes).tolist() == list(range(6))


def test_mixed_bits_help_where_inputs_differ() -> None:
    columns = 64
    x = problems.random(512, columns, seed=3) * torch.tensor([0.1, 1.0, 1.0, 10.0]).repeat_interleave(16)
    weight, stats = problems.random(96, columns, seed=4), problems.stats(x)
    mixed, equal = (quantize(weight, stats, group_size=16, mixed_bits=on) for on in (True, False))
    assert mixed.nbytes == equal.nbytes
    assert mixed.tensors["group_bits"].tolist() == [1, 2, 2, 3]
    assert loss(weight, mixed, stats) < 0.5 * loss(weight, equal, stats)


# Layers.


@pytest.mark.parametrize("settings", [{}, {"compand": True, "bits": 3}, {"row_scales": False, "dim": 16}])
def test_each_step_after_the_loop_lowers_the_loss(settings: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    weight, stats = layer(40, 64)
    config = glvq.Config(group_size=32, **settings)  # type: ignore[arg-type]
    problem = feedback.prepare(weight, stats, config.damp, config.dim, 32)
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


def test_more_bits_and_more_search_are_better() -> None:
    weight, stats = layer(64, 64)
    losses = [loss(weight, quantize(weight, stats, bits=bits, group_size=32), stats) for bits in (2, 3, 4)]
    assert losses[1] < 0.5 * losses[0]
    assert losses[2] < 0.5 * losses[1]
    assert loss(weight, quantize(weight, stats, group_size=32, beam=8), stats) < loss(
        weight, quantize(weight, stats, group_size=32, beam=1), stats
    )


def test_distortion_of_gaussian_weights() -> None:
    """Uniform levels give .1189 on N(0, 1): with nothing to learn, learning stays near the grid."""
    weight = problems.random(1024, 128, seed=5)
    packed = quantize(weight, Stats(torch.eye(128), 1), row_scales=False, mixed_bits=False)
    error = (problems.decoded(packed) - weight).square().mean() / weight.double().square().mean()
    assert error.item() == pytest.approx(0.1181, rel=0.01)


@pytest.mark.parametrize("shape", [(64, 64), (24, 50), (96, 32), (5, 3), (1, 1), (33, 130)])
@pytest.mark.parametrize("settings", [{}, {"bits": 3, "dim": 16, "compand": True}, {"row_scales": False, "dim": 32}])
def test_any_shape(shape: tuple[int, int], settings: dict[str, int]) -> None:
    weight, stats = layer(*shape)
    value = problems.decoded(quantize(weight, stats, iterations=2, sweeps=1, **settings))
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
    found = loss(weight, quantize(weight, stats), stats)
    packed = quantize(weight * size, stats)
    assert problems.loss(weight, problems.decoded(packed) / size, stats.hessian) == pytest.approx(found, rel=0.05)


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
        ({"beam": 0}, "beam 0 is not one of 1..64"),
    ],
)
def test_bad_settings(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        glvq.Config(**settings)  # type: ignore[arg-type]
