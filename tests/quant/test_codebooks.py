"""Learners of codebooks against exhaustive and dense references in float64; refits; storage types."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import problems
from compress.quant import codebooks, refit
from compress.quant.codebooks import Vectors
from compress.quant.feedback import Objective


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def example(groups: int, blocks: int, count: int, d: int, weighted: bool = True) -> Vectors:
    factors = problems.random(blocks, d, d, seed=1).triu() + 2 * torch.eye(d)
    weights = problems.random(groups, blocks, count, seed=2).exp() if weighted else None
    return Vectors(problems.random(groups, blocks, count, d), factors, weights)


def distances(vectors: Vectors, entries: Tensor) -> Tensor:
    """(x - e) M (x - e)^T for all pairs, [groups, blocks, count, k], float64."""
    difference = vectors.values.double().unsqueeze(3) - entries.double()[:, None, None]
    metrics = vectors.metrics().double()
    return torch.einsum("gbnkd,bde,gbnke->gbnk", difference, metrics, difference)


def slow_em(vectors: Vectors, entries: Tensor, iterations: int) -> Tensor:
    """EM of one group in float64, member by member."""
    entries, metrics = entries.double().clone(), vectors.metrics().double()
    weights = torch.ones_like(vectors.values[..., 0]) if vectors.weights is None else vectors.weights
    for _ in range(iterations):
        index = distances(vectors, entries[None])[0].argmin(2)
        for k in range(len(entries)):
            pairs = (index == k).nonzero().tolist()
            matrix = sum((weights[0, b, n].double() * metrics[b] for b, n in pairs), torch.zeros_like(metrics[0]))
            total = sum(
                (weights[0, b, n].double() * metrics[b] @ vectors.values[0, b, n].double() for b, n in pairs),
                torch.zeros_like(entries[0]),
            )
            entries[k] = torch.linalg.solve(matrix, total)
    return entries


@pytest.mark.parametrize("scores", [1, 100, 1 << 19])
def test_nearest_is_exhaustive(scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codebooks, "SCORES", scores)
    points, entries = problems.random(3, 20, 4), problems.random(3, 16, 4, seed=1)
    index, score = codebooks.nearest(points, entries)
    squares = (points.double().unsqueeze(2) - entries.double().unsqueeze(1)).square().sum(3)
    assert torch.equal(index, squares.argmin(2))
    assert torch.allclose(score + points.square().sum(2), squares.amin(2).float(), atol=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("d", [1, 2, 4])
def test_em_equals_the_slow_reference(d: int, weighted: bool) -> None:
    vectors = example(1, 5, 60, d, weighted)
    start = vectors.values[0, :, 0][:4].clone()
    found = codebooks._em(vectors, start[None], 3)[0]
    assert torch.allclose(found.double(), slow_em(vectors, start, 3), atol=2e-5)


def test_scalar_factors_are_multiples_of_the_identity() -> None:
    vectors = example(2, 5, 60, 3)
    factors = torch.linspace(0.5, 2, 5)
    full = Vectors(vectors.values, factors[:, None, None] * torch.eye(3), vectors.weights)
    short = Vectors(vectors.values, factors, vectors.weights)
    for seeding in codebooks.SEEDINGS:
        a = codebooks.learn(full, 8, 5, seeding, generator())
        assert torch.allclose(a, codebooks.learn(short, 8, 5, seeding, generator()), atol=1e-4)


@pytest.mark.parametrize("seeding", codebooks.SEEDINGS)
def test_groups_are_learned_apart_and_chunks_change_nothing(seeding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = example(4, 3, 50, 2)
    whole = codebooks.learn(vectors, 8, 6, seeding, generator())
    monkeypatch.setattr(codebooks, "LEARNED", 1)
    monkeypatch.setattr(codebooks, "SCORES", 64)
    assert torch.allclose(codebooks.learn(vectors, 8, 6, seeding, generator()), whole, atol=1e-5)


@pytest.mark.parametrize("seeding", codebooks.SEEDINGS)
def test_the_same_seed_gives_the_same_entries(seeding: str) -> None:
    vectors = example(2, 3, 50, 4)
    first, second = (codebooks.learn(vectors, 8, 4, seeding, generator()) for _ in range(2))
    assert torch.equal(first, second)
    other = codebooks.learn(vectors, 8, 4, seeding, generator(1))
    assert torch.equal(first, other) == (seeding == "mahalanobis")


@pytest.mark.parametrize("seeding", codebooks.SEEDINGS)
def test_em_lowers_the_loss(seeding: str) -> None:
    vectors = example(1, 4, 200, 2, weighted=False)
    losses = [
        distances(vectors, codebooks.learn(vectors, 16, n, seeding, generator())).amin(3).sum().item()
        for n in (0, 1, 5, 30)
    ]
    assert losses[0] > 1.1 * losses[1] and losses[1] > losses[2] >= losses[3]


def test_entries_without_members_restart_at_the_worst_vectors() -> None:
    values = torch.cat([problems.random(30, 2) * 0.1, torch.tensor([[9.0, 9.0], [-9.0, 9.0]])])[None, None]
    vectors = Vectors(values, torch.ones(1))
    start = torch.cat([torch.zeros(1, 2), torch.full((3, 2), 100.0)])[None]
    found = codebooks._em(vectors, start, 10)
    assert distances(vectors, found).amin(3).max() < 0.5  # both far vectors have an entry of their own


GAUSSIAN = [(1, 2, 0.3634), (1, 4, 0.1177), (1, 8, 0.0346), (2, 16, 0.1077)]


@pytest.mark.parametrize(("d", "size", "expected"), [*GAUSSIAN, (2, 256, 0.00794), (4, 256, 0.0974)])
def test_distortion_of_gaussian_vectors(d: int, size: int, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One to four bits per weight of N(0, 1): the known distortions of k-means, within 2%, when EM may converge."""
    if d < 4:
        monkeypatch.setattr(codebooks, "CONVERGED", 1e-5)
    values = problems.random(1, 1, 65536, d)
    entries = codebooks.learn(Vectors(values, torch.ones(1)), size, 25 if d == 4 else 150, "kmeans++", generator())
    fresh = Vectors(problems.random(1, 1, 65536, d, seed=9), torch.ones(1))
    _, errors = codebooks.assign(fresh, entries)
    assert errors.mean().item() / d == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("seeding", codebooks.SEEDINGS)
def test_fewer_vectors_than_entries(seeding: str, count: int) -> None:
    vectors = Vectors(problems.random(2, 1, count, 4), torch.ones(1))
    entries = codebooks.learn(vectors, 8, 5, seeding, generator())
    assert torch.isfinite(entries).all()
    assert distances(vectors, entries).amin(3).max() < 1e-9


@pytest.mark.parametrize("seeding", codebooks.SEEDINGS)
def test_vectors_that_are_all_zero(seeding: str) -> None:
    entries = codebooks.learn(Vectors(torch.zeros(2, 3, 20, 4), torch.ones(3)), 8, 5, seeding, generator())
    assert not entries.any()


# Refits.


def layout_case(along_rows: bool, stages: int, scaled: bool) -> tuple[refit.Layout, Tensor, tuple[int, int]]:
    """Layout of a [12, 24] (in, out) matrix with 10 entries of two weights, entry 9 without members."""
    shape = (12, 24)
    blocks, units = (12, 12) if along_rows else (6, 24)
    index = torch.randint(0, 9, (stages, blocks, units), generator=generator())
    multiplier = problems.random(*shape, seed=4).exp() if scaled else None
    return refit.Layout(index, along_rows, multiplier), problems.random(10, 2, seed=5), shape


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("along_rows", [False, True])
def test_values_and_adjoint(along_rows: bool, stages: int, scaled: bool) -> None:
    layout, entries, shape = layout_case(along_rows, stages, scaled)
    values = layout.values(entries)
    for i in range(shape[0]):
        for j in range(shape[1]):
            block, unit, inner = (i, j // 2, j % 2) if along_rows else (i // 2, j, i % 2)
            wanted = sum(entries[layout.index[s, block, unit], inner].item() for s in range(stages))
            factor = 1.0 if layout.multiplier is None else layout.multiplier[i, j].item()
            assert values[i, j].item() == pytest.approx(wanted * factor, rel=1e-5)
    matrix = problems.random(*shape, seed=6)
    inner_products = (values * matrix).sum(), (entries * layout.adjoint(matrix, entries)).sum()
    assert inner_products[0].item() == pytest.approx(inner_products[1].item(), rel=1e-4)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("along_rows", [False, True])
def test_refit_is_least_squares(along_rows: bool, stages: int, scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refit, "TOLERANCE", 1e-7)
    layout, entries, shape = layout_case(along_rows, stages, scaled)
    weight = problems.random(*shape, seed=7)
    hessian = problems.stats(problems.inputs(60, shape[0])).hessian
    damping = 0.01 * hessian.diagonal().mean().item()
    damped = problems.damped(hessian, 0.01)
    found = refit.refit(Objective(weight, hessian, damping), layout, entries, 200)
    units = torch.eye(entries.numel()).view(-1, *entries.shape)
    design = torch.stack([layout.values(unit).flatten() for unit in units], 1).double()  # weights, unknowns
    upper = problems.upper(damped)
    transformed = (upper.T @ design.view(*shape, -1).flatten(1)).view(design.shape)
    best = torch.linalg.lstsq(transformed, (upper.T @ weight.double()).flatten(), driver="gelsd").solution
    least = problems.loss(weight.T, (design @ best).view(shape).T, damped)
    assert problems.loss(weight.T, layout.values(found).T, damped) == pytest.approx(least, rel=1e-4)
    assert torch.equal(found[9], entries[9])  # no members: stays


def test_every_step_of_a_refit_lowers_the_loss() -> None:
    layout, entries, shape = layout_case(False, 1, False)
    weight = problems.random(*shape, seed=7)
    hessian = problems.stats(problems.inputs(60, shape[0])).hessian
    found = [refit.refit(Objective(weight, hessian, 0.1), layout, entries, steps) for steps in range(5)]
    losses = [
        problems.loss(weight.T, layout.values(e).T, hessian.double() + 0.1 * torch.eye(shape[0], dtype=torch.float64))
        for e in found
    ]
    assert torch.equal(found[0], entries)
    assert all(b < a for a, b in zip(losses, losses[1:], strict=False))


@dataclasses.dataclass(frozen=True)
class Factoring:
    """16 x 30 weights at 2 bits, a codebook for each 8 columns of a row, of rank 2."""

    layer: Objective
    layout: refit.Layout
    left: Tensor  # [groups, 2]
    right: Tensor  # [2, k]

    def loss(self, entries: Tensor) -> float:
        damped = self.layer.hessian.double() + self.layer.damping * torch.eye(16, dtype=torch.float64)
        return problems.loss(self.layer.weight.T, self.layout.values(entries.reshape(-1, 1)).T, damped)


def factoring(scaled: bool = False) -> Factoring:
    book = torch.arange(16).unsqueeze(1) // 8 * 30 + torch.arange(30)
    index = book * 4 + torch.randint(0, 4, (16, 30), generator=generator())
    layout = refit.Layout(index.unsqueeze(0), False, problems.random(16, 30, seed=4).exp() if scaled else None)
    hessian = problems.stats(problems.inputs(60, 16)).hessian
    weight, damping = problems.random(16, 30, seed=7), 0.01 * hessian.diagonal().mean().item()
    return Factoring(
        Objective(weight, hessian, damping), layout, problems.random(60, 2, seed=8), problems.random(2, 4, seed=9)
    )


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_refit_of_a_factor_is_least_squares(side: str, scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refit, "TOLERANCE", 1e-8)
    f = factoring(scaled)
    across = dataclasses.replace(f.layout, index=f.layout.index % 4 * 60 + f.layout.index // 4)
    start, linear = (f.left, refit.Spanned(f.layout, f.right))
    if side == "right":
        start, linear = f.right.T.contiguous(), refit.Spanned(across, f.left.T)
    found = refit.refit(f.layer, linear, start, 400)
    units = torch.eye(start.numel()).view(-1, *start.shape)
    design = torch.stack([linear.values(unit).flatten() for unit in units], 1).double()  # weights, unknowns
    upper = problems.upper(problems.damped(f.layer.hessian, 0.01))
    transformed = (upper.T @ design.view(16, -1)).view(design.shape)
    wanted = (upper.T @ f.layer.weight.double()).flatten()
    best = torch.linalg.lstsq(transformed, wanted, driver="gelsd").solution
    least = (transformed @ best - wanted).square().sum().item()
    entries = found @ f.right if side == "left" else f.left @ found.T
    assert f.loss(entries) == pytest.approx(least, rel=1e-4)
    assert f.loss(f.left @ f.right) > 1.5 * least
    matrix = problems.random(16, 30, seed=6)
    products = (linear.values(start) * matrix).sum(), (start * linear.adjoint(matrix, start)).sum()
    assert products[0].item() == pytest.approx(products[1].item(), rel=1e-4)


def test_factors_start_from_the_truncated_decomposition() -> None:
    f, entries = factoring(), problems.random(60, 4, 1)
    books = refit.refit_factors(f.layer, f.layout, entries, 2, 0)
    u, s, vh = torch.linalg.svd(entries.squeeze(2))
    assert torch.allclose(books.entries.squeeze(2), u[:, :2] * s[:2] @ vh[:2], atol=0.02)
    assert books.right is not None and torch.linalg.matrix_rank(books.entries.squeeze(2).double(), rtol=1e-5) == 2


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_fitted_factors_beat_the_truncated_decomposition(rank: int) -> None:
    f = factoring()
    entries = refit.refit(f.layer, f.layout, torch.zeros(240, 1), 50).view(60, 4, 1)
    plain, fitted = (refit.refit_factors(f.layer, f.layout, entries, rank, steps).entries for steps in (0, 20))
    whole = f.loss(entries)
    assert whole * 0.999 < f.loss(fitted) < (1.01 * whole if rank == 4 else 0.9 * f.loss(plain))


def test_refit_of_a_perfect_fit_and_of_zeros() -> None:
    layout, entries, shape = layout_case(False, 1, False)
    hessian = problems.stats(problems.inputs(60, shape[0])).hessian
    exact = refit.refit(Objective(layout.values(entries), hessian, 0.1), layout, entries, 10)
    assert torch.allclose(exact, entries, atol=1e-5)
    zero = refit.refit(Objective(torch.zeros(shape), hessian, 0.1), layout, torch.zeros_like(entries), 10)
    assert not zero.any()


# Storage types.


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize("dtype", ["int8", "float16"])
def test_stored_entries_are_the_nearest_of_their_type(dtype: str, size: float) -> None:
    entries = problems.random(5, 16, 4) * size
    books = codebooks.rounded(entries, dtype)
    largest = entries.abs().amax((1, 2), keepdim=True)
    step = 2.0**-10 if dtype == "float16" else 1 / 127
    assert ((books.entries - entries).abs() <= largest * step * 0.51 + 2.0**-24).all()
    assert books.stored.dtype == getattr(torch, dtype) and (books.scale is None) == (dtype == "float16")
    scale = 1.0 if books.scale is None else books.scale.float()[:, None, None]
    assert torch.equal(books.entries, books.stored.float() * scale)


def test_stored_factors_are_the_nearest_of_their_type() -> None:
    left, right = problems.random(50, 3) * torch.tensor([1.0, 1e-3, 1e2]), problems.random(3, 8, seed=1)
    books = codebooks.factored(codebooks.rounded(left.T.unsqueeze(2), "int8"), right)
    assert books.scale is not None and books.right is not None
    assert (books.stored.dtype, books.scale.dtype, books.right.dtype) == (torch.int8, torch.float16, torch.float16)
    stored = books.stored.float() * books.scale.float()
    assert ((stored - left).abs() <= left.abs().amax(0) / 127 * 0.51 + 2.0**-24).all()
    assert torch.equal(books.right, right.half())
    assert torch.allclose(books.entries.squeeze(2), stored @ right.half().float(), rtol=1e-5, atol=1e-6)


def test_stored_zeros_are_zeros() -> None:
    for dtype in ("int8", "float16"):
        assert not codebooks.rounded(torch.zeros(2, 4, 2), dtype).entries.any()


@pytest.mark.parametrize(("vectors", "bits"), [(1, 1), (4, 1), (8, 2), (511, 7), (512, 8), (1 << 20, 19)])
def test_the_longest_code(vectors: int, bits: int) -> None:
    assert codebooks.most_bits(vectors) == bits


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("codebook_dtype", "int4"),
        ("seeding", "random"),
        ("iterations", -1),
        ("rounds", -1),
        ("sweeps", -1),
        ("refit_steps", -1),
        ("damp", 1.0),
        ("damp", -0.1),
    ],
)
def test_impossible_settings_are_refused(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{key} "):
        codebooks.SearchConfig(**{key: value})  # type: ignore[arg-type]
