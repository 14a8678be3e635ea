"""Ternary weights with error feedback: a scale times -1, 0 or 1, chosen as GPTQ chooses integers (arXiv 2210.17323).

Three values are an integer grid of one step to each side. So columns are rounded one by one, and the error of each is
folded into the targets of the rest (compress/quant/feedback.py); coordinate-descent sweeps revisit every column and
refit the scales in closed form (compress/quant/descent.py). Groups get their scales when the loop reaches them, on
targets that carry the errors so far.

The scale of a group is the best there is, found by sorting: if the k largest magnitudes |t| become +-s, the weighted
error is least at s = sum w |t| / sum w over these, and is then sum w t^2 over all less (sum w |t|)^2 / sum w over
these. All k are tried in one pass over sorted weights. For normal weights that keeps 54% of them, with a threshold of
0.61 and a level of 1.22 standard deviations (squared error 0.190); the level mean |w| of BitNet with its threshold at
half of that loses 0.264, the median 0.318.

Not in the core: the recipe has KL 0.0726 at 1.76 bits a weight (16,384 tokens of the bundled model), where `vq1.5bit`
has 0.0531 at 1.51 and `int2` 0.0389 at 2.29 (65,408 tokens; docs/low_bit.md says why). Ternary weights are faster.

With an output metric groups of rows are rounded behind each other (compress/quant/two_sided.py).

Not done: one scale for the whole weight (formats/ternary.py has it for models that were trained so); binary weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from compress.formats import int as int_format
from compress.formats import ternary
from compress.kernels.loops import columns as column_loops
from compress.numerics.linalg import upper_factor
from compress.quant import descent, feedback, grid, two_sided
from compress.quant.settings import check, check_damp
from compress.types import PackedWeight, Quantized, Stats, Stored, Work

FORMAT = "ternary"
NEEDS = frozenset({"hessian"})
INCOHERENCE = False
TWO_SIDED = True
WEIGHT_STEPS = 600  # measured for integers: its scale is fitted, it is rounded, and swept
PACKED = 4 << 20  # bytes of the buffers of matrix products
TOP = 2  # the largest of the codes 0, 1 and 2
SORTED_WEIGHTS = 1 << 17  # weights that are sorted at a time: temporaries stay in the cache
SORTED_NBYTES = 32 * SORTED_WEIGHTS


@dataclass(frozen=True)
class Config:
    """Settings of ternary rounding."""

    group_size: int = 128  # [columns] that share a scale; -1: the whole row
    packing: str = "base3"  # base3 (1.6 bits), or planar (2 bits, the same weights)
    damp: float = 0.01  # [fraction] of the mean diagonal, added to the diagonal of the Hessian
    sweeps: int = 3  # [sweeps] of coordinate descent after the column loop, each at twice its cost

    def __post_init__(self) -> None:
        check(self, "sweeps", packing=(ternary.BASE3, ternary.PLANAR))
        check_damp(self.damp)
        ternary.Params(self.packing, self.group_size)


def plan_params(config: Config, shape: tuple[int, int], scale_dtype: str = "float16") -> ternary.Params:
    """Return the format's parameters for a weight [out, in]; a group longer than the row is the whole row."""
    group = -1 if config.group_size >= shape[1] else config.group_size
    return ternary.Params(config.packing, group, scale_dtype)


def row_unit(config: Config, shape: tuple[int, int]) -> int:
    """Return the rows that stay in one tile."""
    return 1


def workspace(config: Config, shape: tuple[int, int]) -> int:
    """Return the bytes needed beside weight and Hessian: those of compress/quant/gptq.py, and what is sorted."""
    numel, columns = shape[0] * shape[1], plan_params(config, shape).group(shape[1])
    rows = feedback.row_tiles(shape)[0].stop
    tile, group = rows * shape[1], 4 * rows * columns
    beside = numel * (4 + 1)
    sorted_nbytes = max(SORTED_NBYTES, 32 * 16 * columns)
    loop = feedback.workspace(shape, beside + tile * 4 * 4 + 3 * group + sorted_nbytes, ordered=False)
    copies = 2 + (tile < numel)  # a single tile is the copy of the weight itself
    stepping = tile * (copies * 4 + 2) + max(4 * tile, 4 * group + 2 * 4 * columns**2)
    return PACKED + max(loop, 4 * shape[1] ** 2 + beside + stepping)


def work(config: Config, shape: tuple[int, int]) -> Work:
    """Return what `quantize` takes."""
    return feedback.work(shape, config.sweeps).plus(Work(0, WEIGHT_STEPS * shape[0] * shape[1]))


def quantize(weight: Tensor, stats: Stats | None, config: Config, seed: int = 0) -> Quantized:
    """Quantize weight [out, in], any float dtype, finite, by stats.hessian [in, in], as one tile. `seed` is unused."""
    rounding = prepare(weight, stats, config)
    return join(rounding, [quantize_rows(rounding, slice(0, len(weight)))])


@dataclass
class TernaryRounding(feedback.ColumnRounding):
    """A weight, the order of its columns and the factor of its Hessian."""

    config: Config
    params: ternary.Params


def prepare(weight: Tensor, stats: Stats | None, config: Config) -> TernaryRounding:
    """Return what all rows have in common; arguments as of `quantize`."""
    assert stats is not None
    target = weight.T.float().contiguous()
    shape = (weight.shape[0], weight.shape[1])
    params = plan_params(config, shape, int_format.scale_dtype(target.abs().amax(0), 1))
    hessian, notes = feedback.usable(stats)
    order = feedback.loop_order(hessian.diagonal(), 0 if params.group_size == -1 else params.group_size)
    factor = upper_factor(hessian, config.damp, order)
    damping = (factor.damp * hessian.diagonal().mean()).item()
    return TernaryRounding(
        config, params, target, hessian, damping, order, factor.upper, (*notes, *factor.notes), stats.output
    )


def quantize_rows(rounding: TernaryRounding, rows: slice) -> tuple[Tensor, grid.Grid]:
    """Return codes [in, rows] uint8, trits plus one, and grids of a tile."""
    target = rounding.target[:, rows].contiguous()
    if rounding.output is None:
        return _round(rounding, target)
    return _join_tiles(two_sided.by_groups(target, rounding.output, rows, partial(_round_group, rounding)))


def _round(rounding: TernaryRounding, target: Tensor) -> tuple[Tensor, grid.Grid]:
    """Return codes [in, rows] uint8 and grids for a target [in, rows]."""
    order = rounding.order
    rounder = _TernaryRounder(target, order, rounding.upper, rounding.params)
    feedback.run(target[order], rounding.upper, rounder)
    codes = torch.empty_like(rounder.codes).index_copy_(0, order, rounder.codes)
    layer = feedback.Objective(target, rounding.hessian, rounding.damping)
    state = _OnTrits(layer, codes, rounder.grid, rounding.params)
    state.sweep(rounding.params.group(len(target)), rounding.config.sweeps)
    return state.codes, grid.Grid(state.scale, state.zero)


def _round_group(rounding: TernaryRounding, _: slice, target: Tensor) -> tuple[tuple[Tensor, grid.Grid], Tensor]:
    """Return codes [in, rows] and grids for a target [in, rows], and the values [in, rows] that they are."""
    codes, fitted = _round(rounding, target)
    return (codes, fitted), fitted.values(codes, rounding.params.group(len(target)))


def join(rounding: TernaryRounding, tiles: Sequence[tuple[Tensor, grid.Grid]]) -> Quantized:
    """Return the weight, from all its tiles in order."""
    codes, fitted = _join_tiles(tiles)
    params = rounding.params
    tensors = ternary.pack((codes.to(torch.int8) - 1).T, fitted.scale.T, params)
    shape = (codes.shape[1], codes.shape[0])
    return Quantized(PackedWeight(Stored(FORMAT, params), tensors, shape), rounding.notes)


def _join_tiles(tiles: Sequence[tuple[Tensor, grid.Grid]]) -> tuple[Tensor, grid.Grid]:
    """Return the codes and grids of all rows, from those of some."""
    if len(tiles) == 1:
        return tiles[0]
    codes = torch.cat([codes for codes, _ in tiles], 1)
    return codes, grid.Grid(*(torch.cat(tensors, 1) for tensors in zip(*(part for _, part in tiles), strict=True)))


def best_scale(target: Tensor, importance: Tensor) -> Tensor:
    """Return the scale [rows] of the least weighted error of trits for a group: target [columns, rows] float32.

    importance [columns] is not negative. Rows of zeros get scale 0.
    """
    scales = []
    for part in target.split(max(16, SORTED_WEIGHTS // len(target)), dim=1):
        size, index = part.abs().sort(0, descending=True)
        weight = importance[index]
        top = size.mul_(weight).cumsum_(0)
        count = weight.cumsum_(0).clamp_min_(torch.finfo(torch.float32).tiny)
        best = (top.square() / count).argmax(0, keepdim=True)
        scales.append((top.gather(0, best) / count.gather(0, best))[0])
    return torch.cat(scales)


class _TernaryRounder(feedback.ColumnRounder):
    """Trits as a Rounder; columns arrive in `order`, groups are counted in the original order."""

    width = 1

    def __init__(self, target: Tensor, order: Tensor, factor: Tensor, params: ternary.Params) -> None:
        columns, rows = target.shape
        self.dtype, size = getattr(torch, params.scale_dtype), params.group(columns)
        self.owners = order // size  # group of the k-th column
        self.owner = self.owners.tolist()
        self.codes = torch.empty(columns, rows, dtype=torch.uint8, device=target.device)
        scale = torch.empty(params.groups(columns), rows).to(target)
        self.grid = grid.Grid(scale, torch.ones_like(scale))
        self.group = size
        if params.group_size == -1:
            self.group = 0
            self._fit(target[order], factor, 0)

    def fit_group(self, targets: Tensor, metric: Tensor, start: int) -> None:
        self._fit(targets, metric, self.owner[start])

    def _fit(self, targets: Tensor, metric: Tensor, index: int) -> None:
        self.grid.scale[index] = grid.storable(best_scale(targets, metric.diagonal().square()), self.dtype)

    def round_columns(self, leaf: feedback.Leaf) -> bool:
        if len(leaf.weight) > column_loops.MAX_COLUMNS or not column_loops.supports(self.codes):
            return False
        part = slice(leaf.start, leaf.start + len(leaf.weight))
        column_loops.round_columns(*leaf[1:], (self.owners[part], *self.grid), self.codes[part], TOP)
        return True

    def round_block(self, target: Tensor, metric: Tensor, start: int) -> Tensor:
        scale = self.grid.scale[self.owner[start]]
        trits = (target / scale).round_().clamp_(-1, 1)
        self.codes[start] = trits[0] + 1
        return trits.mul_(scale)


class _OnTrits(descent.Descent):
    """Trits whose scales are floating-point numbers."""

    def __init__(self, layer: feedback.Objective, codes: Tensor, fitted: grid.Grid, params: ternary.Params) -> None:
        super().__init__(layer, codes, fitted.values(codes, params.group(len(codes))), fitted, bits=2)
        self.top, self.dtype = TOP, getattr(torch, params.scale_dtype)

    def storable(self, index: int, scale: Tensor) -> Tensor:
        return grid.storable(scale, self.dtype)
