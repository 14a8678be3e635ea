"""How heads of keys and values become one: against slow float64 references, and what merging must leave as it is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from compress.papers.transform import kv_heads
from compress.papers.transform.kv_heads import ChannelLayout, HeadMoments, HeadWeights, Merge, Shared

HEADS, REPEATS, SIZE, HIDDEN, TOKENS = 4, 2, 6, 10, 50
HALVES = ChannelLayout(
    torch.tensor([[0, 2], [1, 3]]), torch.tensor([4, 5])
)  # two pairs that are turned, two channels that stay
THETA = torch.tensor([1.0, 0.1], dtype=torch.float64)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights(heads: int = HEADS) -> HeadWeights:
    """Projections with a column for the bias."""
    every = heads * REPEATS
    return HeadWeights(
        random(every, SIZE, HIDDEN + 1),
        random(heads, SIZE, HIDDEN + 1, seed=1),
        random(heads, SIZE, HIDDEN + 1, seed=2),
        random(every, HIDDEN, SIZE, seed=3),
    )


def rows(x: Tensor, heads: Tensor) -> Tensor:
    """x [tokens, hidden] with a one behind it, through heads [n, d, hidden + 1] -> [n, tokens, d]."""
    return torch.cat((x, torch.ones(len(x), 1, dtype=x.dtype)), 1) @ heads.mT


def turned(x: Tensor, layout: ChannelLayout) -> Tensor:
    """The rotary embedding, channel by channel: x [n, tokens, d]."""
    found = x.clone()
    for (a, b), theta in zip(layout.pairs.tolist(), THETA, strict=True):
        angle = torch.arange(x.shape[1]) * theta
        found[..., a] = x[..., a] * angle.cos() - x[..., b] * angle.sin()
        found[..., b] = x[..., b] * angle.cos() + x[..., a] * angle.sin()
    return found


def attended(x: Tensor, w: HeadWeights, layout: ChannelLayout) -> Tensor:
    """Causal attention of every query head, summed: [tokens, hidden]."""
    q, k, v = turned(rows(x, w.queries), layout), turned(rows(x, w.keys), layout), rows(x, w.values)
    mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    repeats, total = len(q) // len(k), torch.zeros_like(x)
    for head in range(len(q)):
        scores = (q[head] @ k[head // repeats].T).masked_fill(~mask, -torch.inf)
        total += scores.softmax(-1) @ v[head // repeats] @ w.outputs[head].T
    return total


def found_by(x: Tensor, w: HeadWeights, layout: ChannelLayout) -> HeadMoments:
    q, k, v = (rows(x, part).transpose(0, 1) for part in w[:3])
    outputs = kv_heads.read_by(w.outputs, len(w.keys))
    return kv_heads.moments(q, k, v, layout, len(w.queries) // len(w.keys))._replace(outputs=outputs)


def merge(x: Tensor, w: HeadWeights, groups: Sequence[Sequence[int]], layout: ChannelLayout = HALVES) -> HeadWeights:
    found = found_by(x, w, layout)
    return kv_heads.merge_weights(w, layout, groups, [kv_heads.fitted_merge(found.of(group)) for group in groups])


def multiples(w: HeadWeights, layout: ChannelLayout = HALVES) -> HeadWeights:
    """The same with heads 1 and 3 made of heads 0 and 2: pairs of keys times complex numbers, values times a matrix."""
    keys, values = w.keys.clone(), w.values.clone()
    for head in (1, 3):
        factors = torch.complex(random(len(layout.pairs), seed=head), random(len(layout.pairs), seed=head + 9))
        pairs = layout.pairs
        turned_by = factors[:, None] * torch.complex(w.keys[head - 1, pairs[:, 0]], w.keys[head - 1, pairs[:, 1]])
        keys[head, pairs[:, 0]], keys[head, pairs[:, 1]] = turned_by.real, turned_by.imag
        free = len(layout.free)
        keys[head, layout.free] = random(free, free, seed=head) @ w.keys[head - 1, layout.free]
        values[head] = random(SIZE, SIZE, seed=head) @ w.values[head - 1]
    return w._replace(keys=keys, values=values)


def test_heads_that_are_multiples_of_each_other_are_merged_without_loss() -> None:
    x, w = random(TOKENS, HIDDEN, seed=5), multiples(weights())
    expected = attended(x, w, HALVES)
    found = merge(x, w, [[0, 1], [2, 3]])
    assert found.keys.shape == (2, SIZE, HIDDEN + 1) and found.queries.shape == w.queries.shape
    torch.testing.assert_close(attended(x, found, HALVES), expected, rtol=1e-7, atol=1e-7)
    unlike = attended(x, merge(x, w, [[0, 2], [1, 3]]), HALVES)  # what is no multiple is not
    assert (unlike - expected).norm() > 0.1 * expected.norm()


def test_equal_heads_give_themselves() -> None:
    w = weights()
    w = w._replace(keys=w.keys[[0, 0, 1, 1]], values=w.values[[0, 0, 1, 1]])
    found = merge(random(TOKENS, HIDDEN, seed=5), w, [[0, 1], [2, 3]])
    for now, before in zip(found, (w.queries, w.keys[[0, 2]], w.values[[0, 2]], w.outputs), strict=True):
        torch.testing.assert_close(now, before, rtol=1e-6, atol=1e-6)


def test_heads_that_change_places_change_nothing_else() -> None:
    x, w = random(TOKENS, HIDDEN, seed=5), weights()
    ones = Shared(torch.ones(1, 2, dtype=torch.complex128), torch.ones(1, 2, dtype=torch.complex128))
    eyes = [Shared(*[torch.eye(n, dtype=torch.float64)[None]] * 2) for n in (2, SIZE)]
    order = [[2], [0], [3], [1]]
    found = kv_heads.merge_weights(w, HALVES, order, [Merge(ones, *eyes)] * HEADS)
    assert torch.equal(found.keys, w.keys[[2, 0, 3, 1]])
    assert torch.equal(found.queries, w.queries[[4, 5, 0, 1, 6, 7, 2, 3]])
    torch.testing.assert_close(attended(x, found, HALVES), attended(x, w, HALVES))


def test_keys_are_those_of_the_best_search() -> None:
    """No other complex factors lose less, in the metric of the queries: found by alternating least squares."""
    second = torch.complex(random(3, 20, 3), random(3, 20, 3, seed=1))  # pair, token, head
    sizes = random(3, 3, seed=2).square() + 0.1
    shared = kv_heads.rank_one(second.mT @ second.conj(), sizes)
    for pair in range(3):
        keys, size = second[pair], sizes[pair]
        read = shared.read[:, pair]
        one = keys @ shared.write[:, pair]
        error = (size * (keys - one[:, None] * read).abs().square().sum(0)).sum()
        best = torch.inf
        for start in range(5):
            a = torch.complex(random(3, seed=start), random(3, seed=start + 50))
            for _ in range(300):
                c = (keys * a.conj() * size).sum(1) / (a.abs().square() * size).sum()
                a = (keys * c.conj()[:, None]).sum(0) / c.abs().square().sum()
            best = min(best, (size * (keys - c[:, None] * a).abs().square().sum(0)).sum().item())
        assert error.item() == pytest.approx(best, rel=1e-6)
        assert read.abs().square().mean().item() == pytest.approx(1)


def test_values_are_those_of_the_singular_vectors() -> None:
    """Without a metric, the error is the sum of the squares of the smallest singular values of the caches."""
    x = random(TOKENS, 3, SIZE)
    second = (x.flatten(1).T @ x.flatten(1)).view(3, SIZE, 3, SIZE)
    eyes = torch.eye(SIZE, dtype=torch.float64).expand(3, -1, -1)
    for metric in (eyes, random(3, SIZE, SIZE, seed=4) @ random(3, SIZE, SIZE, seed=4).mT + 2 * eyes):
        shared = kv_heads.leading(second, metric)
        one = torch.einsum("ide,nie->nd", shared.write, x)
        left = x - torch.einsum("ide,ne->nid", shared.read, one)
        error = torch.einsum("nid,ide,nie->", left, metric, left)
        root = torch.linalg.cholesky(metric)
        expected = torch.linalg.svdvals(torch.einsum("nid,ide->nie", x, root).flatten(1))[SIZE:].square().sum()
        torch.testing.assert_close(error, expected, rtol=1e-6, atol=0)


def test_no_map_beyond_complex_factors_passes_the_rotary_embedding() -> None:
    """A map of heads commutes with the turns of all positions only if it is a complex number for each pair."""
    size = 2 * len(THETA)
    channels = [f"{part}{pair}" for part in "ri" for pair in range(len(THETA))]
    turns = []
    for n in (1, 2):
        turn = torch.zeros(size, size, dtype=torch.float64)
        for pair, theta in enumerate(THETA.tolist()):
            r, i = channels.index(f"r{pair}"), channels.index(f"i{pair}")
            cos, sin = torch.tensor(n * theta).cos(), torch.tensor(n * theta).sin()
            turn[r, r], turn[r, i], turn[i, r], turn[i, i] = cos, -sin, sin, cos
        turns.append(turn)
    eye = torch.eye(size, dtype=torch.float64)
    conditions = torch.cat([torch.kron(turn, eye) - torch.kron(eye, turn.T.contiguous()) for turn in turns])
    free = size * size - int(torch.linalg.matrix_rank(conditions))
    assert free == 2 * len(THETA)  # a real and an imaginary part for each pair


def test_what_is_lost_is_what_the_errors_are() -> None:
    x, w = random(TOKENS, HIDDEN, seed=5), weights()
    found = found_by(x, w, HALVES)
    groups = [[0, 1], [2, 3]]
    merges = [kv_heads.fitted_merge(found.of(group)) for group in groups]
    lost = kv_heads.lost_of(merges, groups, found)
    error = whole = 0.0
    for group, each in zip(groups, merges, strict=True):
        values = rows(x, w.values[group])  # head, token, channel
        one = (each.values.write @ values.mT).sum(0)
        left = values - (each.values.read @ one).mT
        for n, head in enumerate(group):
            for query in range(REPEATS * head, REPEATS * (head + 1)):
                error += (left[n] @ w.outputs[query].T).square().sum().item()
                whole += (values[n] @ w.outputs[query].T).square().sum().item()
    assert lost.values == pytest.approx(error / whole, rel=1e-9)
    assert 0 < lost.keys < 1
    mean = kv_heads.lost_of([kv_heads.mean_merge(found.of(group)) for group in groups], groups, found)
    plain = kv_heads.lost_of([kv_heads.fitted_merge(found.of(group), False) for group in groups], groups, found)
    assert lost.keys < plain.keys and lost.values < plain.values < mean.values and lost.keys < mean.keys


def test_nothing_seen_gives_finite_heads() -> None:
    w = weights()
    found = found_by(torch.zeros(TOKENS, HIDDEN, dtype=torch.float64), w._replace(values=0 * w.values), HALVES)
    found = found._replace(keys=0 * found.keys, queries=0 * found.queries, free_queries=0 * found.free_queries)
    each = kv_heads.fitted_merge(found.of([0, 1]))
    assert all(torch.isfinite(torch.view_as_real(x) if x.is_complex() else x).all() for part in each for x in part)
