"""MatQuant against a slow loop in float64 that tries every code, and a weighed loss that falls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.formats import int as int_format
from compress.formats import levels
from compress.numerics.linalg import upper_factor
from compress.papers.quant import matquant
from compress.quant import feedback, gptq
from compress.types import PackedWeight, Stats, Stored
from helpers import problems

Settings = dict[str, object]


def layer(rows: int = 12, columns: int = 48, seed: int = 0) -> tuple[Tensor, Stats]:
    return problems.random(rows, columns, seed=seed + 40), problems.stats(problems.inputs(4 * columns, columns, seed))


def quantize(weight: Tensor, stats: Stats, **settings: object) -> PackedWeight:
    config = matquant.Config(**settings)  # type: ignore[arg-type]
    packed = matquant.quantize(weight, stats, config).weight
    assert formats.nbytes(Stored("sliced", matquant.plan_params(config, packed.shape)), packed.shape) == packed.nbytes
    return packed


def losses(weight: Tensor, packed: PackedWeight, stats: Stats) -> list[float]:
    """Those of all levels, rising."""
    hessian = problems.damped(stats.hessian, 0.01)
    views = [levels.view(packed, level) for level in levels.levels(packed.stored)]
    return [problems.loss(weight, problems.decoded(view), hessian) for view in views]


def level_values(codes: Tensor, scale: Tensor, zero: Tensor, config: matquant.Config) -> list[Tensor]:
    """What codes stand for at each level, as the format says it: the middle of what a cut code may have been."""
    values = []
    for level in (*config.levels, config.bits):
        low = 2 ** (config.bits - level)
        values.append(scale * low * (codes // low - (zero - (low - 1) / 2) / low))
    return values


@pytest.mark.parametrize(("bits", "below"), [(4, (2,)), (8, (4,)), (6, (2, 4))])
def test_the_nearest_code_is_that_of_all_codes(bits: int, below: tuple[int, ...]) -> None:
    config = matquant.Config(bits=bits, levels=below, level_weights=(0.3,) * len(below))
    choice = matquant.JointChoice(config)
    wanted = choice.roots * problems.random(200, len(below) + 1) * 2 ** (bits - 1)
    zero = torch.full((200,), 2.0 ** (bits - 1))
    codes, units = choice.nearest(wanted, zero)
    every = torch.arange(2**bits).float()
    offered = choice.units(every, torch.full_like(every, 2.0 ** (bits - 1)))
    least = (offered - wanted[:, None]).square().sum(-1).min(1).values
    assert torch.allclose((units - wanted).square().sum(-1), least, rtol=1e-5)
    assert torch.equal(units, choice.units(codes, zero))


@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_are_those_of_a_loop_that_tries_every_code(symmetric: bool) -> None:
    """Each level has its own targets, by its own errors; a few codes lie between two of equal loss."""
    weight, stats = layer()
    config = matquant.Config(group_size=16, symmetric=symmetric, level_weights=(0.2,), sweeps=0)
    packed = matquant.quantize(weight, stats, config).weight
    codes, scales, zeros = int_format.unpack(packed.tensors, packed.params, packed.shape)
    owner = torch.arange(48) // 16
    scale = scales.double()[:, owner]
    zero = torch.full_like(scale, 8.0) if zeros is None else zeros.double()[:, owner]
    order = feedback.loop_order(stats.hessian.diagonal())
    factor = upper_factor(stats.hessian.double(), config.damp, order).upper.double()
    residual = torch.zeros(2, 48, 12, dtype=torch.float64)
    chosen = torch.empty(12, 48, dtype=torch.int64)
    for place, column in enumerate(order.tolist()):
        pending = torch.einsum("j,ljr->lr", factor[:place, place], residual[:, :place]) / factor[place, place]
        offered = torch.arange(16).double()[:, None]
        values = level_values(offered, scale[:, column], zero[:, column], config)
        weights = (0.2, 1.0)
        cost = sum(w * (weight[:, column] + pending[i] - values[i]).square() for i, w in enumerate(weights))
        chosen[:, column] = cost.argmin(0)
        for i in range(2):
            picked = values[i].gather(0, chosen[:, column][None])[0]
            residual[i, place] = weight[:, column] - picked
    assert (chosen == codes).double().mean() > 0.98


@pytest.mark.parametrize(
    "settings", [{}, {"symmetric": False}, {"bits": 8, "levels": (2, 4), "level_weights": (0.1, 0.3)}]
)
def test_no_sweep_raises_the_weighed_loss(settings: Settings) -> None:
    weight, stats = layer(16, 64)
    weights = (*matquant.Config(**settings).level_weights, 1.0)  # type: ignore[arg-type]
    before = torch.inf
    for sweeps in range(4):
        found = losses(weight, quantize(weight, stats, group_size=32, sweeps=sweeps, **settings), stats)
        weighed = sum(loss * factor for loss, factor in zip(found, weights, strict=True))
        assert weighed <= before * (1 + 1e-5)
        before = weighed


@pytest.mark.parametrize("symmetric", [True, False])
def test_without_a_weight_it_is_gptq(symmetric: bool) -> None:
    """The loop of gptq is compiled, so that a code next to a tie may differ."""
    weight, stats = layer(32, 96)
    packed = quantize(weight, stats, group_size=32, symmetric=symmetric, level_weights=(0.0,))
    plain = gptq.quantize(weight, stats, gptq.Config(group_size=32, symmetric=symmetric)).weight
    ours, theirs = (int_format.unpack(one.tensors, one.params, one.shape) for one in (packed, plain))
    assert (ours[0] == theirs[0]).double().mean() > 0.99
    hessian = problems.damped(stats.hessian, 0.01)
    loss = problems.loss(weight, problems.decoded(plain), hessian)
    assert losses(weight, packed, stats)[1] <= loss * (1 + 1e-3)


def test_a_weight_moves_the_loss_from_one_level_to_the_other() -> None:
    weight, stats = layer(32, 96)
    low, high = zip(
        *(losses(weight, quantize(weight, stats, level_weights=(w,)), stats) for w in (0.0, 0.05, 1.0)), strict=True
    )
    assert low[0] > low[1] > low[2] and high[0] < high[1] < high[2]


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (40, 1), (1, 40), (33, 50)])
def test_tiny_layers(shape: tuple[int, int]) -> None:
    weight, stats = layer(*shape)
    packed = quantize(weight, stats, group_size=16)
    assert levels.levels(packed.stored) == (2, 4)
    assert problems.decoded(packed).isfinite().all()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"levels": (4,)}, "are not rising numbers below bits 4"),
        ({"levels": ()}, "are not rising numbers"),
        ({"level_weights": (-1.0,)}, "are not a number of at least 0 for each level"),
        ({"level_weights": (1.0, 1.0)}, "are not a number of at least 0 for each level"),
    ],
)
def test_impossible_settings(settings: Settings, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        matquant.Config(**settings)  # type: ignore[arg-type]
