"""Learn codebooks, search nearest entries and round to storage types, for the methods that write `codebook`.

- `learn`: weighted k-means (EM). Vectors come in blocks that share a metric M_b [d, d]: the loss of a vector x with
  entry c is (x - c) M_b (x - c)^T. Diagonal and scalar weights are special cases. Both steps are exact: the E-step is a
  Euclidean search after the factor of M_b, the M-step solves c = (sum M_b)^-1 sum M_b x over the members. Empty entries
  restart at the vectors with the largest loss.
- `round_entries`: entries rounded to what is stored, int8 with one float16 scale for each codebook.

Arrays are transposed, [in, out], as in the column loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from compress.quant.settings import check, check_damp

CPU_SCORES = 1 << 19  # distances computed at a time: the table stays in the cache
DEVICE_SCORES = 1 << 24
VECTORS_TOGETHER = 1 << 22  # learned from at a time, in whole groups
SAMPLES_PER_ENTRY = 256  # vectors that are enough to learn a codebook
EM_TOLERANCE = 1e-4  # relative: a group stops when an iteration lowers its loss by less


@dataclass(frozen=True)
class SearchConfig:
    """Recipe keys that every method with learned codebooks has."""

    iterations: int = 30  # [iterations] of expectation maximization, at most
    sweeps: int = 6  # [sweeps] of coordinate descent, each after a refit of the codebooks; 0: none
    damp: float = 0.01  # [fraction] of the mean diagonal, added to the diagonal of the Hessian

    REMOVED_KEYS: ClassVar[dict[str, Any]] = {
        "codebook_dtype": "int8",
        "seeding": "kmeans++",
        "rounds": 1,
        "refit_steps": 20,
    }

    def __post_init__(self) -> None:
        check(self, "iterations", "sweeps")
        check_damp(self.damp)


def nearest(points: Tensor, entries: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index [batch, count] int64 of the entry [batch, k, d] nearest to each point [batch, count, d].

    And its squared distance less |point|^2. Memory is bounded by CPU_SCORES and DEVICE_SCORES.
    """
    batch, count, _ = points.shape
    norms, books = entries.square().sum(2).unsqueeze(1), entries.transpose(1, 2)
    index = torch.empty(batch, count, dtype=torch.int64, device=points.device)
    score = torch.empty(batch, count, dtype=points.dtype, device=points.device)
    scores = CPU_SCORES if points.device.type == "cpu" else DEVICE_SCORES
    rows = max(1, scores // entries.shape[1])  # points at a time
    step = max(1, rows // count)  # whole batches at a time
    for first in range(0, batch, step):
        batches = slice(first, first + step)
        for start in range(0, count, rows):
            some = slice(start, start + rows)
            table = torch.baddbmm(norms[batches], points[batches, some], books[batches], alpha=-2)
            score[batches, some], index[batches, some] = table.min(2)
    return index, score


class GroupedVectors(NamedTuple):
    """The vectors that codebooks of several groups are learned from; the groups share the metrics of their blocks."""

    values: Tensor  # [groups, blocks, count, d]
    factors: Tensor  # [blocks, d, d]: the loss of x - e is |(x - e) F|^2; or [blocks]: F = factor * I

    def to_euclidean(self, values: Tensor) -> Tensor:
        """Return values [groups, blocks, n, d] in coordinates in which the loss is Euclidean."""
        return values * self.factors[:, None, None] if self.factors.dim() == 1 else values @ self.factors

    def metrics(self) -> Tensor:
        """Return F F^T, [blocks, d, d]."""
        if self.factors.dim() > 1:
            return self.factors @ self.factors.transpose(1, 2)
        unit = torch.eye(self.values.shape[3], dtype=self.factors.dtype, device=self.factors.device)
        return self.factors.square()[:, None, None] * unit

    def sample(self, size: int) -> GroupedVectors:
        """Return about `size` vectors of each group, every n-th of each block."""
        stride = max(1, self.values.shape[1] * self.values.shape[2] // size)
        return GroupedVectors(self.values[:, :, ::stride].contiguous(), self.factors)


def learn(vectors: GroupedVectors, size: int, iterations: int, generator: torch.Generator) -> Tensor:
    """Learn entries [groups, size, d] float32 by at most `iterations` of EM; a group stops when it gains no more."""
    vectors = vectors.sample(SAMPLES_PER_ENTRY * size)
    groups, blocks, count, _ = vectors.values.shape
    draws = torch.rand(groups, size, dtype=torch.float64, generator=generator)
    step = max(1, VECTORS_TOGETHER // (blocks * count))
    learned = []
    for first in range(0, groups, step):
        some = GroupedVectors(vectors.values[first : first + step], vectors.factors)
        entries = draw_entries(some, draws[first : first + step].to(some.values.device))
        learned.append(_em(some, entries, iterations))
    return torch.cat(learned)


def _em(vectors: GroupedVectors, entries: Tensor, iterations: int) -> Tensor:
    groups, blocks, count, d = vectors.values.shape
    size, metrics = entries.shape[1], vectors.metrics()
    pulled = (vectors.values @ metrics).view(-1, d)  # M x
    owner = torch.arange(groups, device=entries.device).view(-1, 1, 1) * blocks
    owner = (owner + torch.arange(blocks, device=entries.device).view(-1, 1)) * size  # group, block, 1
    best, least = entries, torch.full((groups,), float("inf"), dtype=torch.float64, device=entries.device)
    active = torch.ones(groups, dtype=torch.bool, device=entries.device)
    for step in range(iterations + 1):
        index, errors = assign(vectors, entries)
        loss = errors.sum((1, 2), dtype=torch.float64)
        best = torch.where((active & (loss < least)).view(-1, 1, 1), entries, best)
        active = active & (loss < least * (1 - EM_TOLERANCE))
        least = torch.minimum(loss, least)
        if step == iterations or not active.any():
            break
        members = torch.bincount((index + owner).flatten(), minlength=groups * blocks * size)
        members = members.view(groups, blocks, size).to(entries.dtype)
        entry = (index + owner[:, :1] // blocks).flatten()
        total = torch.zeros_like(entries).view(-1, d).index_add_(0, entry, pulled).view_as(entries)
        entries = _means(total, members, metrics, entries)
        _restart_empty_entries(entries, members.sum(1) == 0, vectors, errors)
    return best


def assign(vectors: GroupedVectors, entries: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest of entries [groups, k, d] and the losses, both [groups, blocks, count]."""
    groups, blocks, count, d = vectors.values.shape
    if vectors.factors.dim() == 1:  # one search for all blocks
        flat = vectors.values.reshape(groups, blocks * count, d)
        index, score = nearest(flat, entries)
        loss = (score + flat.square().sum(2)).view(groups, blocks, count) * vectors.factors.square().view(-1, 1)
    else:
        points = vectors.to_euclidean(vectors.values).view(groups * blocks, count, d)
        index, score = nearest(points, vectors.to_euclidean(entries.unsqueeze(1)).flatten(0, 1))
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


def _restart_empty_entries(entries: Tensor, empty: Tensor, vectors: GroupedVectors, errors: Tensor) -> None:
    """Put the vectors with the largest loss in place of the entries without members [groups, k]."""
    for group in empty.any(1).nonzero().flatten().tolist():
        lost = empty[group].nonzero().flatten()
        worst = errors[group].flatten().topk(min(len(lost), errors[group].numel())).indices
        entries[group, lost[: len(worst)]] = vectors.values[group].reshape(-1, entries.shape[2])[worst]


def draw_entries(vectors: GroupedVectors, draws: Tensor) -> Tensor:
    """Draw entries by k-means++: each is a vector, with a probability proportional to its present loss."""
    flat = vectors.values.flatten(1, 2)
    points = vectors.to_euclidean(vectors.values)
    loss = torch.ones_like(points[..., 0])
    # all at once: many small ones would keep what is freed between them from the system
    entries = flat.new_empty(flat.shape[0], draws.shape[1], flat.shape[2])
    for i in range(draws.shape[1]):
        sums = loss.flatten(1).cumsum(1, dtype=torch.float64)
        place = torch.searchsorted(sums, draws[:, i : i + 1] * sums[:, -1:], right=True).clamp_(max=flat.shape[1] - 1)
        entries[:, i : i + 1] = flat.gather(1, place.unsqueeze(2).expand(-1, -1, flat.shape[2]))
        distance = (points - vectors.to_euclidean(entries[:, i : i + 1].unsqueeze(1))).square_().sum(3)
        loss = distance if i == 0 else torch.minimum(loss, distance)
    return entries


class StoredEntries(NamedTuple):
    """Codebooks as stored, and the float32 entries that they decode to."""

    entries: Tensor  # [..., k, d]
    stored: Tensor  # [..., k, d] int8
    scale: Tensor  # [...] float16


def round_entries(entries: Tensor) -> StoredEntries:
    """Round codebooks [..., k, d] to int8 with one float16 scale for each."""
    largest = entries.abs().amax((-1, -2)) / 127
    scale = (largest * (1 + 2.0**-10) + 2.0**-24).clamp(max=65504).half()  # rounded, it is no smaller than `largest`
    wide = scale.float()[..., None, None]
    stored = (entries / wide).round_().clamp_(-127, 127).to(torch.int8)
    return StoredEntries(stored.float() * wide, stored, scale)


def most_bits(vectors: int) -> int:
    """Return the most bits of a code for so many vectors: a codebook has at most half as many entries, at least two."""
    return max(1, vectors.bit_length() - 2)


def notes(used: int, wanted: int) -> list[str]:
    """Return the note for the report where `most_bits` made codes shorter."""
    if used == wanted:
        return []
    return [f"codes of {used} bits instead of {wanted}: the weight has too few vectors for a larger codebook"]


def workspace(weights: int, vector_dim: int) -> int:
    """Return the bytes that learning, refitting and rounding take beside the weight and n x n matrices.

    Twelve float32 copies of the weight, codes and indices, the table of scores with the sums of its rows.
    """
    return weights * (12 * 4 + 3 * 8 // vector_dim) + 2 * 4 * CPU_SCORES
