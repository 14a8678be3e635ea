"""Correct a quantized weight by two thin matrices beside it (EoRA, arXiv 2410.21271).

For a weight W, what its method makes of it, Q, and the inputs x that the quantized prefix gives, H = sum x x^T, the
best product of rank k is min tr[(W - Q - B^T A) H (W - Q - B^T A)^T]: `linalg.truncate_rank` of W - Q. This is EoRA
(arXiv 2410.21271) and the exact form of QERA (arXiv 2410.06040), which solve it through the eigenvectors and the root
of H; here H may be singular. `metric: sizes` is QERA's approximation (the diagonal of H alone; LQER is near it),
`metric: none` a plain SVD, as in LoftQ and ZeroQuant-V2. `metric: fisher` is that of LQ-LoRA (arXiv 2311.12023): rows
and columns weigh what the gradients of the model's loss say (calib/fisher.py).

By default the part comes first: the best product of rank k in place of W itself is taken off W, the method rounds the
rest, and the better one of that product and of the best one for what Q leaves is stored. The rest is smaller just where
errors count, so that far more is gained than by `start: rounding`, where W is rounded as it is, as EoRA and QERA do:
losses of layers at rank 8 on tests/models/books-8m are 0.60 to 0.84 of those without a correction, and 0.79 to 0.92
with `start: rounding` (int2). In 4 bits (0.64 to 0.87 there) the rounding of the factors is part of what Q makes up
for, but they have the whole weight's size: where inputs differ much, `start: rounding` can then be the better one.

With `iterations` the weight is rounded again, less the part so far, and corrected again; the best try is kept. With
`metric: none` or `fisher` this is the loop of LQ-LoRA (whose code returns the last try) and of LoftQ, for any
quantized format; with `metric: inputs` that of CALDERA (arXiv 2405.18886).

Not done: the rounding of A with feedback as in GPTQ, which was tried: losses of layers fell by less than 1%; one A for
all linears that read the same input, which would have to be stored once for several of them. Training of the factors is
compress/tune/end_to_end.py with `trains: low_rank`, and compress/tune/low_rank.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from compress import formats
from compress.formats import lowrank
from compress.numerics.linalg import truncate_rank, truncation_workspace
from compress.types import Correction, Fisher, LowRank, PackedWeight, Quantized, Stats

MetricName = Literal["inputs", "sizes", "fisher", "none"]

MIN_ITERATED_SIDE = 8192  # the smaller side; the subspace of larger matrices is found by iteration


class Metric(NamedTuple):
    """The size of an error R [out, in] is tr(D R H R^T D), D the diagonal matrix of `rows`; None: the identity."""

    hessian: Tensor | None = None  # [in, in]
    rows: Tensor | None = None  # [out] float32, positive

    def loss(self, residual: Tensor) -> float:
        weighted = residual if self.rows is None else residual * self.rows[:, None]
        image = weighted if self.hessian is None else weighted @ self.hessian
        return (image * weighted).sum(dtype=torch.float64).item()


class LowRankPart(NamedTuple):
    """A low-rank part: its stored tensors as the format `lowrank` names them, how they are stored, what they give."""

    tensors: dict[str, Tensor]
    stored: LowRank
    product: Tensor  # [out, in] float32


def metric(stats: Stats | None, name: MetricName, power: float = 1.0, fisher: Fisher | None = None) -> Metric:
    """Return the metric in which errors are measured.

    inputs: the Hessian of the inputs; sizes: its diagonal to the `power`; fisher: a weight for each row and column.
    none, and where no token tells: the identity.
    """
    if name == "fisher" and fisher is not None:
        return Metric(fisher.columns.square().diag(), fisher.rows)
    if name in ("none", "fisher") or stats is None or not (stats.hessian.diagonal() > 0).any():
        return Metric()
    return Metric(stats.hessian if name == "inputs" else stats.hessian.diagonal().pow(power).diag())


def split(matrix: Tensor, measure: Metric, wanted: LowRank, seed: int) -> LowRankPart:
    """Return the low-rank part nearest to a float32 matrix [out, in], its entries rounded.

    Both factors get the same norm in every direction. With integers, B is rounded first and A is then solved for again,
    for the rounded B: as close as a product with these can come, whatever the metric is. Entries are of the wanted
    type, unless float16 cannot hold them.
    """
    shape = (matrix.shape[0], matrix.shape[1])
    weights = torch.ones(shape[0], device=matrix.device) if measure.rows is None else measure.rows
    weighted = matrix if measure.rows is None else matrix * weights[:, None]
    solution = truncate_rank(weighted, measure.hessian, wanted.rank, seed if min(shape) >= MIN_ITERATED_SIDE else None)
    left = solution.left.T / weights
    sizes = (solution.right.norm(dim=1, keepdim=True) / left.norm(dim=1, keepdim=True)).sqrt()
    sizes = torch.where(sizes > 0, sizes, 1.0)
    a, b = solution.right / sizes, left * sizes
    stored = wanted if lowrank.fits_float16(a, b) else dataclasses.replace(wanted, dtype="bfloat16")
    packed = lowrank.pack_factor("b", b, stored)
    if stored.bits < 16:
        rounded = lowrank.factor("b", packed, stored, shape[0], torch.float64)
        wide = rounded * weights.square()
        a = torch.linalg.pinv(wide @ rounded.T, hermitian=True).float() @ (wide.float() @ matrix)
    tensors = {**lowrank.pack_factor("a", a, stored), **packed}
    return LowRankPart(tensors, stored, lowrank.decode(tensors, stored, shape, torch.float32))


def needs_statistics(settings: Correction | None) -> bool:
    return settings is not None and settings.metric in ("inputs", "sizes")


def workspace(shape: tuple[int, int], method: int) -> int:
    """Return the bytes needed where the method takes so many: the weight, its rest, three products and the best try.

    The solver and the method take turns.
    """
    return max(method, truncation_workspace(shape)) + 6 * 4 * shape[0] * shape[1]


def quantize_with_part(
    weight: Tensor,
    statistics: Stats | Fisher | None,
    settings: Correction,
    quantize: Callable[[Tensor], Quantized],
    seed: int,
) -> Quantized:
    """Quantize weight [out, in] less a low-rank part, and return the result with this part beside it.

    `statistics` are what the metric needs; without them, or a token to go by, the metric is the plain one.
    """
    stats, fisher = (None, statistics) if isinstance(statistics, Fisher) else (statistics, None)
    measure = metric(stats, settings.metric, fisher=fisher)
    stored, original = settings.stored, weight.float()
    best: Quantized | None = None
    lowest = float("inf")
    part: LowRankPart | None = split(original, measure, stored, seed) if settings.start == "weight" else None
    for _ in range(settings.iterations):
        result = quantize(weight if part is None else original - part.product)
        residual = original - formats.decode_stored(result.weight, torch.float32)
        tried = [split(residual, measure, stored, seed), *([] if part is None else [part])]
        losses = [measure.loss(residual - one.product) for one in tried]
        loss = min(losses)
        part = tried[losses.index(loss)]
        if best is None or loss < lowest:
            best, lowest = _attach(result, part), loss
    assert best is not None
    return best


def _attach(result: Quantized, part: LowRankPart) -> Quantized:
    weight = result.weight
    tensors = {**weight.tensors, **{lowrank.PREFIX + name: tensor for name, tensor in part.tensors.items()}}
    stored = dataclasses.replace(weight.stored, lowrank=part.stored)
    return Quantized(PackedWeight(stored, tensors, weight.shape), result.notes)
