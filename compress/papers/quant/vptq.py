"""VPTQ: round vectors of consecutive rows to learned codebooks, with error feedback (arXiv 2409.17066).

All weights of a vector meet the same input, so that its metric is a number and the nearest entry is exact: the column
loop runs column by column (width 1), and all vectors of a column are matched at once ("channel-independent second-order
optimization"). Codebooks are learned before the loop by k-means with the weight that the loop gives each column (the
squared diagonal of the Hessian's factor), optionally with a second, residual codebook. Then the entries are refitted to
the codes by least squares and the loop runs again; coordinate descent and further refits follow
(compress/quant/refit.py).

Options of the paper: `residual_bits` (a second stage), `outliers` (columns with the largest inputs; here an added layer
of small integers, see compress/formats/codebook.py), `norm: columns` with `bias` (each column's spread and mean instead
of max - min and min, which two extreme weights decide).

Differences from the paper and its code, and why:
- Columns are taken by falling diag(H) but stay where they are: the loop's order needs no permutation at run time, since
  a vector lies in one column.
- A residual code is chosen after the main code, and the main code once more for it, in every loop; the paper chooses
  main codes in one pass and residual codes in a second.
- Least-squares refits replace the first part of the layer-wise training.

Not done: training of centroids against block outputs (a tuning pass over the packed weight).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.formats import codebook
from compress.quant import codebooks, feedback
from compress.quant.feedback import Objective
from compress.quant.refit import Layout, alternate, refit
from compress.quant.settings import check
from compress.types import PackedWeight, Quantized, Stats, Stored

FORMAT = "codebook"
NEEDS = frozenset({"hessian"})
INCOHERENCE = True  # output error -6%, KL 0.0318 against 0.0343 at equal bytes: a column cannot trade bits with another
RATIOS = tuple(1 - 0.05 * i for i in range(12))  # of the min-max scale of an outlier column


@dataclass(frozen=True)
class Config(codebooks.SearchConfig):
    """Settings of VPTQ. (bits + residual_bits) / vector_dim is the rate without side information."""

    bits: int = 8  # [bits] of the main code: 1 to 16
    vector_dim: int = 4  # [rows] of a vector
    residual_bits: int = 0  # [bits] of a second code for what the first one leaves: 0 (none) to 16
    group_columns: int = -1  # [columns] that share codebooks; -1: all
    norm: str = "none"  # scales stored beside the codes: none, or columns (a float16 scale for each column)
    bias: bool = False  # store a bias for each column, too; with `norm: columns`
    outliers: float = 0.0  # [fraction] of the columns, those with the largest inputs, that get an added integer part
    outlier_bits: int = 4  # [bits] of the added integer part: 4 or 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, bits=range(1, 17), residual_bits=range(17), vector_dim=range(1, 33))
        check(self, norm=("none", "columns"), outlier_bits=(4, 8))
        if self.group_columns != -1 and self.group_columns < 1:
            raise ValueError(f"group_columns {self.group_columns} is neither positive nor -1 (all columns)")
        if self.bias and self.norm == "none":
            raise ValueError("bias needs norm: columns")
        if not 0 <= self.outliers < 1:
            raise ValueError(f"outliers {self.outliers} is not in [0, 1)")


def plan_params(config: Config, shape: tuple[int, int]) -> codebook.Params:
    """Return the format's parameters for a weight [out, in]: enough for the exact stored bytes.

    A matrix with fewer vectors than twice the entries of a codebook gets shorter codes.
    """
    most = codebooks.most_bits(-(-shape[0] // config.vector_dim) * shape[1])
    stages = (config.bits, config.residual_bits) if config.residual_bits else (config.bits,)
    bits = tuple(min(b, most) for b in stages)
    return codebook.Params(
        bits=bits,
        vector_dim=config.vector_dim,
        tile_words=codebook.tile_words(bits, shape[1]),
        axis="out",
        group_columns=-1 if config.group_columns >= shape[1] else config.group_columns,
        codebook_dtype=config.codebook_dtype,
        norm=config.norm,
        bias=config.bias,
        outliers=round(config.outliers * shape[1]),
        outlier_bits=config.outlier_bits,
    )


def workspace(config: Config, shape: tuple[int, int]) -> int:
    """Return the bytes needed beside weight and Hessian: the Hessian in order, copies of the weight, scores."""
    m, n = shape[0] + config.vector_dim, shape[1]
    return 4 * n * n + feedback.workspace((m, n), codebooks.workspace(m * n, config.vector_dim), ordered=False)


def quantize(weight: Tensor, stats: Stats | None, config: Config, seed: int = 0) -> Quantized:
    """Quantize weight [out, in], any float dtype, finite, by stats.hessian [in, in]."""
    assert stats is not None
    shape = (weight.shape[0], weight.shape[1])
    params = plan_params(config, shape)
    hessian, notes = feedback.usable(stats)
    notes += codebooks.shrunk(params.bits, (config.bits, config.residual_bits))
    order = hessian.diagonal().argsort(descending=True, stable=True)
    target = torch.nn.functional.pad(weight.T.float()[order], (0, -shape[0] % config.vector_dim))
    layer = feedback.factored(target, hessian[order][:, order], config.damp, notes)
    rounder = _RowVectorRounder(target, order, config, params)
    rounder.learn(target, layer.factor.diagonal(), torch.Generator().manual_seed(seed))
    alternate(layer, rounder, config.rounds, config.sweeps)
    return Quantized(_packed(rounder, order, params, shape), tuple(layer.notes))


class _RowVectorRounder(feedback.Rounder):
    """Codes and codebooks of one matrix; column k of the loop is column order[k] of the weight."""

    width = 1

    def __init__(self, target: Tensor, order: Tensor, config: Config, params: codebook.Params) -> None:
        columns, rows = target.shape
        self.config, self.params, self.unit_rows = config, params, params.vector_dim
        stripe = columns if params.group_columns == -1 else params.group_columns
        self.owner = order // stripe  # column group of each column
        self.sizes = [2**bits for bits in params.bits]
        self.groups = int(self.owner.max()) + 1
        units, depth = rows // params.vector_dim, len(self.sizes) + (params.vector_dim if params.outliers else 0)
        # of each vector: the codes of the stages; with outliers, the integers of its rows too, zero elsewhere
        self.codes = torch.zeros(columns, units, depth, dtype=torch.int32, device=target.device)
        empty = torch.zeros(self.groups, sum(self.sizes), params.vector_dim, device=target.device)
        self.books = self._rounded(empty)  # column group, entries of all stages, d
        self.scale, self.bias = _norms(target, config)
        # of the integers of the first columns, chosen when the loop first reaches them
        self.outlier_scale = torch.zeros(params.outliers, 1, device=target.device)

    def learn(self, target: Tensor, importance: Tensor, generator: torch.Generator) -> None:
        """Learn the codebooks of all stages by weighted k-means on the weight itself."""
        left = self._normalized(target).unflatten(1, (-1, self.unit_rows))  # column, unit, row
        factors = importance * self.scale.squeeze(1)
        learned = torch.empty_like(self.books.entries)
        for group in range(self.groups):
            members = self.owner == group
            vectors = codebooks.Vectors(left[members].unsqueeze(0), factors[members])
            for entries in learned[group].split(self.sizes):  # views, one for each stage
                c = self.config
                entries.copy_(codebooks.learn(vectors, len(entries), c.iterations, c.seeding, generator)[0])
                index, _ = codebooks.assign(vectors, entries.unsqueeze(0))
                vectors = codebooks.Vectors(vectors.values - entries[index], factors[members])
        self.books = self._rounded(learned)

    def round_block(self, target: Tensor, metric: Tensor, start: int) -> Tensor:
        stages, books = len(self.sizes), self.books.entries[self.owner[start]].split(self.sizes)
        points = self._normalized(target, start).view(1, -1, self.unit_rows)
        chosen = [torch.zeros_like(points[0]) for _ in books]
        # One stage after the other; with a residual stage, the main code once more for the residual code chosen.
        for stage in [*range(stages), *range(stages - 1)]:
            others = sum(chosen[:stage] + chosen[stage + 1 :], torch.zeros_like(points))
            index, _ = codebooks.nearest(points - others, books[stage].unsqueeze(0))
            chosen[stage] = books[stage][index[0]]
            self.codes[start, :, stage] = index[0]
        coded = sum(chosen[1:], chosen[0]).view(1, -1) * self.scale[start] + self.bias[start]
        if start >= self.params.outliers:
            return coded
        left = target - coded
        if self.outlier_scale[start] == 0:
            self.outlier_scale[start] = _integer_scale(left, self.params.outlier_bits)
        top = 2 ** (self.params.outlier_bits - 1)
        integers = (left / self.outlier_scale[start]).round_().clamp_(-top, top - 1)
        self.codes[start, :, stages:] = integers.view(-1, self.unit_rows)
        return coded + integers * self.outlier_scale[start]

    def layout(self) -> Layout:
        first = 0
        index = []
        for stage, size in enumerate(self.sizes):
            index.append(self.codes[:, :, stage] + (self.owner * sum(self.sizes) + first).unsqueeze(1))
            first += size
        return Layout(torch.stack(index), True, self.scale)

    def values(self) -> Tensor:
        """Return the values [in, out] of the present codes and entries."""
        values = self.layout().values(self.books.entries.flatten(0, 1)) + self.bias
        if self.params.outliers:
            values[: self.params.outliers] += self._added()
        return values

    def refit(self, layer: Objective) -> None:
        """Fit the entries to the codes and round them to their storage type."""
        if not self.config.refit_steps:
            return
        coded = layer.weight - self.bias
        if self.params.outliers:
            coded[: self.params.outliers] -= self._added()
        entries = self.books.entries.flatten(0, 1)
        entries = refit(replace(layer, weight=coded), self.layout(), entries, self.config.refit_steps)
        self.books = self._rounded(entries.view_as(self.books.entries))

    def _added(self) -> Tensor:
        """Return the integer parts of the outlier columns, [outliers, out]."""
        integers = self.codes[: self.params.outliers, :, len(self.sizes) :]
        return integers.flatten(1).float() * self.outlier_scale

    def _normalized(self, target: Tensor, start: int | slice = slice(None)) -> Tensor:
        return (target - self.bias[start]) / self.scale[start]

    def _rounded(self, entries: Tensor) -> codebooks.Books:
        """Round each stage with a scale of its own; scale [column group, stage]."""
        stages = [codebooks.rounded(part, self.params.codebook_dtype) for part in entries.split(self.sizes, 1)]
        scales = [stage.scale for stage in stages if stage.scale is not None]
        return codebooks.Books(
            torch.cat([stage.entries for stage in stages], 1),
            torch.cat([stage.stored for stage in stages], 1),
            torch.stack(scales, 1) if scales else None,
        )


def _norms(target: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """Scale and bias of each column, [in, 1], rounded to float16: root mean square about the bias, and the mean."""
    bias, scale = torch.zeros_like(target[:, :1]), torch.ones_like(target[:, :1])
    if config.norm == "columns":
        if config.bias:
            bias = target.mean(1, keepdim=True).half().float()
        scale = (target - bias).square().mean(1, keepdim=True).sqrt().clamp(2.0**-24, 65504).half().float()
    return scale, bias


def _integer_scale(left: Tensor, bits: int) -> Tensor:
    """Return the float16 scale whose integers lose least of `left` [1, rows]."""
    largest = left.abs().amax() / (2 ** (bits - 1) - 1)
    scales = (largest * torch.tensor(RATIOS, device=left.device)).clamp(2.0**-24, 65504).half().float().unsqueeze(1)
    top = 2 ** (bits - 1)
    lost = ((left / scales).round_().clamp_(-top, top - 1) * scales - left).square_().sum(1)
    return scales[lost.argmin()]


def _packed(rounder: _RowVectorRounder, order: Tensor, params: codebook.Params, shape: tuple[int, int]) -> PackedWeight:
    inverse = torch.argsort(order)
    codes, count = rounder.codes[inverse], params.outliers  # column, unit, stage
    books = rounder.books
    parts = codebook.Parts(
        codes=[codes[:, :, stage].T for stage in range(len(params.bits))],
        codebooks=[stored.unsqueeze(1).clone() for stored in books.stored.split(rounder.sizes, 1)],
        codebook_scales=[] if books.scale is None else [scale.clone() for scale in books.scale.split(1, 1)],
    )
    if params.norm == "columns":
        parts = replace(parts, norm_scale=rounder.scale[inverse, 0].half())
        parts = replace(parts, norm_bias=rounder.bias[inverse, 0].half() if params.bias else None)
    if count:
        integers = rounder.codes[:count, :, len(params.bits) :].flatten(1)[:, : shape[0]]  # outlier, row
        parts = replace(
            parts,
            outliers=(integers.T + 2 ** (params.outlier_bits - 1)).to(torch.uint8),
            outlier_scale=rounder.outlier_scale[:, 0].half(),
            outlier_index=order[:count],
        )
    return PackedWeight(Stored(FORMAT, params), codebook.pack(parts, params, shape), shape)
