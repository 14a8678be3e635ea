"""PVQ: code directions of vectors as integer points with a fixed sum of magnitudes, their lengths apart (2410.16926).

There is no codebook, and the rate may be any fraction of a bit. A row, made Gaussian by the rotation before, is a point
of a sphere. The share of its squared length that falls on D columns is Beta(D/2, (n-D)/2), so that the levels of the
vectors' lengths ("gains") follow from D and n alone. The column loop (compress/quant/feedback.py) rounds D columns at a
time: pulses are placed for the best direction, then moved one at a time, each from where it is worth least to where it
is worth most, by the loss of the block, ||(t - q) C_BB||^2, until no move helps. The gain is that of the projection on
the direction found. Sweeps as in compress/quant/descent.py and a closed-form refit of the rows' scales follow.

Differences from the paper, of which only the abstract and the formulas above were followed: the moves in the metric of
the block are ours (they lower the loss of a correlated layer by a quarter for D = 32, by a half for D = 128, against
the Euclidean search), and so are the numbering of the points (compress/papers/formats/pvq.py) and the refit.

Not in the core: at 2.982 bits a weight it has KL 0.0069, where `trellis` has 0.0048 at 3.006 (docs/low_bit.md).

With an output metric all of that is done for groups of rows behind each other (compress/quant/two_sided.py).

Activations are coded alike by compress/papers/inputs/pvq.py (recipe `w4a4-pvq`).

Without incoherence the gains of vectors with large weights are clipped at the largest level.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from compress import formats
from compress.errors import needs
from compress.papers.formats import pvq as pvq_format
from compress.quant import descent, feedback, two_sided
from compress.quant.feedback import Layer
from compress.quant.settings import check, check_damp
from compress.types import PackedWeight, Quantized, Stats, Stored

FORMAT = "pvq"
NEEDS = frozenset({"hessian"})
INCOHERENCE = True
TWO_SIDED = True

CHUNK = 1 << 16  # weights searched at a time: temporaries stay in the cache
SAMPLES = 2048  # Gaussian vectors that tell the mean cosine of vectors and their codes
GREEDY = 16  # all of them, up to 64 for D = 128, gain nothing
MOVES = 4  # most moves of a vector over its columns: a fourth of one was seen, but float noise may move on for ever
PADDING = 1 / 16  # largest share of padded columns before the vectors are shortened
LLOYD_STEPS = 200


@dataclass(frozen=True)
class Config:
    """Settings of PVQ."""

    bpw: float = 3.0  # [bits per weight] stored, all overhead of the layer counted but that of the random rotation
    # (incoherence)
    pulses: int | None = None  # [pulses] in a vector, the sum of |y|; null: the most that `bpw` allows
    vector_dim: int = 128  # [columns] of a vector
    gain_bits: int = 4  # [bits] of the length of a vector
    damp: float = 0.01  # [fraction] of the mean diagonal, added to the diagonal of the Hessian
    sweeps: int = 1  # [sweeps] of coordinate descent after the column loop, each at about its cost; 0: none

    def __post_init__(self) -> None:
        if not 0 < self.bpw <= 8:
            raise ValueError(f"bpw {self.bpw} is not in (0, 8]")
        if self.pulses is not None:
            check(self, pulses=range(1, pvq_format.MAX_PULSES + 1))
        check(self, "sweeps", vector_dim=pvq_format.VECTOR_DIMS, gain_bits=range(2, pvq_format.MAX_GAIN_BITS + 1))
        check_damp(self.damp)


def plan_params(config: Config, shape: tuple[int, int]) -> pvq_format.Params:
    """Return the format's parameters for a weight [out, in]: enough for the exact stored bytes.

    Vectors are halved while the padding to whole vectors is more than PADDING of the columns.
    """
    dim = config.vector_dim
    while dim > pvq_format.VECTOR_DIMS[0] and -shape[1] % dim > PADDING * shape[1]:
        dim //= 2
    if config.pulses is not None:
        return pvq_format.Params(dim, config.pulses, config.gain_bits)
    low, high = 1, pvq_format.MAX_PULSES + 1  # low fits or is the least there is, high does not fit
    while high - low > 1:
        middle = min((low + high) // 2, 2 * low)  # sizes of many pulses take time to count: never look far beyond
        params = pvq_format.Params(dim, middle, config.gain_bits)
        if 8 * formats.nbytes(Stored(FORMAT, params), shape) <= config.bpw * shape[0] * shape[1]:
            low = middle
        else:
            high = middle
    return pvq_format.Params(dim, low, config.gain_bits)


def workspace(config: Config, shape: tuple[int, int]) -> int:
    """Return a bound of the bytes needed beside weight and Hessian: twelve copies of the weight, and what codes it."""
    n = -(-shape[1] // config.vector_dim) * config.vector_dim
    coding = 64 * 8 * min(pvq_format.DECODE_CHUNK, max(shape[0] * n, n))
    return feedback.workspace((shape[0], n), 12 * 4 * shape[0] * n + coding)


def quantize(weight: Tensor, stats: Stats | None, config: Config, seed: int = 0) -> Quantized:
    """Quantize weight [out, in], any float dtype, finite, by stats.hessian [in, in]."""
    assert stats is not None
    shape = (weight.shape[0], weight.shape[1])
    params = plan_params(config, shape)
    hessian, notes = feedback.usable(stats)
    target, hessian = feedback.pad_columns(weight.T.float().contiguous(), hessian, params.vector_dim)  # [in, out]
    notes += _plan_notes(config, params, shape)
    layer = feedback.factor_layer(target, hessian, config.damp, notes)
    levels = gain_levels(params, len(target)).to(target.device)
    scales, dtype = _row_scales(target, params.vector_dim)
    params = pvq_format.Params(params.vector_dim, params.pulses, params.gain_bits, dtype)

    def quantize_group(rows: slice, target: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        own, before = replace(layer, weight=target), scales[rows]
        rounder = _PyramidRounder(len(target), before, levels, params)
        values = target - feedback.run(target, layer.factor, rounder).residual
        if config.sweeps:
            values = descent.improve_blocks(own, values, rounder, config.sweeps)
        after = _refit_scales(own, values, before, getattr(torch, dtype))
        return (rounder.codes, after), values * torch.where(before > 0, after / before, 1.0)

    made = two_sided.by_tiles(target, stats.output, quantize_group)
    codes, scales = torch.cat([codes for codes, _ in made], 1), torch.cat([after for _, after in made])
    points, gains = codes[..., :-1].transpose(0, 1), codes[..., -1].T  # row, vector, (coordinate)
    packed = pvq_format.pack(points, gains, scales, levels, params)
    return Quantized(PackedWeight(Stored(FORMAT, params), packed, shape), tuple(layer.notes))


def _plan_notes(config: Config, params: pvq_format.Params, shape: tuple[int, int]) -> list[str]:
    notes = []
    if params.vector_dim != config.vector_dim:
        notes.append(f"vectors of {params.vector_dim} columns, not {config.vector_dim}, to pad {shape[1]} columns less")
    bpw = 8 * formats.nbytes(Stored(FORMAT, params), shape) / (shape[0] * shape[1])
    if config.pulses is None and bpw > config.bpw:
        notes.append(f"{bpw:.3g} bits per weight, not {config.bpw:.3g}: the layer is too small for less")
    return notes


def _row_scales(target: Tensor, dim: int) -> tuple[Tensor, str]:
    """Return the length [out] of a typical vector of each row, rounded to its storage type, and that type's name."""
    lengths = target.square().mean(0).mul_(dim).sqrt_()
    used = lengths[lengths > 0]
    fits = not used.numel() or (used.max() < 2.0**15 and used.median() > 2.0**-12)  # normal float16, with a margin
    dtype = "float16" if fits else "bfloat16"
    return lengths.to(getattr(torch, dtype)).float(), dtype


def _refit_scales(layer: Layer, values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scales [out] that are best for the codes, in their storage type: the old times <q, w> / <q, q> in H."""
    pulled = layer.times_hessian(values)
    power = (pulled * values).sum(0)
    ratio = (pulled * layer.weight).sum(0) / power
    refitted = (scales * ratio).to(dtype).float()
    usable_ratio = (power > 0) & (ratio > 0.5) & (ratio < 2) & (refitted > 0)
    return torch.where(usable_ratio, refitted, scales)


# Gains.


@lru_cache(maxsize=64)
def gain_levels(params: pvq_format.Params, columns: int) -> Tensor:
    """Return levels [2**gain_bits] of vectors' lengths over a typical one: float32, float16 values, level 0 zero. Kept.

    Lloyd's levels for sqrt(r n / D), r ~ Beta(D/2, (n-D)/2), in closed form, times the mean cosine between Gaussian
    vectors and their codes, since the gain is that of the projection.
    """
    import numpy as np

    with needs("scipy", "the method pvq"):
        from scipy.special import betainc, betaincinv, betaln

    a, b = params.vector_dim / 2, max(columns - params.vector_dim, params.vector_dim) / 2
    count = 2**params.gain_bits - 1
    mean = np.exp(betaln(a + 0.5, b) - betaln(a, b))  # of sqrt(r)
    levels = np.sqrt(betaincinv(a, b, (np.arange(count) + 0.5) / count))
    for _ in range(LLOYD_STEPS):
        edges = np.concatenate([[0.0], ((levels[1:] + levels[:-1]) / 2) ** 2, [1.0]])
        levels = mean * np.diff(betainc(a + 0.5, b, edges)) / np.diff(betainc(a, b, edges))
    sample = torch.randn(SAMPLES, params.vector_dim, generator=torch.Generator().manual_seed(0))
    points = search(sample, params.pulses)
    cosine = ((sample * points).sum(1) / points.norm(dim=1) / sample.norm(dim=1)).mean()
    scaled = torch.tensor(levels * np.sqrt((a + b) / a), dtype=torch.float32) * cosine
    return torch.cat([torch.zeros(1), scaled]).half().float()


# Points.


def search(vectors: Tensor, pulses: int) -> Tensor:
    """Return points [rows, D] float32, sum |y| = pulses, about the best in angle for vectors [rows, D] float32.

    Whole parts of the projection on the pyramid, then a pulse for the largest fractions, the last GREEDY pulses one
    after the other where the cosine gains most.
    """
    size = vectors.abs()
    size[:, 0] += size.sum(1) == 0  # a zero vector gets some point
    projection = size * (pulses / size.sum(1, keepdim=True))
    points = projection.floor()
    points *= points.sum(1, keepdim=True) <= pulses  # float sums may round past the last pulse
    left = pulses - points.sum(1, keepdim=True)
    fractions = (projection - points).argsort(dim=1, descending=True, stable=True)
    points.scatter_add_(1, fractions, (torch.arange(points.shape[1], device=points.device) < left - GREEDY).float())
    left = pulses - points.sum(1)
    product, power = (size * points).sum(1, keepdim=True), points.square().sum(1, keepdim=True)
    while bool((left > 0).any()):
        scores = (size + product).square_().div_((2 * points).add_(power + 1))
        best = scores.argmax(1, keepdim=True)
        one = (left > 0).float().unsqueeze(1)
        there = points.gather(1, best)
        product += one * size.gather(1, best)
        power += one * (2 * there + 1)
        points.scatter_(1, best, there + one)
        left -= one[:, 0]
    return points.copysign_(vectors)


def improve(vectors: Tensor, points: Tensor, gram: Tensor) -> Tensor:
    """Return points with less loss e M e^T, e = vector - gain * point, found by moving pulses one at a time.

    vectors, points [rows, D], points about in the directions of vectors; gram M = C_BB C_BB^T [D, D]. The gain of a row
    is fixed: that of the projection on its point. Each row's result is its own.
    """
    pulled = points @ gram
    plain = _gains(vectors, points, points)
    gains = torch.maximum(_gains(vectors, points, pulled), plain / 4)  # the metric may give any sign
    live, work = torch.arange(len(points), device=points.device), points.clone()
    pull = pulled - (vectors / torch.where(gains > 0, gains, 1.0)) @ gram  # half the gradient over the gain
    points, diagonal = points.clone(), gram.diagonal()
    least = -1e-5 * diagonal.mean()  # smaller changes may be float noise
    for _ in range(MOVES * points.shape[1]):
        rows = torch.arange(len(live), device=points.device)
        signs = work.sign()
        cost = (signs * pull).mul_(-2).add_(diagonal).masked_fill_(work == 0, torch.inf)
        removal, i = cost.min(1)
        step = signs[rows, i]
        work[rows, i] -= step
        pull.addcmul_(step.unsqueeze(1), gram[i], value=-1)
        signs = torch.where(work == 0, -pull.sign(), work.sign())
        cost = (signs * pull).mul_(2).add_(diagonal)
        addition, j = cost.min(1)
        step = torch.where(signs[rows, j] < 0, -1.0, 1.0)
        better = removal + addition < least
        work[rows, j] += step
        pull.addcmul_(step.unsqueeze(1), gram[j])
        live, work, pull = live[better], work[better], pull[better]
        points[live] = work
        if not len(live):
            break
    return points


class _PyramidRounder(feedback.Rounder):
    """Vectors of D columns; codes are the points, and the gain behind them."""

    unit_rows = 1

    def __init__(self, columns: int, scales: Tensor, levels: Tensor, params: pvq_format.Params) -> None:
        self.width, self.pulses = params.vector_dim, params.pulses
        self.scales, self.levels = scales, levels
        self.edges = (levels[1:] + levels[:-1]) / 2
        shape = (columns // self.width, len(scales), self.width + 1)
        self.codes = torch.zeros(shape, dtype=torch.int16, device=scales.device)

    def round_block(self, target: Tensor, metric: Tensor, start: int) -> Tensor:
        gram = metric @ metric.T
        codes = self.codes[start // self.width]
        values = torch.empty_like(target)
        step = max(1, CHUNK // self.width)
        for first in range(0, target.shape[1], step):
            rows = slice(first, first + step)
            vectors, scale = target[:, rows].T.contiguous(), self.scales[rows]
            points = search(vectors, self.pulses)
            for _ in range(2):
                points = improve(vectors, points, gram)
            lengths = _gains(vectors, points, points @ gram)[:, 0] * points.norm(dim=1)
            index = torch.bucketize((lengths / scale.clamp(min=1e-30)).contiguous(), self.edges)
            codes[rows, :-1] = points.to(torch.int16)
            codes[rows, -1] = index.to(torch.int16)
            values[:, rows] = pvq_format.vectors(points, self.levels[index] * scale).T
        return values


def _gains(vectors: Tensor, points: Tensor, pulled: Tensor) -> Tensor:
    """Return the best factors [rows, 1] of points for vectors, in the metric M; pulled: points @ M."""
    return (vectors * pulled).sum(1, keepdim=True) / (points * pulled).sum(1, keepdim=True)
