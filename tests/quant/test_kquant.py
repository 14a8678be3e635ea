"""K-quants: the paper's loop on the stored grids in float64, the search of super-blocks, invariances, odd layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress.formats import kquant as format
from compress.quant import gptq, kquant, super_blocks
from compress.quant.super_blocks import SuperGrid
from compress.types import PackedWeight, Stats
from helpers import problems

ROWS, COLUMNS = 8, 512
TYPES = list(format.LAYOUTS)
UNSIGNED, SIGNED = "q4_k", "q3_k"


def layer(rows: int = ROWS, columns: int = COLUMNS, seed: int = 0) -> tuple[Tensor, Stats]:
    weight = 0.02 * problems.random(rows, columns, seed=seed + 40)
    return weight, problems.stats(problems.inputs(2 * columns, columns, seed))


def quantize(weight: Tensor, stats: Stats, **settings: object) -> PackedWeight:
    result = kquant.quantize(weight, stats, kquant.Config(**settings))  # type: ignore[arg-type]
    assert result.notes == ()
    return result.weight


def relative_loss(weight: Tensor, packed: PackedWeight, stats: Stats) -> float:
    hessian = problems.damped(stats.hessian, 0.01)
    return problems.loss(weight, problems.decoded(packed), hessian) / problems.loss(weight, 0 * weight, hessian)


def units_of(layout: format.Layout) -> Tensor:
    """What each code stands for, float64."""
    plain = torch.arange(2**layout.bits).double() - layout.zero
    return torch.tensor(layout.levels).double() if layout.levels else plain


def nearest(units: Tensor, layout: format.Layout) -> Tensor:
    """The nearest of these, one by one."""
    known = units_of(layout)
    return known[(units[..., None] - known).abs().argmin(-1)]


def same_but_for_ties(found: Tensor, expected: Tensor) -> None:
    """Equal, except that in one row float32 may break a tie another way."""
    differ = ((found - expected).abs() > 1e-6 * expected.abs().max()).any(1)
    assert differ.sum() <= 1, f"rows {differ.nonzero().flatten().tolist()} differ"


def grids(packed: PackedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and minima of each weight, [rows, columns] float64, by the formulas of llama.cpp."""
    layout = packed.params.layout
    codes, scales = format.unpack(packed.tensors, packed.params, packed.shape)
    group, block = torch.arange(packed.shape[1]) // layout.group_size, torch.arange(packed.shape[1]) // 256
    scale = (scales.codes.double() - layout.scale_zero)[:, group] * scales.steps.double()[:, block]
    minimum = torch.zeros_like(scale)
    if scales.minima is not None and scales.minimum_steps is not None:
        minimum = scales.minima.double()[:, group] * scales.minimum_steps.double()[:, block]
    return units_of(layout)[codes[:, : packed.shape[1]].int()], scale, minimum


@pytest.mark.parametrize("type", TYPES)
def test_weights_are_scale_times_code_less_minimum(type: str) -> None:
    weight, stats = layer()
    packed = quantize(weight, stats, type=type)
    codes, scale, minimum = grids(packed)
    assert torch.equal(problems.decoded(packed), (scale * codes - minimum).float().double()), "rounded once"


@pytest.mark.parametrize(
    ("type", "bits"),
    [("q2_k", 2.625), ("q3_k", 3.4375), ("q4_k", 4.5), ("q5_k", 5.5), ("q6_k", 6.5625), ("iq4_xs", 4.25)],
)
def test_bits_are_those_of_llama_cpp(type: str, bits: float) -> None:
    weight, stats = layer(rows=16)
    assert quantize(weight, stats, type=type, sweeps=0).bpw == bits


@pytest.mark.parametrize("type", TYPES)
def test_codes_are_those_of_the_paper_on_the_stored_grid(type: str) -> None:
    weight, stats = layer(seed=1)
    packed = quantize(weight, stats, type=type, sweeps=0)
    layout, (_, scale, minimum) = packed.params.layout, grids(packed)
    sizes = stats.hessian.diagonal().tolist()
    mean = [sum(sizes[start : start + 256]) for start in range(0, COLUMNS, 256)]
    order = sorted(range(COLUMNS), key=lambda j: (-mean[j // 256], -sizes[j]))

    def round_column(target: Tensor, k: int) -> Tensor:
        s, m = scale[:, order[k]], minimum[:, order[k]]
        units = nearest((target + m) / s, layout)
        return units * s - m

    hessian = problems.damped(stats.hessian, 0.01)[order][:, order]
    expected = torch.empty(ROWS, COLUMNS, dtype=torch.float64)
    expected[:, order] = problems.right_looking(weight[:, order], hessian, 0, lambda *_: None, round_column)
    same_but_for_ties(problems.decoded(packed), expected)


def weighted_loss(target: Tensor, importance: Tensor, grid: SuperGrid, layout: format.Layout) -> Tensor:
    """Weighted squared error [rows] of the nearest codes, float64."""
    owner = torch.arange(len(target)) // layout.group_size
    scale, minimum = grid.scale().double()[owner], grid.minimum().double()[owner]
    codes = nearest((target + minimum) / scale, layout)
    return importance.double() @ (codes * scale - minimum - target).square()


@pytest.mark.parametrize("type", TYPES)
def test_scales_are_better_than_all_their_neighbours(type: str) -> None:
    """A scale one code further, with this minimum or a neighbour of it, lowers the loss of hardly any row."""
    layout = format.LAYOUTS[type]
    target, importance = problems.random(256, 40, seed=4).double(), 0.1 + problems.random(256, seed=5).abs()
    grid = super_blocks.fit_super_block(target.float(), importance, layout)
    least = weighted_loss(target, importance, grid, layout)
    highest = (1 << layout.scale_bits) - 1
    for change in (-1, 1):
        for minimum in (-1, 0, 1) if layout.has_minima else (0,):
            for group in range(0, layout.groups, 3):
                scales, minima = grid.scales.clone(), grid.minima.clone()
                scales[group] = super_blocks.scale_codes(scales[group] + change, layout)
                minima[group] = (minima[group] + minimum).clamp(0, highest) if layout.has_minima else 0
                loss = weighted_loss(target, importance, grid._replace(scales=scales, minima=minima), layout)
                assert (loss >= 0.95 * least).all() and loss.sum() > 0.999 * least.sum()


@pytest.mark.parametrize("type", TYPES)
def test_rounds_lower_the_loss_and_rounding_scales_costs_little(type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, losses = format.LAYOUTS[type], []
    target, importance = problems.random(256, 40, seed=6), 0.1 + problems.random(256, seed=7).abs()
    target[3] *= 8  # one group of much larger weights
    for rounds in (0, 1, 2):
        monkeypatch.setattr(super_blocks, "FITTING_ROUNDS", rounds)
        grid = super_blocks.fit_super_block(target, importance, layout)
        losses.append(weighted_loss(target.double(), importance, grid, layout))
    assert (losses[1] <= losses[0] * (1 + 1e-5)).all() and (losses[2] <= losses[1] * (1 + 1e-5)).all()
    assert losses[2].sum() < 0.999 * losses[0].sum()


@pytest.mark.parametrize("type", [UNSIGNED, SIGNED, "iq4_xs"])
def test_sweeps_never_raise_the_loss(type: str) -> None:
    weight, stats = layer(seed=2)
    losses = [relative_loss(weight, quantize(weight, stats, type=type, sweeps=n), stats) for n in range(4)]
    assert all(after <= before * (1 + 1e-6) for before, after in zip(losses, losses[1:], strict=False))
    assert losses[3] < 0.99 * losses[0]


def test_it_loses_less_than_plain_integers_of_as_many_bits() -> None:
    """Symmetric groups of 32 take 4.5 bits, too; and 2 bits with zero points nearly as many as Q2_K."""
    weight, stats = layer(rows=32, seed=3)
    plain = gptq.quantize(weight, stats, gptq.Config(bits=4, group_size=32)).weight
    ours = quantize(weight, stats, type="q4_k")
    assert ours.nbytes == plain.nbytes
    assert relative_loss(weight, ours, stats) < 0.8 * relative_loss(weight, plain, stats)
    plain = gptq.quantize(weight, stats, gptq.Config(bits=2, group_size=32, symmetric=False)).weight
    ours = quantize(weight, stats, type="q2_k")
    assert ours.nbytes < 1.03 * plain.nbytes
    assert relative_loss(weight, ours, stats) < 0.7 * relative_loss(weight, plain, stats)


@pytest.mark.parametrize("type", [UNSIGNED, SIGNED])
def test_rows_are_independent(type: str) -> None:
    weight, stats = layer(rows=20, seed=5)
    whole = problems.decoded(quantize(weight, stats, type=type))
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    for part in (order, torch.arange(3, 9)):
        same_but_for_ties(problems.decoded(quantize(weight[part], stats, type=type)), whole[part])


def test_neither_the_size_of_the_hessian_nor_that_of_chunks_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, stats = layer(rows=40, seed=7)
    whole = quantize(weight, stats)
    for factor in (2.0**-20, 2.0**20):
        scaled = quantize(weight, Stats(stats.hessian * factor, stats.count))
        assert all(torch.equal(tensor, scaled.tensors[name]) for name, tensor in whole.tensors.items())
    monkeypatch.setattr(kquant, "CHUNK", 16 * 256)
    same_but_for_ties(problems.decoded(quantize(weight, stats)), problems.decoded(whole))


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 30), (17, 300)])
def test_odd_shapes(shape: tuple[int, int], type: str) -> None:
    """Columns behind the last one count for nothing, neither in scales nor in codes."""
    weight, stats = layer(*shape, seed=12)
    packed = quantize(weight, stats, type=type)
    assert packed.shape == shape and problems.decoded(packed).shape == shape
    assert relative_loss(weight, packed, stats) < 0.1


@pytest.mark.parametrize("type", TYPES)
def test_rows_of_zeros_stay_zeros_and_unused_inputs_are_rounded(type: str) -> None:
    weight, stats = layer(seed=8)
    weight[:, :64], weight[2] = 0, 0
    hessian = stats.hessian.clone()
    hessian[300], hessian[:, 300] = 0, 0
    result = kquant.quantize(weight, Stats(hessian, stats.count), kquant.Config(type=type))  # type: ignore[arg-type]
    decoded = problems.decoded(result.weight)
    assert not decoded[2].any()
    assert (decoded[:, 300] - weight[:, 300]).abs().max() < 0.5 * weight.abs().max()
    assert result.notes == ("1 input channels were always zero: their weights are rounded to nearest",)
    unseen = kquant.quantize(weight, Stats(0 * hessian, 0), kquant.Config(type=type))  # type: ignore[arg-type]
    assert "rounded to nearest" in unseen.notes[0]
    assert (problems.decoded(unseen.weight) - weight).square().sum() < 0.1 * weight.double().square().sum()


@pytest.mark.parametrize("settings", [{"damp": -0.1}, {"sweeps": -1}, {"type": "q4_0"}], ids=str)
def test_impossible_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        kquant.Config(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("type", sorted(format.LAYOUTS))
def test_rows_are_looked_up_and_joined(type: str) -> None:
    """Single rows are those of the whole weight; parts of whole multiples of 16 rows are joined to it."""
    weight, stats = layer(rows=40)
    packed = quantize(weight, stats, type=type, sweeps=0)
    whole = format.decode(packed.tensors, packed.params, packed.shape, torch.bfloat16)
    rows = torch.tensor([39, 0, 7, 7, 22])
    assert torch.equal(
        format.decode_rows(packed.tensors, packed.params, packed.shape, rows, torch.bfloat16), whole[rows]
    )
    parts = [
        format.cut(packed.tensors, packed.params, packed.shape, part, range(COLUMNS))[1]
        for part in (range(0, 16), range(16, 32), range(32, 40))
    ]
    joined = format.join_rows(parts, packed.params)
    assert joined.keys() == packed.tensors.keys()
    assert all(torch.equal(joined[name], tensor) for name, tensor in packed.tensors.items())
