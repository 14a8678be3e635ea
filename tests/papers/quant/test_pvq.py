"""PVQ: the search against trying everything, and whole layers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.numerics.linalg import upper_factor
from compress.papers.formats import pvq as pvq_format
from compress.papers.quant import pvq
from compress.types import PackedWeight, Stats, Stored
from helpers import problems

# The shapes of the reference's table of distortions: vector_dim -> pulses at 2, 3 and 4 bits.
PULSES = {8: (4, 10, 24), 16: (9, 21, 46), 32: (19, 43, 92), 64: (39, 89, 186), 128: (80, 179, 371)}
GAIN_BITS = {8: 4, 16: 5, 32: 6, 64: 6, 128: 7}
DISTORTION = {16: (0.1303, 0.0312, 0.0071), 32: (0.1152, 0.0284, 0.0066), 64: (0.1093, 0.0263, 0.0064)}
SHAPES = [(64, 64), (24, 50), (96, 32), (7, 33), (3, 200), (1, 5), (40, 1)]


def all_points(dim: int, pulses: int) -> Tensor:
    """S(dim, pulses), [count, dim] int64."""
    span = range(-pulses, pulses + 1)
    return torch.tensor([y for y in itertools.product(span, repeat=dim) if sum(map(abs, y)) == pulses])


def quantize(weight: Tensor, stats: Stats, **settings: float) -> PackedWeight:
    return pvq.quantize(weight, stats, pvq.Config(**settings)).weight  # type: ignore[arg-type]


def layer(rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Stats]:
    """A weight and correlated inputs, both rotated at random as incoherence does."""
    turn, _ = torch.linalg.qr(problems.random(columns, columns, seed=seed + 9))
    x = problems.inputs(8 * columns, columns, seed) @ turn
    return problems.random(rows, columns, seed=seed + 40) @ turn, problems.stats(x)


def relative_loss(weight: Tensor, packed: PackedWeight, stats: Stats) -> float:
    zero = torch.zeros_like(weight)
    return problems.loss(weight, problems.decoded(packed), stats.hessian) / problems.loss(weight, zero, stats.hessian)


# Choosing points and gains.


def test_search_is_close_to_the_best_direction() -> None:
    """Close to the best cosine over all points, by trying them; multiples of a point are found exactly."""
    points = all_points(4, 6).float()
    unit = points / points.norm(dim=1, keepdim=True)
    x = problems.random(200, 4)
    found = pvq.search(x, 6)
    assert bool((found.abs().sum(1) == 6).all())
    best = (x @ unit.T).amax(1)
    cosine = (x * found).sum(1) / found.norm(dim=1)
    assert bool((cosine > 0.97 * best).all())
    assert (cosine / best).mean() > 0.998
    assert torch.equal(pvq.search(0.37 * points, 6), points)


@pytest.mark.parametrize("pulses", [1, 7, 40])
def test_search_of_awkward_vectors(pulses: int) -> None:
    x = torch.stack([torch.zeros(8), torch.full((8,), 1e-30), torch.eye(8)[3] * -1e30, torch.ones(8)])
    found = pvq.search(x, pulses)
    assert bool((found.abs().sum(1) == pulses).all())
    assert found[2].tolist() == [0, 0, 0, -pulses, 0, 0, 0, 0]


def test_moves_end_where_no_move_helps() -> None:
    """Against losses in float64: they fall, and where it ends the cheapest removal has no addition that pays."""
    gram = problems.damped(problems.stats(problems.inputs(64, 6)).hessian, 0.01)
    x, pulses = problems.random(12, 6).double(), 9
    start = pvq.search(x.float(), pulses).double()
    found = pvq.improve(x.float(), start.float(), gram.float()).double()
    assert bool((found.abs().sum(1) == pulses).all())
    gains = (x @ gram * start).sum(1) / (start @ gram * start).sum(1)
    assert bool((gains > (x * start).sum(1) / start.square().sum(1) / 4).all())  # no guard is at work

    def loss(row: int, point: Tensor) -> float:
        error = x[row] - gains[row] * point
        return (error @ gram @ error).item()

    unit, falls = torch.eye(6, dtype=torch.float64), 0
    for row, y in enumerate(found):
        here, before = loss(row, y), loss(row, start[row])
        falls += here < 0.99 * before
        assert here <= before * (1 + 1e-6)
        less = min((y - y.sign() * unit[i] for i in range(6) if y[i] != 0), key=lambda point: loss(row, point))
        others = [less + sign * unit[j] for j in range(6) for sign in (-1, 1)]
        noise = 1e-4 * (gains[row] ** 2 * gram.diagonal().mean()).item()
        assert all(loss(row, point) > here - noise for point in others if point.abs().sum() == pulses)
    assert falls > len(x) // 2


def test_gain_levels() -> None:
    """Lloyd's conditions on a sample of the spherical distribution; level 0 is zero."""
    params = pvq_format.Params(16, 46, 3)
    levels = pvq.gain_levels(params, 64)
    assert levels[0] == 0
    assert bool((levels.diff() > 0).all())
    assert torch.equal(levels, levels.half().float())
    x = problems.random(200000, 64)
    length = x[:, :16].norm(dim=1) / x.norm(dim=1) * 2  # over the typical length: sqrt(64 / 16)
    nearest = (length[:, None] - levels[1:]).abs().argmin(1)
    means = torch.stack([length[nearest == i].mean() for i in range(7)])
    cosine = (levels[1:] / means).mean()
    assert 0.98 < cosine < 1  # of vectors and their points at 4 bits
    assert torch.allclose(levels[1:] / cosine, means, rtol=0.01)


# Layers.


@pytest.mark.parametrize("dim", DISTORTION)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_distortion_of_gaussians(dim: int, bits: int) -> None:
    """Published values within 2%; better by up to 5% (moves of pulses, which the reference has not)."""
    weight = problems.random(96, 1024)
    settings = {"vector_dim": dim, "gain_bits": GAIN_BITS[dim], "pulses": PULSES[dim][bits - 2], "sweeps": 0}
    packed = quantize(weight, Stats(torch.eye(1024), 0), **settings)
    assert packed.bpw - 16 / 1024 - 0.03 < bits  # beside the scale of a row and the levels
    found = (weight - problems.decoded(packed)).square().mean() / weight.square().mean()
    expected = DISTORTION[dim][bits - 2]
    assert 0.95 * expected < found < 1.02 * expected


def test_the_metric_of_the_block_pays() -> None:
    """Feedback and the metric against neither, and sweeps after them, on a rotated correlated layer."""
    weight, stats = layer(64, 128)
    plain = quantize(weight, Stats(torch.eye(128), 0), pulses=89, vector_dim=64, sweeps=0)
    once = quantize(weight, stats, pulses=89, vector_dim=64, sweeps=0)
    swept = quantize(weight, stats, pulses=89, vector_dim=64, sweeps=3)
    losses = [relative_loss(weight, packed, stats) for packed in (plain, once, swept)]
    assert losses[1] < 0.5 * losses[0]
    assert losses[2] < 0.97 * losses[1]


@pytest.mark.parametrize("bpw", [2.0, 2.5, 3.0, 4.0])
def test_beats_scalar_rounding_in_the_same_loop(bpw: float) -> None:
    from compress.quant import gptq

    weight, stats = layer(64, 256)
    packed = quantize(weight, stats, bpw=bpw, vector_dim=64, sweeps=1)
    scalar = gptq.quantize(weight, stats, gptq.Config(bits=math.ceil(bpw), group_size=-1)).weight
    assert packed.bpw <= bpw < scalar.bpw
    if bpw == int(bpw):
        assert relative_loss(weight, packed, stats) < 0.85 * relative_loss(weight, scalar, stats)


def test_more_bits_less_loss() -> None:
    weight, stats = layer(48, 128)
    packed = [quantize(weight, stats, bpw=bpw, vector_dim=32) for bpw in (1.5, 2.0, 2.5, 3.0, 4.0, 6.0)]
    losses = [relative_loss(weight, p, stats) for p in packed]
    assert losses == sorted(losses, reverse=True)
    assert [p.bpw for p in packed] == sorted(p.bpw for p in packed)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bpw", [2.0, 3.0])
def test_any_size(shape: tuple[int, int], bpw: float) -> None:
    """Planned bytes are stored bytes, the budget is used up to one pulse, and the result is finite."""
    config = pvq.Config(bpw=bpw)
    params = pvq.plan_params(config, shape)
    weight = problems.random(*shape)
    before = weight.clone()
    stats = problems.stats(problems.inputs(300, shape[1]))
    result = pvq.quantize(weight, stats, config)
    packed = result.weight
    assert torch.equal(weight, before)
    assert packed.nbytes == formats.nbytes(Stored("pvq", params), shape)
    assert {k: (tuple(t.shape), t.dtype) for k, t in packed.tensors.items()} == pvq_format.specs(packed.params, shape)
    assert torch.isfinite(problems.decoded(packed)).all()
    more = pvq_format.Params(params.vector_dim, params.pulses + 1, params.gain_bits)
    assert 8 * formats.nbytes(Stored("pvq", more), shape) > bpw * weight.numel()
    over = packed.bpw > bpw
    assert (params.pulses == 1) if over else (relative_loss(weight, packed, stats) < 0.6)
    assert any("too small" in note for note in result.notes) == over
    assert any("columns, not 128" in note for note in result.notes) == (params.vector_dim != 128)


def test_vectors_shrink_where_they_would_be_padding() -> None:
    dims = {n: pvq.plan_params(pvq.Config(), (64, n)).vector_dim for n in (4096, 11008, 768, 64, 96, 50, 33, 5, 2000)}
    assert dims == {4096: 128, 11008: 128, 768: 128, 64: 64, 96: 32, 50: 8, 33: 8, 5: 8, 2000: 128}


def test_explicit_pulses_and_a_seed_that_changes_nothing() -> None:
    weight, stats = layer(8, 32)
    config = pvq.Config(pulses=20, vector_dim=32, bpw=1.0)
    first, second = (pvq.quantize(weight, stats, config, seed).weight for seed in (0, 5))
    assert first.params.pulses == 20
    assert torch.equal(first.tensors["codes"], second.tensors["codes"])


def test_rows_are_independent() -> None:
    weight, stats = layer(12, 64)
    whole = quantize(weight, stats, pulses=40, vector_dim=32)
    parts = [quantize(half, stats, pulses=40, vector_dim=32) for half in weight.split(5)]
    assert torch.equal(problems.decoded(whole), torch.cat([problems.decoded(part) for part in parts]))


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, stats = layer(20, 64)
    whole = quantize(weight, stats, vector_dim=16)
    decoded = problems.decoded(whole)
    monkeypatch.setattr(pvq_format, "DECODE_CHUNK", 150)
    monkeypatch.setattr(pvq, "CHUNK", 48)
    parts = quantize(weight, stats, vector_dim=16)
    assert all(torch.equal(whole.tensors[name], parts.tensors[name]) for name in whole.tensors)
    assert torch.equal(problems.decoded(parts), decoded)


def test_values_in_the_loop_are_the_decoded_ones() -> None:
    """Without sweeps and refit, the loop's own values are those that come out of the stored bits, bit for bit."""
    weight, stats = layer(16, 64)
    target = weight.T.contiguous()
    params = pvq_format.Params(16, 30, 4)
    scales, dtype = pvq._row_scales(target, 16)
    assert dtype == params.scale_dtype
    levels = pvq.gain_levels(params, 64)
    rounder = pvq._PyramidRounder(64, scales, levels, params)
    factor = upper_factor(stats.hessian, 0.01).upper
    values = torch.cat(
        [rounder.round_block(target[b : b + 16], factor[b : b + 16, b : b + 16], b) for b in range(0, 64, 16)]
    )
    tensors = pvq_format.pack(rounder.codes[..., :-1].transpose(0, 1), rounder.codes[..., -1].T, scales, levels, params)
    assert torch.equal(pvq_format.decode(tensors, params, (16, 64), torch.float32), values.T)


def test_zero_rows_and_vectors() -> None:
    weight, stats = layer(6, 64)
    weight[2] = 0
    weight[3, 16:32] = 0
    plain = quantize(weight, Stats(torch.eye(64), 0), vector_dim=16, pulses=30)
    assert bool((problems.decoded(plain)[3, 16:32] == 0).all())
    for packed in (plain, quantize(weight, stats, vector_dim=16, pulses=30), quantize(0 * weight, stats)):
        assert bool((problems.decoded(packed)[2] == 0).all())


def test_dead_inputs_and_no_inputs() -> None:
    weight, stats = layer(8, 64)
    hessian = stats.hessian.clone()
    hessian[5], hessian[:, 5] = 0, 0
    result = pvq.quantize(weight, Stats(hessian, stats.count), pvq.Config(vector_dim=16))
    assert any("1 input channels" in note for note in result.notes)
    result = pvq.quantize(weight, Stats(torch.zeros(64, 64), 0), pvq.Config(vector_dim=16))
    assert any("no calibration token" in note for note in result.notes)
    assert (weight - problems.decoded(result.weight)).square().mean() < 0.1 * weight.square().mean()


@pytest.mark.parametrize("size", [1e-9, 1e-6, 1e6, 1e9])
def test_weights_of_unusual_size(size: float) -> None:
    weight, stats = layer(8, 64)
    packed = quantize(weight * size, stats, vector_dim=16)
    assert packed.params.scale_dtype == "bfloat16"
    usual = quantize(weight, stats, vector_dim=16)
    assert usual.params.scale_dtype == "float16"
    assert relative_loss(weight * size, packed, stats) < 1.1 * relative_loss(weight, usual, stats)


def test_without_incoherence() -> None:
    """Columns of very different size are rounded badly but honestly: decoded values belong to the stored codes."""
    weight = problems.random(16, 128) * problems.random(128, seed=3).exp()
    stats = problems.stats(problems.inputs(600, 128))
    assert relative_loss(weight, quantize(weight, stats, vector_dim=32), stats) < 0.3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bpw": 0}, "bpw 0 is not in"),
        ({"bpw": 9.0}, "bpw 9.0 is not in"),
        ({"pulses": 0}, "pulses 0 is not one of"),
        ({"vector_dim": 24}, "vector_dim 24 is not one of"),
        ({"gain_bits": 1}, "gain_bits 1 is not one of 2..8"),
        ({"damp": 1.0}, "damp 1.0 is not in"),
        ({"sweeps": -1}, "sweeps -1 is negative"),
    ],
)
def test_bad_settings(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pvq.Config(**settings)  # type: ignore[arg-type]


def test_workspace_is_a_bound() -> None:
    assert pvq.workspace(pvq.Config(), (256, 512)) > 3 * 8 * 512**2 + 6 * 4 * 256 * 512
