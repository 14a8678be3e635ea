"""VPTQ: round vectors of consecutive rows to learned codebooks, with error feedback (arXiv 2409.17066).

All weights of a vector meet the same input, so that its metric is a number and the nearest entry is exact: the column
loop runs column by column (width 1), and all vectors of a column are matched at once ("channel-independent second-order
optimization"). Codebooks are learned before the loop by k-means with the weight that the loop gives each column (the
squared diagonal of the Hessian's factor). Then the entries are refitted to the codes by least squares and the loop runs
again; coordinate descent and further refits follow (compress/quant/refit.py). `outliers` are the paper's columns with
the largest inputs; here they get an added layer of 4-bit integers (compress/formats/codebook.py).

Not in the core: at 2.160 bits a weight it has KL 0.0315, where `trellis` has 0.0238 at 2.006 and `gptvq`, whose vectors
need no rotation, 0.0320 at 2.183 (docs/low_bit.md).

Differences from the paper and its code, and why:
- Columns are taken by falling diag(H) but stay where they are: the loop's order needs no permutation at run time, since
  a vector lies in one column.
- Least-squares refits replace the first part of the layer-wise training. With `codebook_dtype: float16`, the paper's
  type, entries are trained behind it, codes fixed, by compress/tune/blockwise.py and compress/tune/end_to_end.py
  (recipe `vptq2bit-tuned`); int8 entries, the default, stay as they are.

With an output metric rows are rounded again, and entries refitted, in the two-sided metric (compress/quant/refit.py).

Not done: a second, residual codebook, scales and biases of columns, several groups of columns (older checkpoints may
have them, and are read).
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from compress.formats import codebook
from compress.quant import codebooks, feedback, two_sided
from compress.quant.feedback import Objective
from compress.quant.refit import EntryLayout, alternate, alternate_two_sided, refit
from compress.quant.settings import check
from compress.types import PackedWeight, Quantized, Stats, Stored

FORMAT = "codebook"
NEEDS = frozenset({"hessian"})
TWO_SIDED = True
INCOHERENCE = True  # output error -6%, KL 0.0318 against 0.0343 at equal bytes: a column cannot trade bits with another
OUTLIER_BITS = 4  # outlier columns get integers of so many beside their codes
OUTLIER_RATIOS = tuple(1 - 0.05 * i for i in range(12))  # scales that are tried: these times the min-max scale


@dataclass(frozen=True)
class Config(codebooks.SearchConfig):
    """Settings of VPTQ. bits / vector_dim is the rate without side information."""

    bits: int = 8  # [bits] of a code: 1 to 16
    vector_dim: int = 4  # [rows] of a vector
    outliers: float = 0.0  # [fraction] of the columns, those with the largest inputs, that get an added integer part
    codebook_dtype: Literal["int8", "float16"] = "int8"  # of entries; only float16 ones, the paper's, can be trained

    REMOVED_KEYS: ClassVar[dict[str, Any]] = {
        **{key: value for key, value in codebooks.SearchConfig.REMOVED_KEYS.items() if key != "codebook_dtype"},
        **{"residual_bits": 0, "group_columns": -1, "norm": "none", "bias": False, "outlier_bits": 4},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, bits=range(1, 17), vector_dim=range(1, 33), codebook_dtype=("int8", "float16"))
        if not 0 <= self.outliers < 1:
            raise ValueError(f"outliers {self.outliers} is not in [0, 1)")


def plan_params(config: Config, shape: tuple[int, int]) -> codebook.Params:
    """Return the format's parameters for a weight [out, in]: enough for the exact stored bytes.

    A matrix with fewer vectors than twice the entries of a codebook gets shorter codes.
    """
    bits = (min(config.bits, codebooks.most_bits(-(-shape[0] // config.vector_dim) * shape[1])),)
    return codebook.Params(
        bits=bits,
        vector_dim=config.vector_dim,
        tile_words=codebook.tile_words(bits, shape[1]),
        axis="out",
        codebook_dtype=config.codebook_dtype,
        outliers=round(config.outliers * shape[1]),
        outlier_bits=OUTLIER_BITS,
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
    notes += codebooks.notes(params.bits[0], config.bits)
    order = hessian.diagonal().argsort(descending=True, stable=True)
    target = torch.nn.functional.pad(weight.T.float()[order], (0, -shape[0] % config.vector_dim))
    layer = feedback.factor_layer(target, hessian[order][:, order], config.damp, notes)
    vectors = target.unflatten(1, (-1, config.vector_dim))[None]  # group, column, unit, row
    grouped = codebooks.GroupedVectors(vectors, layer.factor.diagonal().contiguous())
    entries = codebooks.learn(grouped, 2 ** params.bits[0], config.iterations, torch.Generator().manual_seed(seed))
    rounder = _RowVectorRounder(target, entries, params)
    alternate(layer, rounder, config.sweeps)
    if stats.output is not None:
        output = two_sided.pad_rows(stats.output, shape[0])
        alternate_two_sided(layer, rounder, config.sweeps, output, config.vector_dim)
    return Quantized(_pack(rounder, order, params, shape), tuple(layer.notes))


class _RowVectorRounder(feedback.Rounder):
    """Codes and the codebook of one matrix; column k of the loop is column order[k] of the weight."""

    width = 1

    def __init__(self, target: Tensor, entries: Tensor, params: codebook.Params) -> None:
        columns, rows = target.shape
        self.params, self.unit_rows = params, params.vector_dim
        depth = 1 + (params.vector_dim if params.outliers else 0)
        # of each vector: its code; with outliers, the integers of its rows too, zero elsewhere
        self.codes = torch.zeros(columns, rows // self.unit_rows, depth, dtype=torch.int32, device=target.device)
        self.books = _round_entries(entries, params)  # 1, k, d
        # of the integers of the first columns, chosen when the loop first reaches them
        self.outlier_scale = torch.zeros(params.outliers, 1, device=target.device)

    def round_block(self, target: Tensor, metric: Tensor, start: int) -> Tensor:
        index, _ = codebooks.nearest(target.view(1, -1, self.unit_rows), self.books.entries)
        self.codes[start, :, 0] = index[0]
        coded = self.books.entries[0][index[0]].view(1, -1)
        if start >= self.params.outliers:
            return coded
        left = target - coded
        if self.outlier_scale[start] == 0:
            self.outlier_scale[start] = _integer_scale(left)
        top = 2 ** (OUTLIER_BITS - 1)
        integers = (left / self.outlier_scale[start]).round_().clamp_(-top, top - 1)
        self.codes[start, :, 1:] = integers.view(-1, self.unit_rows)
        return coded + integers * self.outlier_scale[start]

    def layout(self) -> EntryLayout:
        return EntryLayout(self.codes[:, :, 0].long(), along_rows=True)

    def values(self) -> Tensor:
        """Return the values [in, out] of the present codes and entries."""
        values = self.layout().values(self.books.entries[0])
        if self.params.outliers:
            values[: self.params.outliers] += self._outlier_parts()
        return values

    def refit(self, layer: Objective) -> None:
        """Fit the entries to the codes and round them to their storage type."""
        coded = layer.weight.clone()
        if self.params.outliers:
            coded[: self.params.outliers] -= self._outlier_parts()
        entries = refit(replace(layer, weight=coded), self.layout(), self.books.entries[0])
        self.books = _round_entries(entries[None], self.params)

    def part(self, rows: slice) -> _RowVectorRounder:
        """Return a rounder of the vectors of some rows; the scales of outliers stay as they are."""
        part = copy(self)
        part.codes = torch.zeros_like(self.codes[:, rows.start // self.unit_rows : -(-rows.stop // self.unit_rows)])
        return part

    def _outlier_parts(self) -> Tensor:
        """Return the integer parts of the outlier columns, [outliers, out]."""
        return self.codes[: self.params.outliers, :, 1:].flatten(1).float() * self.outlier_scale


def _round_entries(entries: Tensor, params: codebook.Params) -> codebooks.StoredEntries:
    """Round a codebook [1, k, d] to the type that is stored; one of float16 has no scale."""
    if params.codebook_dtype == "int8":
        return codebooks.round_entries(entries)
    stored = entries.clamp(-65504, 65504).half()
    return codebooks.StoredEntries(stored.float(), stored, stored.new_ones(1))


def _integer_scale(left: Tensor) -> Tensor:
    """Return the float16 scale whose integers lose least of `left` [1, rows]."""
    top = 2 ** (OUTLIER_BITS - 1)
    ratios = torch.tensor(OUTLIER_RATIOS, device=left.device)
    scales = (left.abs().amax() / (top - 1) * ratios).clamp(2.0**-24, 65504).half().float().unsqueeze(1)
    lost = ((left / scales).round_().clamp_(-top, top - 1) * scales - left).square_().sum(1)
    return scales[lost.argmin()]


def _pack(rounder: _RowVectorRounder, order: Tensor, params: codebook.Params, shape: tuple[int, int]) -> PackedWeight:
    books, count = rounder.books, params.outliers
    codes = rounder.codes[torch.argsort(order), :, 0].T  # unit, column
    scales = [books.scale.unsqueeze(1)] if params.codebook_dtype == "int8" else []
    parts = codebook.Parts([codes], [books.stored.unsqueeze(1)], scales)
    if count:
        integers = rounder.codes[:count, :, 1:].flatten(1)[:, : shape[0]]  # outlier, row
        parts = replace(
            parts,
            outliers=(integers.T + 2 ** (OUTLIER_BITS - 1)).to(torch.uint8),
            outlier_scale=rounder.outlier_scale[:, 0].half(),
            outlier_index=order[:count],
        )
    return PackedWeight(Stored(FORMAT, params), codebook.pack(parts, params, shape), shape)
