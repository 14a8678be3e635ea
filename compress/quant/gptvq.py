"""GPTVQ: round vectors of consecutive columns to learned codebooks, with error feedback (arXiv 2402.15319).

A vector is d columns of one row. The column loop (compress/quant/feedback.py) hands over d columns at a time; codes are
chosen in the metric C_BB of the block, in which the loss is exact. A codebook belongs to a group of columns x rows; it
is learned when the loop reaches the group's columns, on targets that carry all errors so far, by EM in the same metric.
Then the entries are refitted to the codes by least squares over the whole matrix and the loop runs again;
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

With an output metric the codebooks are those of above; rows are then rounded again, and entries refitted, in the
two-sided metric (compress/quant/refit.py).

Not done here: codebooks as products of two factors and scales of blocks of columns, which older checkpoints may have
(docs/results/low_bit.md has their figures); several candidates per block.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.formats import codebook
from compress.numerics.linalg import upper_factor
from compress.quant import codebooks, feedback
from compress.quant.feedback import Objective
from compress.quant.refit import EntryLayout, alternate, alternate_two_sided, refit
from compress.quant.settings import check
from compress.types import PackedWeight, Quantized, Stats, Stored

FORMAT = "codebook"
NEEDS = frozenset({"hessian"})
INCOHERENCE = False  # a stored order of columns gains more than a rotation: output error 2% less, 23% in places
TWO_SIDED = True
STRIPE_COLUMNS = 256  # a codebook group has so many as long as it has enough rows


@dataclass(frozen=True)
class Config(codebooks.SearchConfig):
    """Settings of GPTVQ. bits / vector_dim is the rate without side information."""

    bits: int = 8  # [bits] of one code: 1 to 12
    vector_dim: int = 4  # [columns] of a vector: 1, 2 or 4
    group_weights: int = 65536  # [weights] that share a codebook; -1: the whole matrix
    permute: bool = True  # store an order of the columns that the codebooks can exploit

    REMOVED_KEYS: ClassVar[dict[str, Any]] = {**codebooks.SearchConfig.REMOVED_KEYS, "scale_columns": 0, "svd_rank": 0}

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, bits=range(1, 13), vector_dim=(1, 2, 4))
        if self.group_weights != -1 and self.group_weights < 1:
            raise ValueError(f"group_weights {self.group_weights} is neither positive nor -1 (the whole matrix)")


def plan_params(config: Config, shape: tuple[int, int]) -> codebook.Params:
    """Return the format's parameters for a weight [out, in]: enough for the exact stored bytes.

    A group with fewer vectors than twice the codebook's entries gets shorter codes.
    """
    out_features, in_features = shape
    d = config.vector_dim
    group_columns, group_rows = _group(config, shape)
    columns = -(-in_features // d)
    group_size = (columns if group_columns == -1 else group_columns // d) * (
        out_features if group_rows == -1 else group_rows
    )
    bits = min(config.bits, codebooks.most_bits(group_size))
    return codebook.Params(
        bits=(bits,),
        vector_dim=d,
        tile_words=codebook.tile_words((bits,), columns),
        group_columns=group_columns,
        group_rows=group_rows,
        permuted=config.permute,
    )


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
    notes += codebooks.notes(params.bits[0], config.bits)
    target = weight.T.float()
    order = _order(target, hessian, config)
    target, hessian = feedback.pad_columns(target[order], hessian[order][:, order], config.vector_dim)
    layer = feedback.factor_layer(target, hessian, config.damp, notes)
    rounder = _ColumnVectorRounder(target, config, params, shape, seed)
    alternate(layer, rounder, config.sweeps)
    if stats.output is not None:
        alternate_two_sided(layer, rounder, config.sweeps, stats.output, cut=rounder.group_rows)
    return Quantized(_pack(rounder, order, params, shape), tuple(layer.notes))


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
        self.books = codebooks.round_entries(empty)  # column group, row group, k, d

    def fit_group(self, targets: Tensor, metric: Tensor, start: int) -> None:
        """Learn the codebooks of a stripe, those of all row groups at once."""
        d, blocks = self.width, len(targets) // self.width
        factors = metric.diagonal()
        if d > 1:
            factors = metric.view(blocks, d, blocks, d).diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # block, d, d
        vectors = targets.view(blocks, d, self.rows).transpose(1, 2)  # block, row, d
        whole = self.rows // self.group_rows * self.group_rows
        learned = []
        for rows in (slice(0, whole), slice(whole, self.rows)):
            if rows.start == rows.stop:
                continue
            size = min(self.group_rows, rows.stop - rows.start)
            values = vectors[:, rows].unflatten(1, (-1, size)).transpose(0, 1).contiguous()  # group, block, row, d
            grouped = codebooks.GroupedVectors(values, factors.contiguous())
            learned.append(codebooks.learn(grouped, self.size, self.config.iterations, self.generator))
        stripe = start // self.group_columns
        for whole_matrix, of_stripe in zip(self.books, codebooks.round_entries(torch.cat(learned)), strict=True):
            whole_matrix[stripe] = of_stripe

    def round_block(self, target: Tensor, metric: Tensor, start: int) -> Tensor:
        entries = self.books.entries[start // self.group_columns]  # row group, k, d
        points = torch.nn.functional.pad(target.T @ metric, (0, 0, 0, -self.rows % self.group_rows))
        index, _ = codebooks.nearest(points.view(len(entries), self.group_rows, -1), entries @ metric)
        self.codes[start // self.width] = index.flatten()[: self.rows]
        return torch.take_along_dim(entries, index.unsqueeze(2), 1).flatten(0, 1)[: self.rows].T  # d, row

    def layout(self) -> EntryLayout:
        device = self.codes.device
        stripe = torch.arange(len(self.codes), device=device) * self.width // self.group_columns
        row_group = torch.arange(self.rows, device=device) // self.group_rows
        book = stripe.unsqueeze(1) * self.groups[1] + row_group
        return EntryLayout(book * self.size + self.codes, along_rows=False)

    def values(self) -> Tensor:
        """Return the values [in, out] of the present codes and entries."""
        return self.layout().values(self.books.entries.view(-1, self.width))

    def refit(self, layer: Objective) -> None:
        """Fit the entries to the codes and round them to their storage type."""
        entries = refit(layer, self.layout(), self.books.entries.view(-1, self.width))
        self.books = codebooks.round_entries(entries.view_as(self.books.entries))

    def part(self, rows: slice) -> _ColumnVectorRounder:
        """Return a rounder of some rows of one row group."""
        part, owner = copy(self), rows.start // self.group_rows
        part.rows = part.group_rows = rows.stop - rows.start
        part.codes = torch.zeros_like(self.codes[:, rows])
        part.books = codebooks.StoredEntries(*(tensor[:, owner : owner + 1] for tensor in self.books))
        return part


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
    stripes = max(1, round(in_features / max(STRIPE_COLUMNS, weights // out_features)))
    columns = -(-in_features // (stripes * d)) * d
    tall = max(1, round(out_features * columns / weights))
    rows = -(-out_features // tall)
    return (columns if columns < in_features else -1), (rows if rows < out_features else -1)


def _pack(
    rounder: _ColumnVectorRounder, order: Tensor, params: codebook.Params, shape: tuple[int, int]
) -> PackedWeight:
    books = rounder.books
    parts = codebook.Parts([rounder.codes.T], [books.stored], [books.scale], order=order if params.permuted else None)
    return PackedWeight(Stored(FORMAT, params), codebook.pack(parts, params, shape), shape)
