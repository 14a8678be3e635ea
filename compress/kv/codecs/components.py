"""Learn the components of keys or values, and divide bits among them, for compress/kv/codecs/pca.py.

An error of a token costs what attention reads of it: of a value p^2 for each query that gives it probability p. Few
tokens may have nearly all of that. Beside the first token of a text, which the cache keeps exact, models have attention
sinks in the midst of it: tokens with a small value, on which heads put their probability when they look for nothing.
Counted like others they vanish in the statistics; then the mean, which is taken off, is far from their values, and
they are coded with errors as large as those of others, each of which is read by all queries. So tokens are weighted by
`attended`, the sum of p^2 over the queries that read them from the cache: in the mean of values with it, which brings
the mean to the sinks, in all else with its square root, which leaves enough tokens to tell the variances from.
"""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from compress.kernels.contract import MOST_MIXED_BITS
from compress.kv.codecs.packed import row_nbytes

QUERY_DAMP = 1e-3  # the second moment of queries gets this share of its mean diagonal
MIN_VARIANCE = 1e-6  # variance of a component, relative to the mean
GAUSSIAN_ERRORS = (1.0, 0.36338, 0.11748, 0.034548, 0.0095010, 0.0025036, 0.00064420, 0.00016352)  # N(0, 1), by bits


def allocate(variances: Tensor, budget: int, unit: int) -> Tensor:
    """variances [h, width] descending along the last axis -> bits uint8 alike, with a sum of at most `budget`.

    Runs of `unit` components of a head get a bit together, those first whose error falls most; `GAUSSIAN_ERRORS`
    falls by ever smaller steps, so that this is optimal but for the last bits.
    """
    heads, width = variances.shape
    runs = [variances[:, start : start + unit].sum(1).tolist() for start in range(0, width, unit)]
    sizes = [min(unit, width - start) for start in range(0, width, unit)]
    bits = torch.zeros(heads, width, dtype=torch.uint8)
    heap = [
        (-(1 - GAUSSIAN_ERRORS[1]) * energy / sizes[run], run, head, 0)
        for run, energies in enumerate(runs)
        for head, energy in enumerate(energies)
    ]
    heapq.heapify(heap)
    while heap:
        _, run, head, run_bits = heapq.heappop(heap)
        if sizes[run] > budget:
            continue
        budget -= sizes[run]
        bits[head, run * unit : run * unit + unit] += 1
        if run_bits + 1 < MOST_MIXED_BITS:
            gain = (GAUSSIAN_ERRORS[run_bits + 1] - GAUSSIAN_ERRORS[run_bits + 2]) * runs[run][head] / sizes[run]
            heapq.heappush(heap, (-gain, run, head, run_bits + 1))
    return bits


def fitting(variances: Tensor, budget: int, unit: int) -> Tensor:
    """Return the bits of the largest budget whose codes, filled up, take no more bytes than `budget` bits do."""
    low, high, row = 0, budget, -(-budget // 8)
    if row_nbytes(bits := allocate(variances, high, unit)) <= row:
        return bits
    while high - low > 1:
        middle = (low + high) // 2
        if row_nbytes(allocate(variances, middle, unit)) <= row:
            low = middle
        else:
            high = middle
    return allocate(variances, low, unit)


def token_weights(read: Tensor, power: float) -> Tensor:
    """Return float64 [tokens, h] with a sum of 1 for each head: `read` [tokens, h], from 0 on, to this power.

    A head of which nothing was read has equal weights.
    """
    weights = read.double().pow(power)
    total = weights.sum(0)
    return torch.where(total > 0, weights / total.clamp(min=torch.finfo(torch.float64).tiny), 1 / len(read))


def components(x: Tensor, moment: Tensor | None, weights: Tensor, centre: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [tokens, h, width] -> mean [h, width], back [h, width, width] with x = mean + back z for z of unit variance,
    and the variances [h, width] that an error of z stands for, descending; moment [h, width, width] of queries or none.

    weights [tokens, h], with a sum of 1 for each head, are those of tokens in the variances; centre: in the mean.
    """
    x = x.transpose(0, 1).to(torch.float64, copy=True)
    mean = (centre.T[:, None] @ x)[:, 0]
    x -= mean[:, None]
    covariance = (x * weights.T[..., None]).mT @ x
    if moment is None:
        variances, back = torch.linalg.eigh(covariance)
    else:
        damp = QUERY_DAMP * moment.double().diagonal(dim1=1, dim2=2).mean(-1).clamp(min=1e-12)
        one = torch.eye(moment.shape[1], dtype=torch.float64, device=moment.device)
        root, inverse = roots(moment.double() + damp[:, None, None] * one)
        variances, back = torch.linalg.eigh(root @ covariance @ root)
        back = inverse @ back
    variances, back = variances.flip(-1), back.flip(-1)
    variances = variances.clamp(min=MIN_VARIANCE * variances.mean(-1, keepdim=True)).clamp(min=1e-12)
    return mean, back * variances.sqrt()[:, None], variances


def moments(queries: Tensor, heads: int) -> Tensor:
    """Return second moments float64 [h, width, width] of queries [tokens, H, width]."""
    grouped = queries.unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 2).double()
    return grouped.mT @ grouped / grouped.shape[1]


def roots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the symmetric square root of a positive definite matrix [..., n, n], and its inverse."""
    values, vectors = torch.linalg.eigh(matrix)
    sizes = values.sqrt()[..., None, :]
    return (vectors * sizes) @ vectors.mT, (vectors / sizes) @ vectors.mT
