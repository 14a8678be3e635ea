"""Integer grids: published distortions, the clip search, nearest levels, extremes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress.formats import int as int_format
from compress.quant import grid, rtn
from compress.types import PackedWeight
from helpers import problems

BITS = range(2, 9)


def quantize(weight: Tensor, **settings: bool | int) -> PackedWeight:
    config = rtn.Config(**settings)  # type: ignore[arg-type]
    result = rtn.quantize(weight, None, config)
    assert result.notes == () and result.weight.params.symmetric == config.symmetric
    return result.weight


def error(weight: Tensor, packed: PackedWeight) -> float:
    """Relative squared error."""
    return ((problems.decoded(packed) - weight.double()).square().sum() / weight.double().square().sum()).item()


@pytest.fixture(scope="module")
def gaussian() -> Tensor:
    return problems.random(256, 2048)


@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "expected"),
    [
        (4, 128, False, 0.01013),
        (4, 32, False, 0.00653),
        (4, 128, True, 0.01068),
        (3, 128, False, 0.0464),
        (2, 64, False, 0.208),
        (2, 128, False, 0.253),
    ],
)
def test_min_max_distortion_of_gaussian_weights(
    gaussian: Tensor, bits: int, group: int, symmetric: bool, expected: float
) -> None:
    packed = quantize(gaussian, bits=bits, group_size=group, symmetric=symmetric, clip_search=False)
    assert error(gaussian, packed) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "limit"),
    [
        (4, 128, True, 0.00943),
        (3, 128, True, 0.0346),
        (2, 64, True, 0.124),
        (4, 128, False, 0.00907),
        (3, 128, False, 0.0346),
        (2, 64, False, 0.124),
    ],
)
def test_searched_distortion_of_gaussian_weights(
    gaussian: Tensor, bits: int, group: int, symmetric: bool, limit: float
) -> None:
    found = error(gaussian, quantize(gaussian, bits=bits, group_size=group, symmetric=symmetric))
    assert 0.98 * limit < found <= limit  # much less would mean that the measurement is wrong


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("clip_search", [True, False], ids=["search", "min-max"])
def test_error_falls_as_bits_rise(clip_search: bool, symmetric: bool) -> None:
    weight = problems.random(16, 256)
    errors = [
        error(weight, quantize(weight, bits=b, group_size=64, symmetric=symmetric, clip_search=clip_search))
        for b in BITS
    ]
    assert all(after < before / 2.5 for before, after in zip(errors, errors[1:], strict=False))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_clip_search_is_never_worse_than_min_max(bits: int, symmetric: bool, weighted: bool) -> None:
    target = problems.random(48, 200) * problems.random(48, 200, seed=1).exp()  # [columns, rows], heavy tails
    target[0, 7] = 300.0
    importance = problems.random(48, seed=2).square() if weighted else None

    def losses(search: bool) -> Tensor:
        config = grid.GridConfig(bits, 48, symmetric, search)
        scale, zero = grid.fit(target, importance, config, torch.float16)
        levels = ((target.double() / scale).round() + zero).clamp(0, 2**bits - 1)
        squares = (scale.double() * (levels - zero) - target).square()
        return (squares if importance is None else squares * importance[:, None].double()).sum(0)

    searched, plain = losses(True), losses(False)
    assert (searched <= plain * (1 + 1e-5)).all()
    assert searched.sum() < (0.98 if bits < 8 else 1.0) * plain.sum()


def best_grids(target: Tensor, importance: Tensor, bits: int, symmetric: bool) -> Tensor:
    """Least weighted loss [rows] over 200 scales of both signs and all zero points, float64."""
    target, top = target.double(), 2**bits - 1
    step = (target.amax(0).clamp(min=0) - target.amin(0).clamp(max=0)) / top
    best = torch.full_like(step, float("inf"))
    for ratio in torch.linspace(0.2, 2.2, 200):
        for sign in (1, -1) if symmetric else (1,):
            for zero in (2 ** (bits - 1),) if symmetric else range(2**bits):
                scale = step * ratio * sign
                levels = ((target / scale).round() + zero).clamp(0, top) - zero
                best = torch.minimum(best, importance.double() @ (levels * scale - target).square())
    return best


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_clip_search_finds_nearly_the_best_grid(bits: int, symmetric: bool, weighted: bool) -> None:
    target = problems.random(48, 40) * (problems.random(48, 40, seed=3) / 2).exp()
    importance = problems.random(48, seed=5).exp() if weighted else torch.ones(48)
    scale, zero = grid.fit(target, importance, grid.GridConfig(bits, 48, symmetric), torch.float16)
    levels = ((target / scale).round() + zero).clamp(0, 2**bits - 1) - zero
    found = importance.double() @ (levels * scale - target).double().square()
    assert found.sum() < 1.012 * best_grids(target, importance, bits, symmetric).sum()


def test_importance_moves_the_grid() -> None:
    """With all weight on one column, that column is stored almost exactly."""
    target = problems.random(32, 50)
    importance = torch.full((32,), 1e-6)
    importance[5] = 1.0
    config = grid.GridConfig(bits=3, group_size=32)

    def miss(weights: Tensor | None) -> Tensor:
        scale, zero = grid.fit(target, weights, config, torch.float16)
        return (((target[5] / scale).round() + zero).clamp(0, 7) - zero).mul(scale).sub(target[5]).abs().mean()

    assert miss(importance) < 0.2 * miss(None)


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_row_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch, symmetric: bool) -> None:
    target, config = problems.random(40, 100), grid.GridConfig(bits=3, symmetric=symmetric)
    whole = grid.fit(target, None, config, torch.float16)
    monkeypatch.setattr(grid, "WEIGHTS_AT_A_TIME", 40 * 17)
    monkeypatch.setattr(grid, "COMPILED_WEIGHTS_AT_A_TIME", 40 * 17)
    parts = grid.fit(target, None, config, torch.float16)
    assert torch.equal(whole.scale, parts.scale) and torch.equal(whole.zero, parts.zero)


@pytest.mark.parametrize("clip_search", [True, False], ids=["search", "min-max"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("group", [-1, 16, 100, 128])
@pytest.mark.parametrize("bits", BITS)
def test_each_weight_takes_the_nearest_level(bits: int, group: int, symmetric: bool, clip_search: bool) -> None:
    weight = problems.random(7, 150)
    packed = quantize(weight, bits=bits, group_size=group, symmetric=symmetric, clip_search=clip_search)
    codes, scales, zeros = problems.parts(packed)
    assert packed.params.group_size == group and packed.params.bits == bits
    assert torch.equal(problems.decoded(packed), scales * (codes - zeros))
    distance = (scales * (codes - zeros) - weight).abs()
    assert (distance <= problems.nearest(weight, scales, zeros, bits) + 1e-6 * scales.abs()).all()


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", BITS)
def test_weights_on_the_grid_stay(bits: int, symmetric: bool) -> None:
    """Quantizing a decoded weight again changes nothing, because every group uses its whole range."""
    levels = torch.arange(2**bits).float()
    order = torch.randperm(2**bits, generator=torch.Generator().manual_seed(0))
    zero = 2 ** (bits - 1) if symmetric else 1
    steps = (
        torch.tensor([0.5, -0.25, 2.0, -1.0])[:, None] if symmetric else torch.tensor([0.5, 0.25, 2.0, 1.0])[:, None]
    )
    weight = steps * (levels[order] - zero)
    for clip_search in (True, False):
        packed = quantize(weight, bits=bits, group_size=-1, symmetric=symmetric, clip_search=clip_search)
        assert torch.equal(problems.decoded(packed), weight.double())
        codes, scales, _ = problems.parts(packed)
        assert torch.equal(codes, levels[order].double().expand(4, -1)) and torch.equal(scales[:, :1], steps.double())


def test_the_unmirrored_level_falls_on_the_largest_weight() -> None:
    weight = torch.tensor([[2.0, 1.0, 0.0, -1.0], [-2.0, -1.0, 0.0, 1.0], [2.0, -2.0, 0.0, 1.0]])
    packed = quantize(weight, bits=2, group_size=-1, clip_search=False)
    codes, scales, _ = problems.parts(packed)
    assert scales[:, 0].tolist() == [-1.0, 1.0, -1.0]  # of two equally large weights the positive one
    assert codes.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 3, 2, 1]]
    assert problems.decoded(packed).tolist() == [[2, 1, 0, -1], [-2, -1, 0, 1], [2, -1, 0, 1]]


def test_ties_go_to_the_even_level() -> None:
    """Half steps, of both signs of the scale: any neighbour is nearest, the choice must be stable."""
    weight = torch.tensor([[-8.0, 0.5, 1.5, 2.5, -0.5, -1.5], [8.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    packed = quantize(weight, bits=4, group_size=-1, clip_search=False)
    assert problems.parts(packed)[1][:, 0].tolist() == [1.0, -1.0]
    assert problems.decoded(packed).tolist() == [[-8, 0, 2, 2, 0, -2], [8, 0, 2, 2, 0, -2]]


@pytest.mark.parametrize("sign", [1, -1])
def test_asymmetric_grids_of_one_sign_reach_zero(sign: int) -> None:
    weight = sign * (problems.random(4, 64).abs() + 1)
    packed = quantize(weight, bits=4, group_size=-1, symmetric=False, clip_search=False)
    codes, scales, zeros = problems.parts(packed)
    assert (zeros == (0 if sign > 0 else 15)).all() and (scales > 0).all()
    assert (codes == (15 if sign > 0 else 0)).any(1).all() and error(weight, packed) < 0.01


@pytest.mark.parametrize("clip_search", [True, False], ids=["search", "min-max"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("size", [1e-12, 1e-7, 1e-3, 1.0, 1e3, 6e4, 1.2e5, 5e5, 1e6, 1e12])
def test_size_of_weights_does_not_matter(size: float, bits: int, symmetric: bool, clip_search: bool) -> None:
    weight = problems.random(8, 64)
    weight = weight / weight.abs().amax(1, keepdim=True)
    weight[:, :2] = torch.tensor([1.0, -1.0])  # asymmetric scales are widest when both ends are full
    settings = {"bits": bits, "symmetric": symmetric, "clip_search": clip_search, "group_size": 32}
    expected = error(weight, quantize(weight, **settings))
    assert error(weight * size, quantize(weight * size, **settings)) < 1.1 * expected + 2e-5


def test_zeros_stay_zeros() -> None:
    weight = problems.random(4, 64)
    weight[1] = 0
    weight[2, 32:] = 0
    for symmetric in (True, False):
        decoded = problems.decoded(quantize(weight, bits=3, group_size=32, symmetric=symmetric))
        assert not decoded[1].any() and not decoded[2, 32:].any() and decoded[0].any()
        assert not problems.decoded(quantize(weight * 0, bits=3, symmetric=symmetric)).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_inputs_are_not_written_and_results_repeat(dtype: torch.dtype) -> None:
    for shape in [(6, 96), (1, 40), (40, 1)]:  # a single row or column is its own transpose in memory
        weight = problems.random(*shape).to(dtype)
        before = weight.clone()
        first, second = (quantize(weight, bits=4, group_size=32) for _ in range(2))
        assert torch.equal(weight, before)
        assert all(torch.equal(first.tensors[key], second.tensors[key]) for key in first.tensors)


def test_statistics_are_ignored() -> None:
    weight = problems.random(6, 96)
    stats = problems.stats(problems.inputs(200, 96))
    with_stats, without = rtn.quantize(weight, stats, rtn.Config()), rtn.quantize(weight, None, rtn.Config())
    assert all(torch.equal(t, without.weight.tensors[k]) for k, t in with_stats.weight.tensors.items())


@pytest.mark.parametrize("group", [64, 65, 1000])
def test_a_group_longer_than_the_row_is_the_row(group: int) -> None:
    weight = problems.random(5, 64)
    packed, whole = quantize(weight, group_size=group), quantize(weight, group_size=-1)
    assert packed.params == whole.params and packed.params.group_size == -1
    assert all(torch.equal(t, whole.tensors[k]) for k, t in packed.tensors.items())


def test_planned_bytes_are_the_stored_bytes() -> None:
    for size in (1.0, 1e-7):  # float16 or bfloat16 scales: the plan does not know, the bytes are equal
        for shape in [(5, 64), (16, 300)]:
            config = rtn.Config(bits=3, group_size=64, symmetric=False)
            packed = rtn.quantize(problems.random(*shape) * size, None, config).weight
            specs = int_format.specs(rtn.plan_params(config, shape), shape)
            assert {k: s for k, (s, _) in specs.items()} == {k: t.shape for k, t in packed.tensors.items()}
            assert sum(torch.empty(s, dtype=d).nbytes for s, d in specs.values()) == packed.nbytes


@pytest.mark.parametrize("settings", [{"bits": 1}, {"bits": 9}, {"group_size": 0}, {"group_size": -2}], ids=str)
def test_impossible_settings_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        rtn.Config(**settings)  # type: ignore[arg-type]
