"""Compute how several key/value heads become one, and fold that into the weights around them (arXiv 2406.07056).

t heads of keys k_i and of values v_i become one head each: c = sum_i E_i k_i is cached, and what reads head i reads
A_i c in its place. E goes into the projections of keys and values, A into those of queries and into the output.

Values: any A_i, E_i of width d x d. Of all such, A E is the projection on the d leading directions of the values that
a calibration text gives, in the metric of what the output makes of them: B_i = sum_h O_h^T O_h over the query heads h
that read head i.

Keys pass the rotary embedding between projection and cache, which turns the two channels of a pair j at position n like
one complex number, by e^(i n w_j). A_i commutes with that for all n if and only if it is, for each pair, one complex
number a_ij (a 2 x 2 block of rotation and scale); a map between pairs of different w_j commutes with nothing. So for
each pair the t complex sequences k_ij are approximated by a_ij c_j, which is the leading eigenvector of a t x t
Hermitian matrix: that of their second moments, in which the turns cancel, weighed by how large the queries are that
read them. A score Re(conj(q) a c) is Re(conj(conj(a) q) c): conj(a_ij) is folded into the queries' rows. Channels that
no position turns are treated like values.

All is float64. A factor that c and A may exchange is chosen so that equal heads give their mean, read as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import NamedTuple

import torch
from torch import Tensor

Place = tuple[int, int]  # of a head: its group, its number there

MIN_METRIC_SHARE = (
    1e-6  # no weight of a metric is less than this share of the mean: a head that nothing reads stays finite
)
STEEP = 30.0  # condition number up to which the mean of what reads a head is made the identity


class HeadWeights(NamedTuple):
    """The projections of one attention, by head, float64; a bias is one more column."""

    queries: Tensor  # [heads, head_dim, hidden (+ 1)]; head i * r + j reads key/value head i, of h, r = heads / h
    keys: Tensor  # [h, head_dim, hidden (+ 1)]
    values: Tensor  # [h, head_dim, hidden (+ 1)]
    outputs: Tensor  # [heads, out, head_dim]


class ChannelLayout(NamedTuple):
    """Which channels of a head of keys are turned together."""

    pairs: Tensor  # [pairs, 2] int64
    free: Tensor  # [n] int64: those that no position turns


class HeadMoments(NamedTuple):
    """Second moments over tokens, sums or means, of h key/value heads."""

    keys: Tensor  # [pairs, h, h] complex128: of k_i conj(k_j)
    queries: Tensor  # [pairs, h] float64: of |q|^2, over the query heads of each head
    free_keys: Tensor  # [h, n, h, n] float64
    free_queries: Tensor  # [h, n, n] float64
    values: Tensor  # [h, head_dim, h, head_dim] float64
    outputs: Tensor  # [h, head_dim, head_dim] float64: sum of O^T O over the query heads of each head; no moment

    def of(self, heads: Sequence[int]) -> HeadMoments:
        """Return those of some heads, in this order."""
        i = torch.tensor(heads)
        return HeadMoments(
            self.keys[:, i][:, :, i], self.queries[:, i], self.free_keys[i][:, :, i], self.free_queries[i],
            self.values[i][:, :, i], self.outputs[i],
        )  # fmt: skip


class Shared(NamedTuple):
    """How t heads are written as one and read from it: c = sum_i write_i x_i, x_i is about read_i c."""

    write: Tensor  # [t, pairs] complex128, or [t, n, n] float64
    read: Tensor  # the same


class Merge(NamedTuple):
    """How t key/value heads become one."""

    keys: Shared  # of pairs
    free: Shared
    values: Shared


class LostShares(NamedTuple):
    """Shares of the squares, in the metric of what reads them, that merged heads do not give; of a layer, or a part."""

    keys: float
    values: float


def moments(queries: Tensor, keys: Tensor, values: Tensor, layout: ChannelLayout, repeats: int) -> HeadMoments:
    """Sum over tokens; queries [tokens, heads, head_dim], keys, values [tokens, h, head_dim] float32 or float64.

    Keys and queries may be those before the rotary embedding or behind it. `outputs` is left empty.
    """
    k, q = (_complex(x, layout.pairs).movedim(2, 0) for x in (keys, queries))  # pair, token, head
    sizes = (q.real.square() + q.imag.square()).sum(1, dtype=torch.float64).unflatten(1, (-1, repeats)).sum(-1)
    free, reading = keys[..., layout.free], queries[..., layout.free]
    read = torch.einsum("nhrc,nhrd->hcd", *[reading.unflatten(1, (-1, repeats))] * 2)
    return HeadMoments(
        (k.mT @ k.conj()).to(torch.complex128),
        sizes,
        _outer(free),
        read.double(),
        _outer(values),
        torch.empty(keys.shape[1], 0, 0, dtype=torch.float64),
    )


def read_by(outputs: Tensor, heads: int) -> Tensor:
    """Return [h, head_dim, head_dim], the sum of O^T O over the query heads of each head; outputs [heads, out, d]."""
    products = outputs.mT @ outputs
    return products.unflatten(0, (heads, -1)).sum(1)


def mean_merge(found: HeadMoments) -> Merge:
    """Return the merge of all these heads into their mean, as grouped-query attention begins (arXiv 2305.13245)."""
    count, pairs, free, size = len(found.values), len(found.keys), found.free_keys.shape[1], found.values.shape[1]
    ones = torch.ones(count, pairs, dtype=torch.complex128)
    eyes = [torch.eye(n, dtype=torch.float64).expand(count, n, n) for n in (free, size)]
    return Merge(*(Shared(x / count, x) for x in (ones, *eyes)))


def fitted_merge(found: HeadMoments, is_weighed: bool = True) -> Merge:
    """Return the merge of all these heads that loses least on what was seen.

    is_weighed: by the queries and by the output; else every channel counts alike.
    """
    count, free, size = len(found.values), found.free_keys.shape[1], found.values.shape[1]
    eyes = [torch.eye(n, dtype=torch.float64).expand(count, n, n) for n in (free, size)]
    metrics = (found.free_queries, found.outputs) if is_weighed else eyes
    sizes = found.queries if is_weighed else torch.ones_like(found.queries)
    return Merge(rank_one(found.keys, sizes), leading(found.free_keys, metrics[0]), leading(found.values, metrics[1]))


def rank_one(second: Tensor, sizes: Tensor) -> Shared:
    """Approximate t complex sequences by one, for each pair: second [pairs, t, t] complex128, sizes [pairs, t].

    Minimizes sum_i sizes_i |k_i - a_i c|^2, summed over tokens.
    """
    root = _relative_sizes(sizes).sqrt()
    first = torch.linalg.eigh(root[:, :, None] * second * root[:, None])[1][..., -1]  # pair, head
    read = first / root
    largest = read.abs().argmax(1, keepdim=True)
    phase = torch.polar(torch.ones_like(root[:, :1]), read.gather(1, largest).angle())
    factor = phase * read.abs().square().mean(1, keepdim=True).sqrt()
    return Shared((first.conj() * root * factor).T, (read / factor).T)


def leading(second: Tensor, metric: Tensor) -> Shared:
    """Project t heads of width n on their n leading directions: second [t, n, t, n], metric [t, n, n], float64.

    Minimizes sum_i (x_i - A_i c)^T metric_i (x_i - A_i c), summed over tokens.
    """
    count, size = second.shape[:2]
    if not size:
        return Shared(*[torch.zeros(count, 0, 0, dtype=torch.float64)] * 2)
    scales, axes = torch.linalg.eigh(metric)
    scales = _relative_sizes(scales.flatten()[None])[0].view_as(scales).sqrt()
    root, inverse = ((axes * each[:, None]) @ axes.mT for each in (scales, 1 / scales))
    turned = torch.einsum("iab,ibjc,jcd->iajd", root, second, root).reshape(count * size, count * size)
    first = torch.linalg.eigh((turned + turned.T) / 2)[1][:, -size:].view(count, size, size)
    read, write = inverse @ first, first.mT @ root
    mean = read.mean(0)
    left, sizes, right = torch.linalg.svd(mean)
    if sizes[-1] * STEEP > sizes[0]:  # c may be any basis of what is kept: that in which the mean of A_i is one
        return Shared(mean @ write, read @ torch.linalg.inv(mean))
    factor = read.square().sum().div(count * size).sqrt()
    turn = (left @ right) * factor
    return Shared(turn @ write, read @ torch.linalg.inv(turn))


def lost_of(merges: Sequence[Merge], groups: Sequence[Sequence[int]], found: HeadMoments) -> LostShares:
    """Return what the merges of a layer lose, as shares of all its squares in the metric of what reads them."""
    rests, whole = [_rest(merge, found.of(group)) for merge, group in zip(merges, groups, strict=True)], _all(found)
    sums = [sum(part) for part in zip(*rests, strict=True)]
    return LostShares(*(rest / max(every, 1e-300) for rest, every in zip(sums, whole, strict=True)))


def merge_weights(
    weights: HeadWeights, layout: ChannelLayout, groups: Sequence[Sequence[int]], merges: Sequence[Merge]
) -> HeadWeights:
    """Return the projections with one key/value head for each group; query heads follow in the order of the groups."""
    count, parts = len(weights.keys), []
    queries, outputs = (x.unflatten(0, (count, -1)) for x in (weights.queries, weights.outputs))  # head, of its queries
    for heads, merge in zip(groups, merges, strict=True):
        i = torch.tensor(heads)
        key, query = torch.zeros_like(weights.keys[0]), torch.zeros_like(queries[i])
        _put(key, layout.pairs, (merge.keys.write[..., None] * _rows(weights.keys[i], layout.pairs)).sum(0))
        key[layout.free] = (merge.free.write @ weights.keys[i][:, layout.free]).sum(0)
        _put(query, layout.pairs, merge.keys.read.conj()[:, None, :, None] * _rows(queries[i], layout.pairs))
        query[:, :, layout.free] = merge.free.read.mT[:, None] @ queries[i][:, :, layout.free]
        value = (merge.values.write @ weights.values[i]).sum(0)
        parts.append((query.flatten(0, 1), key, value, (outputs[i] @ merge.values.read[:, None]).flatten(0, 1)))
    query_parts, keys, values, output_parts = zip(*parts, strict=True)
    return HeadWeights(torch.cat(query_parts), torch.stack(keys), torch.stack(values), torch.cat(output_parts))


def neighbours(heads: int, size: int) -> list[list[int]]:
    """Return groups of `size` heads that follow each other."""
    return [list(range(start, start + size)) for start in range(0, heads, size)]


def similar(found: HeadMoments, size: int, is_fitted: bool = True, is_weighed: bool = True) -> list[list[int]]:
    """Return groups of `size` heads of a layer that lose little when they are merged.

    A group costs what its pairs lose, each merged alone: the squares of keys and of values, as shares of the layer's.
    Beginning with neighbours, the two heads whose exchange saves most change places until none saves anything.
    """
    heads = len(found.values)
    groups = neighbours(heads, size)
    if size in (1, heads):
        return groups
    cost = torch.zeros(heads, heads, dtype=torch.float64)
    whole = _all(found)
    for i, j in combinations(range(heads), 2):
        part = found.of((i, j))
        rest = _rest(fitted_merge(part, is_weighed) if is_fitted else mean_merge(part), part)
        cost[i, j] = cost[j, i] = rest.keys / max(whole.keys, 1e-300) + rest.values / max(whole.values, 1e-300)
    while True:
        saved, where = max(_exchanges(cost, groups), key=lambda each: each[0])
        if saved <= 1e-9:
            return sorted(sorted(group) for group in groups)
        (a, x), (b, y) = where
        groups[a][x], groups[b][y] = groups[b][y], groups[a][x]


def _exchanges(cost: Tensor, groups: Sequence[Sequence[int]]) -> Iterator[tuple[float, tuple[Place, Place]]]:
    """Yield what each exchange of two heads of different groups saves, and their places."""
    for a, b in combinations(range(len(groups)), 2):
        for x, y in product(range(len(groups[a])), range(len(groups[b]))):
            i, j = groups[a][x], groups[b][y]
            first, second = ([h for h in groups[g] if h not in (i, j)] for g in (a, b))
            before = cost[i, first].sum() + cost[j, second].sum()
            yield (before - cost[j, first].sum() - cost[i, second].sum()).item(), ((a, x), (b, y))


def _rest(merge: Merge, found: HeadMoments) -> LostShares:
    """Return the squares that a merge leaves, in the metric of what reads them."""
    left = torch.eye(len(found.values)) - merge.keys.read.T[:, :, None] * merge.keys.write.T[:, None]
    keys = ((left @ found.keys @ left.mH).diagonal(dim1=1, dim2=2).real * found.queries).sum()
    free = _remainder(merge.free, found.free_keys, found.free_queries)
    return LostShares((keys + free).item(), _remainder(merge.values, found.values, found.outputs).item())


def _all(found: HeadMoments) -> LostShares:
    """Return all squares in the metric of what reads them."""
    keys = (found.keys.diagonal(dim1=1, dim2=2).real * found.queries).sum() + _squares_in_metric(
        found.free_keys, found.free_queries
    )
    return LostShares(keys.item(), _squares_in_metric(found.values, found.outputs).item())


def _squares_in_metric(second: Tensor, metric: Tensor) -> Tensor:
    """Return the squares of heads with the moments [h, n, h, n] in the metric [h, n, n] of each, a scalar."""
    return torch.einsum("hahb,hab->", second, metric)


def _remainder(shared: Shared, second: Tensor, metric: Tensor) -> Tensor:
    count, size = second.shape[:2]
    flat = second.reshape(count * size, count * size)
    away = torch.eye(count * size, dtype=torch.float64)
    away -= shared.read.reshape(count * size, size) @ shared.write.transpose(0, 1).reshape(size, count * size)
    return _squares_in_metric((away @ flat @ away.T).view(count, size, count, size), metric)


def _relative_sizes(sizes: Tensor) -> Tensor:
    """Return sizes [n, m] over the mean of each row, none below FLOOR; ones where all are zero."""
    mean = sizes.mean(1, keepdim=True)
    return torch.where(mean > 0, sizes / mean.clamp(min=torch.finfo(sizes.dtype).tiny), 1.0).clamp(min=MIN_METRIC_SHARE)


def _outer(x: Tensor) -> Tensor:
    """Return the second moments [h, n, h, n] float64 of x [tokens, h, n]."""
    flat = x.flatten(1)
    return (flat.T @ flat).double().view(*x.shape[1:], *x.shape[1:])


def _complex(x: Tensor, pairs: Tensor) -> Tensor:
    """Return x [..., head_dim] as complex numbers [..., pairs]."""
    return torch.complex(x[..., pairs[:, 0]], x[..., pairs[:, 1]])


def _rows(heads: Tensor, pairs: Tensor) -> Tensor:
    """Return the rows of heads [..., head_dim, n] as complex rows [..., pairs, n]."""
    return torch.complex(heads[..., pairs[:, 0], :], heads[..., pairs[:, 1], :])


def _put(heads: Tensor, pairs: Tensor, rows: Tensor) -> None:
    """Write complex rows [..., pairs, n] into heads [..., head_dim, n]."""
    heads[..., pairs[:, 0], :], heads[..., pairs[:, 1], :] = rows.real, rows.imag
