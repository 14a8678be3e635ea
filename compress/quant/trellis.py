"""QTIP: quantize each column as a path through a trellis, at whole, half or quarter bits a weight (arXiv 2406.11235).

As in EXL3, too, a weight is a fixed function of the last `state_bits` bits of a bit stream that grows by `bits` for
each weight, so that a column is quantized as one vector of hundreds of dimensions, close to the rate-distortion bound,
at the decoding cost of a scalar. The best path, up to integer costs, is searched (compress/quant/viterbi.py) for the
target that the column loop gives (compress/quant/feedback.py).

Differences, and why:
- A path runs down a column instead of through a tile of 16 x 16. All its weights then share one entry of the Hessian,
  plain squared error is the exact metric, and the error of each column is fed back before the next is chosen; with the
  square, 16 columns are rounded at once as if they were independent.
- Columns are taken in descending diag(H), which costs nothing to store: columns do not know each other's codes.
- One scale for the whole weight: a fixed multiple of its root mean square (`RATIOS`) while codes are chosen, then in
  closed form for these codes (-0.5% at 2 bits).
- Coordinate-descent sweeps (`sweeps`) choose whole paths anew, tile by tile, only where that lowers the loss.

With an output metric (compress/quant/two_sided.py) paths of the same rows are groups, columns are rounded one at a
time, the last factor on the scale is that of the two-sided metric, and there are no sweeps.

`hyb` stores its table of 1024 float16 values with every weight: 0.004 bits a weight at 2048 x 2048, but 0.25 at 256 x
256. With `row_scales` the search weighs all rows alike. Not done: tuning of the table, several scales over the columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from compress.formats import trellis as trellis_format
from compress.formats.trellis import HYB_ENTRIES, MAX_TILE_ROWS, Params
from compress.kernels import llvm
from compress.kernels.loops import columns as column_loops
from compress.kernels.loops import viterbi as viterbi_compiled
from compress.quant import descent, feedback, two_sided
from compress.quant.feedback import Layer, Objective
from compress.quant.settings import check, check_damp
from compress.quant.viterbi import DECISIONS, LEVELS, NARROW, STATES, Search
from compress.types import OutputMetric, PackedWeight, Quantized, Stats, Stored, Work

FORMAT = "trellis"
NEEDS = frozenset({"hessian"})
INCOHERENCE = True
TWO_SIDED = True

# Bits -> scale over the one that matches the root mean squares of weights and code. Fed-back errors make the targets
# larger than the weights, and a target outside the code's range costs more than a coarser code. Measured on rotated
# layers of tests/models/books-8m: the loss changes by less than 2% within 0.05 of these, for all codes. Those of parts
# of a bit lie between their neighbours.
RATIOS = {1: 1.15, 1.25: 1.14, 1.5: 1.13, 1.75: 1.12, 2: 1.11, 2.25: 1.115, 2.5: 1.12, 2.75: 1.13}
RATIOS |= {3: 1.14, 3.25: 1.155, 3.5: 1.17, 3.75: 1.185, 4: 1.2}
LAST_RATIO = 1.3
NO_SWEEPS = "two-sided rounding of paths has no sweeps: none were done"
STATE_STEPS = 0.8  # measured: a weight takes so many for each state of the search
BATCH = 16  # tiles that fill the search
CORRECTION_ROWS = 1024  # rows that the last factor on the scale is fitted to, or up to twice as many


@dataclass(frozen=True)
class Config:
    """Settings of trellis-coded quantization."""

    bits: int | float = 2  # [bits] of a weight: 1 to 8; with code mul1 also multiples of 0.25 between 1 and 4
    state_bits: int = 12  # [bits] of the window that decodes to a weight: up to 16; time doubles with each
    tile_rows: int = (
        128  # [rows] of one circular stream, at most; a multiple of 16, or of 32 and 64 for halves and
        # quarters of a bit
    )
    code: str = "mul1"  # how a window becomes a number: mul1, 1mad, 3inst, mcg (computed) or hyb (2 rows at a time from
    # a small table)
    row_scales: bool = False  # a float16 scale for each row, beside that of the tensor
    act_order: bool = True  # round the columns with the largest inputs first
    block_columns: int = 0  # [columns] rounded at once, without feedback among them; 0: as many as make BATCH tiles
    damp: float = 0.01  # [fraction] of the mean diagonal, added to the diagonal of the Hessian
    sweeps: int = 0  # [sweeps] of coordinate descent after the column loop, each at the cost of the loop; 0: none

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", trellis_format.whole(self.bits))
        Params(self.bits, self.state_bits, self.tile_rows, self.code)  # the format's own checks
        check(self, "block_columns", "sweeps")
        check_damp(self.damp)


def plan_params(config: Config, shape: tuple[int, int]) -> Params:
    """Return the format's parameters for a weight [out, in]: the tiles that pad least, then the largest."""
    least = -(-config.state_bits // config.bits)  # rows whose bits fill a window
    unit = trellis_format.row_multiple(config.bits)
    sizes = [rows for rows in range(unit, config.tile_rows + 1, unit) if rows >= least]
    large = [rows for rows in sizes if 2 * rows >= config.tile_rows] or sizes  # short streams lose quality at the seam
    if shape[0] <= large[0]:  # one tile holds all rows
        large = sizes
    tile = min(large, key=lambda rows: (-(-shape[0] // rows) * rows, -rows))
    return Params(config.bits, config.state_bits, tile, config.code, config.row_scales)


def row_unit(config: Config, shape: tuple[int, int]) -> int:
    """Return the rows that stay in one tile: a path has so many."""
    return plan_params(config, shape).tile_rows


def workspace(config: Config, shape: tuple[int, int]) -> int:
    """Return the bytes needed beside weight and Hessian.

    In the loop that is four copies of the weight, three of a tile, and a chunk's: it is searched, and later coded.
    """
    n, rows = shape[1], shape[0] + MAX_TILE_ROWS
    params = plan_params(config, shape)
    tile = min(rows, feedback.row_tiles(shape, params.tile_rows)[0].stop + MAX_TILE_ROWS)
    bits = params.symbol_bits
    if llvm.available() and bits <= NARROW:
        space = viterbi_compiled.workspace(MAX_TILE_ROWS, config.state_bits, bits, max(LEVELS.values()))
        search = torch.get_num_threads() * space
        search += 0 if column_loops.is_worthwhile(shape[0] * n) else viterbi_compiled.COMPILER  # counted for a run
    else:
        search = DECISIONS["cpu"] + 48 * max(STATES["cpu"], 1 << config.state_bits)
    search += 64 << config.state_bits
    coding = 5 * 8 * min(trellis_format.DECODE_CHUNK, rows * n)
    return feedback.workspace((rows, n), rows * n * 4 * 4 + tile * n * 3 * 4 + max(search, coding))


def work(config: Config, shape: tuple[int, int]) -> Work:
    """Return what `quantize` takes: a weight's search passes over all states, once more for each sweep."""
    searching = STATE_STEPS * 2**config.state_bits * shape[0] * shape[1] * (1 + config.sweeps)
    return feedback.work(shape, config.sweeps).plus(Work(0, searching))


def quantize(weight: Tensor, stats: Stats | None, config: Config, seed: int = 0) -> Quantized:
    """Quantize weight [out, in], any float dtype, finite, by stats.hessian [in, in], as one tile. `seed` is unused."""
    rounding = prepare(weight, stats, config)
    return join(rounding, [quantize_rows(rounding, slice(0, len(weight)))])


@dataclass
class Rounding(feedback.Rounding):
    """A weight with its scales, and the factor of its Hessian."""

    config: Config
    params: Params
    shape: tuple[int, int]
    search: Search
    scale: float
    table: Tensor | None  # of `hyb`
    row_scales: Tensor | None  # [padded out] float16
    layer: Layer  # of the weight over its row scales, rows padded to whole paths
    notes: tuple[str, ...]
    output: OutputMetric | None

    def release(self) -> None:
        del self.layer
        self.output = None


class Tile(NamedTuple):
    """The codes of some rows, and their terms of the factor on the scale (see `_terms`)."""

    states: Tensor  # [in, rows / vector_dim] int32
    pulled: float
    power: float


def prepare(weight: Tensor, stats: Stats | None, config: Config) -> Rounding:
    """Return what all rows have in common; arguments as of `quantize`."""
    assert stats is not None
    shape = rows, columns = weight.shape[0], weight.shape[1]
    params = plan_params(config, shape)
    extra = trellis_format.padded_rows(params, rows) - rows
    target = torch.nn.functional.pad(weight.T.float(), (0, extra)).contiguous()  # [in, padded out]
    row_scales = _row_scales(target) if config.row_scales else None
    if row_scales is not None:
        target /= row_scales.float()
    hessian, notes = feedback.usable(stats)
    order = torch.arange(columns, device=weight.device)
    if config.act_order:
        order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    table = _hyb_table().to(weight.device) if config.code == "hyb" else None
    levels = trellis_format.states_table(params, table).to(weight.device)
    search = Search(levels, params.state_bits, params.symbol_bits)
    scale = _scale(search, target[:, :rows], params.bits)
    layer = feedback.factor_layer(target, hessian, config.damp, notes, order)
    notes = [*layer.notes, *([NO_SWEEPS] if config.sweeps and stats.output is not None else [])]
    return Rounding(config, params, shape, search, scale, table, row_scales, layer, tuple(notes), stats.output)


def quantize_rows(rounding: Rounding, rows: slice) -> Tile:
    """Return the tile of some rows, whole paths but for the last ones, which are padded."""
    config, params, (outputs, columns) = rounding.config, rounding.params, rounding.shape
    paths = slice(rows.start, trellis_format.padded_rows(params, rows.stop))
    layer = replace(rounding.layer, weight=rounding.layer.weight[:, paths].contiguous())
    if rounding.output is not None and rounding.scale:
        return _quantize_two_sided(rounding, layer, rounding.output, rows)
    width = _width(config, layer.weight.shape, params)
    rounder = _TrellisRounder(rounding.search, params, layer.weight, rounding.scale, width)
    values = layer.weight - feedback.run(layer.weight, layer.factor, rounder).residual
    if config.sweeps:
        values = descent.improve_blocks(layer, values, rounder, config.sweeps)
    step = max(1, trellis_format.padded_rows(params, outputs) // CORRECTION_ROWS)
    some = slice(-rows.start % step, outputs - rows.start, step)  # without padding
    scales = None if rounding.row_scales is None else rounding.row_scales[paths][some].float()
    terms = _terms(layer, layer.weight[:, some], values[:, some], scales)
    return Tile(layer.natural(rounder.codes.transpose(1, 2).reshape(columns, -1)), *terms)


def _quantize_two_sided(rounding: Rounding, layer: Layer, output: OutputMetric, rows: slice) -> Tile:
    """Return the tile of some rows, all paths behind each other in a wavefront; layer: theirs, padded."""
    params, (outputs, columns) = rounding.params, rounding.shape
    search, scale, tile = rounding.search, rounding.scale, params.tile_rows
    metric = two_sided.padded_metric(output, slice(rows.start, min(rows.stop, outputs)), layer.weight.shape[1])
    if rounding.row_scales is not None:
        scales = rounding.row_scales[rows.start : rows.start + len(metric)].float()
        metric = metric * scales * scales[:, None]
    paths, steps = layer.weight.shape[1] // tile, tile // params.vector_dim
    codes = torch.zeros(paths, columns, steps, dtype=torch.int32, device=layer.weight.device)
    scaled = search.table * scale

    def encode(front: two_sided.Front, target: Tensor) -> Tensor:
        states = search.encode((target / scale).view(-1, tile))
        front.of(codes).copy_(states.view(*target.shape[:2], steps))
        return scaled.index_select(0, states.flatten()).view(target.shape)

    values = two_sided.wavefront(layer.weight, layer.factor, metric, encode, tile)
    some = slice(0, min(CORRECTION_ROWS, outputs - rows.start))
    terms = _terms(layer, layer.weight[:, some], values[:, some], None, metric[some, some])
    return Tile(layer.natural(codes.transpose(0, 1).reshape(columns, -1)), *terms)


def join(rounding: Rounding, tiles: Sequence[Tile]) -> Quantized:
    """Return the weight, from all its tiles in order."""
    pulled, power = sum(tile.pulled for tile in tiles), sum(tile.power for tile in tiles)
    scale = rounding.scale * (pulled / power if power > 0 else 1.0)
    states = torch.cat([tile.states for tile in tiles], 1)
    tensors = trellis_format.pack(states.T, scale, rounding.params, rounding.row_scales, rounding.table)
    return Quantized(PackedWeight(Stored(FORMAT, rounding.params), tensors, rounding.shape), rounding.notes)


class _TrellisRounder(feedback.Rounder):
    """Paths as a Rounder: one column at a time, all its tiles at once."""

    def __init__(self, search: Search, params: Params, target: Tensor, scale: float, width: int) -> None:
        self.width, self.scale = width, scale
        self.search, self.tile, self.unit_rows = search, params.tile_rows, params.tile_rows
        columns, rows = target.shape
        steps = rows // params.vector_dim
        self.codes = torch.zeros(columns // width, steps, width, dtype=torch.int32, device=target.device)

    def round_block(self, target: Tensor, metric: Tensor, start: int) -> Tensor:
        if self.scale == 0:
            return torch.zeros_like(target)
        states = self.search.encode((target / self.scale).reshape(-1, self.tile))
        self.codes[start // self.width] = states.view(self.width, -1).T
        return self.search.table[states].view(target.shape) * self.scale


def _width(config: Config, shape: Sequence[int], params: Params) -> int:
    """Return the columns rounded at once: a divisor of the columns of `shape` [in, padded out]."""
    most = config.block_columns or BATCH * params.tile_rows // shape[1]
    return max(d for d in range(1, max(1, most) + 1) if shape[0] % d == 0)


def _scale(search: Search, target: Tensor, bits: float) -> float:
    """Return the scale that suits the loop's targets, 0 if all weights are zero; target [in, out] without padding."""
    rms = target.square().mean(dtype=torch.float64).sqrt().item()
    return rms / search.table.square().mean(dtype=torch.float64).sqrt().item() * RATIOS.get(bits, LAST_RATIO)


def _terms(
    layer: Objective, target: Tensor, values: Tensor, row_scales: Tensor | None, metric: Tensor | None = None
) -> tuple[float, float]:
    """Return <Q, W> and <Q, Q> in the metric H, whose ratio is the factor on the values that lowers the loss most.

    target W and values Q [in, rows]: of some thousand rows at equal distances, which make the factor as good as all do.
    metric: G of these rows, then without gaps, where the loss is two-sided.
    """
    if row_scales is not None:  # the loss is that of the weight itself
        target, values = target * row_scales, values * row_scales
    pulled = layer.pull(values) if metric is None else layer.pull(values) @ metric
    power = (pulled * values).sum(dtype=torch.float64).item()
    return (pulled * target).sum(dtype=torch.float64).item(), power


def _row_scales(target: Tensor) -> Tensor:
    """Return each row's root mean square relative to the largest, float16 [padded out]; 1 for rows that are zero."""
    rms = target.square().mean(0).sqrt()
    relative = (rms / rms.max().clamp_min(torch.finfo(torch.float32).tiny)).half()
    return torch.where(relative > 0, relative, torch.ones_like(relative))


@cache
def _hyb_table() -> Tensor:
    """Learn 512 points for pairs of N(0, 1) values whose first may be negated, [512, 2] float16, by k-means."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(1 << 15, 2, generator=generator, device="cpu")
    points[:, 0].abs_()
    centres = points[:HYB_ENTRIES].clone()
    for _ in range(20):
        owner = torch.cdist(points, centres).argmin(1)
        total = torch.zeros_like(centres).index_add_(0, owner, points)
        count = torch.bincount(owner, minlength=HYB_ENTRIES)[:, None]
        centres = torch.where(count > 0, total / count.clamp_min(1), centres)
    return centres.half()
