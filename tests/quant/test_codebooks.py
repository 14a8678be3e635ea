"""Learners of codebooks against exhaustive and dense references in float64; refits; storage types."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compress.quant import codebooks, refit
from compress.quant.codebooks import GroupedVectors
from compress.quant.feedback import Objective
from helpers import problems


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def example(groups: int, blocks: int, count: int, d: int) -> GroupedVectors:
    factors = problems.random(blocks, d, d, seed=1).triu() + 2 * torch.eye(d)
    return GroupedVectors(problems.random(groups, blocks, count, d), factors)


def distances(vectors: GroupedVectors, entries: Tensor) -> Tensor:
    """(x - e) M (x - e)^T for all pairs, [groups, blocks, count, k], float64."""
    difference = vectors.values.double().unsqueeze(3) - entries.double()[:, None, None]
    metrics = vectors.metrics().double()
    return torch.einsum("gbnkd,bde,gbnke->gbnk", difference, metrics, difference)


def slow_em(vectors: GroupedVectors, entries: Tensor, iterations: int) -> Tensor:
    """EM of one group in float64, member by member."""
    entries, metrics = entries.double().clone(), vectors.metrics().double()
    for _ in range(iterations):
        index = distances(vectors, entries[None])[0].argmin(2)
        for k in range(len(entries)):
            pairs = (index == k).nonzero().tolist()
            matrix = sum((metrics[b] for b, _ in pairs), torch.zeros_like(metrics[0]))
            total = sum(
                (metrics[b] @ vectors.values[0, b, n].double() for b, n in pairs),
                torch.zeros_like(entries[0]),
            )
            entries[k] = torch.linalg.solve(matrix, total)
    return entries


@pytest.mark.parametrize("scores", [1, 100, 1 << 19])
def test_nearest_is_exhaustive(scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codebooks, "CPU_SCORES", scores)
    points, entries = problems.random(3, 20, 4), problems.random(3, 16, 4, seed=1)
    index, score = codebooks.nearest(points, entries)
    squares = (points.double().unsqueeze(2) - entries.double().unsqueeze(1)).square().sum(3)
    assert torch.equal(index, squares.argmin(2))
    assert torch.allclose(score + points.square().sum(2), squares.amin(2).float(), atol=1e-5)


@pytest.mark.parametrize("d", [1, 2, 4])
def test_em_equals_the_slow_reference(d: int) -> None:
    vectors = example(1, 5, 60, d)
    start = vectors.values[0, :, 0][:4].clone()
    found = codebooks._em(vectors, start[None], 3)[0]
    assert torch.allclose(found.double(), slow_em(vectors, start, 3), atol=2e-5)


def test_scalar_factors_are_multiples_of_the_identity() -> None:
    vectors = example(2, 5, 60, 3)
    factors = torch.linspace(0.5, 2, 5)
    full = GroupedVectors(vectors.values, factors[:, None, None] * torch.eye(3))
    short = GroupedVectors(vectors.values, factors)
    learned = codebooks.learn(full, 8, 5, generator())
    assert torch.allclose(learned, codebooks.learn(short, 8, 5, generator()), atol=1e-4)


def test_groups_are_learned_apart_and_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = example(4, 3, 50, 2)
    whole = codebooks.learn(vectors, 8, 6, generator())
    monkeypatch.setattr(codebooks, "VECTORS_TOGETHER", 1)
    monkeypatch.setattr(codebooks, "CPU_SCORES", 64)
    assert torch.allclose(codebooks.learn(vectors, 8, 6, generator()), whole, atol=1e-5)


def test_the_same_seed_gives_the_same_entries() -> None:
    vectors = example(2, 3, 50, 4)
    first, second = (codebooks.learn(vectors, 8, 4, generator()) for _ in range(2))
    assert torch.equal(first, second)
    other = codebooks.learn(vectors, 8, 4, generator(1))
    assert not torch.equal(first, other)


def test_em_lowers_the_loss() -> None:
    vectors = example(1, 4, 200, 2)
    losses = [
        distances(vectors, codebooks.learn(vectors, 16, n, generator())).amin(3).sum().item() for n in (0, 1, 5, 30)
    ]
    assert losses[0] > 1.1 * losses[1] and losses[1] > losses[2] >= losses[3]


def test_entries_without_members_restart_at_the_worst_vectors() -> None:
    values = torch.cat([problems.random(30, 2) * 0.1, torch.tensor([[9.0, 9.0], [-9.0, 9.0]])])[None, None]
    vectors = GroupedVectors(values, torch.ones(1))
    start = torch.cat([torch.zeros(1, 2), torch.full((3, 2), 100.0)])[None]
    found = codebooks._em(vectors, start, 10)
    assert distances(vectors, found).amin(3).max() < 0.5  # both far vectors have an entry of their own


GAUSSIAN = [(1, 2, 0.3634), (1, 4, 0.1177), (1, 8, 0.0346), (2, 16, 0.1077)]


@pytest.mark.parametrize(("d", "size", "expected"), [*GAUSSIAN, (2, 256, 0.00794), (4, 256, 0.0974)])
def test_distortion_of_gaussian_vectors(d: int, size: int, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One to four bits per weight of N(0, 1): the known distortions of k-means, within 2%, when EM may converge."""
    if d < 4:
        monkeypatch.setattr(codebooks, "EM_TOLERANCE", 1e-5)
    values = problems.random(1, 1, 65536, d)
    entries = codebooks.learn(GroupedVectors(values, torch.ones(1)), size, 25 if d == 4 else 150, generator())
    fresh = GroupedVectors(problems.random(1, 1, 65536, d, seed=9), torch.ones(1))
    _, errors = codebooks.assign(fresh, entries)
    assert errors.mean().item() / d == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_fewer_vectors_than_entries(count: int) -> None:
    vectors = GroupedVectors(problems.random(2, 1, count, 4), torch.ones(1))
    entries = codebooks.learn(vectors, 8, 5, generator())
    assert torch.isfinite(entries).all()
    assert distances(vectors, entries).amin(3).max() < 1e-9


def test_vectors_that_are_all_zero() -> None:
    entries = codebooks.learn(GroupedVectors(torch.zeros(2, 3, 20, 4), torch.ones(3)), 8, 5, generator())
    assert not entries.any()


# Refits.


def layout_case(along_rows: bool) -> tuple[refit.EntryLayout, Tensor, tuple[int, int]]:
    """Layout of a [12, 24] (in, out) matrix with 10 entries of two weights, entry 9 without members."""
    blocks, units = (12, 12) if along_rows else (6, 24)
    index = torch.randint(0, 9, (blocks, units), generator=generator())
    return refit.EntryLayout(index, along_rows), problems.random(10, 2, seed=5), (12, 24)


@pytest.mark.parametrize("along_rows", [False, True])
def test_values_and_adjoint(along_rows: bool) -> None:
    layout, entries, shape = layout_case(along_rows)
    values = layout.values(entries)
    for i in range(shape[0]):
        for j in range(shape[1]):
            block, unit, inner = (i, j // 2, j % 2) if along_rows else (i // 2, j, i % 2)
            assert values[i, j] == entries[layout.index[block, unit], inner]
    matrix = problems.random(*shape, seed=6)
    inner_products = (values * matrix).sum(), (entries * layout.adjoint(matrix, entries)).sum()
    assert inner_products[0].item() == pytest.approx(inner_products[1].item(), rel=1e-4)


@pytest.mark.parametrize("along_rows", [False, True])
def test_refit_is_least_squares(along_rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refit, "REFIT_TOLERANCE", 1e-7)
    monkeypatch.setattr(refit, "MAX_REFIT_STEPS", 200)
    layout, entries, shape = layout_case(along_rows)
    weight = problems.random(*shape, seed=7)
    hessian = problems.stats(problems.inputs(60, shape[0])).hessian
    damping = 0.01 * hessian.diagonal().mean().item()
    damped = problems.damped(hessian, 0.01)
    fitted = refit.refit(Objective(weight, hessian, damping), layout, entries)
    units = torch.eye(entries.numel()).view(-1, *entries.shape)
    design = torch.stack([layout.values(unit).flatten() for unit in units], 1).double()  # weights, unknowns
    upper = problems.upper(damped)
    transformed = (upper.T @ design.view(*shape, -1).flatten(1)).view(design.shape)
    best = torch.linalg.lstsq(transformed, (upper.T @ weight.double()).flatten(), driver="gelsd").solution
    least = problems.loss(weight.T, (design @ best).view(shape).T, damped)
    assert problems.loss(weight.T, layout.values(fitted).T, damped) == pytest.approx(least, rel=1e-4)
    assert torch.equal(fitted[9], entries[9])  # no members: stays


def test_every_step_of_a_refit_lowers_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, entries, shape = layout_case(False)
    weight = problems.random(*shape, seed=7)
    hessian = problems.stats(problems.inputs(60, shape[0])).hessian
    fitted = []
    for steps in range(5):
        monkeypatch.setattr(refit, "MAX_REFIT_STEPS", steps)
        fitted.append(refit.refit(Objective(weight, hessian, 0.1), layout, entries))
    losses = [
        problems.loss(weight.T, layout.values(e).T, hessian.double() + 0.1 * torch.eye(shape[0], dtype=torch.float64))
        for e in fitted
    ]
    assert torch.equal(fitted[0], entries)
    assert all(b < a for a, b in zip(losses, losses[1:], strict=False))


def test_refit_of_a_perfect_fit_and_of_zeros() -> None:
    layout, entries, shape = layout_case(False)
    hessian = problems.stats(problems.inputs(60, shape[0])).hessian
    exact = refit.refit(Objective(layout.values(entries), hessian, 0.1), layout, entries)
    assert torch.allclose(exact, entries, atol=1e-5)
    zero = refit.refit(Objective(torch.zeros(shape), hessian, 0.1), layout, torch.zeros_like(entries))
    assert not zero.any()


# Storage types.


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3])
def test_stored_entries_are_the_nearest_of_their_type(size: float) -> None:
    entries = problems.random(5, 16, 4) * size
    books = codebooks.round_entries(entries)
    largest = entries.abs().amax((1, 2), keepdim=True)
    assert ((books.entries - entries).abs() <= largest / 127 * 0.51 + 2.0**-24).all()
    assert (books.stored.dtype, books.scale.dtype) == (torch.int8, torch.float16)
    assert torch.equal(books.entries, books.stored.float() * books.scale.float()[:, None, None])


def test_stored_zeros_are_zeros() -> None:
    assert not codebooks.round_entries(torch.zeros(2, 4, 2)).entries.any()


@pytest.mark.parametrize(("vectors", "bits"), [(1, 1), (4, 1), (8, 2), (511, 7), (512, 8), (1 << 20, 19)])
def test_the_longest_code(vectors: int, bits: int) -> None:
    assert codebooks.most_bits(vectors) == bits


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("iterations", -1),
        ("sweeps", -1),
        ("damp", 1.0),
        ("damp", -0.1),
    ],
)
def test_impossible_settings_are_refused(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{key} "):
        codebooks.SearchConfig(**{key: value})  # type: ignore[arg-type]
