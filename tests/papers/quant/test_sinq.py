"""SINQ against the published iteration in float64, nearest levels, and weights that rows or columns have spoilt."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.papers.quant import hqq, sinq
from compress.types import PackedWeight, Stored
from helpers import problems


def quantize(weight: Tensor, **settings: int) -> PackedWeight:
    packed = sinq.quantize(weight, None, sinq.Config(**settings)).weight
    assert formats.nbytes(Stored("affine", packed.params), packed.shape) == packed.nbytes
    return packed


def published_factors(tile: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of columns [columns] and rows [rows]: all steps are taken, a gate closes where imbalance has risen."""
    aim = min(tile.std(1).min(), tile.std(0).min())
    columns, rows, is_open = torch.zeros(tile.shape[1]).double(), torch.zeros(tile.shape[0]).double(), 1.0
    best, least = (columns.exp(), rows.exp()), float("inf")
    for _ in range(16):
        now = tile / columns.exp() / rows.exp()[:, None]
        deviations = torch.cat((now.std(1), now.std(0)))
        imbalance = float(deviations.max() / deviations.min())
        if imbalance <= least:
            best, least = (columns.exp(), rows.exp()), imbalance
        else:
            is_open = 0.0
        columns = (columns + is_open * (now.std(0) / aim).clamp(0.7, 2.0).log()).clamp(-0.3, 10)
        rows = (rows + is_open * (now.std(1) / aim).clamp(0.7, 2.0).log()).clamp(-0.3, 10)
    return best


def uneven(rows: int, columns: int) -> Tensor:
    """Rows and columns of log-normal sizes."""
    sizes = problems.random(rows, 1, seed=1).mul(0.7).exp() * problems.random(1, columns, seed=2).mul(0.7).exp()
    return 0.02 * problems.random(rows, columns) * sizes


@pytest.mark.parametrize("shape", [(48, 64), (200, 16), (7, 33)])
def test_factors_are_the_published_ones(shape: tuple[int, int]) -> None:
    tile = uneven(*shape).double()
    for mine, wanted in zip(sinq.balance(tile), published_factors(tile), strict=True):
        torch.testing.assert_close(mine, wanted)
    columns, rows = sinq.balance(tile)
    before, after = (torch.cat((t.std(0), t.std(1))) for t in (tile, tile / columns / rows[:, None]))
    assert after.max() / after.min() < 0.5 * before.max() / before.min()


def test_the_size_of_the_weight_does_not_matter() -> None:
    tile = uneven(32, 64).double()
    for mine, wanted in zip(sinq.balance(tile * 2.0**-30), sinq.balance(tile), strict=True):
        torch.testing.assert_close(mine, wanted)


@pytest.mark.parametrize(("shape", "bits", "group"), [((40, 96), 3, 32), ((17, 100), 4, -1), ((8, 70), 5, 24)])
def test_every_weight_is_at_the_nearest_level(shape: tuple[int, int], bits: int, group: int) -> None:
    weight = uneven(*shape)
    packed = quantize(weight, bits=bits, group_size=group)
    owner = torch.arange(shape[1]) // packed.params.group(shape[1])
    scales, minima = (packed.tensors[name].double()[:, owner, None] for name in ("scales", "minima"))
    levels = (scales * torch.arange(2**bits) + minima) * packed.tensors["column_scales"].double()[:, None]
    least = (levels - weight.double()[..., None]).abs().amin(2)
    assert ((problems.decoded(packed) - weight.double()).abs() <= least + 1e-5 * weight.abs().max()).all()


def test_columns_of_their_own_size_lose_less() -> None:
    weight = uneven(128, 256)
    one, two = quantize(weight), hqq.quantize(weight, None, hqq.Config()).weight
    errors = [(problems.decoded(each) - weight).square().sum().item() for each in (one, two)]
    assert errors[0] < 0.6 * errors[1] and one.nbytes == two.nbytes + 2 * 256


@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1), (3, 7)])
def test_tiny_weights_and_zeros(shape: tuple[int, int]) -> None:
    packed = quantize(problems.random(*shape))
    assert problems.decoded(packed).isfinite().all()
    assert not problems.decoded(quantize(torch.zeros(*shape))).any()


def test_rows_and_columns_of_zeros_stay_zeros() -> None:
    weight = uneven(32, 128)
    weight[3], weight[:, 7] = 0, 0
    decoded = problems.decoded(quantize(weight))
    assert not decoded[3].any() and decoded[:, 7].abs().max() < 0.1 * weight.abs().max()
    assert (decoded - weight).square().sum() < 0.02 * weight.square().sum()
