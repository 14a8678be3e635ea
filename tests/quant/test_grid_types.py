"""Data types of the grid format: rounding as hardware does, and scales against slow searches in float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.formats import grid
from compress.quant import grid_rtn, grid_types
from compress.types import PackedWeight, Stats
from helpers import problems

WEIGHT = problems.random(12, 160, seed=5) * problems.random(12, 1, seed=6).exp() / 50
TYPES = list(grid_types.TYPES)


def quantize(weight: Tensor, search: bool = True, **settings: str) -> PackedWeight:
    return grid_rtn.quantize(weight, None, grid_rtn.Config(scale_search=search, **settings)).weight


def error(weight: PackedWeight, original: Tensor = WEIGHT) -> float:
    return float((formats.decode(weight, torch.float32).double() - original.double()).square().sum())


@pytest.mark.parametrize(("values", "dtype"), [("e2m1", None), ("e4m3", torch.float8_e4m3fn)])
def test_halves_go_to_the_even_mantissa(values: str, dtype: torch.dtype | None) -> None:
    table = grid.value_table(values)
    points = table[table.isfinite()].unique()
    middle = (points[1:] + points[:-1]) / 2
    rounded = table[grid_types.nearest(middle, values).int()]
    if values == "e2m1":  # the published thresholds
        given = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
        wanted = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
        assert torch.equal(table[grid_types.nearest(given, values).int()], wanted)
        assert torch.equal(table[grid_types.nearest(-given, values).int()], -wanted)
    if dtype is not None:
        assert torch.equal(rounded, middle.to(dtype).float())
    assert torch.equal(rounded, grid_types.points(middle, values))


@pytest.mark.parametrize("values", list(grid.VALUE_BITS))
def test_the_nearest_point_is_the_nearest(values: str) -> None:
    table = grid.value_table(values).double()
    units = torch.cat((torch.linspace(-7, 7, 3001), torch.tensor([1e9, -1e9])))
    codes, known = grid_types.nearest(units, values), table.nan_to_num(torch.inf)
    distance = (known[None] - units.double()[:, None]).abs().amin(1)
    assert torch.equal((table[codes.int()] - units.double()).abs(), distance)
    assert torch.equal(table[codes.int()].float(), grid_types.points(units, values))


@pytest.mark.parametrize("largest", [1e-30, 0.001, 0.3, 1.0, 1792.0, 3e4])
def test_a_tensor_scale_has_an_exact_inverse_and_room(largest: float) -> None:
    scale = grid_types.tensor_scale(torch.tensor(largest), "e2m1")
    assert float(1 / (1 / scale)) == float(scale)
    assert 448 / 2 < largest / 4 / float(scale) <= 448 or largest == 1e-30
    assert float(grid_types.tensor_scale(torch.tensor(0.0), "e2m1")) == 1


def test_the_largest_of_other_weights_counts() -> None:
    given = Stats(torch.empty(0, 0), 0, largest_weight=8 * WEIGHT.abs().max())
    alone = quantize(WEIGHT).tensors["tensor_scale"]
    shared = grid_rtn.quantize(WEIGHT, given, grid_rtn.Config()).weight
    assert torch.equal(shared.tensors["tensor_scale"], 8 * alone)
    assert error(shared) < 1.2 * error(quantize(WEIGHT))


@pytest.mark.parametrize("type", TYPES)
def test_searched_scales_are_better_than_the_range(type: str) -> None:
    plain, searched = quantize(WEIGHT, False, type=type), quantize(WEIGHT, type=type)
    assert error(searched) <= error(plain)
    assert searched.nbytes == plain.nbytes
    if type not in ("fp8", "mxfp8", "fp8-block", "dynamic8"):
        assert error(searched) < error(plain)


def nearest_error(block: Tensor, values: str, scale: float) -> float:
    """Of a block [n] float64 with this scale."""
    table = grid.value_table(values).double()
    table = table[table.isfinite()] * scale
    return float((block[:, None] - table[None]).abs().amin(1).square().sum())


@pytest.mark.parametrize("type", ["nvfp4", "mxfp4", "mxfp8"])
def test_no_other_scale_nearby_is_better(type: str) -> None:
    """All scales of the type within a factor of 1.2 (NVFP4) or 2 of the one that meets the largest weight."""
    weight = quantize(WEIGHT, type=type)
    params, t = weight.params, weight.tensors
    whole = float(t["tensor_scale"]) if params.tensor_scale else 1.0
    chosen = grid.factors(t, params).double()
    for row, index in product(range(len(WEIGHT)), range(160 // params.block_columns)):
        block = WEIGHT[row, index * params.block_columns : (index + 1) * params.block_columns].double()
        ideal = float(block.abs().max()) / grid.LARGEST[params.values]
        if type == "nvfp4":
            known = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double() * whole
            tried = [float(s) for s in known if ideal / 1.2 < s < ideal * 1.2]
        else:
            ceiling = 2.0 ** float(torch.tensor(ideal).log2().ceil())
            tried = [ceiling / 2, ceiling, ceiling * 2]
        least = min(nearest_error(block, params.values, scale) for scale in tried)
        assert nearest_error(block, params.values, float(chosen[row, index])) <= least * (1 + 1e-5)


@pytest.mark.parametrize("type", TYPES)
def test_codes_are_the_nearest_to_stored_scales(type: str) -> None:
    weight = quantize(WEIGHT, type=type)
    rows, columns = weight.params.block(weight.shape)
    factors = grid.factors(weight.tensors, weight.params).double()
    wide = factors.repeat_interleave(rows, 0)[: len(WEIGHT)].repeat_interleave(columns, 1)[:, : WEIGHT.shape[1]]
    table = grid.value_table(weight.params.values).double()
    table = table[table.isfinite()]
    distance = (table * wide[..., None] - WEIGHT.double()[..., None]).abs().amin(2)
    decoded = formats.decode(weight, torch.float32).double()
    assert torch.allclose((decoded - WEIGHT.double()).abs(), distance, rtol=1e-4, atol=1e-8)


def slow_double_quantization(weight: Tensor) -> tuple[Tensor, int]:
    """NF4 of QLoRA as bitsandbytes stores it, block by block: decoded values [out, in] float64, and bytes."""
    flat = weight.double().flatten().view(-1, 64)
    absmax = flat.abs().amax(1)
    offset = absmax.mean()
    codes, dynamic = grid.value_table("nf4").double(), grid.value_table("dynamic8").double()
    scales = torch.empty_like(absmax)
    for start in range(0, len(absmax), 256):
        part = absmax[start : start + 256] - offset
        size = part.abs().max()
        scales[start : start + 256] = dynamic[(part[:, None] / size - dynamic).abs().argmin(1)] * size + offset
    decoded = codes[(flat[:, :, None] / scales[:, None, None] - codes).abs().argmin(2)] * scales[:, None]
    nbytes = flat.numel() // 2 + len(absmax) + 4 * -(-len(absmax) // 256) + 4
    return decoded.view(weight.shape), nbytes


def test_nested_scales_are_those_of_double_quantization() -> None:
    """300 blocks: two sizes of scales. Codes are picked by what is stored."""
    weight = problems.random(60, 320, seed=9) * problems.random(60, 1, seed=8).exp()
    packed = quantize(weight, False, type="nf4")
    decoded, nbytes = slow_double_quantization(weight)
    assert torch.allclose(formats.decode(packed, torch.float32).double(), decoded, rtol=1e-5, atol=1e-6)
    assert packed.nbytes == nbytes
    assert error(quantize(weight, type="nf4"), weight) < 0.95 * error(packed, weight)


@pytest.mark.parametrize("type", TYPES)
def test_zeros_and_outliers(type: str) -> None:
    """A weight of zeros decodes to zeros; a block that is tiny beside others is not lost."""
    assert not formats.decode(quantize(torch.zeros(4, 64), type=type), torch.float32).any()
    weight = WEIGHT.clone()
    weight[3] *= 1e-30
    weight[5, 7] = 100.0
    decoded = formats.decode(quantize(weight, type=type), torch.float32)
    assert decoded.isfinite().all() and float(decoded[5, 7]) == pytest.approx(100, rel=0.1)


@pytest.mark.parametrize("type", TYPES)
def test_the_size_of_parts_does_not_matter(type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = quantize(WEIGHT, type=type).tensors
    monkeypatch.setattr(grid_types, "FITTED_WEIGHTS", 160 * 5)
    monkeypatch.setattr(grid_rtn, "ROUNDED_WEIGHTS", 160 * 5)
    parts = quantize(WEIGHT, type=type).tensors
    assert all(torch.equal(parts[name].view(torch.uint8), whole[name].view(torch.uint8)) for name in whole)
