"""Ternary rounding: scales against all thresholds, the loop against the paper's algorithm, and its loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.formats import ternary as ternary_format
from compress.papers.quant import ternary
from compress.types import Stats
from helpers import problems

ROWS, COLUMNS = 8, 96


def layer(rows: int = ROWS, columns: int = COLUMNS) -> tuple[Tensor, Stats]:
    return problems.random(rows, columns, seed=40), problems.stats(problems.inputs(4 * columns, columns))


def slow_scale(target: Tensor, importance: Tensor) -> float:
    """The scale of the least weighted error of [columns] numbers, by trying every number of nonzeros."""
    best, least = 0.0, float("inf")
    order = sorted(range(len(target)), key=lambda j: -abs(float(target[j])))
    for count in range(1, len(order) + 1):
        kept = order[:count]
        scale = sum(float(importance[j] * target[j].abs()) for j in kept) / sum(float(importance[j]) for j in kept)
        error = sum(
            float(importance[j]) * (abs(float(target[j])) - scale * (j in kept)) ** 2 for j in range(len(target))
        )
        if error < least:
            best, least = scale, error
    return best


def test_scales_have_the_least_error() -> None:
    target = problems.random(40, 6).double()
    importance = problems.random(40, seed=1).exp().double()
    target[:, 5] = 0
    scales = ternary.best_scale(target, importance)
    for row in range(5):
        assert scales[row].item() == pytest.approx(slow_scale(target[:, row], importance), rel=1e-9)
    assert scales[5] == 0


def test_the_error_of_normal_weights_is_that_of_the_best_three_levels() -> None:
    target = problems.random(1 << 16, 2)
    scale = ternary.best_scale(target, torch.ones(len(target)))
    error = (target - (target / scale).round().clamp(-1, 1) * scale).square().mean()
    assert error.item() == pytest.approx(0.190, abs=0.003) and scale.mean().item() == pytest.approx(1.224, abs=0.01)


@pytest.mark.parametrize("group", [32, -1])
def test_the_loop_is_that_of_the_paper(group: int) -> None:
    """GPTQ one column at a time, in float64, in the order of the method."""
    weight, stats = layer()
    config = ternary.Config(group_size=group, sweeps=0)
    packed = ternary.quantize(weight, stats, config).weight
    rounding = ternary.prepare(weight, stats, config)
    order, size = rounding.order, COLUMNS if group == -1 else group
    hessian = problems.damped(stats.hessian, 0.01)[order][:, order]
    scales: dict[int, Tensor] = {}

    def fit(targets: Tensor, factor: Tensor, start: int) -> None:
        best = ternary.best_scale(targets.T.contiguous(), factor.diagonal().square())
        scales[int(order[start]) // size] = best.half().double()

    def round_column(target: Tensor, column: int) -> Tensor:
        scale = scales[int(order[column]) // size]
        return (target / scale).round().clamp(-1, 1) * scale

    expected = torch.empty(ROWS, COLUMNS, dtype=torch.float64)
    expected[:, order] = problems.right_looking(weight[:, order], hessian, size, fit, round_column)
    differ = ((problems.decoded(packed) - expected).abs() > 1e-6).any(1)
    assert differ.sum() <= 1  # float32 may break a tie another way, in one row


def test_feedback_sweeps_and_groups_lower_the_loss() -> None:
    weight, stats = layer(64, 128)
    scale = ternary.best_scale(weight.T.contiguous(), torch.ones(128))[:, None]
    nearest = problems.loss(weight, (weight / scale).round().clamp(-1, 1) * scale, stats.hessian)
    losses = [
        problems.loss(weight, problems.decoded(ternary.quantize(weight, stats, config).weight), stats.hessian)
        for config in (
            ternary.Config(group_size=-1, sweeps=0),
            ternary.Config(group_size=-1, sweeps=3),
            ternary.Config(group_size=32, sweeps=3),
        )
    ]
    assert nearest > 1.5 * losses[0] > 1.5 * losses[1] > losses[2]


def test_both_packings_hold_the_same_weight() -> None:
    weight, stats = layer()
    one, two = (ternary.quantize(weight, stats, ternary.Config(packing=name)).weight for name in ("base3", "planar"))
    assert torch.equal(formats.decode(one, torch.float32), formats.decode(two, torch.float32))
    trits, scales = ternary_format.unpack(one.tensors, one.params, one.shape)
    assert set(trits.unique().tolist()) == {-1, 0, 1} and (scales > 0).all()


def test_tiles_are_weights_of_their_rows() -> None:
    weight, stats = layer(48, 96)
    config = ternary.Config(group_size=32)
    rounding = ternary.prepare(weight, stats, config)
    tiles = [ternary.quantize_rows(rounding, slice(start, start + 16)) for start in (0, 16, 32)]
    whole = ternary.join(rounding, tiles).weight
    parts = [ternary.quantize(weight[start : start + 16], stats, config).weight for start in (0, 16, 32)]
    for part, start in zip(parts, (0, 16, 32), strict=True):
        assert torch.equal(
            formats.decode(part, torch.float32), formats.decode(whole, torch.float32)[start : start + 16]
        )


def test_settings_that_are_none() -> None:
    for settings, reason in (
        ({"packing": "binary"}, "packing"),
        ({"sweeps": -1}, "sweeps"),
        ({"group_size": 0}, "group"),
    ):
        with pytest.raises(ValueError, match=reason):
            ternary.Config(**settings)  # type: ignore[arg-type]
