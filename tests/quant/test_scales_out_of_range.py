"""Weights far from 1: every method is as exact as on usual ones, or the report finds that the weight is lost."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from compress import formats, plugins
from compress.errors import NumericalError
from compress.formats import dense
from compress.run import report
from compress.types import LayerPlan, LinearSpec, PackedWeight, Scheme, Stats, Stored

METHODS: dict[str, dict[str, Any]] = {
    "rtn": {"bits": 8},
    "gptq": {"bits": 4},
    "nf": {},
    "kquant": {"type": "q4_k"},
    "gptvq": {"bits": 2},
    "vptq": {},
    "pvq": {},
    "e8p": {},
    "trellis": {},
    "glvq": {},
    "structured": {},
    "lord": {},
}
HOLDS_ANY_SIZE = METHODS.keys() - {"gptvq", "vptq"}  # these two have float16 scales of codebooks
HOLDS_A_HUGE_ROW = {"rtn", "gptq", "kquant", "pvq", "structured", "lord"}  # a scale for each row


@pytest.fixture(scope="module")
def statistics() -> Stats:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(400, 256, generator=generator) * (1 + torch.rand(256, generator=generator))
    return Stats(inputs.T @ inputs, len(inputs))


def usual_weight() -> Tensor:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 0.06
    weight[7] = 0
    return weight


def quantized(name: str, weight: Tensor, stats: Stats, **settings: Any) -> tuple[Tensor, Any]:
    """Return the decoded weight in float64 and the row of the report."""
    method = plugins.load("quant", name)
    config = method.Config(**{**METHODS[name], **settings})
    packed = method.quantize(weight, stats, config, 0).weight
    spec = LinearSpec("layer", (weight.shape[0], weight.shape[1]), weight.dtype, 0, "layer")
    layer = LayerPlan(spec, Scheme(name, config), packed.stored, packed.nbytes)
    return formats.decode(packed, torch.float32).double(), report.measure(layer, weight, packed, stats, ())


def row_errors(weight: Tensor, decoded: Tensor) -> Tensor:
    norms = weight.double().square().sum(1)
    return (decoded - weight.double()).square().sum(1)[norms > 0] / norms[norms > 0]


@pytest.mark.parametrize("name", METHODS)
def test_layers_far_from_one(name: str, statistics: Stats) -> None:
    usual, row = quantized(name, usual_weight().bfloat16(), statistics)
    assert report.check_row(row, False) is row
    limit = 1.2 * float(row_errors(usual_weight().bfloat16(), usual).mean()) + 1e-6
    for factor in (1e10, 1e-10, 1e6, 1e-7, 1e-20):
        weight = (usual_weight() * factor).bfloat16()
        decoded, row = quantized(name, weight, statistics)
        assert torch.isfinite(decoded).all()
        if name in HOLDS_ANY_SIZE or factor == 1e6:
            errors = row_errors(weight, decoded)
            assert errors.mean() < limit and errors.max() < 2 * errors.mean() + 0.1
            assert report.check_row(row, False) is row and not row.notes
            continue
        with pytest.raises(NumericalError, match=r"^layer: .*no likeness .*rule.*ignore.*--allow-partial"):
            report.check_row(row, False)
        assert "no likeness" in report.check_row(row, True).notes[-1]


@pytest.mark.parametrize("name", METHODS)
def test_one_huge_row(name: str, statistics: Stats) -> None:
    """The others are held beside it, or the report says that they are lost."""
    weight = usual_weight()
    weight[3] *= 1e10
    weight = weight.bfloat16()
    decoded, row = quantized(name, weight, statistics)
    if name in HOLDS_A_HUGE_ROW:
        assert row_errors(weight, decoded).mean() < 0.5
        assert report.check_row(row, False) is row
        return
    with pytest.raises(NumericalError, match=r"^layer: .*(no likeness|of the rows are lost beside others)"):
        report.check_row(row, False)


def test_a_tiny_row_is_named(statistics: Stats) -> None:
    weight = usual_weight()
    weight[3] *= 1e-9
    _, row = quantized("rtn", weight.bfloat16(), statistics)
    assert row.notes == ("nothing is left of 1.6% of the rows, less than 1/1000 of the largest one",)
    assert report.check_row(row, False) is row  # one of 63 rows is no lost layer


@pytest.mark.parametrize("name", METHODS)
def test_a_layer_of_zeros_is_no_finding(name: str, statistics: Stats) -> None:
    decoded, row = quantized(name, torch.zeros(64, 256, dtype=torch.bfloat16), statistics)
    assert not decoded.any() and row.weight_error == 0
    assert report.check_row(row, False) is row and not row.lost_rows


def test_outputs_tell_where_they_are_measured(statistics: Stats) -> None:
    _, row = quantized("rtn", usual_weight().bfloat16(), statistics)
    assert report.check_row(dataclasses.replace(row, weight_error=0.95, output_error=0.1), False)
    for worse in ({"output_error": None}, {"output_error": 0.97}, {"output_error": float("nan")}):
        with pytest.raises(NumericalError, match="no likeness"):
            report.check_row(dataclasses.replace(row, **{"weight_error": 0.95, **worse}), False)


def test_errors_do_not_depend_on_the_size_of_the_numbers(statistics: Stats) -> None:
    """Squares of 1e-30 are zero in float32, those of 1e30 infinite."""
    weight = usual_weight()
    near = weight + 0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))
    found = []
    for factor in (1.0, 2.0**-90, 2.0**90):
        params = dense.Params("float32")
        packed = PackedWeight(Stored("dense", params), dense.pack(near * factor, params), (64, 256))
        found.append(report.errors(scaled := weight * factor, packed, statistics))
        assert torch.equal(scaled, weight * factor)
    for errors in found[1:]:
        assert errors.relative == pytest.approx(found[0].relative, rel=1e-5) and 0 < errors.relative < 0.1
        assert errors.output == pytest.approx(found[0].output, rel=1e-3)
