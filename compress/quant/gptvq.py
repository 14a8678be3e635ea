"""GPTVQ: round vectors of consecutive columns to learned codebooks, with error feedback (arXiv 2402.15319).

A vector is d columns of one row. The column loop (compress/quant/feedback.py) hands over d columns at a time; codes are
chosen in the metric C_BB of the block, in which the loss is exact. A codebook belongs to a group of columns x rows; it
is learned when the loop reaches the group's columns, on targets that carry all errors so far, by EM in the same metric.
Then the entries are refitted to the codes by least squares over the whole matrix and the loop runs again (`rounds`);
coordinate descent over the blocks (compress/quant/descent.py) and further refits follow. A result is only replaced by a
better one.

Differences from the paper and its code, and why:
- EM and rounding use the exact metric; the released code weights EM and search differently, and with unsquared entries
  of the factor (measured on a correlated layer, d = 4: 0.0421 there, 0.0344 here).
- Entries are refitted by conjugate gradients on the exact quadratic (compress/quant/refit.py) instead of 25 steps of
  Adam, and alternate with the codes.
- `permute` stores an order of columns: sorted by what they matter, cut into d equal runs, and position p of every
  vector takes its columns from run p. The codebook then spends its levels on the positions that matter (a gain of
  transform coding: large where few inputs carry much, as in front of attention output projections). It costs 16 bits
  per column and one gather of the input at run time. Without it columns keep their order, in the loop too.
- `svd_rank` (the paper's codebook SVD, d = 1): codebooks are sorted, stacked and replaced by two factors, which then
  alternate with the codes like whole codebooks. The paper fits the factors by gradient descent and keeps the codes.
  Measured on two layers at 2 bits, 256 weights for a codebook: rank 1 stores 2.05 and 2.09 bits per weight instead of
  2.21 and 2.25, with 0.4% and 3% more output error; rank 2 stores 2.08 and 2.13, with 0.1% and 1% more.

Not done here: targets from full-precision inputs (compress/quant/target_correction.py); several candidates per block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.formats import codebook
from compress.numerics.linalg import upper_factor
from compress.quant import codebooks, feedback
from compress.quant.feedback import Layer, Objective
from compress.quant.refit import Layout, alternate, refit, refit_factors, settle
from compress.quant.settings import check
from compress.types import PackedWeight, Quantized, Stats, Stored

FORMAT = "codebook"
NEEDS = frozenset({"hessian"})
INCOHERENCE = False  # a stored order of columns gains more than a rotation: output error 2% less, 23% in places
STRIPE = 256  # columns of a codebook group, as long as it has enough rows
OCTAVES = 8  # that the scales of a block of columns span at most: rows of zeros must not coarsen those of the others


@dataclass(frozen=True)
class Config(codebooks.SearchConfig):
    """Settings of GPTVQ. bits / vector_dim is the rate without side information."""

    bits: int = 8  # [bits] of one code: 1 to 12
    vector_dim: int = 4  # [columns] of a vector: 1, 2 or 4
    group_weights: int = 65536  # [weights] that share a codebook; -1: the whole matrix
    scale_columns: int = 0  # [columns] that share a 4-bit scale; 0: no scales
    permute: bool = True  # store an order of the columns that the codebooks can exploit
    svd_rank: int = 0  # of all codebooks together, stored as a product of two factors; 0: stored whole. With vector_dim
    # 1 only

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, bits=range(1, 13), vector_dim=(1, 2, 4))
        if self.group_weights != -1 and self.group_weights < 1:
            raise ValueError(f"group_weights {self.group_weights} is neither positive nor -1 (the whole matrix)")
        if self.scale_columns < 0 or self.scale_columns % self.vector_dim:
            raise ValueError(
                f"scale_columns {self.scale_columns} is not 0 or a multiple of vector_dim {self.vector_dim}"
            )
        check(self, svd_rank=range(2**self.bits + 1))
        if self.svd_rank and (self.vector_dim != 1 or self.codebook_dtype != "int8"):
            raise ValueError(f"svd_rank {self.svd_rank} needs vector_dim 1 and codebook_dtype int8")


def plan_params(config: Config, shape: tuple[int, int]) -> codebook.Params:
    """Return the format's parameters for a weight [out, in]: enough for the exact stored bytes.

    A group with fewer vectors than twice the codebook's entries gets shorter codes. The rank of the codebooks is at
    most their number, and that of their entries.
    """
    out_features, in_features = shape
    d = config.vector_dim
    group_columns, group_rows = _group(config, shape)
    columns = -(-in_features // d)
    group_size = (columns if group_columns == -1 else group_columns // d) * (
        out_features if group_rows == -1 else group_rows
    )
    bits = min(config.bits, codebooks.most_bits(group_size))
    params = codebook.Params(
        bits=(bits,),
        vector_dim=d,
        tile_words=codebook.tile_words((bits,), columns),
        group_columns=group_columns,
        group_rows=group_rows,
        codebook_dtype=config.codebook_dtype,
        scale_columns=config.scale_columns,
        permuted=config.permute,
    )
    count = math.prod(codebook.groups(params, shape))
    return replace(params, svd_rank=min(config.svd_rank, 2**bits, count))


def workspace(config: Config, shape: tuple[int, int]) -> int:
    """Return the bytes needed beside weight and Hessian: the Hessian in order, copies of the weight, scores."""
    m, n = shape[0], shape[1] + config.vector_dim
    return 4 * n * n + feedback.workspace((m, n), codebooks.workspace(m * n, config.vector_dim), ordered=False)


def quantize(weight: Tensor, stats: Stats | None, config: Config, seed: int = 0) -> Quantized:
    """Quantize weight [out, in], any float dtype, finite, by stats.hessian [in, in]."""
    assert stats is not None
    shape = (weight.shape[0], weight.shape[1])
    params = plan_params(config, shape)
    hessian, notes = feedback.usable(stats)
    notes += codebooks.shrunk(params.bits, (config.bits,))
    if params.svd_rank < config.svd_rank:
        notes.append(f"codebooks of rank {params.svd_rank} instead of {config.svd_rank}: they are too few or too small")
    target = weight.T.float()
    order = _order(target, hessian, config)
    target, hessian = feedback.padded(target[order], hessian[order][:, order], config.vector_dim)
    layer = feedback.factored(target, hessian, config.damp, notes)
    rounder = _ColumnVectorRounder(target, config, params, shape, seed)
    alternate(layer, rounder, config.rounds, config.sweeps)
    notes = [*layer.notes, *(_factored(layer, rounder, config) if params.svd_rank else ())]
    return Quantized(_packed(rounder, order, params, shape), tuple(notes))


def _factored(layer: Layer, rounder: _ColumnVectorRounder, config: Config) -> list[str]:
    """Put codebooks of rank svd_rank in place of the rounder's, and choose codes for them; a note if the loss rises.

    Last, not right after the first loop: the error is about equal or up to 2% lower, and what the rank costs is known.
    """
    whole = layer.loss(rounder.values())
    rounder.factor(layer)
    loss = settle(layer, rounder, max(1, config.rounds), config.sweeps)
    return [f"codebooks of rank {rounder.rank} raised the loss from {whole:.4g} to {loss:.4g}"] if loss > whole else []


class _ColumnVectorRounder:
    """Codes and codebooks of one matrix; columns arrive in stored order."""

    unit_rows = 1

    def __init__(
        self, target: Tensor, config: Config, params: codebook.Params, shape: tuple[int, int], seed: int
    ) -> None:
        columns, self.rows = target.shape
        self.config, self.params = config, params
        self.width, self.size = params.vector_dim, 2 ** params.bits[0]
        self.group = columns if params.group_columns == -1 else params.group_columns
        self.group_columns = self.group  # stays when `group` is set to 0: codebooks are not to be fitted again
        self.group_rows = self.rows if params.group_rows == -1 else params.group_rows
        self.groups = codebook.groups(params, shape)
        self.generator = torch.Generator().manual_seed(seed)
        self.codes = torch.zeros(columns // self.width, self.rows, dtype=torch.int32, device=target.device)
        empty = torch.zeros(*self.groups, self.size, self.width, device=target.device)
        self.books = codebooks.rounded(empty, params.codebook_dtype)  # column group, row group, k, d
        self.scales = _Scales(target, params) if params.scale_columns else None
        self.rank = 0  # of the present codebooks; 0: any

    def fit_group(self, targets: Tensor, metric: Tensor, start: int) -> None:
        """Learn the codebooks of a stripe, those of all row groups at once."""
        d, blocks = self.width, len(targets) // self.width
        factors = metric.diagonal()
        if d > 1:
            factors = metric.view(blocks, d, blocks, d).diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # block, d, d
        vectors, weights = targets, None
        if self.scales is not None:
            scale = self.scales.fit(targets, start)
            vectors, weights = targets / scale, scale[::d].square()
        vectors = vectors.view(blocks, d, self.rows).transpose(1, 2)  # block, row, d
        whole = self.rows // self.group_rows * self.group_rows
        learned = []
        for rows in (slice(0, whole), slice(whole, self.rows)):
            if rows.start == rows.stop:
                continue
            size = min(self.group_rows, rows.stop - rows.start)
            grouped = codebooks.Vectors(
                vectors[:, rows].unflatten(1, (-1, size)).transpose(0, 1).contiguous(),  # group, block, row, d
                factors.contiguous(),
                None if weights is None else weights[:, rows].unflatten(1, (-1, size)).transpose(0, 1).contiguous(),
            )
            c = self.config
            learned.append(codebooks.learn(grouped, self.size, c.iterations, c.seeding, self.generator))
        stripe, books = start // self.group_columns, self._rounded(torch.cat(learned))
        self.books.entries[stripe], self.books.stored[stripe] = books.entries, books.stored
        if self.books.scale is not None and books.scale is not None:
            self.books.scale[stripe] = books.scale

    def round_block(self, target: Tensor, metric: Tensor, start: int) -> Tensor:
        entries = self.books.entries[start // self.group_columns]  # row group, k, d
        scale = None if self.scales is None else self.scales.factors[start // self.scales.columns]  # row
        points = (target if scale is None else target / scale).T @ metric
        points = torch.nn.functional.pad(points, (0, 0, 0, -self.rows % self.group_rows))
        index, _ = codebooks.nearest(points.view(len(entries), self.group_rows, -1), entries @ metric)
        self.codes[start // self.width] = index.flatten()[: self.rows]
        chosen = torch.take_along_dim(entries, index.unsqueeze(2), 1).flatten(0, 1)[: self.rows]  # row, d
        return chosen.T if scale is None else chosen.T * scale

    def layout(self) -> Layout:
        device = self.codes.device
        stripe = torch.arange(len(self.codes), device=device) * self.width // self.group_columns
        row_group = torch.arange(self.rows, device=device) // self.group_rows
        book = stripe.unsqueeze(1) * self.groups[1] + row_group
        multiplier = None
        if self.scales is not None:
            multiplier = self.scales.factors.repeat_interleave(self.scales.columns, 0)[: len(self.codes) * self.width]
        return Layout((book * self.size + self.codes).unsqueeze(0), False, multiplier)

    def values(self) -> Tensor:
        """Return the values [in, out] of the present codes and entries."""
        return self.layout().values(self.books.entries.view(-1, self.width))

    def refit(self, layer: Objective) -> None:
        """Fit the entries or their factors to the codes and round them to their storage type."""
        if self.config.refit_steps:
            self.books = self._fitted(layer)

    def factor(self, layer: Objective) -> None:
        """Sort each codebook and put codebooks of rank svd_rank in place of them, from now on."""
        entries, order = self.books.entries.sort(2)  # column group, row group, k, 1
        self.codes = order.argsort(2).flatten()[self.layout().index[0]].to(self.codes.dtype)
        self.books = self.books._replace(entries=entries)
        self.rank = self.params.svd_rank
        self.books = self._fitted(layer)

    def _fitted(self, layer: Objective) -> codebooks.Books:
        entries, steps = self.books.entries, self.config.refit_steps
        if not self.rank:
            flat = refit(layer, self.layout(), entries.view(-1, self.width), steps)
            return self._rounded(flat.view_as(entries))
        books = refit_factors(layer, self.layout(), entries.flatten(0, 1), self.rank, steps)
        return books._replace(entries=books.entries.view_as(entries), stored=books.stored.view(*self.groups, self.rank))

    def _rounded(self, entries: Tensor) -> codebooks.Books:
        return codebooks.rounded(entries, self.params.codebook_dtype)


class _Scales:
    """4-bit logarithmic scales of blocks of columns of each row."""

    def __init__(self, target: Tensor, params: codebook.Params) -> None:
        self.columns = params.scale_columns
        blocks = -(-len(target) // self.columns)
        self.factors = torch.ones(blocks, target.shape[1], device=target.device)  # as decoded
        self.codes = torch.zeros(blocks, target.shape[1], dtype=torch.uint8, device=target.device)
        self.grid = torch.zeros(blocks, 2, dtype=torch.float16, device=target.device)  # offset and step of the log2

    def fit(self, targets: Tensor, start: int) -> Tensor:
        """Fit the scales of a stripe's blocks, the largest magnitudes, on the grid; return factors [columns, rows]."""
        first = start // self.columns
        for index, part in enumerate(targets.split(self.columns), first):
            largest = part.abs().amax(0).clamp_(min=1e-30).log2()
            low = torch.maximum(largest.amin(), largest.amax() - OCTAVES).clamp(min=-24).half()
            step = ((largest.amax() - low) / (codebook.SCALE_LEVELS - 1)).clamp(2.0**-14, 8).half()
            self.grid[index] = torch.stack([low, step])
            codes = ((largest - low) / step).round_().clamp_(0, codebook.SCALE_LEVELS - 1)
            self.codes[index] = codes.to(torch.uint8)
            self.factors[index] = codebook.block_factors(codes.unsqueeze(1), self.grid[index : index + 1]).squeeze(1)
        last = first + -(-len(targets) // self.columns)
        return self.factors[first:last].repeat_interleave(self.columns, 0)[: len(targets)]


def _order(target: Tensor, hessian: Tensor, config: Config) -> Tensor:
    """Return the column of the weight for each stored column, [in] int64; ties keep the original order."""
    columns, d = len(target), config.vector_dim
    diagonal = hessian.diagonal()
    if not config.permute:
        return torch.arange(columns, device=target.device)
    act = diagonal.argsort(descending=True, stable=True)
    factor = upper_factor(hessian, config.damp, act).upper.diagonal().square()
    importance = torch.empty_like(diagonal)
    importance[act] = factor
    importance *= target.square().mean(1)
    ranked = importance.argsort(descending=True, stable=True)
    blocks = -(-columns // d)
    sizes = [blocks - (p >= columns - (blocks - 1) * d) for p in range(d)]
    runs = ranked.split(sizes)
    whole = torch.stack([run[: blocks - 1] for run in runs], 1)  # block, d
    rest = torch.cat([run[blocks - 1 :] for run in runs])
    first = diagonal[whole].mean(1).argsort(descending=True, stable=True)
    return torch.cat([whole[first].flatten(), rest])


def _group(config: Config, shape: tuple[int, int]) -> tuple[int, int]:
    """Return columns and rows of a codebook group, -1: all; both evened out, so that groups are about as large."""
    out_features, in_features = shape
    d, weights = config.vector_dim, config.group_weights
    if weights == -1 or weights >= out_features * in_features:
        return -1, -1
    unit = max(d, config.scale_columns)
    stripes = max(1, round(in_features / max(STRIPE, weights // out_features)))
    columns = -(-in_features // (stripes * unit)) * unit
    tall = max(1, round(out_features * columns / weights))
    rows = -(-out_features // tall)
    return (columns if columns < in_features else -1), (rows if rows < out_features else -1)


def _packed(
    rounder: _ColumnVectorRounder, order: Tensor, params: codebook.Params, shape: tuple[int, int]
) -> PackedWeight:
    books = rounder.books
    parts = codebook.Parts([rounder.codes.T], [], [], order=order if params.permuted else None)
    if params.svd_rank:
        parts = replace(parts, codebook_left=books.stored, codebook_left_scale=books.scale, codebook_right=books.right)
    else:
        parts = replace(parts, codebooks=[books.stored], codebook_scales=[] if books.scale is None else [books.scale])
    if rounder.scales is not None:
        parts = replace(parts, scales=rounder.scales.codes.T, scale_grid=rounder.scales.grid)
    return PackedWeight(Stored(FORMAT, params), codebook.pack(parts, params, shape), shape)
