"""SparseGPT against the published sweep with an inverse in float64, simpler scores one row at a time, exact sizes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.formats import sparse
from compress.papers.quant import sparsegpt
from compress.quant import feedback
from compress.types import PackedWeight, Stats
from helpers import problems

SETTINGS: list[dict[str, Any]] = [
    {"bits": 16},
    {"bits": 16, "kept": 4, "of": 8},
    {"bits": 16, "kept": 16, "of": 32},
    {"bits": 16, "kept": 4, "of": 16, "block_rows": 2, "block_columns": 2},
    {"bits": 4, "group_size": 16},
    {"bits": 3, "kept": 16, "of": 32, "group_size": -1},
]


def layer(rows: int = 24, columns: int = 64, seed: int = 0) -> tuple[Tensor, Stats]:
    return problems.random(rows, columns, seed=seed + 5), problems.stats(problems.inputs(4 * columns, columns, seed))


def quantize(weight: Tensor, stats: Stats, **settings: Any) -> PackedWeight:
    config = sparsegpt.Config(**settings)
    packed = sparsegpt.quantize(weight, stats, config).weight
    assert formats.nbytes(packed.stored, packed.shape) == packed.nbytes
    formats.check(packed, "weight")
    return packed


def mask_of(packed: PackedWeight) -> Tensor:
    """What is kept, [out, in] bool."""
    whole = sparse.decode_mask(packed.tensors, packed.params, packed.shape, slice(0, packed.shape[0]))
    return whole[:, : packed.shape[1]]


def loss(weight: Tensor, packed: PackedWeight, stats: Stats) -> float:
    return problems.loss(weight, problems.decoded(packed), problems.damped(stats.hessian, 0.01))


def keep_best(scores: Tensor, params: sparse.Params) -> Tensor:
    """The best entries of one pattern of all rows [out, of], one block of rows after the other."""
    high, wide, mask = params.block_rows, params.block_columns, torch.zeros_like(scores, dtype=torch.bool)
    for row in range(0, len(scores), high):
        entries = [float(scores[row : row + high, j : j + wide].sum()) for j in range(0, params.of, wide)]
        best = sorted(range(len(entries)), key=lambda k: -entries[k])[: params.keep // wide]
        for k in best:
            mask[row : row + high, k * wide : (k + 1) * wide] = True
    return mask


def sweep(
    target: Tensor, stats: Stats, packed: PackedWeight, order: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The released SparseGPT in float64: mask and values [out, in].

    Kept values are rounded as those of `packed` are, integers only where the mask is given.
    """
    params, work = packed.params, target.double()[:, order].clone()
    hessian = problems.damped(stats.hessian, 0.01)[order][:, order]
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    values = torch.zeros_like(work)
    chosen = torch.zeros(work.shape, dtype=torch.bool) if mask is None else mask[:, order]
    for j in range(work.shape[1]):
        if mask is None and j % params.of == 0:
            part = slice(j, j + params.of)
            natural = torch.argsort(order[part])
            scores = (work[:, part] / upper.diagonal()[part]).square()[:, natural]
            chosen[:, part] = keep_best(scores, params)[:, torch.argsort(natural)]
        is_plain = mask is None and params.inner == "int"
        value = work[:, j] if is_plain else rounded(work[:, j], packed, int(order[j]))
        values[:, j] = torch.where(chosen[:, j], value, 0.0)
        error = (work[:, j] - values[:, j]) / upper[j, j]
        work[:, j:] -= error[:, None] * upper[j, j:]
    back = torch.argsort(order)
    return chosen[:, back], values[:, back]


def rounded(target: Tensor, packed: PackedWeight, column: int) -> Tensor:
    params = packed.params
    if params.inner == "dense":
        return target.to(torch.bfloat16).double()
    kept = params.group_size if params.group_size != -1 else packed.shape[1]
    scale = packed.tensors["scales"][column // params.of * params.keep // kept, : packed.shape[0]].double()
    half = 2 ** (params.bits - 1)
    return (target / scale).round().clamp(-half, half - 1) * scale


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_one_sweep_is_the_published_one(settings: dict[str, Any]) -> None:
    """And a second one of the same kind rounds what is kept."""
    weight, stats = layer()
    packed = quantize(weight, stats, **settings, sweeps=0)
    order = sparsegpt.prepare(weight, stats, sparsegpt.Config(**settings)).order
    assert sorted(order.tolist()) == list(range(64)) and order.tolist() != list(range(64))
    mask, values = sweep(weight, stats, packed, order)
    if settings["bits"] != 16:
        _, values = sweep(values, stats, packed, order, mask)
    assert torch.equal(mask_of(packed), mask)
    assert torch.allclose(problems.decoded(packed), values, rtol=0.01, atol=1e-3)
    assert not problems.decoded(packed)[~mask].any()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("score", ["wanda", "magnitude"])
def test_simple_scores_change_nothing_that_stays(score: str, settings: dict[str, Any]) -> None:
    weight, stats = layer()
    packed = quantize(weight, stats, **settings, score=score)
    norms = stats.hessian.diagonal().sqrt() if score == "wanda" else torch.ones(64)
    scores = (weight.abs() * norms).split(packed.params.of, 1)
    mask = torch.cat([keep_best(part, packed.params) for part in scores], 1)
    assert torch.equal(mask_of(packed), mask)
    if settings["bits"] == 16:
        assert torch.equal(problems.decoded(packed), torch.where(mask, weight.bfloat16().double(), 0.0))
    else:
        wanted = torch.stack([rounded(weight[:, j].double(), packed, j) for j in range(64)], 1) * mask
        assert torch.allclose(problems.decoded(packed), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_leaves_tiles_and_counts(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    weight, stats = layer(26)
    packed = quantize(weight, stats, **settings)
    kept = mask_of(packed).unflatten(1, (-1, packed.params.of)).sum(-1)
    assert bool((kept == packed.params.keep).all())
    config = sparsegpt.Config(**settings)
    rounding = sparsegpt.prepare(weight, stats, config)
    tiles = [sparsegpt.quantize_rows(rounding, rows) for rows in (slice(0, 16), slice(16, 26))]
    rounding.release()
    in_tiles = sparsegpt.join(rounding, tiles).weight
    assert torch.equal(mask_of(in_tiles), mask_of(packed))
    assert torch.allclose(problems.decoded(in_tiles), problems.decoded(packed), atol=1e-3)
    monkeypatch.setattr(feedback, "run", functools.partial(feedback.run, leaf=8))
    assert torch.equal(mask_of(quantize(weight, stats, **settings)), mask_of(packed))


def test_better_scores_lose_less_and_sweeps_less_again() -> None:
    weight, stats = layer(64, 128)
    for pattern in ({"kept": 2, "of": 4}, {"kept": 4, "of": 8}, {"kept": 64, "of": 128}):
        for bits in (16, 4):
            common: dict[str, Any] = {**pattern, "bits": bits}
            scores = ("magnitude", "wanda", "sparsegpt")
            losses = [loss(weight, quantize(weight, stats, **common, score=s, sweeps=0), stats) for s in scores]
            losses += [loss(weight, quantize(weight, stats, **common, sweeps=n), stats) for n in (1, 4)]
            assert losses == sorted(losses, reverse=True), (common, losses)
            assert losses[2] < 0.95 * losses[1]


def test_large_weights_take_the_compiled_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is one it gives what PyTorch does, up to the order of sums."""
    weight, stats = layer(160, 128)
    packed = quantize(weight, stats, sweeps=0)
    monkeypatch.setattr(sparsegpt.column_loops, "supports", lambda _: False)
    plain = quantize(weight, stats, sweeps=0)
    assert loss(weight, packed, stats) == pytest.approx(loss(weight, plain, stats), rel=1e-3)
    assert (mask_of(packed) == mask_of(plain)).float().mean() > 0.999


def test_exact_bytes() -> None:
    """2 bits of codes, 0.75 of the mask and 1/16 of scales for each weight; or one bit and 8 of kept weights."""
    stats = problems.stats(problems.inputs(512, 512))
    packed = quantize(problems.random(32, 512), stats, score="wanda")
    assert packed.bpw == 2 + 0.75 + 16 / 256
    assert quantize(problems.random(32, 512), stats, bits=16, score="wanda").bpw == 8.75
    assert quantize(problems.random(32, 512), stats, bits=16, kept=128, of=256, score="wanda").bpw == 9


@pytest.mark.parametrize(("columns", "pattern"), [(50, (2, 4)), (96, (48, 96)), (192, (48, 96)), (100, (50, 100))])
def test_sizes_that_divide_nothing(columns: int, pattern: tuple[int, int]) -> None:
    """Padding is dropped first; where it would be much, patterns are narrower."""
    weight, stats = layer(9, columns)
    settings = {} if pattern == (2, 4) else {"kept": 64, "of": 128, "group_size": 100}
    packed = quantize(weight, stats, **settings)
    assert (packed.params.keep, packed.params.of) == pattern
    assert int(mask_of(packed).sum()) == 9 * -(-columns // pattern[1]) * pattern[0]


def test_inputs_without_tokens_and_types() -> None:
    weight, stats = layer()
    nothing = sparsegpt.quantize(weight, Stats(torch.zeros(64, 64), 0), sparsegpt.Config(bits=16, sweeps=0))
    assert any("no calibration token" in note for note in nothing.notes)
    assert torch.equal(
        nothing.weight.tensors["mask"], quantize(weight, stats, bits=16, score="magnitude").tensors["mask"]
    )
    assert quantize(weight.half(), stats, bits=16).params.dtype == "float16"
    for settings, message in (
        ({"bits": 1}, "bits 1"),
        ({"kept": 4}, "keep 4"),
        ({"score": "l0"}, "score 'l0'"),
        ({"kept": 64, "of": 128, "group_size": 32}, "group_size 32"),
        ({"sweeps": -1}, "sweeps -1"),
    ):
        with pytest.raises(ValueError, match=message):
            sparsegpt.Config(**settings)
