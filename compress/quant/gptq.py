"""GPTQ: integer rounding that compensates each column's error in the columns still to come (arXiv 2210.17323).

Columns are rounded one after the other; the error of each, seen through the Hessian H = sum x x^T of the layer's
inputs, is folded into the targets of the rest (compress/quant/feedback.py). Afterwards coordinate-descent sweeps
revisit every column with all others known (weights stay on the grid, each step lowers tr(R H R^T)) and refit the scales
in closed form.

Differences from the paper and its code, and why:
- Grid scales are searched with the weight that the loop gives each column (the squared diagonal of the Hessian's
  factor), not by plain min-max or unweighted error, and rounded to their storage type before any code is chosen.
- `act_order` sorts columns by diag(H), descending, but scale groups stay contiguous in the original order, so that
  kernels need no gather: static groups are fitted before the loop; dynamic groups keep each group together and sort the
  groups by their mean diagonal and the columns within.
- Dynamic groups are fitted on exact targets at any group size (the released code uses stale weights for groups smaller
  than its block).
- A dead input (diag(H) = 0) keeps its weights, rounded to nearest; the released code sets them to zero.
- An input that no token reached is rounded to nearest, and the report says so.

With an output metric all of that is done for groups of 64 rows behind each other (compress/quant/two_sided.py).

Not done here: targets from full-precision inputs (GPTAQ, Qronos: compress/quant/target_correction.py); several
candidates per column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from compress.formats import int as int_format
from compress.kernels.loops import columns as column_loops
from compress.numerics.linalg import upper_factor
from compress.quant import descent, feedback, grid, two_sided
from compress.quant.settings import check, check_damp
from compress.types import Quantized, Stats, Work

FORMAT = "int"
NEEDS = frozenset({"hessian"})
INCOHERENCE = False
TWO_SIDED = True
WEIGHT_STEPS = 600  # measured: its scale is fitted, it is rounded, and swept
PACKED = 4 << 20  # bytes; up to 2.3 MiB were seen, depending on where buffers lie


@dataclass(frozen=True)
class Config(grid.GridConfig):
    """Settings of GPTQ."""

    act_order: bool = True  # round the columns with the largest inputs first
    static_groups: bool = True  # fit all scales before the column loop; false: each group when the loop reaches it
    damp: float = 0.01  # [fraction] of the mean diagonal, added to the diagonal of the Hessian
    sweeps: int = 1  # [sweeps] of coordinate descent after the column loop, each at twice its cost; 0: plain GPTQ

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, "sweeps")
        check_damp(self.damp)


plan_params = grid.params


def row_unit(config: Config, shape: tuple[int, int]) -> int:
    """Return the rows that stay in one tile."""
    return 1


def workspace(config: Config, shape: tuple[int, int]) -> int:
    """Return the bytes needed beside weight and Hessian.

    All along these are a copy of the weight, the codes of all tiles and the factor of the Hessian. In the loop four
    copies of a tile are added, and three of a group that is fitted there. Then come the codes of the tile, twice, and
    values, target and pull; first with what is left of the target, later with four copies of a group and its part of
    the Hessian, twice. Matrix products pack their operands into buffers of the library, PACKED.
    """
    numel, columns = shape[0] * shape[1], plan_params(config, shape).group(shape[1])
    rows = feedback.row_tiles(shape)[0].stop
    tile, group = rows * shape[1], 4 * rows * columns
    beside = numel * (4 + 1)
    loop = feedback.workspace(shape, beside + tile * 4 * 4 + (0 if config.static_groups else 3 * group), ordered=False)
    if not config.sweeps:
        return PACKED + loop
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
class Rounding(feedback.ColumnRounding):
    """A weight, the order of its columns and the factor of its Hessian."""

    config: Config
    params: int_format.Params


def prepare(weight: Tensor, stats: Stats | None, config: Config) -> Rounding:
    """Return what all rows have in common; arguments as of `quantize`."""
    assert stats is not None
    target = weight.T.float().contiguous()
    params = grid.params(
        config, (weight.shape[0], weight.shape[1]), int_format.scale_dtype(target.abs().amax(0), config.bits)
    )
    hessian, notes = feedback.usable(stats)
    order = torch.arange(len(target), device=weight.device)
    if config.act_order:
        stays_together = not config.static_groups and params.group_size != -1
        order = feedback.loop_order(hessian.diagonal(), params.group_size if stays_together else 0)
    factor = upper_factor(hessian, config.damp, order)
    damping = (factor.damp * hessian.diagonal().mean()).item()
    return Rounding(
        config, params, target, hessian, damping, order, factor.upper, (*notes, *factor.notes), stats.output
    )


def quantize_rows(rounding: Rounding, rows: slice) -> tuple[Tensor, grid.Grid]:
    """Return codes [in, rows] uint8 and grids of a tile."""
    target, order = rounding.target[:, rows].contiguous(), rounding.order
    if rounding.output is not None:
        return _join_tiles(two_sided.by_groups(target, rounding.output, rows, partial(_quantize_group, rounding)))
    rounder = _GridRounder(target, order, rounding.upper, rounding.config, rounding.params)
    feedback.run(target[order], rounding.upper, rounder)
    codes = torch.empty_like(rounder.codes).index_copy_(0, order, rounder.codes)
    if not rounding.config.sweeps:
        return codes, rounder.grid
    layer = feedback.Objective(target, rounding.hessian, rounding.damping)
    return descent.improve_grid(layer, codes, rounder.grid, rounding.params, rounding.config.sweeps)


def _quantize_group(rounding: Rounding, _: slice, target: Tensor) -> tuple[tuple[Tensor, grid.Grid], Tensor]:
    """Return codes [in, rows] and grids for a target [in, rows], and the values [in, rows] that they are."""
    one_sided = replace(rounding, target=target, output=None)
    codes, fitted = quantize_rows(one_sided, slice(0, target.shape[1]))
    return (codes, fitted), fitted.values(codes, rounding.params.group(len(target)))


def join(rounding: Rounding, tiles: Sequence[tuple[Tensor, grid.Grid]]) -> Quantized:
    """Return the weight, from all its tiles in order."""
    codes, fitted = _join_tiles(tiles)
    return Quantized(grid.pack(codes, fitted, rounding.params, (codes.shape[1], codes.shape[0])), rounding.notes)


def _join_tiles(tiles: Sequence[tuple[Tensor, grid.Grid]]) -> tuple[Tensor, grid.Grid]:
    """Return the codes and grids of all rows, from those of some."""
    if len(tiles) == 1:
        return tiles[0]
    codes = torch.cat([codes for codes, _ in tiles], 1)
    return codes, grid.Grid(*(torch.cat(tensors, 1) for tensors in zip(*(part for _, part in tiles), strict=True)))


class _GridRounder(feedback.ColumnRounder):
    """The integer grid as a Rounder; columns arrive in `order`, groups are counted in the original order."""

    width = 1

    def __init__(
        self, target: Tensor, order: Tensor, factor: Tensor, config: Config, params: int_format.Params
    ) -> None:
        columns, rows = target.shape
        self.config, self.dtype = config, getattr(torch, params.scale_dtype)
        self.size = params.group(columns)
        self.owners = order // self.size  # group of the k-th column
        self.owner = self.owners.tolist()
        self.codes = torch.empty(columns, rows, dtype=torch.uint8, device=target.device)
        if config.static_groups:
            self.group = 0
            importance = torch.empty(columns, device=target.device)
            importance[order] = factor.diagonal().square()
            self.grid = grid.fit_all(target, importance, config, self.dtype, self.size)
        else:
            self.group = self.size
            count = -(-columns // self.size)
            self.grid = grid.Grid(torch.empty(count, rows).to(target), torch.empty(count, rows).to(target))

    def fit_group(self, targets: Tensor, metric: Tensor, start: int) -> None:
        index = self.owner[start]
        fitted = grid.fit(targets, metric.diagonal().square(), self.config, self.dtype)
        self.grid.scale[index], self.grid.zero[index] = fitted

    def round_columns(self, leaf: feedback.Leaf) -> bool:
        if len(leaf.weight) > column_loops.MAX_COLUMNS or not column_loops.supports(self.codes):
            return False
        part, top = slice(leaf.start, leaf.start + len(leaf.weight)), 2**self.config.bits - 1
        column_loops.round_columns(*leaf[1:], (self.owners[part], *self.grid), self.codes[part], top)
        return True

    def round_block(self, target: Tensor, metric: Tensor, start: int) -> Tensor:
        index = self.owner[start]
        scale, zero = self.grid.scale[index], self.grid.zero[index]
        code = grid.codes(target, scale, zero, self.config.bits)
        self.codes[start] = code[0]
        return code.sub_(zero).mul_(scale)
