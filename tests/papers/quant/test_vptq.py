"""VPTQ against a slow loop in float64, what its options buy, and layers that are not as they should be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.formats import codebook
from compress.numerics.linalg import upper_factor
from compress.numerics.packing import unpack_stream
from compress.papers.quant import vptq
from compress.quant import codebooks, feedback, gptq
from compress.types import PackedWeight, Quantized, Stats, Stored
from helpers import problems

Settings = dict[str, int | float | bool | str]
TINY = [(64, 64), (24, 50), (96, 32), (33, 50), (50, 33), (3, 7), (1, 1), (1, 40), (40, 1)]
FULL: Settings = {"bits": 5, "outliers": 0.05}


@pytest.fixture
def loop_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out all that comes behind the column loop."""
    monkeypatch.setattr(vptq, "alternate", lambda layer, rounder, _: feedback.run(layer.weight, layer.factor, rounder))


def layer(rows: int = 32, columns: int = 64, seed: int = 0) -> tuple[Tensor, Stats]:
    return problems.random(rows, columns, seed=seed + 40), problems.stats(problems.inputs(4 * columns, columns, seed))


def quantize(weight: Tensor, stats: Stats, seed: int = 0, **settings: float | str) -> Quantized:
    config = vptq.Config(**settings)  # type: ignore[arg-type]
    result = vptq.quantize(weight, stats, config, seed)
    params = vptq.plan_params(config, result.weight.shape)
    assert result.weight.params == params
    assert formats.nbytes(Stored("codebook", params), result.weight.shape) == result.weight.nbytes
    return result


def relative_loss(weight: Tensor, packed: PackedWeight, stats: Stats) -> float:
    zero = torch.zeros_like(weight)
    return problems.loss(weight, problems.decoded(packed), stats.hessian) / problems.loss(weight, zero, stats.hessian)


def same_bytes(a: PackedWeight, b: PackedWeight) -> bool:
    return a.params == b.params and all(torch.equal(tensor, b.tensors[key]) for key, tensor in a.tensors.items())


def slow_column(target: Tensor, column: int, packed: PackedWeight) -> Tensor:
    """Quantized column [rows] for its target: the nearest entries, then the outlier integers."""
    p, tensors = packed.params, packed.tensors
    book = codebook.entries(tensors, p, 0)[0, 0].double()
    values = book[torch.cdist(target.view(-1, p.vector_dim), book).argmin(1)].flatten()
    for k in range(p.outliers):
        if tensors["outlier_index"][k] == column:
            step, top = tensors["outlier_scale"][k].double(), 2 ** (p.outlier_bits - 1)
            values = values + ((target - values) / step).round().clamp(-top, top - 1) * step
    return values


@pytest.mark.usefixtures("loop_only")
@pytest.mark.parametrize("settings", [{"bits": 6}, {"bits": 6, "vector_dim": 8}, {"bits": 4, "outliers": 0.1}], ids=str)
def test_the_loop_equals_the_slow_loop(settings: Settings) -> None:
    weight, stats = layer(32, 50)
    packed = quantize(weight, stats, damp=0.02, **settings).weight
    order = stats.hessian.diagonal().argsort(descending=True, stable=True)
    expected = torch.empty_like(weight, dtype=torch.float64)
    expected[:, order] = problems.right_looking(
        weight[:, order],
        problems.damped(stats.hessian, 0.02)[order][:, order],
        0,
        lambda *_: None,
        lambda target, k: slow_column(target, int(order[k]), packed),
    )
    differ = ((problems.decoded(packed) - expected).abs() > 1e-5).view(-1, packed.params.vector_dim, 50).any(1).any(1)
    assert differ.sum() <= 1, f"rows of vectors {differ.nonzero().flatten().tolist()} differ"  # one tie may break


@pytest.mark.usefixtures("loop_only")
def test_the_codebook_is_learned_with_the_weights_of_the_loop() -> None:
    weight, stats = layer()
    packed = quantize(weight, stats, seed=3, bits=5).weight
    order = stats.hessian.diagonal().argsort(descending=True, stable=True)
    values = weight.T[order].view(1, 64, 8, 4)  # group, column, unit, row
    vectors = codebooks.GroupedVectors(values, upper_factor(stats.hessian, 0.01, order).upper.diagonal())
    learned = codebooks.learn(vectors, 32, 30, torch.Generator().manual_seed(3))
    expected = codebooks.round_entries(learned).entries[0]
    assert torch.allclose(codebook.entries(packed.tensors, packed.params, 0)[0, 0], expected, atol=1e-4)


def test_what_sweeps_and_outliers_buy() -> None:
    weight, stats = layer(64, 128)
    weight = weight * problems.random(128, seed=3).exp()  # columns of different spread

    def loss(**settings: float) -> float:
        return relative_loss(weight, quantize(weight, stats, bits=6, **settings).weight, stats)

    swept = loss()
    assert swept < 0.92 * loss(sweeps=0) and loss(outliers=0.05) < 0.9 * swept


def test_it_beats_scalar_rounding_with_fewer_bytes() -> None:
    weight, stats = layer(128, 256)
    scalar = gptq.quantize(
        weight, stats, gptq.Config(bits=2, group_size=64, symmetric=False, static_groups=False, sweeps=3)
    ).weight
    vector = quantize(weight, stats, bits=8).weight
    assert vector.nbytes < scalar.nbytes
    assert relative_loss(weight, vector, stats) < 0.9 * relative_loss(weight, scalar, stats)


def test_outliers_are_the_columns_with_the_largest_inputs() -> None:
    weight, stats = layer(32, 50)
    packed = quantize(weight, stats, outliers=0.1).weight
    assert packed.params.outliers == 5
    largest = stats.hessian.diagonal().argsort(descending=True, stable=True)[:5]
    assert torch.equal(packed.tensors["outlier_index"].long(), largest)
    codes = unpack_stream(packed.tensors["outliers"], 4)
    assert all(len(row.unique()) > 4 for row in codes[:, :32])  # integers are used
    error = (problems.decoded(packed) - weight).square().mean(0)
    assert error[largest].max() < 0.1 * error.mean()


@pytest.mark.parametrize("shape", TINY, ids=str)
@pytest.mark.parametrize("settings", [{}, FULL], ids=["default", "full"])
def test_tiny_and_odd_shapes(shape: tuple[int, int], settings: Settings) -> None:
    weight, stats = layer(*shape)
    before = weight.clone(), stats.hessian.clone()
    result = quantize(weight, stats, **settings)
    assert problems.decoded(result.weight).shape == shape and relative_loss(weight, result.weight, stats) < 0.4
    assert torch.equal(weight, before[0]) and torch.equal(stats.hessian, before[1])
    short = result.weight.params.bits[0] < vptq.Config(**settings).bits  # type: ignore[arg-type]
    assert short == any("too few vectors" in note for note in result.notes)


def test_results_repeat_and_follow_the_seed() -> None:
    weight, stats = layer()
    state = torch.get_rng_state()
    first, second, other = (quantize(weight, stats, seed).weight for seed in (0, 0, 1))
    assert same_bytes(first, second) and not same_bytes(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_columns_can_come_in_any_order() -> None:
    """Columns are sorted by their inputs, so that a permuted layer gives the permuted result."""
    weight, stats = layer()
    shuffle = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    moved = quantize(weight[:, shuffle], Stats(stats.hessian[shuffle][:, shuffle], stats.count)).weight
    plain = problems.decoded(quantize(weight, stats).weight)
    assert torch.equal(problems.decoded(moved), plain[:, shuffle])


def test_size_of_the_hessian_does_not_matter() -> None:
    weight, stats = layer()
    assert same_bytes(quantize(weight, stats).weight, quantize(weight, Stats(stats.hessian * 64, 7)).weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_storage_type_of_the_weight(dtype: torch.dtype) -> None:
    weight, stats = layer()
    rounded = weight.to(dtype)
    assert same_bytes(quantize(rounded, stats).weight, quantize(rounded.float(), stats).weight)


@pytest.mark.parametrize("stats", [Stats(torch.zeros(64, 64), 9), Stats(torch.eye(64), 0)], ids=["zero", "no tokens"])
def test_inputs_without_evidence(stats: Stats) -> None:
    weight, _ = layer()
    result = quantize(weight, stats)
    assert "rounded to nearest" in result.notes[0]
    assert problems.loss(weight, problems.decoded(result.weight), torch.eye(64)) < 0.1 * weight.square().sum()


def test_dead_inputs_are_rounded_too() -> None:
    weight, stats = layer()
    stats.hessian[5], stats.hessian[:, 5] = 0, 0
    result = quantize(weight, stats)
    error = (problems.decoded(result.weight)[:, 5] - weight[:, 5]).square().sum()
    assert error < 0.6 * weight[:, 5].square().sum() and "1 input channels" in result.notes[0]


@pytest.mark.parametrize("settings", [{}, FULL], ids=["default", "full"])
def test_zero_weights_stay_zero(settings: Settings) -> None:
    _, stats = layer()
    assert not problems.decoded(quantize(torch.zeros(32, 64), stats, **settings).weight).any()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bits", 0),
        ("bits", 17),
        ("vector_dim", 33),
        ("outliers", 1.0),
        ("damp", 1),
    ],
)
def test_impossible_settings_are_refused(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{key} "):
        vptq.Config(**{key: value})  # type: ignore[arg-type]
