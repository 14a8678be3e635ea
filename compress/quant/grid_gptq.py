"""GPTQ to the points of a data type (arXiv 2210.17323; MR-GPTQ, arXiv 2509.23202): NVFP4, MXFP4, FP8, NF4 and others.

Columns are rounded one after the other, and the error of each is folded into the targets of those to come, as
compress/quant/gptq.py does with integers. The scales of blocks are searched before the loop, each column weighed as the
loop weighs it, or inside of the loop, to the targets that it has by then. Sweeps of coordinate descent follow: they
refit the scale of each block in closed form, and set every column to the best point, all others known. Both keep to
what lowers tr(R H R^T).

Differences from the papers, and why:
- Scales are rounded to what is stored before any code is chosen, and searched (compress/quant/grid_types.py).
- Columns are sorted by diag(H), descending, and blocks stay contiguous: with `static_groups` columns of all blocks mix,
  else the columns of a block stay together.
- MR-GPTQ's Hadamard transform of blocks is a setting of the recipe around any method (compress/quant/incoherence.py).

Scales that rows share (of blocks of rows, of tensors, nested ones) are always those before the loop, and stay.

Not done: several candidates for a column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from compress.formats import grid
from compress.numerics.linalg import upper_factor
from compress.quant import feedback, grid_types, two_sided
from compress.quant.settings import check, check_damp
from compress.types import PackedWeight, Quantized, Stats, Stored, Work

FORMAT = "grid"
NEEDS = frozenset({"hessian", "largest_weight"})
INCOHERENCE = False
TWO_SIDED = True
WEIGHT_STEPS = 1500
CHUNK = 128  # columns that hear of each other's changes one by one


@dataclass(frozen=True)
class Config(grid_types.TypeConfig):
    """Settings of GPTQ to a data type."""

    act_order: bool = True  # round the columns with the largest inputs first
    static_groups: bool = True  # fit all scales before the column loop; false: each block's when the loop reaches it
    damp: float = 0.01  # [fraction] of the mean diagonal, added to the diagonal of the Hessian
    sweeps: int = 1  # [sweeps] of coordinate descent after the column loop, each at twice its cost; 0: plain GPTQ

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, "sweeps")
        check_damp(self.damp)


plan_params = grid_types.params
Tile = tuple[Tensor, Tensor]  # codes [in, rows] uint8, and scales [rows, C] as stored: none where rows share them


def row_unit(config: Config, shape: tuple[int, int]) -> int:
    """Return the rows that stay in one tile."""
    return 1


def workspace(config: Config, shape: tuple[int, int]) -> int:
    """Return the bytes needed beside weight and Hessian.

    All along these are a copy of the weight, the codes of all tiles and the factor of the Hessian. A tile takes its
    target, residuals, what is pending, values and its pull, more for the columns of a block, and a copy while its
    scales are fitted. Scales that rows share are fitted before, to another copy of the weight, of which the one for the
    whole takes two more.
    """
    numel, rows, params = shape[0] * shape[1], feedback.row_tiles(shape)[0].stop, plan_params(config, shape)
    (high, wide), (down, across) = params.block(shape), params.blocks(shape)
    fitted = min(down * high * across * wide, grid_types.FITTED_WEIGHTS + across * wide * high)
    block, fitting = min(shape[1], wide), 10 * 4 * fitted
    sharing = 0
    if not grid.has_rows(params):
        sharing, fitting = 2 * 4 * numel + (2 * 4 * numel if params.is_whole else fitting), 0
    beside = max(numel * (4 + 2) + rows * 4 * (6 * shape[1] + 2 * block) + fitting, sharing)
    return feedback.workspace(shape, beside, ordered=False) + 2 * 4 * block**2


def work(config: Config, shape: tuple[int, int]) -> Work:
    """Return what `quantize` takes."""
    return feedback.work(shape, config.sweeps).plus(Work(0, WEIGHT_STEPS * shape[0] * shape[1]))


def quantize(weight: Tensor, stats: Stats | None, config: Config, seed: int = 0) -> Quantized:
    """Quantize weight [out, in], any float dtype, finite, by stats.hessian [in, in], as one tile. `seed` is unused."""
    rounding = prepare(weight, stats, config)
    return join(rounding, [quantize_rows(rounding, slice(0, len(weight)))])


@dataclass
class PointRounding(feedback.ColumnRounding):
    """A weight, the order of its columns and the factor of its Hessian, and the scales that rows share."""

    config: Config
    params: grid.Params
    largest: Tensor  # float32 [], of all weights with the same tensor scale
    shared: dict[str, Tensor]  # scales and what is beside them, {} where each row has its own

    def importance(self) -> Tensor:
        """Return what errors of a column count in the loop, [in]."""
        counts = torch.empty(len(self.order), device=self.order.device)
        counts[self.order] = self.upper.diagonal().square()
        return counts

    def fit(self, target: Tensor, importance: Tensor) -> grid_types.BlockScales:
        """Return scales of rows, or of a block of columns of them: target [columns, rows]."""
        rows, search = target.T.contiguous(), self.config.scale_search
        return grid_types.BlockScales(rows, self.params, search, self.largest, importance)


def prepare(weight: Tensor, stats: Stats | None, config: Config) -> PointRounding:
    """Return what all rows have in common; arguments as of `quantize`."""
    assert stats is not None
    target = weight.T.float().contiguous()
    params = plan_params(config, (weight.shape[0], weight.shape[1]))
    has_rows = grid.has_rows(params)
    hessian, notes = feedback.usable(stats)
    order = torch.arange(len(target), device=weight.device)
    if config.act_order:
        stays_together = has_rows and not config.static_groups and params.block_columns != -1
        order = feedback.loop_order(hessian.diagonal(), params.block_columns if stays_together else 0)
    factor = upper_factor(hessian, config.damp, order)
    damping = (factor.damp * hessian.diagonal().mean()).item()
    largest = target.abs().amax() if stats.largest_weight is None else stats.largest_weight
    rounding = PointRounding(
        *(config, params, target, hessian, damping, order, factor.upper, (*notes, *factor.notes), stats.output),
        *(largest, {}),
    )
    if not has_rows:
        rounding.shared = rounding.fit(target, rounding.importance()).stored
    return rounding


def quantize_rows(rounding: PointRounding, rows: slice) -> Tile:
    """Return codes and scales of a tile."""
    if rounding.output is not None:
        target = rounding.target[:, rows]
        return _join_tiles(two_sided.by_groups(target, rounding.output, rows, partial(_quantize_group, rounding)))
    return _quantize(rounding, rows, rounding.target[:, rows].contiguous())[0]


def _quantize_group(rounding: PointRounding, rows: slice, target: Tensor) -> tuple[Tile, Tensor]:
    return _quantize(rounding, rows, target.contiguous())


def _quantize(rounding: PointRounding, rows: slice, target: Tensor) -> tuple[Tile, Tensor]:
    """Return codes and scales of some rows for a target [in, rows], and the values [in, rows] that these are."""
    config, order = rounding.config, rounding.order
    blocks = _Blocks(rounding, rows, target)
    rounder = _PointRounder(blocks, order)
    residual = feedback.run(target[order], rounding.upper, rounder).residual
    codes = torch.empty_like(rounder.codes).index_copy_(0, order, rounder.codes)
    if config.sweeps:
        del residual, rounder
        objective = feedback.Objective(target, rounding.hessian, rounding.damping)
        codes, values = _PointDescent(objective, codes, blocks).sweep(config.sweeps)
    else:
        values = torch.empty_like(target).index_copy_(0, order, target[order] - residual)
    return (codes, blocks.pack_scales()), values


def join(rounding: PointRounding, tiles: Sequence[Tile]) -> Quantized:
    """Return the weight, from all its tiles in order."""
    codes, own = _join_tiles(tiles)
    scales = rounding.shared or {"scales": own}
    if rounding.params.tensor_scale and not rounding.shared:
        whole = grid_types.tensor_scale(rounding.largest, rounding.params.values)
        scales |= {grid.TENSOR_SCALE: whole.reshape(1).to(codes.device)}
    tensors = grid.pack(codes.T.contiguous(), scales, rounding.params)
    packed = PackedWeight(Stored(FORMAT, rounding.params), tensors, (codes.shape[1], codes.shape[0]))
    return Quantized(packed, rounding.notes)


def _join_tiles(tiles: Sequence[Tile]) -> Tile:
    """Return the codes and scales of all rows, from those of some."""
    if len(tiles) == 1:
        return tiles[0]
    scales = torch.cat([own.view(torch.uint8) for _, own in tiles]).view(tiles[0][1].dtype)
    return torch.cat([codes for codes, _ in tiles], 1), scales


class _Blocks:
    """What points are multiplied with, of some rows: `factors` [C, rows] float32, of blocks of `size` columns.

    Where rows have scales of their own they can be changed, to what can be stored.
    """

    def __init__(self, rounding: PointRounding, rows: slice, target: Tensor) -> None:
        params, shared = rounding.params, rounding.shared
        self.rounding, self.params, self.is_shared = rounding, params, bool(shared)
        self.size = params.block((target.shape[1], len(target)))[1]
        self.is_dynamic = not (self.is_shared or rounding.config.static_groups)
        self.tensor_scale = target.new_ones(())
        if params.tensor_scale:
            self.tensor_scale = grid_types.tensor_scale(rounding.largest, params.values).to(target.device)
        if self.is_shared:
            high = params.block((rounding.target.shape[1], len(target)))[0]
            owner = torch.arange(rows.start, rows.stop, device=target.device) // high
            self.factors = grid_types.factors(shared, params)[owner].T.contiguous()
        elif self.is_dynamic:
            self.factors = target.new_ones(params.blocks((target.shape[1], len(target)))[::-1])
        else:
            self.factors = rounding.fit(target, rounding.importance()).factors().T.contiguous()

    def fit(self, index: int, targets: Tensor, importance: Tensor) -> None:
        """Fit the scales of a block to targets [columns, rows]."""
        self.factors[index] = self.rounding.fit(targets, importance).factors()[:, 0]

    def storable(self, factors: Tensor) -> Tensor:
        """Return factors [rows], each rounded to one near it that can be stored."""
        wanted = factors / self.tensor_scale
        wanted = wanted if self.params.values == grid.IQ4_NL else wanted.clamp(min=0)
        part = {"scales": grid_types.near(wanted, self.params.scale_type)[:, None]}
        beside = {grid.TENSOR_SCALE: self.tensor_scale}
        return grid_types.factors({**part, **beside}, self.params)[:, 0]

    def pack_scales(self) -> Tensor:
        """Return the scales of rows [rows, C] as stored, none where they are shared."""
        if self.is_shared:
            return self.factors.new_empty(0)
        scales = (self.factors / self.tensor_scale).T.clone(memory_format=torch.contiguous_format)
        return grid_types.storable(scales, self.params.scale_type)


class _PointRounder(feedback.Rounder):
    """The points as a Rounder; columns arrive in `order`, blocks are counted in the original order."""

    width = 1

    def __init__(self, blocks: _Blocks, order: Tensor) -> None:
        self.blocks, self.owner = blocks, (order // blocks.size).tolist()  # block of the k-th column
        self.group = blocks.size if blocks.is_dynamic else 0
        rows = blocks.factors.shape[1]
        self.codes = torch.empty(len(order), rows, dtype=torch.uint8, device=order.device)

    def fit_group(self, targets: Tensor, metric: Tensor, start: int) -> None:
        self.blocks.fit(self.owner[start], targets, metric.diagonal().square())

    def round_block(self, target: Tensor, metric: Tensor, start: int) -> Tensor:
        factor, values = self.blocks.factors[self.owner[start]], self.blocks.params.values
        units = target / factor
        self.codes[start] = grid_types.nearest(units[0], values)
        return grid_types.points(units, values).mul_(factor)


class _PointDescent:
    """Codes and values [in, rows] on the way to less tr(R H R^T), and H R, which is kept up to date."""

    def __init__(self, layer: feedback.Objective, codes: Tensor, blocks: _Blocks) -> None:
        self.hessian, self.damping, self.codes, self.blocks = layer.hessian, layer.damping, codes, blocks
        self.table = grid.value_table(blocks.params.values).to(codes.device)
        owner = torch.arange(len(codes), device=codes.device) // blocks.size
        self.values = self.table[codes.int()].mul_(blocks.factors[owner])
        self.pull = layer.times_hessian(layer.weight - self.values)

    def sweep(self, sweeps: int) -> tuple[Tensor, Tensor]:
        """Step all blocks in turn, so many times; return codes and values."""
        size, columns = self.blocks.size, len(self.codes)
        for _ in range(sweeps):
            for index, start in enumerate(range(0, columns, size)):
                self._step_block(index, slice(start, min(start + size, columns)))
        return self.codes, self.values

    def _step_block(self, index: int, part: slice) -> None:
        """Step the scales of a block, then each of its columns; H R elsewhere follows at the end."""
        values, codes = self.values[part], self.codes[part]
        before, pull = values.clone(), self.pull[part].clone()
        metric = self.hessian[part, part].clone()
        metric.diagonal().add_(self.damping)
        if not self.blocks.is_shared:
            self._rescale(index, part, metric, pull)
        factor, curvatures = self.blocks.factors[index], metric.diagonal().tolist()
        for start in range(0, len(values), CHUNK):
            chunk = slice(start, min(start + CHUNK, len(values)))
            old = values[chunk].clone()
            for j in range(chunk.start, chunk.stop):
                units = torch.add(values[j], pull[j], alpha=1 / curvatures[j]).div_(factor)
                codes[j] = grid_types.nearest(units, self.blocks.params.values)
                new = self.table[codes[j].int()].mul_(factor)
                pull[j + 1 : chunk.stop].addr_(metric[j, j + 1 : chunk.stop], new - values[j], alpha=-1)
                values[j] = new
            if chunk.stop < len(values):
                pull[chunk.stop :].addmm_(metric[chunk.stop :, chunk], old.sub_(values[chunk]))
        change = before.sub_(values)
        self.pull.addmm_(self.hessian[:, part], change)
        self.pull[part].add_(change, alpha=self.damping)

    def _rescale(self, index: int, part: slice, metric: Tensor, pull: Tensor) -> None:
        """Give a block the scales [rows] that are best for its codes, where these can be stored and lower the loss."""
        units, old = self.table[self.codes[part].int()], self.blocks.factors[index].clone()
        product = metric @ units
        curvature, slope = (units * product).sum(0), (units * pull).sum(0)
        step = torch.where(curvature > 0, slope / curvature.clamp_min(torch.finfo(torch.float32).tiny), 0.0)
        moved = self.blocks.storable(old + step) - old
        moved = torch.where(2 * moved * slope - moved.square() * curvature > 0, moved, 0.0)
        self.blocks.factors[index] = old + moved
        pull.sub_(product * moved)
        torch.mul(units, self.blocks.factors[index], out=self.values[part])
