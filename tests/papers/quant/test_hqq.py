"""HQQ against the published iteration, one group at a time in float64, and on groups that are not as they should be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.papers.formats import affine
from compress.papers.quant import hqq
from compress.types import PackedWeight, Stored
from helpers import problems


def quantize(weight: Tensor, **settings: int) -> PackedWeight:
    packed = hqq.quantize(weight, None, hqq.Config(**settings)).weight
    assert formats.nbytes(Stored("affine", packed.params), packed.shape) == packed.nbytes
    return packed


def published_zero(weight: Tensor, bits: int) -> Tensor:
    """The zero point of one group [columns], as the published loop finds it for a matrix of that group alone."""
    top = 2**bits - 1
    scale = top / (weight.max() - weight.min())
    zero, best, least = -weight.min() * scale, torch.zeros(()), 1e4
    for _ in range(20):
        now = zero
        codes = torch.round(weight * scale + zero).clamp(0, top)
        rest = weight - (codes - zero) / scale
        sparse = torch.sign(rest) * torch.relu(rest.abs() - rest.abs() ** (0.7 - 1) / 10)
        zero = torch.mean(codes - (weight - sparse) * scale)
        error = float(rest.abs().mean())
        if error >= least:
            break
        best, least = now, error
    return best


def mean_error(groups: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    codes = torch.round(groups / scale + zero).clamp(0, 2**bits - 1)
    return ((codes - zero) * scale - groups).abs().mean()


@pytest.mark.parametrize(("bits", "group"), [(2, 16), (3, 64), (4, 64), (8, 128)])
def test_zero_points_are_those_of_the_published_loop(bits: int, group: int) -> None:
    """The loop ends where its error falls no more, and one bit of a sum decides that between two that are as good."""
    weight = problems.random(12, 4 * group, seed=3).double().view(12, 4, group)
    scales, minima = hqq.fit(weight, 2**bits - 1)
    same = 0
    for row in range(12):
        for k in range(4):
            own, scale = weight[row, k], scales[row, k]
            assert float(scale) == pytest.approx(float((own.max() - own.min()) / (2**bits - 1)))
            wanted, zero = published_zero(own, bits), -minima[row, k] / scale
            same += int((zero - wanted).abs() < 1e-9)
            errors = (mean_error(own, scale, each, bits) for each in (zero, wanted))
            assert float(next(errors)) == pytest.approx(float(next(errors)), rel=1e-3)
    assert same >= 36  # of 48


@pytest.mark.parametrize("shape", [(5, 64), (3, 50), (17, 200)])
@pytest.mark.parametrize(("bits", "group"), [(2, 16), (3, -1), (5, 24), (8, 64)])
def test_every_weight_is_at_the_nearest_level_of_its_group(bits: int, group: int, shape: tuple[int, int]) -> None:
    weight = problems.random(*shape) * problems.random(shape[0], 1, seed=1).exp()
    packed = quantize(weight, bits=bits, group_size=group)
    size = packed.params.group(shape[1])
    owner = torch.arange(shape[1]) // size
    scales, minima = (packed.tensors[name].double()[:, owner, None] for name in ("scales", "minima"))
    levels = scales * torch.arange(2**bits, dtype=torch.float64) + minima
    least = (levels - weight.double()[..., None]).abs().amin(2)
    assert ((problems.decoded(packed) - weight.double()).abs() <= least + 1e-5 * weight.abs().max()).all()
    assert packed.params == affine.Params(bits, -1 if size == shape[1] else group, packed.params.tile_words)


def test_the_mean_error_is_less_than_that_of_the_range() -> None:
    weight = problems.random(64, 512)
    for bits in (2, 3, 4):
        top = 2**bits - 1
        groups = weight.view(64, 8, 64)
        low, high = groups.aminmax(dim=2, keepdim=True)
        scale = (high - low) / top
        zero = (-low / scale).round()
        plain = ((groups / scale + zero).round().clamp(0, top) - zero) * scale
        fitted = problems.decoded(quantize(weight, bits=bits)).view_as(groups)
        assert (fitted - groups).abs().mean() < 0.995 * (plain - groups).abs().mean()


def test_no_row_depends_on_others() -> None:
    weight = problems.random(40, 96)
    whole = problems.decoded(quantize(weight, bits=3, group_size=32))
    for rows in (slice(0, 1), slice(7, 23)):
        assert torch.equal(problems.decoded(quantize(weight[rows], bits=3, group_size=32)), whole[rows])


def test_groups_of_equal_weights_and_large_ones() -> None:
    weight = torch.cat((torch.zeros(4, 64), torch.full((4, 64), 0.25), problems.random(4, 64)), 1)
    decoded = problems.decoded(quantize(weight))
    assert not decoded[:, :64].any() and (decoded[:, 64:128] == 0.25).all()
    large = quantize(problems.random(4, 64) * 1e6)
    assert large.params.scale_dtype == "bfloat16" and problems.decoded(large).isfinite().all()
    with pytest.raises(ValueError, match="bits 9 is not one of 2..8"):
        hqq.Config(bits=9)
