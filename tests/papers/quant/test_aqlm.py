"""AQLM against losses and searches written out in float64, and a loss that never rises."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.formats import codebook
from compress.papers.quant import aqlm
from compress.quant.feedback import Objective
from compress.tune.codes import vectors
from compress.types import PackedWeight, Quantized, Stats, Stored
from helpers import problems

Settings = dict[str, Any]
SMALL: Settings = {"bits": 4, "vector_dim": 4, "iterations": 4}


def layer(rows: int = 24, columns: int = 48, seed: int = 0) -> tuple[Tensor, Stats]:
    return problems.random(rows, columns, seed=seed + 40), problems.stats(problems.inputs(4 * columns, columns, seed))


def quantize(weight: Tensor, stats: Stats, seed: int = 0, **settings: float | str) -> Quantized:
    config = aqlm.Config(**settings)  # type: ignore[arg-type]
    result = aqlm.quantize(weight, stats, config, seed)
    assert result.weight.params == aqlm.plan_params(config, result.weight.shape)
    assert formats.nbytes(Stored("codebook", result.weight.params), result.weight.shape) == result.weight.nbytes
    return result


def search(weight: Tensor, stats: Stats, **settings: float | str) -> aqlm._CodebookSearch:
    config = aqlm.Config(**settings)  # type: ignore[arg-type]
    params = aqlm.plan_params(config, (weight.shape[0], weight.shape[1]))
    damping = 0.01 * stats.hessian.diagonal().mean().item()
    return aqlm._CodebookSearch(Objective(weight.T.contiguous(), stats.hessian, damping), config, params, 0)


def slow_values(packed: PackedWeight) -> Tensor:
    """The weight [out, in] by the formula of the paper: scales of rows times sums of entries, float64."""
    params, tensors = packed.params, packed.tensors
    books = [codebook.entries(tensors, params, stage)[0, 0].double() for stage in range(len(params.bits))]
    codes = codebook.unpack_codes(tensors, params, packed.shape)
    sums = torch.stack([book[own.long()] for book, own in zip(books, codes, strict=True)]).sum(0)
    scales = tensors["norm_scale"][: packed.shape[0]].double()
    return (scales[:, None, None] * sums).flatten(1)[:, : packed.shape[1]]


@pytest.mark.parametrize("shape", [(24, 48), (17, 50), (3, 7), (1, 1), (40, 1)])
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_what_is_stored_is_a_sum_of_entries(shape: tuple[int, int], dtype: str) -> None:
    weight, stats = layer(*shape)
    packed = quantize(weight, stats, stages=3, codebook_dtype=dtype, **SMALL).weight
    torch.testing.assert_close(problems.decoded(packed), slow_values(packed), rtol=1e-5, atol=1e-5)


def test_a_beam_of_all_finds_what_trying_all_pairs_finds() -> None:
    metric = problems.stats(problems.inputs(40, 3)).hessian
    entries, goal = problems.random(2, 8, 3, seed=1), problems.random(20, 3, seed=2) @ metric
    codes = torch.randint(0, 8, (2, 20), generator=torch.Generator().manual_seed(3))
    m, g, e = metric.double(), goal.double(), entries.double()

    def loss(u: Tensor, row: int) -> float:
        return float(u @ m @ u - 2 * u @ g[row])

    def lose(found: Tensor) -> list[float]:
        return [loss(e[0, found[0, row]] + e[1, found[1, row]], row) for row in range(20)]

    best = [min(loss(e[0, a] + e[1, b], row) for a, b in itertools.product(range(8), repeat=2)) for row in range(20)]
    one_by_one, before = [], lose(codes)
    for row in range(20):  # a beam of one: the better entry of the second codebook, then of the first
        second = min(range(8), key=lambda b, row=row: loss(e[0, codes[0, row]] + e[1, b], row))  # type: ignore[misc]
        one_by_one.append(min(loss(e[0, a] + e[1, second], row) for a in range(8)))
    for beam, wanted in ((8, best), (1, one_by_one)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(aqlm, "BEAM", beam)
            found, sums = aqlm.search_beam(goal, metric, entries, codes, [1, 0])
        torch.testing.assert_close(sums, entries[0][found[0]] + entries[1][found[1]])
        assert lose(found) == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    assert all(a <= b for a, b in zip(one_by_one, before, strict=True))


def test_no_step_raises_the_loss() -> None:
    """By the naive loss in float64, of values as they are stored."""
    weight, stats = layer(32, 64)
    made, hessian = search(weight, stats, stages=2, **SMALL), problems.damped(stats.hessian, 0.01)

    def loss() -> float:
        return problems.loss(weight, slow_values(made.pack((32, 64))), hessian)

    now = loss()
    assert made.layer.loss(made.values()) == pytest.approx(now, rel=1e-4)
    for _ in range(3):
        for step in (made.search_codes, lambda: made.refit(made.layer.loss(made.values()))):
            step()
            before, now = now, loss()
            assert now <= before * (1 + 1e-5)


def test_scales_of_rows_are_the_best_ones() -> None:
    weight, stats = layer(16, 32)
    made, hessian = search(weight, stats, **SMALL), problems.damped(stats.hessian, 0.01)
    before = made.values().T.double()
    wanted = made.scales.double() * ((before @ hessian) * weight.double()).sum(1) / ((before @ hessian) * before).sum(1)
    made._refit_scales()
    assert ((made.scales.double() - wanted).abs() <= 2**-10 * wanted.abs()).double().mean() > 0.8


def test_more_codebooks_and_rounds_lose_less() -> None:
    weight, stats = layer(64, 96)
    hessian = problems.damped(stats.hessian, 0.01)
    cases: list[Settings] = [{"stages": 1}, {"sweeps": 0}, {"sweeps": 1}, {"sweeps": 4}, {"stages": 3}]
    losses = [
        problems.loss(weight, problems.decoded(quantize(weight, stats, **SMALL | case).weight), hessian)
        for case in cases
    ]
    assert all(b < a for a, b in itertools.pairwise(losses)), losses


def test_bits_of_a_weight() -> None:
    params = aqlm.plan_params(aqlm.Config(), (4096, 4096))
    nbytes = formats.nbytes(Stored("codebook", params), (4096, 4096))
    assert 8 * nbytes / 4096**2 == 2 + 2 * 256 * 8 * 16 / 4096**2 + 16 / 4096
    assert aqlm.plan_params(aqlm.Config(bits=12), (16, 64)).bits == (6, 6)


def test_seeds_and_layers_without_text() -> None:
    weight, stats = layer()
    one, same, other = (quantize(weight, stats, seed, **SMALL).weight for seed in (0, 0, 1))
    assert all(torch.equal(tensor, same.tensors[name]) for name, tensor in one.tensors.items())
    assert not all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())
    nothing = quantize(weight, Stats(torch.zeros(48, 48), 0), **SMALL)
    assert "no calibration token" in nothing.notes[0] and problems.decoded(nothing.weight).isfinite().all()
    zeros = quantize(torch.zeros(24, 48), stats, **SMALL).weight
    assert problems.decoded(zeros).abs().max() < 1e-3
    assert vectors.serves(one)
