"""GPTVQ against a slow loop in float64, what its steps buy, and layers that are not as they should be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress import formats, recipe
from compress.errors import RecipeError
from compress.formats import codebook
from compress.numerics.linalg import upper_factor
from compress.quant import codebooks, feedback, gptq, gptvq, refit
from compress.types import PackedWeight, Quantized, Stats, Stored
from helpers import problems

Settings = dict[str, int | float | bool | str]
TINY = [(64, 64), (24, 50), (96, 32), (33, 50), (50, 33), (3, 7), (1, 1), (1, 40), (40, 1)]


@pytest.fixture
def loop_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out all that comes behind the column loop."""
    monkeypatch.setattr(gptvq, "alternate", lambda layer, rounder, _: feedback.run(layer.weight, layer.factor, rounder))


def layer(rows: int = 32, columns: int = 64, seed: int = 0) -> tuple[Tensor, Stats]:
    return problems.random(rows, columns, seed=seed + 40), problems.stats(problems.inputs(4 * columns, columns, seed))


def quantize(weight: Tensor, stats: Stats, seed: int = 0, **settings: float | str) -> Quantized:
    config = gptvq.Config(**settings)  # type: ignore[arg-type]
    result = gptvq.quantize(weight, stats, config, seed)
    params = gptvq.plan_params(config, result.weight.shape)
    assert result.weight.params == params
    assert formats.nbytes(Stored("codebook", params), result.weight.shape) == result.weight.nbytes
    return result


def relative_loss(weight: Tensor, packed: PackedWeight, stats: Stats) -> float:
    zero = torch.zeros_like(weight)
    return problems.loss(weight, problems.decoded(packed), stats.hessian) / problems.loss(weight, zero, stats.hessian)


def same_bytes(a: PackedWeight, b: PackedWeight) -> bool:
    return a.params == b.params and all(torch.equal(tensor, b.tensors[key]) for key, tensor in a.tensors.items())


def stored_order(packed: PackedWeight) -> Tensor:
    return packed.tensors["order"].long() if packed.params.permuted else torch.arange(packed.shape[1])


def slow_loop(weight: Tensor, hessian: Tensor, packed: PackedWeight, damp: float) -> Tensor:
    """Quantized weight, columns in stored order and padded: each block to the nearest stored vector in its metric."""
    p = packed.params
    d, order = p.vector_dim, stored_order(packed)
    entries = codebook.entries(packed.tensors, p, 0).double()
    extra = -len(order) % d
    work = torch.nn.functional.pad(weight[:, order].double(), (0, extra))
    full = torch.nn.functional.pad(hessian[order][:, order].double(), (0, extra, 0, extra))
    full.diagonal()[len(order) :] = hessian.diagonal().double().mean()
    factor = problems.upper(problems.damped(full, damp))
    quantized = torch.zeros_like(work)
    for start in range(0, work.shape[1], d):
        block = slice(start, start + d)
        metric = factor[block, block]
        pushed = (work - quantized)[:, :start] @ factor[:start, block]
        target = work[:, block] + torch.linalg.solve(metric, pushed, left=False)
        for row in range(len(work)):
            stripe = 0 if p.group_columns == -1 else start // p.group_columns
            books = entries[stripe, 0 if p.group_rows == -1 else row // p.group_rows]
            nearest = ((target[row] - books) @ metric).square().sum(1).argmin()
            quantized[row, block] = books[nearest]
    return quantized[:, : len(order)]


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ((12, 64), {"vector_dim": 4, "bits": 5}),
        ((12, 50), {"vector_dim": 4, "bits": 5, "permute": False}),
        ((12, 50), {"vector_dim": 4, "bits": 4}),
        ((16, 64), {"vector_dim": 2, "bits": 4, "group_weights": 256}),
        ((9, 40), {"vector_dim": 1, "bits": 2, "group_weights": 80}),
    ],
    ids=str,
)
@pytest.mark.usefixtures("loop_only")
def test_the_loop_equals_the_slow_loop(
    shape: tuple[int, int], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gptvq, "STRIPE_COLUMNS", 16)
    weight, stats = layer(*shape)
    packed = quantize(weight, stats, damp=0.02, **settings).weight
    assert (packed.params.group_columns != -1) == ("group_weights" in settings)
    found = problems.decoded(packed)[:, stored_order(packed)]
    differ = ((found - slow_loop(weight, stats.hessian, packed, 0.02)).abs() > 1e-6).any(1)
    assert differ.sum() <= 1, f"rows {differ.nonzero().flatten().tolist()} differ"  # float32 may break one tie


@pytest.mark.usefixtures("loop_only")
@pytest.mark.parametrize("d", [1, 2, 4])
def test_the_codebook_is_learned_with_the_metric_of_the_loop(d: int) -> None:
    weight, stats = layer()
    packed = quantize(weight, stats, seed=3, vector_dim=d, bits=3, permute=False).weight
    factor = upper_factor(stats.hessian, 0.01).upper
    blocks = [slice(start, start + d) for start in range(0, 64, d)]
    values = torch.stack([weight[:, block] for block in blocks])[None]  # group, block, row, d
    vectors = codebooks.GroupedVectors(values, torch.stack([factor[block, block] for block in blocks]))
    learned = codebooks.learn(vectors, 8, 30, torch.Generator().manual_seed(3))
    expected = codebooks.round_entries(learned).entries
    assert torch.allclose(codebook.entries(packed.tensors, packed.params, 0)[0], expected, atol=1e-4)


def losses_of_steps(weight: Tensor, stats: Stats, monkeypatch: pytest.MonkeyPatch, **settings: float) -> list[float]:
    """Relative losses after the first loop and a refit, after another loop, after the sweeps."""
    losses = []
    for rounds, sweeps in ((0, 0), (2, 0), (1, 4)):
        monkeypatch.setattr(refit, "MORE_LOOPS", rounds)
        losses.append(relative_loss(weight, quantize(weight, stats, **settings, sweeps=sweeps).weight, stats))
    return losses


def test_what_each_step_buys(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, stats = layer(64, 128)
    settings: Settings = {"vector_dim": 2, "bits": 4, "permute": False}
    refitted, again, swept = losses_of_steps(weight, stats, monkeypatch, **settings)  # type: ignore[arg-type]
    monkeypatch.setattr(gptvq, "alternate", lambda layer, rounder, _: feedback.run(layer.weight, layer.factor, rounder))
    loop = relative_loss(weight, quantize(weight, stats, **settings).weight, stats)
    assert refitted < 0.995 * loop and again < 0.99 * refitted and swept < 0.92 * again


def test_it_beats_scalar_rounding_with_fewer_bytes() -> None:
    weight, stats = layer(128, 128)
    scalar = gptq.quantize(
        weight, stats, gptq.Config(bits=2, group_size=64, symmetric=False, static_groups=False, sweeps=3)
    ).weight
    vector = quantize(weight, stats, vector_dim=2, bits=4, group_weights=8192).weight
    assert vector.nbytes < scalar.nbytes
    assert relative_loss(weight, vector, stats) < 0.7 * relative_loss(weight, scalar, stats)


def test_a_stored_order_pays_where_few_inputs_carry_much() -> None:
    weight, _ = layer(64, 64)
    x = problems.random(400, 64)
    x[:, ::4] *= 8
    stats = problems.stats(x[:, torch.randperm(64, generator=torch.Generator().manual_seed(1))])
    plain, ordered = (quantize(weight, stats, bits=6, permute=permute).weight for permute in (False, True))
    assert relative_loss(weight, ordered, stats) < 0.75 * relative_loss(weight, plain, stats)


@pytest.mark.parametrize("columns", [7, 8, 50, 64])
def test_the_order_spreads_the_important_columns(columns: int) -> None:
    """Each position of a vector takes a run of the ranking; padding can only be at the end of the last vector."""
    hessian = torch.diag(torch.randperm(columns, generator=torch.Generator().manual_seed(0)).float() + 1)
    order = gptvq._order(torch.ones(columns, 8), hessian, gptvq.Config())
    assert order.sort().values.tolist() == list(range(columns))
    importance = hessian.diagonal()[order]
    blocks = -(-columns // 4)
    positions = [importance[p::4] for p in range(4)]
    for first, second in zip(positions, positions[1:], strict=False):
        assert first.min() > second.max()
    vectors = importance[: 4 * (blocks - 1)].view(-1, 4).mean(1)
    assert (vectors[:-1] >= vectors[1:]).all()


@pytest.mark.parametrize("shape", TINY, ids=str)
@pytest.mark.parametrize(
    "settings",
    [{}, {"vector_dim": 1, "bits": 2, "group_weights": 256}],
    ids=["d4", "d1"],
)
def test_tiny_and_odd_shapes(shape: tuple[int, int], settings: Settings) -> None:
    weight, stats = layer(*shape)
    before = weight.clone(), stats.hessian.clone()
    result = quantize(weight, stats, **settings)
    decoded = problems.decoded(result.weight)
    assert decoded.shape == shape and relative_loss(weight, result.weight, stats) < 0.3
    assert torch.equal(weight, before[0]) and torch.equal(stats.hessian, before[1])
    short = result.weight.params.bits[0] < gptvq.Config(**settings).bits  # type: ignore[arg-type]
    assert short == any("too few vectors" in note for note in result.notes)


def test_results_repeat_and_follow_the_seed() -> None:
    weight, stats = layer()
    state = torch.get_rng_state()
    first, second, other = (quantize(weight, stats, seed).weight for seed in (0, 0, 1))
    assert same_bytes(first, second) and not same_bytes(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, stats = layer()
    settings: Settings = {"vector_dim": 2, "bits": 4, "group_weights": 512}
    whole = quantize(weight, stats, **settings).weight
    monkeypatch.setattr(codebooks, "CPU_SCORES", 64)
    monkeypatch.setattr(codebooks, "VECTORS_TOGETHER", 1)
    parts = quantize(weight, stats, **settings).weight
    assert relative_loss(weight, parts, stats) == pytest.approx(relative_loss(weight, whole, stats), rel=0.02)


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


def test_dead_inputs_keep_something_of_their_weights() -> None:
    weight, stats = layer()
    stats.hessian[5], stats.hessian[:, 5] = 0, 0
    result = quantize(weight, stats, damp=0.01)
    error = (problems.decoded(result.weight)[:, 5] - weight[:, 5]).square().sum()
    assert error < 0.6 * weight[:, 5].square().sum() and "1 input channels" in result.notes[0]


def test_zero_weights_stay_zero() -> None:
    _, stats = layer()
    assert not problems.decoded(quantize(torch.zeros(32, 64), stats).weight).any()


@pytest.mark.parametrize(
    ("shape", "weights", "expected"),
    [
        ((4096, 4096), 65536, (256, 256)),
        ((4096, 4096), -1, (-1, -1)),
        ((256, 768), 65536, (256, -1)),
        ((768, 256), 65536, (-1, 256)),
        ((256, 256), 65536, (-1, -1)),
        ((100, 5000), 65536, (628, -1)),
        ((11008, 4096), 65536, (256, 256)),
    ],
)
def test_groups(shape: tuple[int, int], weights: int, expected: tuple[int, int]) -> None:
    params = gptvq.plan_params(gptvq.Config(group_weights=weights), shape)
    assert (params.group_columns, params.group_rows) == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bits", 0),
        ("bits", 13),
        ("vector_dim", 3),
        ("group_weights", 0),
        ("damp", 1),
    ],
)
def test_impossible_settings_are_refused(key: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"^{key} "):
        gptvq.Config(**{key: value})


def test_settings_of_earlier_versions_are_read_at_the_value_that_is_left() -> None:
    assert recipe.load("gptvq2bit", ["seeding=kmeans++", "svd_rank=0"]) == recipe.load("gptvq2bit")
    with pytest.raises(RecipeError, match=r"seeding was taken away and is always \"kmeans\+\+\"; remove the key"):
        recipe.load("gptvq2bit", ["quantize.seeding=mahalanobis"])
