"""E8P: round eight columns at a time to a point of the E8 lattice (QuIP#, arXiv 2402.04396).

The column loop of compress/quant/feedback.py hands blocks of eight columns to an exact nearest-point search in the
65536 points of compress/formats/e8p.py. At 3 and 4 bits the remainder goes through a second, finer code. The points
suit N(0, 1) entries, so the weight should have been rotated (recipe key `incoherence`). There is one scale for the
tensor, found by running the loop on some of the rows, then in closed form between sweeps of coordinate descent.

The search for the nearest point folds signs away as in the paper, but in two classes by the parity of the signs, each
with its own list of 866 and 661 points that can be nearest; brute force over all 65536 points gives the same result.

Differences from the paper and its code, and why (relative layer loss over eight layers of a trained 8M model, 2 bits
unless said otherwise):
- The nearest two points of each shift are compared in the metric of the block, C_BB, and at 3 and 4 bits
  together with their second codes: -0.6 % when rotated, -2 % when not, -11 % at 4 bits. More than 2: under -0.5 %.
- Blocks with large inputs come first: -3 % even after rotation.
- The scale is searched for each layer upwards from the published one (targets carry earlier errors, so that a 6 %
  larger scale is usual) and refitted in closed form after the loop and after each sweep.
- `row_scales`: 16 more bits for each row, -4 % at 256 to 768 columns when rotated, -10 % when not.
- The 4-bit code starts from scale 0.95, not 1.03. Distortion on N(0, 1): .0914, .0295, .0078 at 2, 3 and 4 bits
  (nearest first point, published scales: .0914, .0294, .0096; rate-distortion .0625, .0156, .0039).
- Two sweeps instead of ten: -5 %; two more bring 1 %.
Without rotation, with row scales, that model loses as little (KL 0.0319 against 0.0324): it has no outliers.

With an output metric (compress/quant/two_sided.py) groups of rows are rounded behind each other, with sweeps and
scales of rows of their own. The scale of the tensor stays as it was found until all rows are rounded, and is then
refitted in the two-sided metric.

Not done: the fine-tuning of sign vectors, norms and unquantized weights between layers.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from compress.formats import e8p as e8p_format
from compress.formats.e8p import DIM, RHO, ball, lookup, magnitudes, odd_sum, row_scale
from compress.quant import descent, feedback, two_sided
from compress.quant.feedback import Layer
from compress.quant.settings import check, check_damp
from compress.types import OutputMetric, PackedWeight, Quantized, Stats, Stored

FORMAT = "e8p"
NEEDS = frozenset({"hessian"})
INCOHERENCE = True
TWO_SIDED = True

# Bits -> root mean square of Gaussian entries, in units of the scale, that are distorted least.
GAUSSIAN_RMS = {2: 1.03, 3: 0.98, 4: 0.95}
SCALE_STEP, MAX_SCALE_STEPS = 1.06, 8
CANDIDATES = 2  # points of each of the two shifted lattices that are compared in the metric of the Hessian's block
SEARCH_ROWS = 96  # rows on which scales are compared
TINY = 1e-30  # instead of a scale of zero in divisions
CHUNK = 2048  # vectors compared with the grid at a time: 7 MB of scores
JOINED = 1 << 15  # the same on a GPU: 200 MB
FAR = 1e4  # targets in units of the scale are cut here, so that squares stay finite


@dataclass(frozen=True)
class Config:
    """Settings of E8P."""

    bits: int = 2  # [bits] stored of a weight: 2, 3 or 4
    row_scales: bool = False  # a 16-bit scale for each row, beside that of the tensor
    damp: float = 0.01  # [fraction] of the mean diagonal, added to the diagonal of the Hessian
    sweeps: int = 2  # [sweeps] of coordinate descent after the column loop, each at twice its cost; 0: none

    REMOVED_KEYS: ClassVar[dict[str, Any]] = {"candidates": 2}

    def __post_init__(self) -> None:
        e8p_format.Params(self.bits, self.row_scales)
        check(self, "sweeps")
        check_damp(self.damp)


def plan_params(config: Config, shape: tuple[int, int]) -> e8p_format.Params:
    """Return the format's parameters for a weight [out, in]: enough for the exact stored bytes."""
    return e8p_format.Params(config.bits, config.row_scales)


def workspace(config: Config, shape: tuple[int, int]) -> int:
    """Return the bytes needed beside the stored weight and the Hessian.

    In the loop ten copies of the weight, the candidates of a block, the scores of a chunk.
    """
    n = -(-shape[1] // DIM) * DIM
    vectors = shape[0] * 2 * CANDIDATES
    beside = 40 * shape[0] * n + 4 * 4 * DIM * vectors + 3 * CHUNK * 4 * 866
    return feedback.workspace((shape[0], n), beside)


def quantize(weight: Tensor, stats: Stats | None, config: Config, seed: int = 0) -> Quantized:
    """Quantize weight [out, in], any float dtype, finite, by stats.hessian [in, in]. `seed` is unused."""
    assert stats is not None
    shape = (weight.shape[0], weight.shape[1])
    params = plan_params(config, shape)
    layer = feedback.prepare(weight, stats, config.damp, DIM)
    rounder = E8PRounder(layer, config)
    _search_scale(layer, rounder, config)
    if stats.output is None:
        _round(layer, rounder, config.sweeps, True)
    else:
        _round_two_sided(layer, rounder, config, stats.output)
    codes = layer.natural(rounder.codes).transpose(0, 1)  # row, block, stage
    tensors = e8p_format.pack(codes, rounder.scale, rounder.row_scales, params, shape)
    return Quantized(PackedWeight(Stored(FORMAT, params), tensors, shape), tuple(layer.notes))


def _round(layer: Layer, rounder: E8PRounder, sweeps: int, refits: bool) -> Tensor:
    """Choose codes, refit the scales to them if told to, in turn with sweeps; return the values [in, out]."""
    values = layer.weight - feedback.run(layer.weight, layer.factor, rounder).residual
    for sweep in range(sweeps + 1):
        values = rounder.refit(layer) if refits else values
        if sweep < sweeps:
            values = descent.improve_blocks(layer, values, rounder, 1)
    return values


def _round_two_sided(layer: Layer, rounder: E8PRounder, config: Config, output: OutputMetric) -> None:
    """Round groups of rows behind each other at the scale of the tensor, and then fit that to all of them."""

    def quantize_group(rows: slice, target: Tensor) -> tuple[E8PRounder, Tensor]:
        part = rounder.part(rows)
        return part, _round(replace(layer, weight=target), part, config.sweeps, config.row_scales)

    parts = two_sided.by_tiles(layer.weight, output, quantize_group)
    rounder.codes = torch.cat([part.codes for part in parts], 1)
    if rounder.row_scales is not None:
        rounder.row_scales = torch.cat([part.row_scales for part in parts if part.row_scales is not None])
    values = rounder.values()
    pulled = two_sided.objective(layer, output).pull(values)
    above, below = (pulled * layer.weight).sum(), (pulled * values).sum()
    rounder.scale = torch.where(above > 0, rounder.scale * above / below, rounder.scale)


def _search_scale(layer: Layer, rounder: E8PRounder, config: Config) -> None:
    """Set rounder.scale to the best of a walk in steps of 6 %, judged by the loss of the loop on some rows."""
    rows = layer.weight.shape[1]
    chosen = torch.arange(0, rows, -(-rows // SEARCH_ROWS), device=layer.weight.device)
    sample = replace(layer, weight=layer.weight[:, chosen].contiguous())
    trial = E8PRounder(sample, config)
    trial.row_scales = rounder.row_scales if rounder.row_scales is None else rounder.row_scales[chosen]
    start = rounder.scale

    def loss(power: int) -> float:
        trial.scale = start * SCALE_STEP**power
        return feedback.run(sample.weight, sample.factor, trial).loss

    best, power = loss(0), 0
    for direction in (1, -1):
        while abs(power) < MAX_SCALE_STEPS and (tried := loss(power + direction)) < best:
            best, power = tried, power + direction
        if power:
            break
    rounder.scale = start * SCALE_STEP**power


class E8PRounder(feedback.Rounder):
    """The code points as a Rounder, and the scales in which they are used."""

    width = DIM
    unit_rows = 1

    def __init__(self, layer: Layer, config: Config) -> None:
        columns, rows = layer.weight.shape
        device = layer.weight.device
        self.bits = config.bits
        self.search = Nearest(device)
        self.codes = torch.zeros(columns // DIM, rows, 1 if config.bits == 2 else 2, dtype=torch.int32, device=device)
        rms = layer.weight.square().mean().sqrt()
        self.scale = (rms / GAUSSIAN_RMS[config.bits]).view(1)
        self.row_scales: Tensor | None = None  # [rows] float16
        if config.row_scales:
            self.row_scales = (layer.weight.square().mean(0).sqrt() / rms.clamp(min=TINY)).half()

    def factors(self) -> Tensor:
        """Return the scale of each row, [1] or [rows]."""
        return self.scale if self.row_scales is None else row_scale(self.scale, self.row_scales)

    def round_block(self, target: Tensor, metric: Tensor, start: int) -> Tensor:
        factors = self.factors()
        x = (target / factors.clamp(min=TINY)).clamp_(-FAR, FAR).T.contiguous()  # row, 8
        codes = self.search.stage_candidates(x, self.bits, CANDIDATES)  # row, candidate, stage
        values = lookup(codes, self.bits)  # row, candidate, 8
        best = ((x[:, None] - values) @ metric).square().sum(-1).argmin(1)
        row = torch.arange(len(x), device=x.device)
        self.codes[start // DIM] = codes[row, best]
        return values[row, best].T * factors

    def part(self, rows: slice) -> E8PRounder:
        """Return a rounder of some rows in these scales, with codes of its own."""
        part = copy(self)
        part.codes = torch.zeros_like(self.codes[:, rows])
        part.row_scales = None if self.row_scales is None else self.row_scales[rows]
        return part

    def points(self) -> Tensor:
        """Return the points [in, rows] of all codes."""
        return lookup(self.codes, self.bits).transpose(1, 2).flatten(0, 1)

    def values(self) -> Tensor:
        """Return the values [in, rows] of all codes."""
        return self.points() * self.factors()

    def refit(self, layer: Layer) -> Tensor:
        """Refit the scales to the codes in closed form; return the values [in, out] that result."""
        points = self.points()
        pull = layer.times_hessian(points)
        if self.row_scales is None:
            above, below = (pull * layer.weight).sum(), (pull * points).sum()
            self.scale = torch.where(above > 0, above / below, self.scale)
        else:
            best = (pull * layer.weight).sum(0) / (pull * points).sum(0) / self.scale.clamp(min=TINY)
            self.row_scales = torch.where(best > 0, best, self.row_scales.float()).half()
        return points * self.factors()


class Nearest:
    """Exact search for the nearest E8P points.

    For shift s, z = x - s is compared with points whose coordinate signs have a fixed parity. With the signs of z
    folded into the codes, |z| meets, depending on their parity, an entry of the table as it is or with one coordinate
    negative, and then that coordinate is 1/2 (a larger one is never nearest: the entry with 1/2 there in its stead is
    nearer and has the right parity). Candidates after the nearest are the best of these points only.
    """

    def __init__(self, device: torch.device) -> None:
        entries, odd = magnitudes(), odd_sum()
        place = torch.arange(DIM)
        owner, negative = (entries == 0.5).nonzero(as_tuple=True)  # entries with one coordinate negative
        signed = entries[owner].masked_fill(place == negative[:, None], -0.5)
        self.grid: list[Tensor] = []  # for each parity: points [n, 8]
        self.half: list[Tensor] = []  # half their squared norms
        self.code: list[Tensor] = []  # and their codes where all signs of z are positive
        for parity in (False, True):
            other = odd[owner] != parity
            which = torch.cat([(odd == parity).nonzero()[:, 0], owner[other]])
            flips = torch.cat([torch.zeros(len(which) - int(other.sum())).long(), 1 << negative[other]])
            grid = torch.cat([entries[odd == parity], signed[other]])
            code = which << 8 | flips ^ odd[which].long() << DIM - 1
            self.grid.append(grid.to(device))
            self.half.append(grid.square().sum(1).div(2).to(device))
            self.code.append(code.to(device, torch.int32))
        self.powers = (1 << place).to(device, torch.int32)
        self.ball = ball().to(device)
        self.all = _Joined(torch.cat(self.grid), torch.cat(self.half), torch.cat(self.code), len(self.half[0]))

    def nearest(self, x: Tensor) -> Tensor:
        """Return codes [n] int32 of the nearest points to x [n, 8]."""
        codes, distances = self.candidates(x, 1)
        return codes.gather(1, distances.argmin(1, keepdim=True))[:, 0]

    def stage_candidates(self, x: Tensor, bits: int, count: int) -> Tensor:
        """Return codes [n, 2 * count, stages] int32 of the `count` points of each shift nearest to x [n, 8].

        At 3 and 4 bits each has a second code, nearest to what the first leaves.
        """
        codes = self.candidates(x, count)[0][..., None]
        if bits == 2:
            return codes
        rest = (x[:, None] - lookup(codes, 2)).mul_(RHO[bits]).flatten(0, 1)
        if bits == 3:
            second = torch.addmm(self.ball.square().sum(1) / 2, rest, self.ball.T, beta=-1).argmax(1).int()
        else:
            second = self.nearest(rest)
        return torch.cat([codes, second.view(codes.shape)], -1)

    def candidates(self, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the `count` nearest points of each shift: codes [n, 2 * count] int32, squared distances float32."""
        codes = torch.empty(len(x), 2, count, dtype=torch.int32, device=x.device)
        distances = torch.empty(len(x), 2, count, device=x.device)
        for side, shift in enumerate((0.25, -0.25)):
            z = x - shift
            negative = z < 0
            byte = (negative * self.powers).sum(1, dtype=torch.int32)
            odd = negative.sum(1) % 2 == 1
            z.abs_()
            norm = z.square().sum(1)
            if x.is_cuda:
                at, best = self.all.best(z, odd, count)
                distances[:, side] = norm[:, None] - 2 * best
                codes[:, side] = self.all.code[at] ^ byte[:, None] ^ side
                continue
            for parity, chosen in enumerate((~odd, odd)):
                for rows in chosen.nonzero()[:, 0].split(CHUNK):
                    score = torch.addmm(self.half[parity], z[rows], self.grid[parity].T, beta=-1)
                    best, at = score.max(1, keepdim=True) if count == 1 else score.topk(count)
                    distances[rows, side] = norm[rows, None] - 2 * best
                    codes[rows, side] = self.code[parity][at] ^ byte[rows, None] ^ side
        return codes.flatten(1), distances.flatten(1)


class _Joined(NamedTuple):
    """The points of both parities in one table: more scores, but which vectors have which parity need not be known."""

    grid: Tensor  # [n, 8]
    half: Tensor  # [n]
    code: Tensor  # [n] int32
    even: int  # points of the first parity

    def best(self, z: Tensor, odd: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the `count` best points of the parity of each z [vectors, 8], and their scores, [vectors, count]."""
        parts = []
        for vectors, is_odd in zip(z.split(JOINED), odd.split(JOINED), strict=True):
            score = torch.addmm(self.half, vectors, self.grid.T, beta=-1)
            score[:, : self.even].masked_fill_(is_odd[:, None], -torch.inf)
            score[:, self.even :].masked_fill_(~is_odd[:, None], -torch.inf)
            parts.append(score.topk(count))
        return torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])
