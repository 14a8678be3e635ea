"""Learn codebooks, search nearest entries and round to storage types, for the methods that write `codebook`.

- `learn`: weighted k-means (EM). Vectors come in blocks that share a metric M_b [d, d]: the loss of a vector x with
  entry c is (x - c) M_b (x - c)^T. Diagonal and scalar weights are special cases. Both steps are exact: the E-step is a
  Euclidean search after the factor of M_b, the M-step solves c = (sum M_b)^-1 sum M_b x over the members. Empty entries
  restart at the vectors with the largest loss.
- `rounded`: entries rounded to what is stored, int8 with one float16 scale for each codebook, or float16.
- `factored`: all codebooks of a matrix as the product of two factors that are rounded to what is stored.

Arrays are transposed, [in, out], as in the column loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from compress.formats import codebook
from compress.quant.settings import check, check_damp

SCORES = 1 << 19  # distances computed at a time on a CPU: the table stays in its cache
DEVICE_SCORES = 1 << 24  # and elsewhere
LEARNED = 1 << 22  # vectors of whole groups that are learned from together
SAMPLES = 256  # vectors for each entry that are enough to learn a codebook
CONVERGED = 1e-4  # of the loss: EM stops when an iteration gains less


@dataclass(frozen=True)
class SearchConfig:
    """Recipe keys that every method with learned codebooks has."""

    codebook_dtype: str = "int8"  # in which entries are stored: int8 or float16
    seeding: str = "kmeans++"  # how the first codebook is chosen: kmeans++ or mahalanobis
    iterations: int = 30  # [iterations] of expectation maximization, at most
    rounds: int = 1  # [rounds] of the column loop after the first, each with refitted codebooks
    sweeps: int = 6  # [sweeps] of coordinate descent, each after a refit of the codebooks; 0: none
    refit_steps: int = 20  # [steps] of conjugate gradients in a refit, at most
    damp: float = 0.01  # [fraction] of the mean diagonal, added to the diagonal of the Hessian

    def __post_init__(self) -> None:
        check(self, "iterations", "rounds", "sweeps", "refit_steps")
        check(self, codebook_dtype=("int8", "float16"), seeding=tuple(SEEDINGS))
        check_damp(self.damp)


def nearest(points: Tensor, entries: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index [batch, count] int64 of the entry [batch, k, d] nearest to each point [batch, count, d].

    And its squared distance less |point|^2. Memory is bounded by (DEVICE_)SCORES.
    """
    batch, count, _ = points.shape
    norms, books = entries.square().sum(2).unsqueeze(1), entries.transpose(1, 2)
    index = torch.empty(batch, count, dtype=torch.int64, device=points.device)
    score = torch.empty(batch, count, dtype=points.dtype, device=points.device)
    scores = SCORES if points.device.type == "cpu" else DEVICE_SCORES
    rows = max(1, scores // entries.shape[1])  # points at a time
    step = max(1, rows // count)  # whole batches at a time
    for first in range(0, batch, step):
        batches = slice(first, first + step)
        for start in range(0, count, rows):
            some = slice(start, start + rows)
            table = torch.baddbmm(norms[batches], points[batches, some], books[batches], alpha=-2)
            score[batches, some], index[batches, some] = table.min(2)
    return index, score


class Vectors(NamedTuple):
    """The vectors that codebooks of several groups are learned from; the groups share the metrics of their blocks."""

    values: Tensor  # [groups, blocks, count, d]
    factors: Tensor  # [blocks, d, d]: the loss of x - e is |(x - e) F|^2; or [blocks]: F = factor * I
    weights: Tensor | None = None  # [groups, blocks, count]: of each vector's loss

    def transformed(self, values: Tensor) -> Tensor:
        """Return values [groups, blocks, n, d] in coordinates in which the loss is Euclidean."""
        return values * self.factors[:, None, None] if self.factors.dim() == 1 else values @ self.factors

    def metrics(self) -> Tensor:
        """Return F F^T, [blocks, d, d]."""
        if self.factors.dim() > 1:
            return self.factors @ self.factors.transpose(1, 2)
        unit = torch.eye(self.values.shape[3], dtype=self.factors.dtype, device=self.factors.device)
        return self.factors.square()[:, None, None] * unit

    def sample(self, size: int) -> Vectors:
        """Return about `size` vectors of each group, every n-th of each block."""
        stride = max(1, self.values.shape[1] * self.values.shape[2] // size)
        weights = None if self.weights is None else self.weights[:, :, ::stride]
        return Vectors(self.values[:, :, ::stride].contiguous(), self.factors, weights)


def learn(vectors: Vectors, size: int, iterations: int, seeding: str, generator: torch.Generator) -> Tensor:
    """Learn entries [groups, size, d] float32 by at most `iterations` of EM; a group stops when it gains no more."""
    vectors = vectors.sample(SAMPLES * size)
    groups, blocks, count, _ = vectors.values.shape
    draws = torch.rand(groups, size, dtype=torch.float64, generator=generator)
    step = max(1, LEARNED // (blocks * count))
    parts = []
    for first in range(0, groups, step):
        weights = None if vectors.weights is None else vectors.weights[first : first + step]
        part = Vectors(vectors.values[first : first + step], vectors.factors, weights)
        entries = SEEDINGS[seeding](part, draws[first : first + step].to(part.values.device))
        parts.append(_em(part, entries, iterations))
    return torch.cat(parts)


def _em(vectors: Vectors, entries: Tensor, iterations: int) -> Tensor:
    groups, blocks, count, d = vectors.values.shape
    size, metrics = entries.shape[1], vectors.metrics()
    weights = torch.ones_like(vectors.values[..., 0]) if vectors.weights is None else vectors.weights
    pulled = (vectors.values @ metrics * weights.unsqueeze(3)).view(-1, d)  # M x
    owner = torch.arange(groups, device=entries.device).view(-1, 1, 1) * blocks
    owner = (owner + torch.arange(blocks, device=entries.device).view(-1, 1)) * size  # group, block, 1
    best, least = entries, torch.full((groups,), float("inf"), dtype=torch.float64, device=entries.device)
    active = torch.ones(groups, dtype=torch.bool, device=entries.device)
    for step in range(iterations + 1):
        index, errors = assign(vectors, entries)
        errors = errors * weights
        loss = errors.sum((1, 2), dtype=torch.float64)
        best = torch.where((active & (loss < least)).view(-1, 1, 1), entries, best)
        active = active & (loss < least * (1 - CONVERGED))
        least = torch.minimum(loss, least)
        if step == iterations or not active.any():
            break
        members = torch.bincount((index + owner).flatten(), weights.flatten(), groups * blocks * size)
        members = members.view(groups, blocks, size).to(entries.dtype)
        entry = (index + owner[:, :1] // blocks).flatten()
        total = torch.zeros_like(entries).view(-1, d).index_add_(0, entry, pulled).view_as(entries)
        entries = _means(total, members, metrics, entries)
        _reseed(entries, members.sum(1) == 0, vectors, errors)
    return best


def assign(vectors: Vectors, entries: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest of entries [groups, k, d] and the losses, both [groups, blocks, count]."""
    groups, blocks, count, d = vectors.values.shape
    if vectors.factors.dim() == 1:  # one search for all blocks
        flat = vectors.values.reshape(groups, blocks * count, d)
        index, score = nearest(flat, entries)
        loss = (score + flat.square().sum(2)).view(groups, blocks, count) * vectors.factors.square().view(-1, 1)
    else:
        points = vectors.transformed(vectors.values).view(groups * blocks, count, d)
        index, score = nearest(points, vectors.transformed(entries.unsqueeze(1)).flatten(0, 1))
        loss = score + points.square().sum(2)
    return index.view(groups, blocks, count), loss.view(groups, blocks, count).clamp_(min=0)


def _means(total: Tensor, members: Tensor, metrics: Tensor, old: Tensor) -> Tensor:
    """Return (sum M)^-1 sum M x over the members of each entry; entries without members stay."""
    groups, size, d = old.shape
    matrix = (members.transpose(1, 2) @ metrics.reshape(-1, d * d)).view(groups, size, d, d)
    filled = members.sum(1) > 0
    unit = torch.eye(d, dtype=old.dtype, device=old.device)
    matrix = torch.where(filled[..., None, None], matrix, unit)
    matrix += 1e-6 * matrix.diagonal(dim1=2, dim2=3).mean(2)[..., None, None] * unit
    return torch.where(filled.unsqueeze(2), torch.linalg.solve(matrix, total.unsqueeze(3)).squeeze(3), old)


def _reseed(entries: Tensor, empty: Tensor, vectors: Vectors, errors: Tensor) -> None:
    """Put the vectors with the largest loss in place of the entries without members [groups, k]."""
    for group in empty.any(1).nonzero().flatten().tolist():
        lost = empty[group].nonzero().flatten()
        worst = errors[group].flatten().topk(min(len(lost), errors[group].numel())).indices
        entries[group, lost[: len(worst)]] = vectors.values[group].reshape(-1, entries.shape[2])[worst]


def _mahalanobis(vectors: Vectors, draws: Tensor) -> Tensor:
    """Return the vectors at equally spaced ranks of their Mahalanobis distance to the mean."""
    flat = vectors.values.flatten(1, 2)  # group, vector, d
    count, d = flat.shape[1:]
    centred = flat - flat.mean(1, keepdim=True)
    covariance = centred.transpose(1, 2) @ centred / count
    floor = 1e-6 * covariance.diagonal(dim1=1, dim2=2).mean(1) + 1e-30
    factor = torch.linalg.cholesky(covariance + floor[:, None, None] * torch.eye(d, device=flat.device))
    distance = torch.linalg.solve_triangular(factor, centred.transpose(1, 2), upper=False).square().sum(1)
    places = torch.linspace(0, count - 1, draws.shape[1], device=flat.device, dtype=torch.float64).round().long()
    return _picked(flat, distance.argsort(dim=1, stable=True)[:, places])


def _plus_plus(vectors: Vectors, draws: Tensor) -> Tensor:
    """Draw entries by k-means++: each is a vector, with a probability proportional to its present loss."""
    flat = vectors.values.flatten(1, 2)
    points = vectors.transformed(vectors.values)
    loss = torch.ones_like(points[..., 0]) if vectors.weights is None else vectors.weights.clone()
    # all at once: many small ones would keep what is freed between them from the system
    entries = flat.new_empty(flat.shape[0], draws.shape[1], flat.shape[2])
    for i in range(draws.shape[1]):
        sums = loss.flatten(1).cumsum(1, dtype=torch.float64)
        place = torch.searchsorted(sums, draws[:, i : i + 1] * sums[:, -1:], right=True).clamp_(max=flat.shape[1] - 1)
        entries[:, i : i + 1] = _picked(flat, place)
        distance = (points - vectors.transformed(entries[:, i : i + 1].unsqueeze(1))).square_().sum(3)
        if vectors.weights is not None:
            distance *= vectors.weights
        loss = distance if i == 0 else torch.minimum(loss, distance)
    return entries


def _picked(flat: Tensor, places: Tensor) -> Tensor:
    return flat.gather(1, places.unsqueeze(2).expand(-1, -1, flat.shape[2]))


SEEDINGS = {"mahalanobis": _mahalanobis, "kmeans++": _plus_plus}


class Books(NamedTuple):
    """Codebooks as stored, and the float32 entries that they decode to."""

    entries: Tensor  # [..., k, d]
    stored: Tensor  # int8 or float16; if factored, the left factor [..., r] int8
    scale: Tensor | None  # [...] float16, int8 only; if factored, [r]
    right: Tensor | None = None  # [r, k] float16, the right factor


def rounded(entries: Tensor, dtype: str) -> Books:
    """Round codebooks [..., k, d] to their storage type: float16, or int8 with one float16 scale for each."""
    if dtype == "float16":
        stored = entries.clamp(-65504, 65504).half()
        return Books(stored.float(), stored, None)
    largest = entries.abs().amax((-1, -2)) / 127
    scale = (largest * (1 + 2.0**-10) + 2.0**-24).clamp(max=65504).half()  # rounded, it is no smaller than `largest`
    wide = scale.float()[..., None, None]
    stored = (entries / wide).round_().clamp_(-127, 127).to(torch.int8)
    return Books(stored.float() * wide, stored, scale)


def factored(columns: Books, right: Tensor) -> Books:
    """Return codebooks [groups, k, 1] = left @ right, right [r, k] rounded to float16.

    `columns` [r, groups, 1] are those of the left factor, rounded to int8.
    """
    stored = right.clamp(-65504, 65504).half()
    entries = codebook.product(columns.entries.squeeze(2).T, stored.float())
    return Books(entries.unsqueeze(2), columns.stored.squeeze(2).T, columns.scale, stored)


def most_bits(vectors: int) -> int:
    """Return the most bits of a code for so many vectors: a codebook has at most half as many entries, at least two."""
    return max(1, vectors.bit_length() - 2)


def shrunk(bits: tuple[int, ...], settings: tuple[int, ...]) -> list[str]:
    """Return the note for the report where `most_bits` made codes shorter."""
    return [
        f"codes of {used} bits instead of {set_bits}: the weight has too few vectors for a larger codebook"
        for used, set_bits in zip(bits, settings, strict=False)
        if used < set_bits
    ]


def workspace(weights: int, vector_dim: int) -> int:
    """Return the bytes that learning, refitting and rounding take beside the weight and n x n matrices.

    Twelve float32 copies of the weight, codes and indices, the table of scores with the sums of its rows.
    """
    return weights * (12 * 4 + 3 * 8 // vector_dim) + 2 * 4 * SCORES
