"""Code vectors as sums of codebook entries, and learn the codebooks: additive quantization for caches.

A vector x [d] of a head is the sum of one entry of each of M codebooks of A entries, x = sum_m T_m[c_m]. Codebooks come
in stages of two. Tied, as in CommVQ (arXiv 2506.18879), the second codebook of a stage is the first one with each pair
of channels (j, j + d / 2) turned by a right angle: entry a of T and entry b of J T give (x_a - y_b, y_a + x_b), the sum
of two rotation-scaling matrices applied to the two unit vectors. Untied, both are free.

- `encode`: the best pair of each stage, stage after stage, then sweeps of coordinate descent over single codes. The
  distance to a pair separates: |r - T_a - U_b|^2 = |r|^2 + (|T_a|^2 - 2 r T_a) + (|U_b|^2 - 2 r U_b) + 2 T_a U_b, so
  that a pair costs two products with A entries and one table of A^2 sums instead of A^2 distances.
- `learn`: expectation maximization. Each stage starts from samples of what the stages before it leave, with soft
  assignments at a falling temperature; then all codebooks are solved for together while codes are chosen anew.
- `solve`: the maximization step, weighted least squares in closed form.

Tensors are batched over heads h; N is the number of vectors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SCORES = 1 << 21  # sums of pairs held at a time
RIDGE = 1e-2  # vectors that an entry counts for as it was before: keeps unused entries in place
MIN_GAIN = 1e-5  # rounds end when they gain less of the loss


@dataclass(frozen=True)
class CodeSearch:
    """How codes are chosen."""

    sweeps: int = 2  # of coordinate descent after the stages
    pairs: bool = True  # both codes of a stage at once; false: one after the other


@dataclass(frozen=True)
class BookTraining:
    """How codebooks are learned."""

    entries: int  # A
    stages: int  # M / 2
    tied: bool
    steps: int  # of soft assignment for each stage
    rounds: int  # of all codebooks together, at most
    hot: float = 0.2  # first temperature, in squared lengths of what a stage codes
    cold: float = 0.005  # last one
    soft_vectors: int = 1024  # that a stage starts from, at most


def quarter_turn(x: Tensor) -> Tensor:
    """Return x [..., d] with each pair of channels (j, j + d / 2) turned by a right angle: (x, y) -> (-y, x)."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def all_books(own: Tensor, tied: bool) -> Tensor:
    """Return all codebooks [h, M, A, d] of what is stored: [h, M / 2, A, d] of tied ones, else [h, M, A, d]."""
    return torch.stack((own, quarter_turn(own)), 2).flatten(1, 2) if tied else own


def own_books(tables: Tensor, tied: bool) -> Tensor:
    """Inverse of `all_books`."""
    return tables[:, ::2] if tied else tables


def total(codes: Tensor, tables: Tensor) -> Tensor:
    """Add up the entries of codes [h, N, M] of an integer type -> [h, N, d]."""
    h, m, a, d = tables.shape
    first = torch.arange(h * m, device=tables.device).view(h, 1, m) * a
    bags = (codes.long() + first).reshape(-1, m)
    return torch.nn.functional.embedding_bag(bags, tables.reshape(-1, d), mode="sum").view(h, -1, d)


def encode(x: Tensor, tables: Tensor, search: CodeSearch) -> Tensor:
    """Return codes uint8 [h, N, M] of x [h, N, d]; the same for a vector whatever others come with it."""
    h, m, a, _ = tables.shape
    step = max(1, SCORES // (h * a * (a if search.pairs else m)))
    parts = [_encode(piece, tables, search) for piece in x.split(step, 1)]
    return torch.cat(parts, 1) if parts else x.new_zeros(h, 0, m, dtype=torch.uint8)


def _encode(x: Tensor, tables: Tensor, search: CodeSearch) -> Tensor:
    h, m, a, _ = tables.shape
    lengths = tables.square().sum(-1)[:, :, None] / 2  # h, M, 1, A
    codes = torch.zeros(h, x.shape[1], m, dtype=torch.int64, device=x.device)
    left = x
    for stage in range(0, m, 2):
        if search.pairs:
            best = _pair(left, tables[:, stage : stage + 2], lengths[:, stage : stage + 2]).min(-1)[1]
            codes[:, :, stage], codes[:, :, stage + 1] = best // a, best % a
            left = left - _entry(tables, codes, stage) - _entry(tables, codes, stage + 1)
        else:
            for place in (stage, stage + 1):
                codes[:, :, place] = (lengths[:, place] - left @ tables[:, place].mT).min(-1)[1]
                left = left - _entry(tables, codes, place)
    for _ in range(search.sweeps):
        for place in range(m):
            left = left + _entry(tables, codes, place)
            codes[:, :, place] = (lengths[:, place] - left @ tables[:, place].mT).min(-1)[1]
            left = left - _entry(tables, codes, place)
    return codes.to(torch.uint8)


def _pair(x: Tensor, pair: Tensor, lengths: Tensor) -> Tensor:
    """Return half of the squared distances less |x|^2 to all pairs of entries, [h, N, A^2]; pair [h, 2, A, d]."""
    one, two = (lengths[:, i] - x @ pair[:, i].mT for i in range(2))
    cross = pair[:, 0] @ pair[:, 1].mT
    return ((two[:, :, None] + cross[:, None]) + one[..., None]).flatten(2)


def _entry(tables: Tensor, codes: Tensor, place: int) -> Tensor:
    h, _, a, d = tables.shape
    first = torch.arange(h, device=tables.device)[:, None] * a
    return tables[:, place].reshape(-1, d)[(codes[:, :, place] + first).flatten()].view(h, -1, d)


def solve(counts: Tensor, sums: Tensor, before: Tensor, tied: bool) -> Tensor:
    """Return the codebooks [h, M, A, d] of least squared error for given assignments, float64.

    counts [h, M, A, M, A]: how often (softly) two entries come together; sums [h, M, A, d]: of the vectors that an
    entry is in. before: the codebooks until now, which unused entries keep; the sum of the squared errors and RIDGE
    times the squared change is what is minimized, so that the error never grows.
    """
    h, m, a, d = sums.shape
    matrix, right = counts.double(), sums.double() + RIDGE * before.double()
    if not tied:
        matrix = matrix.reshape(h, m * a, m * a)
        matrix = matrix + RIDGE * torch.eye(m * a, dtype=torch.float64, device=matrix.device)
        return torch.linalg.solve(matrix, right.flatten(1, 2)).view(h, m, a, d)
    one, two = matrix[:, ::2], matrix[:, 1::2]  # complex numbers: the second codebook is i times the first
    real = one[:, :, :, ::2] + two[:, :, :, 1::2]
    imaginary = one[:, :, :, 1::2] - two[:, :, :, ::2]
    size = m // 2 * a
    matrix = torch.complex(real, imaginary).reshape(h, size, size)
    matrix = matrix + 2 * RIDGE * torch.eye(size, dtype=torch.float64, device=matrix.device)
    right = right[:, ::2] - quarter_turn(right[:, 1::2])
    pairs = torch.complex(right[..., : d // 2], right[..., d // 2 :]).flatten(1, 2)
    solution = torch.linalg.solve(matrix, pairs).view(h, m // 2, a, d // 2)
    return all_books(torch.cat((solution.real, solution.imag), -1), True)


def learn(x: Tensor, training: BookTraining, search: CodeSearch, generator: torch.Generator) -> Tensor:
    """Return codebooks [h, M, A, d] float32 for vectors x [h, N, d] float32."""
    left, tables = x, []
    for _ in range(training.stages):
        stage = _stage(left, training, generator)
        left = left - total(encode(left, stage, search), stage)
        tables.append(stage)
    books = torch.cat(tables, 1)
    best, least = books, None
    for round_ in range(training.rounds + 1):
        codes = encode(x, books, search)
        loss = float((x - total(codes, books)).square().sum(dtype=torch.float64))
        if least is None or loss < least:
            best = books
        if least is not None and loss > least * (1 - MIN_GAIN) or round_ == training.rounds:
            break
        least = loss if least is None else min(least, loss)
        books = solve(*moments(x, codes, training.entries), books, training.tied).float()
    return best


def moments(x: Tensor, codes: Tensor, entries: int) -> tuple[Tensor, Tensor]:
    """Return `counts` and `sums` of `solve` for codes [h, N, M] of vectors x [h, N, d]."""
    h, count, m = codes.shape
    codes = codes.long()
    counts = torch.zeros(h, m, entries, m, entries, dtype=torch.float64, device=x.device)
    sums = torch.zeros(h, m, entries, x.shape[-1], dtype=x.dtype, device=x.device)
    for head in range(h):
        for i in range(m):
            sums[head, i].index_add_(0, codes[head, :, i], x[head])
            for j in range(i, m):
                both = codes[head, :, i] * entries + codes[head, :, j]
                pair_counts = torch.bincount(both, minlength=entries**2).view(entries, entries).double()
                counts[head, i, :, j] = pair_counts
                counts[head, j, :, i] = pair_counts.T
    return counts, sums


def _stage(x: Tensor, training: BookTraining, generator: torch.Generator) -> Tensor:
    """Return the two codebooks of a stage [h, 2, A, d], by soft assignments to all pairs at a falling temperature."""
    h, count, d = x.shape
    a = training.entries
    order = torch.randperm(count, generator=generator)[: training.soft_vectors].to(x.device)
    some = x[:, order]
    places = torch.randint(len(order), (2, a), generator=generator).to(x.device)
    own = some[:, places[0]] * 0.5**0.5
    tables = torch.stack((own, quarter_turn(own) if training.tied else some[:, places[1]] * 0.5**0.5), 1)
    size = some.square().sum(-1).mean(-1).clamp(min=1e-30)[:, None, None]
    for step in range(training.steps):
        heat = training.hot * (training.cold / training.hot) ** (step / max(1, training.steps - 1))
        counts = torch.zeros(h, 2, a, 2, a, dtype=torch.float64, device=x.device)
        sums = torch.zeros(h, 2, a, d, dtype=x.dtype, device=x.device)
        lengths = tables.square().sum(-1)[:, :, None] / 2
        for piece in some.split(max(1, SCORES // (h * a * a)), 1):
            shares = _pair(piece, tables, lengths).mul_(-2 / (heat * size)).softmax(-1).unflatten(-1, (a, a))
            both, one, two = shares.sum(1), shares.sum(3), shares.sum(2)
            counts[:, 0, :, 1] += both
            counts[:, 1, :, 0] += both.mT
            for i, share in enumerate((one, two)):
                counts[:, i, :, i].diagonal(dim1=1, dim2=2).add_(share.sum(1))
                sums[:, i] += share.mT @ piece
        tables = solve(counts, sums, tables, training.tied).float()
    return tables
