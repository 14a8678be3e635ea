"""SpQR against sensitivities one weight at a time and a slow loop in float64, and what its format refuses."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.errors import CheckpointError
from compress.papers.formats import sparse_outliers
from compress.papers.quant import spqr
from compress.quant import feedback
from compress.types import PackedWeight, Quantized, Stats, Stored
from helpers import problems


def layer(rows: int = 40, columns: int = 64, seed: int = 0) -> tuple[Tensor, Stats]:
    weight = problems.random(rows, columns, seed=seed + 40)
    weight.view(-1)[::97] *= 6
    return weight, problems.stats(problems.inputs(4 * columns, columns, seed))


def quantize(weight: Tensor, stats: Stats, **settings: float) -> Quantized:
    config = spqr.Config(**settings)  # type: ignore[arg-type]
    result = spqr.quantize(weight, stats, config)
    assert result.weight.params == spqr.plan_params(config, result.weight.shape)
    stored = Stored("sparse_outliers", result.weight.params)
    assert formats.nbytes(stored, result.weight.shape) == result.weight.nbytes
    formats.check(result.weight, "weight")
    return result


def loss(weight: Tensor, packed: PackedWeight, stats: Stats) -> float:
    return problems.loss(weight, problems.decoded(packed), problems.damped(stats.hessian, 0.01))


def numbers(packed: PackedWeight, name: str) -> Tensor:
    """Scales or zero points [out, G], read bit by bit."""
    params, (rows, columns) = packed.params, packed.shape
    groups, size = -(-columns // params.group_size), params.block_rows
    out = torch.zeros(rows, groups, dtype=torch.float64)
    for block, stream in enumerate(packed.tensors[f"{name}_codes"].tolist()):
        whole = sum(octet << 8 * i for i, octet in enumerate(stream))
        for group, inside in itertools.product(range(groups), range(size)):
            if (row := block * size + inside) < rows:
                code = whole >> (group * size + inside) * params.code_bits & 2**params.code_bits - 1
                low, step = packed.tensors[f"{name}_grid"][block, group].double()
                out[row, group] = low + step * code
    return out


def range_loss(values: Tensor, importance: Tensor, bits: int) -> float:
    """The weighted squared error of one group over its own range."""
    low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
    step = (high - low) / (2**bits - 1) or 1.0
    zero = round(-low / step)
    rounded = ((values / step).round() + zero).clamp(0, 2**bits - 1).sub(zero) * step
    return float((importance * (rounded - values).square()).sum())


@pytest.mark.parametrize("columns", [16, 5, 2])
def test_sensitivity_is_what_a_group_loses_less_without_a_weight(columns: int) -> None:
    group, importance = problems.random(6, columns).double(), problems.random(columns, seed=1).double().exp()
    found = spqr.sensitivity(group, importance, 3)
    for row, column in itertools.product(range(6), range(columns)):
        others = torch.arange(columns) != column
        wanted = range_loss(group[row], importance, 3) - range_loss(group[row, others], importance[others], 3)
        assert float(found[row, column]) == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("shape", [(40, 64), (17, 50), (3, 7), (1, 1), (40, 1)])
def test_what_is_stored_is_decoded(shape: tuple[int, int]) -> None:
    packed = quantize(*layer(*shape), outliers=0.1).weight
    params, tensors = packed.params, packed.tensors
    owner = torch.arange(shape[1]) // params.group_size
    scales, zeros = (numbers(packed, name)[:, owner] for name in ("scale", "zero"))
    levels = scales[..., None] * (torch.arange(2**params.bits) - zeros[..., None])
    rest = problems.decoded(packed)
    for row in range(shape[0]) if params.outliers else ():
        own = slice(int(tensors["row_starts"][row]), int(tensors["row_starts"][row + 1]))
        rest[row, tensors["outlier_columns"][own].long()] -= tensors["outlier_values"][own].double()
    assert (levels - rest[..., None]).abs().amin(2).max() < 1e-4 * rest.abs().max()


def test_values_are_those_of_a_slow_loop() -> None:
    """One column at a time in float64 on the grids that are stored; few codes lie between two levels."""
    weight, stats = layer()
    packed = quantize(weight, stats, outliers=0.02).weight
    hessian, owner = problems.damped(stats.hessian, 0.01), torch.arange(64) // 16
    scales, zeros = (numbers(packed, name)[:, owner] for name in ("scale", "zero"))
    mask = torch.zeros(40, 64, dtype=torch.bool)
    rows = torch.arange(40).repeat_interleave(packed.tensors["row_starts"].long().diff())
    mask[rows, packed.tensors["outlier_columns"].long()] = True
    order = feedback.loop_order(stats.hessian.diagonal(), 16)

    def round_column(target: Tensor, place: int) -> Tensor:
        scale, zero = (each[:, order[place]] for each in (scales, zeros))
        level = ((target / scale + zero).round().clamp(0, 7) - zero) * scale
        return torch.where(mask[:, order[place]], target, level)

    wanted = problems.right_looking(weight[:, order], hessian[order][:, order], 0, lambda *_: None, round_column)
    mine = problems.decoded(packed)[:, order]
    assert ((mine - wanted).abs() < 2e-3).double().mean() > 0.97
    assert mask.sum() == packed.params.outliers == round(0.02 * 40 * 64)


def test_outliers_lower_the_loss() -> None:
    weight, stats = layer(64, 96)
    losses = [loss(weight, quantize(weight, stats, outliers=share).weight, stats) for share in (0.0, 0.01, 0.1)]
    assert losses[1] < 0.8 * losses[0] and losses[2] < 0.8 * losses[1], losses


def test_bits_of_a_weight() -> None:
    shape = (1024, 1024)
    nbytes = formats.nbytes(Stored("sparse_outliers", spqr.plan_params(spqr.Config(), shape)), shape)
    count = round(0.005 * 1024**2)
    assert 8 * nbytes == 1024**2 * (3 + 6 / 16 + 64 / 256) + 32 * count + 32 * 1025


def test_damaged_outliers_are_refused() -> None:
    packed = quantize(*layer(), outliers=0.1).weight
    for name, place, value in (("row_starts", 1, 900), ("outlier_columns", 0, 64), ("outlier_columns", 1, 0)):
        tensors = {key: tensor.clone() for key, tensor in packed.tensors.items()}
        tensors[name][place] = value
        with pytest.raises(CheckpointError, match=name if name == "row_starts" else "outlier_columns"):
            formats.check(PackedWeight(packed.stored, tensors, packed.shape), "weight")
    with pytest.raises(ValueError, match="40000 columns are more than 32768"):
        sparse_outliers.specs(packed.params, (1, 40000))


def test_layers_without_text_and_with_zeros() -> None:
    weight, stats = layer()
    nothing = quantize(weight, Stats(torch.zeros(64, 64), 0))
    assert "no calibration token" in nothing.notes[0] and problems.decoded(nothing.weight).isfinite().all()
    assert not problems.decoded(quantize(torch.zeros(40, 64), stats).weight).any()
    with pytest.raises(ValueError, match="outliers 1 is not a fraction"):
        spqr.Config(outliers=1)
