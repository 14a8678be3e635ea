"""GPTQ to data types: against GPTQ as published, column by column in float64, and what must not matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.formats import grid
from compress.quant import feedback, grid_gptq, grid_rtn, grid_types
from compress.types import OutputMetric, PackedWeight, Stats
from helpers import problems

ROWS, COLUMNS = 48, 128
WEIGHT = problems.random(ROWS, COLUMNS, seed=3) / 40
STATS = problems.stats(problems.inputs(4 * COLUMNS, COLUMNS, 4))
TYPES = list(grid_types.TYPES)
BLOCKS = [type for type in TYPES if grid.has_rows(grid_types.TYPES[type])]


def quantize(stats: Stats = STATS, **settings: Any) -> PackedWeight:
    return grid_gptq.quantize(WEIGHT, stats, grid_gptq.Config(**settings)).weight


def decoded(weight: PackedWeight) -> Tensor:
    return formats.decode(weight, torch.float32).double()


def loss(weight: PackedWeight) -> float:
    return problems.loss(WEIGHT, decoded(weight), problems.damped(STATS.hessian, 0.01))


def same(a: PackedWeight, b: PackedWeight) -> bool:
    pairs = [(tensor, b.tensors[name]) for name, tensor in a.tensors.items()]
    return a.tensors.keys() == b.tensors.keys() and all(torch.equal(*(x.view(torch.uint8) for x in p)) for p in pairs)


def published(weight: PackedWeight, order: Tensor) -> Tensor:
    """GPTQ with the scales of a packed weight, in float64: values [rows, columns]."""
    factors = grid.factors(weight.tensors, weight.params).double()
    high, wide = weight.params.block(weight.shape)
    factors = factors.repeat_interleave(high, 0)[:ROWS].repeat_interleave(wide, 1)[:, :COLUMNS][:, order]
    table = grid.value_table(weight.params.values).double()
    table = table[table.isfinite()]

    def round_column(target: Tensor, column: int) -> Tensor:
        near = (target[:, None] - table * factors[:, column, None]).abs().argmin(1)
        return table[near] * factors[:, column]

    hessian = problems.damped(STATS.hessian, 0.01)[order][:, order]
    result = problems.right_looking(WEIGHT.double()[:, order], hessian, 0, lambda *_: None, round_column)
    return result[:, torch.argsort(order)]


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("act_order", [False, True])
def test_codes_are_those_of_gptq(type: str, act_order: bool) -> None:
    """A rare code that float32 has rounded to the other side moves what comes behind it, in its row alone."""
    weight = quantize(type=type, act_order=act_order, sweeps=0)
    order = torch.arange(COLUMNS)
    if act_order:
        order = feedback.loop_order(STATS.hessian.diagonal())
    wanted = published(weight, order)
    alike = ((decoded(weight) - wanted).abs() < 1e-6 * WEIGHT.abs().max()).all(1)
    assert alike.double().mean() > 0.9
    slow = problems.loss(WEIGHT, wanted, problems.damped(STATS.hessian, 0.01))
    assert loss(weight) == pytest.approx(slow, rel=0.02)


@pytest.mark.parametrize("type", TYPES)
def test_each_step_lowers_the_loss(type: str) -> None:
    plain = grid_rtn.quantize(WEIGHT, None, grid_rtn.Config(type=type)).weight
    losses = [loss(quantize(type=type, sweeps=sweeps)) for sweeps in (0, 1, 4)]
    assert losses[0] < 0.6 * loss(plain) and losses[0] >= losses[1] >= losses[2] * (1 - 1e-4)
    assert quantize(type=type).nbytes == plain.nbytes


@pytest.mark.parametrize("type", BLOCKS)
def test_scales_inside_of_the_loop(type: str) -> None:
    """They are fitted to other targets, and codes belong to what is stored."""
    static, dynamic = quantize(type=type, sweeps=0), quantize(type=type, sweeps=0, static_groups=False)
    assert same(static, dynamic) == (static.params.block(static.shape)[1] >= COLUMNS)
    assert loss(dynamic) < 0.7 * loss(grid_rtn.quantize(WEIGHT, None, grid_rtn.Config(type=type)).weight)


@pytest.mark.parametrize("type", ["nvfp4", "fp8"])
def test_the_tensor_scale_is_that_of_all_readers(type: str) -> None:
    top = WEIGHT.abs().max()
    for factor in (0.5, 4.0):  # half: targets may be larger than all weights
        given = Stats(STATS.hessian, STATS.count, largest_weight=factor * top)
        made, plain = quantize(given, type=type), quantize(type=type)
        name = "tensor_scale" if type == "nvfp4" else "scales"
        assert torch.allclose(made.tensors[name], factor * plain.tensors[name])
    assert loss(made) < 1.3 * loss(plain)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("settings", [{}, {"static_groups": False, "sweeps": 0}])
def test_tiles_know_nothing_of_each_other(type: str, settings: dict[str, Any]) -> None:
    config = grid_gptq.Config(type=type, **settings)
    rounding = grid_gptq.prepare(WEIGHT, STATS, config)
    tiles = [grid_gptq.quantize_rows(rounding, rows) for rows in (slice(0, 20), slice(20, 33), slice(33, ROWS))]
    rounding.release()
    assert same(grid_gptq.join(rounding, tiles).weight, quantize(type=type, **settings))


@pytest.mark.parametrize("type", ["nvfp4", "mxfp4", "fp8-block", "nf4"])
def test_without_correlated_outputs_two_sided_is_one_sided(type: str) -> None:
    output = OutputMetric(lambda rows: torch.eye(rows.stop - rows.start))
    assert same(quantize(Stats(STATS.hessian, STATS.count, output=output), type=type), quantize(type=type))


def test_the_scale_of_the_statistics_does_not_matter() -> None:
    assert same(quantize(Stats(STATS.hessian * 4, STATS.count)), quantize())


def test_inputs_that_no_token_reached_are_rounded_to_nearest() -> None:
    result = grid_gptq.quantize(WEIGHT, Stats(torch.zeros(COLUMNS, COLUMNS), 0), grid_gptq.Config())
    assert "rounded to nearest" in result.notes[0]
    assert same(result.weight, grid_rtn.quantize(WEIGHT, None, grid_rtn.Config()).weight)


def test_a_row_that_is_no_multiple_of_the_block() -> None:
    weight = problems.random(5, 43, seed=1)
    stats = problems.stats(problems.inputs(200, 43, 1))
    for type in TYPES:
        for is_static in (True, False):
            config = grid_gptq.Config(type=type, static_groups=is_static)
            packed = grid_gptq.quantize(weight, stats, config).weight
            nothing = problems.loss(weight, 0 * weight, stats.hessian)
            assert problems.loss(weight, decoded(packed), stats.hessian) < 0.02 * nothing
