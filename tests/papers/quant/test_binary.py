"""Binary weights: against a slow loop in float64, bytes, scales, and layers that are not as they should be."""

from __future__ import annotations

import pytest
import torch

from compress import formats
from compress.formats import ternary
from compress.papers.quant import binary
from compress.quant import feedback
from compress.types import PackedWeight, Stats, Stored
from helpers import problems

WEIGHT = problems.random(32, 128, seed=5)
STATS = problems.stats(problems.inputs(512, 128))


def quantize(weight: torch.Tensor = WEIGHT, stats: Stats = STATS, **settings: float) -> PackedWeight:
    config = binary.Config(**settings)  # type: ignore[arg-type]
    packed = binary.quantize(weight, stats, config).weight
    assert formats.nbytes(Stored("ternary", packed.params), packed.shape) == packed.nbytes
    return packed


def loss(packed: PackedWeight, weight: torch.Tensor = WEIGHT) -> float:
    return problems.loss(weight, problems.decoded(packed), STATS.hessian)


def test_the_loop_equals_a_slow_loop() -> None:
    """One group: its scale is the weighted mean of the magnitudes, and each column takes the signs of its target."""
    packed = quantize(sweeps=0, group_size=-1, damp=0.02)
    order = feedback.loop_order(STATS.hessian.diagonal(), 0)
    factor = torch.linalg.cholesky(torch.linalg.inv(problems.damped(STATS.hessian, 0.02)[order][:, order])).T
    weights = 1 / factor.diagonal().square()  # what an error of a column costs once those behind it make up for it
    scale = ((WEIGHT.double()[:, order].abs() * weights).sum(1) / weights.sum()).half().double()
    left, expected = WEIGHT.double()[:, order].clone(), torch.empty(32, 128, dtype=torch.float64)
    for k in range(128):
        expected[:, order[k]] = torch.where(left[:, k] >= 0, scale, -scale)
        error = (left[:, k] - expected[:, order[k]]) / factor[k, k]
        left[:, k:] -= error[:, None] * factor[k, k:]
    differ = (problems.decoded(packed) - expected).abs() > 1e-4
    assert differ.float().mean() < 0.002  # a target near zero, or a scale between two of float16


def test_the_scale_of_a_group_is_the_best_for_its_signs() -> None:
    target, importance = problems.random(16, 3), problems.random(16, seed=1).square()
    best = binary.best_scale(target, importance)

    def error(scale: torch.Tensor) -> torch.Tensor:
        return (importance[:, None] * (target - scale * target.sign()).square()).sum(0)

    for factor in (0.98, 1.02):
        assert (error(best) < error(factor * best)).all()


def test_feedback_and_sweeps_lower_the_loss() -> None:
    plain = WEIGHT.sign() * WEIGHT.abs().mean(1, keepdim=True)
    rounded = problems.loss(WEIGHT, plain.double(), STATS.hessian)
    fed_back = loss(quantize(sweeps=0))
    assert fed_back < 0.8 * rounded and loss(quantize(sweeps=2)) < 0.95 * fed_back


def test_there_are_two_values_a_group_and_one_bit_a_weight() -> None:
    packed = quantize(group_size=64)
    assert packed.params == ternary.Params("binary", 64)
    assert all(len(part.abs().unique()) == 1 for row in problems.decoded(packed) for part in row.split(64))
    assert packed.nbytes == 32 * 128 // 8 + 32 * 2 * 2


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (33, 50), (16, 200)], ids=str)
def test_odd_shapes(shape: tuple[int, int]) -> None:
    weight = problems.random(*shape)
    stats = problems.stats(problems.inputs(256, shape[1]))
    decoded = problems.decoded(quantize(weight, stats, group_size=32))
    nothing = problems.loss(weight, torch.zeros_like(decoded), stats.hessian)
    assert decoded.shape == shape and problems.loss(weight, decoded, stats.hessian) < 0.5 * nothing


def test_zeros_and_missing_statistics() -> None:
    zeros = problems.decoded(quantize(torch.zeros(16, 128)))
    assert torch.isfinite(zeros).all()
    result = binary.quantize(WEIGHT, Stats(torch.zeros(128, 128), 0), binary.Config())
    assert "rounded to nearest" in result.notes[0]


def test_it_repeats_and_does_not_depend_on_the_scale_of_the_statistics() -> None:
    first = quantize()
    again = quantize(stats=Stats(STATS.hessian * 64, 7))
    assert all(torch.equal(tensor, again.tensors[name]) for name, tensor in first.tensors.items())


@pytest.mark.parametrize("settings", [{"sweeps": -1}, {"damp": 1.0}, {"group_size": 0}], ids=str)
def test_impossible_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        binary.Config(**settings)  # type: ignore[arg-type]
