"""GPTQ against the paper's algorithm in float64, its invariances, and layers that are not as they should be."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from compress.calib.stats import HessianSum
from compress.errors import NumericalError
from compress.quant import gptq, grid, rtn
from compress.types import PackedWeight, Stats, Stored
from helpers import problems

ROWS, COLUMNS = 8, 72

Settings = dict[str, int | float | bool]


def layer(rows: int = ROWS, columns: int = COLUMNS, seed: int = 0) -> tuple[Tensor, Stats]:
    return problems.random(rows, columns, seed=seed + 40), problems.stats(problems.inputs(4 * columns, columns, seed))


def quantize(weight: Tensor, stats: Stats, **settings: float) -> PackedWeight:
    result = gptq.quantize(weight, stats, gptq.Config(**settings))  # type: ignore[arg-type]
    assert result.notes == ()
    return result.weight


def same_bytes(a: PackedWeight, b: PackedWeight) -> bool:
    return a.params == b.params and all(torch.equal(tensor, b.tensors[key]) for key, tensor in a.tensors.items())


def relative_loss(weight: Tensor, packed: PackedWeight, stats: Stats) -> float:
    zero = torch.zeros_like(weight)
    return problems.loss(weight, problems.decoded(packed), stats.hessian) / problems.loss(weight, zero, stats.hessian)


def check_rows(found: Tensor, expected: Tensor) -> None:
    """Equal, except that in one row float32 may break a tie another way than float64."""
    differ = ((found - expected).abs() > 1e-6 * expected.abs().max()).any(1)
    assert differ.sum() <= 1, f"rows {differ.nonzero().flatten().tolist()} differ"


# Against the paper.


def slow_order(diagonal: Tensor, config: gptq.Config) -> list[int]:
    size, sizes = config.group_size, diagonal.tolist()
    columns = sorted(range(len(sizes)), key=lambda j: -sizes[j])
    if not config.act_order:
        return sorted(columns)
    if config.static_groups or size == -1:
        return columns
    groups = [range(start, min(start + size, len(sizes))) for start in range(0, len(sizes), size)]
    whole = sorted((g for g in groups if len(g) == size), key=lambda g: -sum(sizes[j] for j in g))
    return [j for g in [*whole, *(g for g in groups if len(g) < size)] for j in columns if j in g]


class MinMax:
    """Grids of all groups from the formulas of the format, scales rounded to float16."""

    def __init__(self, config: gptq.Config, columns: int) -> None:
        self.config, self.size = config, columns if config.group_size == -1 else config.group_size
        self.top = 2**config.bits - 1
        self.grids: dict[int, tuple[Tensor, Tensor]] = {}

    def fit(self, targets: Tensor, group: int) -> None:
        low, high = targets.amin(1).clamp(max=0), targets.amax(1).clamp(min=0)
        if self.config.symmetric:
            half = (self.top + 1) // 2
            scale = (torch.where(-low > high, low, high) / -half).half().double()
            self.grids[group] = scale, torch.full_like(scale, half)
        else:
            scale = ((high - low) / self.top).half().double()
            self.grids[group] = scale, (-low / scale).round()

    def round(self, target: Tensor, column: int) -> Tensor:
        scale, zero = self.grids[column // self.size]
        return ((target / scale).round() + zero).clamp(0, self.top).sub(zero) * scale


@pytest.mark.parametrize("group", [-1, 16, 24])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
@pytest.mark.parametrize("act_order", [True, False], ids=["sorted", "natural"])
def test_equals_the_paper(act_order: bool, static: bool, symmetric: bool, group: int) -> None:
    weight = problems.random(ROWS, COLUMNS)
    x = problems.inputs(4 * COLUMNS, COLUMNS)
    x[:, -6:] *= 30  # the last group matters most, but a short one stays last
    stats = problems.stats(x)
    config = gptq.Config(3, group, symmetric, False, act_order, static, damp=0.02, sweeps=0)
    order = slow_order(stats.hessian.diagonal(), config)
    reference = MinMax(config, COLUMNS)
    for index, start in enumerate(range(0, COLUMNS, reference.size) if static else ()):
        reference.fit(weight[:, start : start + reference.size].double(), index)
    expected = torch.empty(ROWS, COLUMNS, dtype=torch.float64)
    expected[:, order] = problems.right_looking(
        weight[:, order],
        problems.damped(stats.hessian, 0.02)[order][:, order],
        0 if static else reference.size,
        lambda targets, _, start: reference.fit(targets, order[start] // reference.size),
        lambda target, k: reference.round(target, order[k]),
    )
    check_rows(problems.decoded(gptq.quantize(weight, stats, config).weight), expected)


@pytest.mark.parametrize("size", [1.0, 1e-7], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_codes_belong_to_the_stored_scales(symmetric: bool, static: bool, size: float) -> None:
    """The paper's algorithm, given the grids on disk, chooses the codes on disk."""
    weight, stats = layer(seed=1)
    weight = weight * size
    config = gptq.Config(bits=4, group_size=32, symmetric=symmetric, static_groups=static, sweeps=0)
    packed = gptq.quantize(weight, stats, config).weight
    assert packed.params.scale_dtype == ("float16" if size == 1 else "bfloat16")
    _, scales, zeros = problems.parts(packed)
    order = slow_order(stats.hessian.diagonal(), config)

    def round_column(target: Tensor, k: int) -> Tensor:
        scale, zero = scales[:, order[k]], zeros[:, order[k]]
        return ((target / scale).round() + zero).clamp(0, 15).sub(zero) * scale

    expected = torch.empty(ROWS, COLUMNS, dtype=torch.float64)
    expected[:, order] = problems.right_looking(
        weight[:, order], problems.damped(stats.hessian, 0.01)[order][:, order], 0, lambda *_: None, round_column
    )
    check_rows(problems.decoded(packed), expected)


@pytest.mark.parametrize("act_order", [True, False], ids=["sorted", "natural"])
def test_static_grids_are_searched_with_the_weights_of_the_loop(act_order: bool) -> None:
    weight, stats = layer(rows=40, seed=2)
    config = gptq.Config(bits=3, group_size=24, act_order=act_order, sweeps=0)
    order = slow_order(stats.hessian.diagonal(), config)
    importance = torch.empty(COLUMNS)
    factor = problems.upper(problems.damped(stats.hessian, 0.01)[order][:, order])
    importance[order] = factor.diagonal().square().float()
    fitted = grid.fit_all(weight.T.contiguous(), importance, config, torch.float16, 24)
    scales = problems.parts(gptq.quantize(weight, stats, config).weight)[1]
    assert (scales[:, ::24] == fitted.scale.T).double().mean() > 0.98
    plain = grid.fit_all(weight.T.contiguous(), None, config, torch.float16, 24)
    assert (scales[:, ::24] == plain.scale.T).double().mean() < 0.8  # the weights do matter here


@pytest.mark.parametrize("group", [-1, 24, 20])
def test_dynamic_grids_are_searched_on_exact_targets(group: int) -> None:
    weight, stats = layer(seed=15)
    config = gptq.Config(bits=3, group_size=group, static_groups=False, sweeps=0)
    size, order = COLUMNS if group == -1 else group, slow_order(stats.hessian.diagonal(), config)
    fitted: list[grid.Grid] = []

    def fit(targets: Tensor, metric: Tensor, start: int) -> None:
        importance = metric.diagonal().square().float()
        fitted.append(grid.fit(targets.T.float(), importance, config, torch.float16))

    def round_column(target: Tensor, column: int) -> Tensor:
        scale, zero = (values.double() for values in fitted[-1])
        return ((target / scale).round() + zero).clamp(0, 7).sub(zero) * scale

    hessian = problems.damped(stats.hessian, 0.01)[order][:, order]
    expected = torch.empty(ROWS, COLUMNS, dtype=torch.float64)
    expected[:, order] = problems.right_looking(weight[:, order], hessian, size, fit, round_column)
    check_rows(problems.decoded(gptq.quantize(weight, stats, config).weight), expected)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_what_each_step_buys(bits: int) -> None:
    """Rounding, feedback, order, sweeps: the gains that were measured on layers like this one."""
    weight, stats = layer(32, 256, seed=3)
    row = {"bits": bits, "group_size": -1, "symmetric": False}
    plain = relative_loss(weight, rtn.quantize(weight, None, rtn.Config(**row)).weight, stats)  # type: ignore[arg-type]
    natural = relative_loss(weight, quantize(weight, stats, **row, act_order=False, sweeps=0), stats)
    ordered = relative_loss(weight, quantize(weight, stats, **row, sweeps=0), stats)
    swept = relative_loss(weight, quantize(weight, stats, **row, sweeps=3), stats)
    assert natural < 0.7 * plain and ordered < 0.8 * natural and swept < 0.99 * ordered
    assert swept < {2: 0.065, 3: 0.0130, 4: 0.0033}[bits]


@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
@pytest.mark.parametrize("act_order", [True, False], ids=["sorted", "natural"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_sweeps_never_raise_the_loss(symmetric: bool, act_order: bool, static: bool) -> None:
    weight, stats = layer(seed=4)
    hessian = problems.damped(stats.hessian, 0.01)
    settings: Settings = {"bits": 2, "group_size": 20, "symmetric": symmetric, "act_order": act_order}
    losses = []
    for sweeps in range(6):
        packed = quantize(weight, stats, **settings, static_groups=static, sweeps=sweeps)
        losses.append(problems.loss(weight, problems.decoded(packed), hessian))
    assert all(after <= before * (1 + 1e-6) for before, after in zip(losses, losses[1:], strict=False))
    assert losses[5] < 0.99 * losses[0]


# Invariances.


ALL = [{"static_groups": s, "act_order": a, "symmetric": y} for s in (0, 1) for a in (0, 1) for y in (0, 1)]


@pytest.mark.parametrize("settings", ALL, ids=lambda s: "".join(str(v) for v in s.values()))
def test_rows_are_independent(settings: Settings) -> None:
    weight, stats = layer(rows=20, seed=5)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    whole = problems.decoded(quantize(weight, stats, bits=3, group_size=32, **settings))
    check_rows(problems.decoded(quantize(weight[order], stats, bits=3, group_size=32, **settings)), whole[order])
    check_rows(problems.decoded(quantize(weight[3:9], stats, bits=3, group_size=32, **settings)), whole[3:9])


def test_sorted_columns_can_come_in_any_order() -> None:
    weight, stats = layer(seed=6)
    order = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(2))
    shuffled = Stats(stats.hessian[order][:, order], stats.count)
    row: Settings = {"bits": 3, "group_size": -1, "sweeps": 0}
    whole = problems.decoded(quantize(weight, stats, **row))
    check_rows(problems.decoded(quantize(weight[:, order], shuffled, **row)), whole[:, order])


def test_size_of_the_hessian_does_not_matter() -> None:
    weight, stats = layer(seed=7)
    small, large = (Stats(stats.hessian * factor, stats.count) for factor in (2.0**-20, 2.0**20))
    assert same_bytes(quantize(weight, small, bits=3), quantize(weight, large, bits=3))


def test_batches_of_calibration_tokens_do_not_matter() -> None:
    weight, x = problems.random(ROWS, COLUMNS), problems.inputs(12 * 16, COLUMNS).view(12, 16, COLUMNS)
    packed = []
    for sizes in ([12], [1] * 12, [5, 7], [8, 4]):
        total = HessianSum(COLUMNS, torch.device("cpu"))
        for batch in x.split(sizes):
            total.add(batch, chunk=16)
        packed.append(quantize(weight, total.finish("layer"), bits=3, group_size=24))
    assert all(same_bytes(packed[0], other) for other in packed[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(ROWS, COLUMNS), (1, 40), (40, 1)])
def test_inputs_are_not_written_and_results_repeat(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, stats = layer(*shape, seed=8)
    weight = weight.to(dtype)
    before, hessian = weight.clone(), stats.hessian.clone()
    first, second = quantize(weight, stats), quantize(weight, stats)
    assert torch.equal(weight, before) and torch.equal(stats.hessian, hessian)
    assert same_bytes(first, second)
    assert same_bytes(first, quantize(weight.float(), stats))


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
def test_identity_hessian_is_rounding_to_nearest(static: bool, symmetric: bool) -> None:
    weight = problems.random(ROWS, COLUMNS)
    plain = rtn.quantize(weight, None, rtn.Config(bits=3, group_size=20, symmetric=symmetric)).weight
    stats = Stats(torch.eye(COLUMNS) * 64, 100)
    settings: Settings = {"bits": 3, "group_size": 20, "symmetric": symmetric, "static_groups": static, "sweeps": 0}
    check_rows(problems.decoded(quantize(weight, stats, **settings)), problems.decoded(plain))


# Layers that are not as they should be.


@pytest.mark.parametrize("sweeps", [0, 3])
@pytest.mark.parametrize(
    ("stats", "note"),
    [
        (Stats(torch.zeros(COLUMNS, COLUMNS), 0), "no calibration token reached this input"),
        (Stats(torch.zeros(COLUMNS, COLUMNS), 9), "all calibration inputs were zero"),
    ],
)
def test_inputs_without_evidence_are_rounded_to_nearest(stats: Stats, note: str, sweeps: int) -> None:
    weight, config = problems.random(ROWS, COLUMNS), gptq.Config(sweeps=sweeps)
    result = gptq.quantize(weight, stats, config)
    assert result.notes == (f"{note}: rounded to nearest",) and not stats.hessian.any()
    assert same_bytes(result.weight, gptq.quantize(weight, Stats(torch.eye(COLUMNS), 9), config).weight)
    codes, scales, zeros = problems.parts(result.weight)
    distance = (scales * (codes - zeros) - weight).abs()
    assert (distance <= problems.nearest(weight, scales, zeros, 4) + 1e-5 * scales.abs()).all()


@pytest.mark.parametrize("settings", ALL, ids=lambda s: "".join(str(v) for v in s.values()))
def test_dead_inputs_are_rounded_to_nearest(settings: Settings) -> None:
    x = problems.inputs(300, COLUMNS, seed=9)
    dead = [0, 17, 40, 71]
    x[:, dead] = 0
    weight, stats = problems.random(ROWS, COLUMNS), problems.stats(x)
    result = gptq.quantize(weight, stats, gptq.Config(bits=4, group_size=20, **settings))  # type: ignore[arg-type]
    assert result.notes == ("4 input channels were always zero: their weights are rounded to nearest",)
    codes, scales, zeros = problems.parts(result.weight)
    distance = (scales * (codes - zeros) - weight).abs()
    smallest = problems.nearest(weight, scales, zeros, 4)
    assert (distance <= smallest + 1e-4 * scales.abs())[:, dead].all()
    assert (distance > smallest + 1e-4 * scales.abs()).any()  # feedback moves the living ones
    assert result.weight.params.bits == 4 and problems.decoded(result.weight)[:, dead].any(0).all()


def test_damping_that_had_to_rise_is_reported() -> None:
    weight, stats = layer()
    lowest = torch.linalg.eigvalsh(stats.hessian.double())[0]
    broken = stats.hessian - torch.eye(COLUMNS) * (lowest + 0.015 * stats.hessian.diagonal().mean())
    result = gptq.quantize(weight, Stats(broken.float(), 100), gptq.Config(damp=0.01))
    (note,) = result.notes
    assert note == "damping raised to 0.02 of the mean diagonal to factor the Hessian"
    assert problems.decoded(result.weight).isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_hessians_that_are_not_finite_are_refused(value: float) -> None:
    weight, stats = layer()
    stats.hessian[3, 3] = value
    with pytest.raises(NumericalError):
        gptq.quantize(weight, stats, gptq.Config())


@pytest.mark.parametrize("settings", ALL, ids=lambda s: "".join(str(v) for v in s.values()))
def test_zero_weights_stay_zero(settings: Settings) -> None:
    weight, stats = layer()
    weight[2] = 0
    decoded = problems.decoded(quantize(weight, stats, group_size=20, **settings))
    assert not decoded[2].any() and decoded[[0, 1, 3]].any(1).all()
    assert not problems.decoded(quantize(weight * 0, stats, group_size=20, **settings)).any()


@pytest.mark.parametrize("settings", ALL, ids=lambda s: "".join(str(v) for v in s.values()))
def test_an_outlier_costs_its_own_row_only(settings: Settings) -> None:
    weight, stats = layer(seed=10)
    spoiled = weight.clone()
    spoiled[5, 30] = -1e4
    others = [i for i in range(ROWS) if i != 5]
    packed = quantize(spoiled, stats, bits=4, group_size=24, **settings)
    decoded, clean = problems.decoded(packed), problems.decoded(quantize(weight, stats, group_size=24, **settings))
    check_rows(decoded[others], clean[others])
    assert relative_loss(spoiled[5:6], packed_row(decoded[5:6]), stats) < 0.01
    assert decoded[5, 30] == pytest.approx(-1e4, rel=0.1)


def packed_row(values: Tensor) -> PackedWeight:
    """Values as a packed weight, unquantized."""
    from compress.formats import dense

    params = dense.Params("float32")
    return PackedWeight(Stored("dense", params), dense.pack(values, params), (values.shape[0], values.shape[1]))


@pytest.mark.parametrize("size", [1e-7, 1e6])
@pytest.mark.parametrize("settings", ALL, ids=lambda s: "".join(str(v) for v in s.values()))
def test_size_of_weights_does_not_matter(settings: Settings, size: float) -> None:
    weight, stats = layer(seed=11)
    packed = quantize(weight * size, stats, bits=3, group_size=20, **settings)
    expected = relative_loss(weight, quantize(weight, stats, bits=3, group_size=20, **settings), stats)
    assert packed.params.scale_dtype == "bfloat16"
    assert relative_loss(weight * size, packed, stats) < 1.15 * expected


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 30), (17, 100), (2, 129)])
def test_odd_shapes(shape: tuple[int, int]) -> None:
    weight, stats = layer(*shape, seed=12)
    for group in (-1, 16, 64):
        for static in (True, False):
            packed = quantize(weight, stats, bits=3, group_size=group, static_groups=static)
            assert packed.shape == shape and problems.decoded(packed).shape == shape
            plain = rtn.quantize(weight, None, rtn.Config(bits=3, group_size=group)).weight
            assert relative_loss(weight, packed, stats) <= relative_loss(weight, plain, stats)


@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
@pytest.mark.parametrize("group", [COLUMNS, COLUMNS + 1, 4096])
def test_a_group_longer_than_the_row_is_the_row(group: int, static: bool) -> None:
    weight, stats = layer(seed=13)
    packed = quantize(weight, stats, group_size=group, static_groups=static)
    assert packed.params.group_size == -1
    assert same_bytes(packed, quantize(weight, stats, group_size=-1, static_groups=static))


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_error_falls_as_bits_rise(symmetric: bool) -> None:
    weight, stats = layer(seed=14)
    packed = [quantize(weight, stats, bits=b, group_size=24, symmetric=symmetric) for b in range(2, 9)]
    losses = [relative_loss(weight, p, stats) for p in packed]
    assert all(after < before / 2.5 for before, after in zip(losses, losses[1:], strict=False))
    assert [p.params.bits for p in packed] == list(range(2, 9))


@pytest.mark.parametrize("settings", [{"damp": -0.1}, {"damp": 1.0}, {"sweeps": -1}, {"bits": 1}], ids=str)
def test_impossible_settings_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        gptq.Config(**settings)  # type: ignore[arg-type]
