"""decoupleQ against slow steps in float64: a feedback loop as published, systems row by row, and a loss that falls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.numerics.linalg import upper_factor
from compress.papers.formats import affine
from compress.papers.quant import affine_grid, decoupleq
from compress.quant import feedback, gptq
from compress.types import PackedWeight, Quantized, Stats, Stored
from helpers import problems

Settings = dict[str, int | float]


def layer(rows: int = 24, columns: int = 96, seed: int = 0) -> tuple[Tensor, Stats]:
    return problems.random(rows, columns, seed=seed + 40), problems.stats(problems.inputs(4 * columns, columns, seed))


def problem(weight: Tensor, stats: Stats, **settings: float) -> decoupleq.MatrixProblem:
    config = decoupleq.Config(**settings)  # type: ignore[arg-type]
    order = feedback.loop_order(stats.hessian.diagonal())
    factor = upper_factor(stats.hessian, config.damp, order)
    damping = (factor.damp * stats.hessian.diagonal().mean()).item()
    params = affine_grid.params(config, (weight.shape[0], weight.shape[1]))
    objective = feedback.Objective(weight.T.contiguous(), stats.hessian, damping)
    return decoupleq.MatrixProblem(objective, order, factor.upper, config, params)


def quantize(weight: Tensor, stats: Stats, **settings: float) -> Quantized:
    result = decoupleq.quantize(weight, stats, decoupleq.Config(**settings))  # type: ignore[arg-type]
    assert formats.nbytes(Stored("affine", result.weight.params), result.weight.shape) == result.weight.nbytes
    return result


def loss(weight: Tensor, packed: PackedWeight, stats: Stats) -> float:
    return problems.loss(weight, problems.decoded(packed), problems.damped(stats.hessian, 0.01))


def published_floats(codes: Tensor, row: Tensor, hessian: Tensor, group: int) -> Tensor:
    """Scales, then minima, of one row [in] for its codes [in]: the 2 G x 2 G system of the paper, float64."""
    columns = len(row)
    owner = torch.arange(columns) // group
    indicator = torch.nn.functional.one_hot(owner).double().T  # G, in
    both = torch.cat((indicator * codes.double(), indicator))
    return torch.linalg.lstsq(both @ hessian @ both.T, both @ hessian @ row.double()).solution


@pytest.mark.parametrize(("columns", "group"), [(96, 32), (90, 40), (64, -1)])
def test_floats_are_those_of_the_system_of_each_row(columns: int, group: int) -> None:
    weight, stats = layer(8, columns)
    made = problem(weight, stats, bits=3, group_size=group)
    start = made.start()
    pull = made.layer.pull(made.layer.weight - made.values(start.codes, start.scales, start.minima)).double()
    scales, minima = decoupleq.solve_systems(made.layer, start.codes, pull, made.size)
    hessian = problems.damped(stats.hessian, 0.01)
    for row in range(8):
        codes = start.codes[:, row]
        wanted = published_floats(codes, weight[row], hessian, made.size)
        mine = torch.cat((start.scales[:, row] + scales[:, row], start.minima[:, row] + minima[:, row]))
        owner = torch.arange(columns) // made.size
        losses = []
        for numbers in (wanted, mine, torch.cat((start.scales[:, row], start.minima[:, row])).double()):
            values = numbers[owner] * codes.double() + numbers[len(numbers) // 2 :][owner]
            losses.append(problems.loss(weight[row : row + 1], values[None], hessian))
        assert losses[1] <= losses[0] * 1.0001 and losses[0] < losses[2]


def test_codes_are_those_of_the_published_loop() -> None:
    """With the minimum taken off, against GPTQ one column at a time in float64; few codes lie between two levels."""
    weight, stats = layer()
    made = problem(weight, stats, bits=3, group_size=32, sweeps=0)
    start = made.start()
    codes = made.choose_codes(start).codes.double()
    owner = torch.arange(96) // 32
    scales, minima = start.scales.double()[owner].T, start.minima.double()[owner].T
    order = made.order
    hessian = problems.damped(stats.hessian, 0.01)[order][:, order]

    def round_column(target: Tensor, place: int) -> Tensor:
        column = int(order[place])
        level = ((target - minima[:, column]) / scales[:, column]).round().clamp(0, 7)
        return level * scales[:, column] + minima[:, column]

    wanted = problems.right_looking(weight[:, order], hessian, 0, lambda *_: None, round_column)
    mine = (codes.T * scales + minima)[:, order]
    same = ((mine - wanted).abs() < 1e-4).double().mean()
    assert same > 0.98
    assert problems.loss(weight[:, order], mine, hessian) < 1.01 * problems.loss(weight[:, order], wanted, hessian)


@pytest.mark.parametrize("settings", [{"sweeps": 0}, {"sweeps": 2, "group_size": -1}, {"bits": 4, "group_size": 16}])
def test_no_round_raises_the_loss_of_a_row(settings: Settings) -> None:
    weight, stats = layer(16, 80)
    hessian = problems.damped(stats.hessian, 0.01)
    before = torch.full((16,), torch.inf, dtype=torch.float64)
    for rounds in (1, 2, 4, 8):
        values = problems.decoded(quantize(weight, stats, rounds=rounds, **settings).weight)
        residual = weight.double() - values
        rows = (residual @ hessian * residual).sum(1)
        assert (rows <= before * (1 + 1e-5)).all()
        before = rows


def test_it_beats_integer_zero_points() -> None:
    weight, stats = layer(48, 128)
    plain = gptq.Config(bits=2, group_size=64, symmetric=False, static_groups=False, sweeps=3)
    assert loss(weight, quantize(weight, stats).weight, stats) < 0.95 * loss(
        weight, gptq.quantize(weight, stats, plain).weight, stats
    )


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (40, 1), (1, 40), (33, 50)])
def test_tiny_layers(shape: tuple[int, int]) -> None:
    weight, stats = layer(*shape)
    result = quantize(weight, stats, bits=3, group_size=16)
    assert problems.decoded(result.weight).isfinite().all()
    assert result.weight.params == affine.Params(3, 16 if shape[1] > 16 else -1, result.weight.params.tile_words)


def test_layers_without_text_and_with_zeros() -> None:
    weight, stats = layer(8, 64)
    nothing = quantize(weight, Stats(torch.zeros(64, 64), 0))
    assert "no calibration token" in nothing.notes[0] and problems.decoded(nothing.weight).isfinite().all()
    zeros = quantize(torch.zeros(8, 64), stats)
    assert not problems.decoded(zeros.weight).any()
    with pytest.raises(ValueError, match="rounds 0 is less than 1"):
        decoupleq.Config(rounds=0)
