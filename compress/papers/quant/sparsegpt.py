"""SparseGPT: drop weights in a sweep over the columns, and make up for them in those that stay (arXiv 2301.00774).

The column loop of GPTQ (compress/quant/feedback.py) folds the error of a column into the targets of those to come, and
does not mind whether a weight was rounded or dropped. Of each `of` consecutive columns a row keeps `keep`. With H =
C C^T a dropped weight loses (target_j C_jj)^2 once all later columns have made up for it: the paper's w_j^2 / U_jj^2
with U the factor of the inverse. When the loop reaches `of` columns their targets are exact, and those that lose least
are dropped. Sweeps of coordinate descent over what is kept follow (compress/quant/descent.py). A second loop rounds
what is kept to integers: scales are fitted to what their columns keep, and errors are folded into the rest. More sweeps
of descent follow, each with scales refitted in closed form. Weights of 16 bits are rounded in the first loop.

`score` takes the weights to drop by simpler rules, without any update of what stays: `wanda` (arXiv 2306.11695) by
|w_j| ||x_j||, `magnitude` by |w_j|; what is kept is rounded to nearest.

Differences from the papers, and why:
- Every row keeps as much as any other, and of any `of` columns: what is stored has a known size. SparseGPT drops half
  of 128 columns of all rows together, Wanda half of a row.
- The paper drops and rounds in one loop. Where a second one rounds, scales are fitted to weights that have made up for
  the dropped ones, and descent begins nearer to the optimum: linears lose 9% less; KL is 0.0505 for 0.0513, within
  its standard error.
- Columns are sorted by diag(H), descending, but those of a pattern and those of a scale stay together.

Not in the core: on the bundled model 2:4 with 4 bits has KL 0.050 at 2.81 bits a weight, where `gptq` has 0.012 at 3.13
and mixed trellis codes 0.011 at 2.25. Half of the weights in 16 bits cost 0.139 by magnitude, 0.115 by Wanda and 0.067
in one sweep of SparseGPT at 2:4, and 0.056, 0.048 and 0.031 at 64:128 (16,352 tokens, docs/results/sparsity.md).

Not done: shares that differ between rows or layers by themselves (that is allocation).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from compress.formats import dense, sparse
from compress.formats import int as int_format
from compress.kernels.loops import columns as column_loops
from compress.numerics.linalg import upper_factor
from compress.quant import descent, feedback, grid
from compress.quant.settings import check, check_damp
from compress.types import PackedWeight, Quantized, Stats, Stored, Work

FORMAT = "sparse"
NEEDS = frozenset({"hessian"})
INCOHERENCE = False
WEIGHT_STEPS = 1500
PACKED = 4 << 20  # bytes of buffers of the library
FAR = 2.0**100  # scale of a dropped weight: any target is nearest to the level 0
LEAST_PADDING = 16  # columns for each of padding: with more of it patterns are narrower
SCORES = ("sparsegpt", "wanda", "magnitude")


@dataclass(frozen=True)
class Config:
    """Settings of SparseGPT."""

    bits: int = 4  # [bits] of one code of a kept weight: 2 to 8; 16: kept weights are not rounded to a grid
    group_size: int = 128  # [kept weights] that share a scale; -1: all of a row
    kept: int = 2  # [columns] of each `of` that a row keeps
    of: int = 4  # [columns] of a pattern; less where a row would be padded much
    block_rows: int = 1  # [rows] that are kept or dropped together
    block_columns: int = 1  # [columns] that are kept or dropped together
    score: str = "sparsegpt"  # what is dropped: sparsegpt, or wanda or magnitude, which update nothing
    damp: float = 0.01  # [fraction] of the mean diagonal, added to the diagonal of the Hessian
    sweeps: int = 4  # [sweeps] of coordinate descent over kept weights after each column loop; 0: none

    def __post_init__(self) -> None:
        sparse.Params(self.kept, self.of, "dense", self.block_rows, self.block_columns)
        if self.bits != 16 and 0 < self.group_size < self.kept:
            raise ValueError(f"group_size {self.group_size} is less than the {self.kept} weights that are kept")
        if self.bits != 16:
            _ = self.search
        check(self, "sweeps", score=SCORES)
        check_damp(self.damp)

    @property
    def search(self) -> grid.GridConfig:
        """The grid of what is kept: scales are counted in whole patterns."""
        whole = self.group_size if self.group_size == -1 else self.group_size // self.kept * self.kept
        return grid.GridConfig(self.bits, whole)


def plan_params(config: Config, shape: tuple[int, int], dtype: str = "") -> sparse.Params:
    """Return the format's parameters for a weight [out, in]: enough for the exact stored bytes.

    dtype: of scales, or of kept weights in 16 bits.
    """
    keep, of = _pattern(config, shape[1])
    kept = shape[0], -(-shape[1] // of) * keep
    if config.bits == 16:
        inner: dense.Params | int_format.Params = dense.Params(dtype or "bfloat16")
    else:
        inner = grid.params(replace(config, kept=keep, of=of).search, kept, dtype or "float16")
    return sparse.params_for(keep, of, inner, config.block_rows, config.block_columns)


def _pattern(config: Config, columns: int) -> tuple[int, int]:
    """Return `kept` and `of` for a row: the same share, of fewer columns where `of` would leave much padding."""
    keep, of, block = config.kept, config.of, config.block_columns
    if -columns % of * LEAST_PADDING > columns:
        for fewer in range(min(of, columns), of // 2 - 1, -1):
            wanted, rest = divmod(keep * fewer, of)
            if not (columns % fewer or rest or fewer % block or wanted % block):
                return wanted, fewer
    return keep, of


def row_unit(config: Config, shape: tuple[int, int]) -> int:
    """Return the rows that stay in one tile."""
    return config.block_rows


def workspace(config: Config, shape: tuple[int, int]) -> int:
    """Return a bound for the bytes needed beside weight and Hessian."""
    numel = shape[0] * shape[1]
    return PACKED + feedback.workspace(shape, 10 * 4 * numel)


def work(config: Config, shape: tuple[int, int]) -> Work:
    """Return what `quantize` takes."""
    steps = Work(0, WEIGHT_STEPS * shape[0] * shape[1])
    if config.score != "sparsegpt":
        return steps
    to_round = Work(shape[0] * shape[1] ** 2 * (1 + 2 * config.sweeps), 0)
    dropped = feedback.work(shape, config.sweeps).plus(steps)
    return dropped if config.bits == 16 else dropped.plus(to_round).plus(steps)


def quantize(weight: Tensor, stats: Stats | None, config: Config, seed: int = 0) -> Quantized:
    """Quantize weight [out, in], any float dtype, finite, by stats.hessian [in, in], as one tile. `seed` is unused."""
    rounding = prepare(weight, stats, config)
    return join(rounding, [quantize_rows(rounding, slice(0, len(weight)))])


@dataclass
class SparseRounding(feedback.ColumnRounding):
    """A weight with its columns padded to whole patterns, their order and the factor of its Hessian."""

    config: Config
    params: sparse.Params
    shape: tuple[int, int]  # of the weight

    @property
    def group(self) -> int:
        """Columns whose kept weights share a scale."""
        kept = self.params.group_size
        return len(self.order) if kept == -1 else kept // self.params.keep * self.params.of

    def choose(self, scores: Tensor, first: int = 0) -> Tensor:
        """Return what is kept of the columns of whole patterns from `first` on: scores [columns, rows], bool."""
        params, real = self.params, self.shape[1] - first
        entries = torch.where(torch.arange(len(scores), device=scores.device)[:, None] < real, scores, -torch.inf)
        high, wide = params.block_rows, params.block_columns
        if wide > 1:
            entries = entries.unflatten(0, (-1, wide)).sum(1)
        if high > 1:
            padded = torch.nn.functional.pad(entries, (0, -entries.shape[1] % high))
            entries = padded.unflatten(1, (-1, high)).sum(2)
        entries = entries.unflatten(0, (-1, params.of // wide))
        best = entries.sort(dim=1, descending=True, stable=True).indices[:, : params.keep // wide]
        mask = torch.zeros(entries.shape, dtype=torch.bool, device=scores.device).scatter_(1, best, True).flatten(0, 1)
        return mask.repeat_interleave(wide, 0).repeat_interleave(high, 1)[:, : scores.shape[1]]


class KeptRows(NamedTuple):
    """What is kept of some rows."""

    mask: Tensor  # [in, rows] bool
    codes: Tensor  # [in, rows] uint8, or the weights in 16 bits
    grid: grid.Grid  # scales and zero points [groups, rows]; none with 16 bits


def prepare(weight: Tensor, stats: Stats | None, config: Config) -> SparseRounding:
    """Return what all rows have in common; arguments as of `quantize`."""
    assert stats is not None
    target, shape = weight.T.float().contiguous(), (weight.shape[0], weight.shape[1])
    if config.bits == 16:
        dtype = "float16" if weight.dtype == torch.float16 else "bfloat16"
    else:
        dtype = int_format.scale_dtype(target.abs().amax(0), config.bits)
    params = plan_params(config, shape, dtype)
    hessian, notes = feedback.usable(stats)
    target, hessian = feedback.pad_columns(target, hessian, params.of)
    order = torch.arange(len(target), device=weight.device)
    rounding = SparseRounding(
        config, params, target, hessian, 0.0, order, hessian[:0], tuple(notes), stats.output, shape
    )
    if config.score == "sparsegpt":
        rounding.order = feedback.loop_order(hessian.diagonal(), params.of, rounding.group)
        factor = upper_factor(hessian, config.damp, rounding.order)
        rounding.damping = (factor.damp * hessian.diagonal().mean()).item()
        rounding.upper, rounding.notes = factor.upper, (*notes, *factor.notes)
    return rounding


def quantize_rows(rounding: SparseRounding, rows: slice) -> KeptRows:
    """Return what is kept of a tile."""
    target, config = rounding.target[:, rows].contiguous(), rounding.config
    if config.score != "sparsegpt":
        return _keep_nearest(rounding, target)
    layer = feedback.Objective(target, rounding.hessian, rounding.damping)
    tile = _drop(rounding, layer)
    return tile if config.bits == 16 else _round_kept(rounding, layer, tile)


def _drop(rounding: SparseRounding, layer: feedback.Objective) -> KeptRows:
    """Return what some rows keep, with values of 16 bits, or float32 ones where these are rounded later."""
    rounder = _DroppingRounder(rounding, layer.weight)
    feedback.run(layer.weight[rounding.order], rounding.upper, rounder)
    values = torch.empty_like(rounder.codes).index_copy_(0, rounding.order, rounder.codes)
    tile = KeptRows(rounder.mask, values, _no_grid(layer.weight))
    if not rounding.config.sweeps:
        return tile
    state = _DescentOfValues(layer, tile)
    state.sweep(descent.BLOCK_COLUMNS, rounding.config.sweeps)
    return tile._replace(codes=state.codes)


def _round_kept(rounding: SparseRounding, layer: feedback.Objective, tile: KeptRows) -> KeptRows:
    """Return the same weights of some rows, rounded to integers."""
    rounder = _KeptRounder(rounding, tile)
    feedback.run(tile.codes[rounding.order], rounding.upper, rounder)
    codes = torch.empty_like(rounder.codes).index_copy_(0, rounding.order, rounder.codes)
    tile = KeptRows(tile.mask, codes, rounder.grid)
    if not rounding.config.sweeps:
        return tile
    state = _DescentOfCodes(layer, tile, rounding)
    state.sweep(rounding.group, rounding.config.sweeps)
    return tile._replace(codes=state.codes, grid=grid.Grid(state.scale, state.zero))


def _keep_nearest(rounding: SparseRounding, target: Tensor) -> KeptRows:
    """Return what has the best scores of some rows [in, rows], rounded to nearest."""
    config, scores = rounding.config, target.abs()
    if config.score == "wanda":
        scores = scores * rounding.hessian.diagonal().sqrt()[:, None]
    mask = rounding.choose(scores)
    if config.bits == 16:
        return KeptRows(mask, target.to(getattr(torch, rounding.params.dtype)), _no_grid(target))
    dtype = getattr(torch, rounding.params.scale_dtype)
    fitted = grid.fit_all(target * mask, None, config.search, dtype, rounding.group)
    codes = torch.empty(target.shape, dtype=torch.uint8, device=target.device)
    for index, start in enumerate(range(0, len(target), rounding.group)):
        part = slice(start, start + rounding.group)
        codes[part] = grid.codes(target[part], fitted.scale[index], fitted.zero[index], config.bits)
    return KeptRows(mask, codes, fitted)


def join(rounding: SparseRounding, tiles: Sequence[KeptRows]) -> Quantized:
    """Return the weight, from all its tiles in order."""
    params, shape = rounding.params, rounding.shape
    mask, codes = (torch.cat(parts, 1) for parts in zip(*((tile.mask, tile.codes) for tile in tiles), strict=True))
    kept = codes.T.contiguous()[mask.T].view(params.kept_shape(shape))
    if params.inner == "dense":
        tensors = dense.pack(kept, params.inner_params)
    else:
        scale = torch.cat([tile.grid.scale for tile in tiles], 1)
        tensors = int_format.pack(kept, scale.T, None, params.inner_params)
    packed = PackedWeight(Stored(FORMAT, params), sparse.pack(mask.T, tensors, params), shape)
    return Quantized(packed, rounding.notes)


def _no_grid(like: Tensor) -> grid.Grid:
    return grid.Grid(like.new_ones(1, like.shape[1]), like.new_zeros(1, like.shape[1]))


class _DroppingRounder(feedback.Rounder):
    """Chooses what each pattern keeps when the loop reaches it. Columns arrive in `order`."""

    width = 1

    def __init__(self, rounding: SparseRounding, target: Tensor) -> None:
        params = rounding.params
        dtype = torch.float32 if params.inner == "int" else getattr(torch, params.dtype)
        self.rounding, self.group = rounding, params.of
        self.mask = torch.empty(target.shape, dtype=torch.bool, device=target.device)  # of the weight
        self.kept = torch.empty_like(self.mask)  # in the order of the loop, as are codes
        self.codes = torch.empty(target.shape, dtype=dtype, device=target.device)

    def fit_group(self, targets: Tensor, metric: Tensor, start: int) -> None:
        """Choose what a pattern keeps."""
        part = slice(start, start + len(targets))
        first = int(self.rounding.order[part].min())
        places = self.rounding.order[part] - first
        scores = torch.empty_like(targets).index_copy_(0, places, (targets * metric.diagonal()[:, None]).square_())
        mask = self.rounding.choose(scores, first)
        self.mask[first : first + len(targets)] = mask
        self.kept[part] = mask[places]

    def round_block(self, target: Tensor, metric: Tensor, start: int) -> Tensor:
        self.codes[start] = torch.where(self.kept[start], target[0], 0.0).to(self.codes.dtype)
        return self.codes[start][None].float()


class _KeptRounder(feedback.ColumnRounder):
    """Rounds what is kept to integers. Columns arrive in `order`."""

    width = 1

    def __init__(self, rounding: SparseRounding, tile: KeptRows) -> None:
        self.rounding, self.group = rounding, rounding.group
        self.kept, self.owners = tile.mask[rounding.order], rounding.order // rounding.group
        columns, rows = tile.codes.shape
        count = -(-columns // self.group)
        self.codes = torch.empty(tile.codes.shape, dtype=torch.uint8, device=tile.codes.device)
        self.grid = grid.Grid(tile.codes.new_empty(count, rows), tile.codes.new_empty(count, rows))
        self.scales = torch.empty_like(tile.codes)  # of each weight, in the order of the loop

    def fit_group(self, targets: Tensor, metric: Tensor, start: int) -> None:
        """Fit scales of a group to what it keeps."""
        part, index = slice(start, start + len(targets)), int(self.owners[start])
        config, dtype = self.rounding.config, getattr(torch, self.rounding.params.scale_dtype)
        fitted = grid.fit(targets * self.kept[part], metric.diagonal().square(), config.search, dtype)
        self.grid.scale[index], self.grid.zero[index] = fitted
        self.scales[part] = torch.where(self.kept[part], fitted.scale, FAR)

    def round_columns(self, leaf: feedback.Leaf) -> bool:
        columns = len(leaf.weight)
        if columns > column_loops.MAX_COLUMNS or not column_loops.supports(self.codes):
            return False
        part, top = slice(leaf.start, leaf.start + columns), 2**self.rounding.config.bits - 1
        each = torch.arange(columns, device=self.owners.device)
        zeros = self.grid.zero[self.owners[part]]
        column_loops.round_columns(*leaf[1:], (each, self.scales[part], zeros), self.codes[part], top)
        return True

    def round_block(self, target: Tensor, metric: Tensor, start: int) -> Tensor:
        scale, zero = self.scales[start], self.grid.zero[self.owners[start]]
        code = grid.codes(target, scale, zero, self.rounding.config.bits)
        self.codes[start] = code[0]
        return code.sub_(zero).mul_(scale)


class _DescentOfCodes(descent.OnGrid):
    """Codes of kept weights on the way to less loss: dropped ones stay on the level 0."""

    def __init__(self, layer: feedback.Objective, tile: KeptRows, rounding: SparseRounding) -> None:
        self.mask, self.left = tile.mask, tile.mask
        values = tile.grid.values(tile.codes, rounding.group).mul_(tile.mask)
        super().__init__(layer, tile.codes, values, tile.grid, rounding.params.inner_params)

    def group(self, index: int, part: slice) -> None:
        self.left = self.mask[part]
        super().group(index, part)

    def step(self, units: Tensor, pull: Tensor, metric: Tensor, grid: Sequence[Tensor]) -> None:
        scale, inverse, low, high = grid
        mask, self.left = self.left[: len(units)], self.left[len(units) :]
        for j, curvature in enumerate(metric.diagonal().tolist()):
            now = units[j]
            best = torch.addcmul(now, pull[j], inverse, value=1 / curvature)
            change = best.round_().clamp_(low, high).mul_(mask[j]).sub_(now)
            now += change
            pull[j + 1 :].addr_(metric[j, j + 1 :], change.mul_(scale), alpha=-1)


class _DescentOfValues(descent.Descent):
    """Kept weights of 16 bits on the way to less loss."""

    def __init__(self, layer: feedback.Objective, tile: KeptRows) -> None:
        self.mask, self.left, self.dtype = tile.mask, tile.mask, tile.codes.dtype
        super().__init__(layer, tile.codes, tile.codes.float(), tile.grid, 16)

    def group(self, index: int, part: slice) -> None:
        self.left = self.mask[part]
        super().group(0, part)

    def units(self, codes: Tensor, zero: Tensor) -> Tensor:
        return codes.float()

    def encode(self, units: Tensor, zero: Tensor) -> Tensor:
        return units.to(self.dtype)

    def storable(self, index: int, scale: Tensor) -> Tensor:
        return torch.ones_like(scale)

    def step(self, units: Tensor, pull: Tensor, metric: Tensor, grid: Sequence[Tensor]) -> None:
        for j, curvature in enumerate(metric.diagonal().tolist()):
            best = torch.add(units[j], pull[j], alpha=1 / curvature).mul_(self.left[j])
            change = best.to(self.dtype).float().sub_(units[j])
            units[j] += change
            pull[j + 1 :].addr_(metric[j, j + 1 :], change, alpha=-1)
