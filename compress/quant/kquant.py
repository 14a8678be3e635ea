"""K-quants by GPTQ: codes with error feedback on the two-level grids of llama.cpp's Q2_K to Q6_K and IQ4_XS.

llama.cpp stores the scales of these types as integers times a float16 step of 256 columns, and the minima of some of
them likewise (compress/formats/kquant.py). Steps that leave the normal range of float16 are bfloat16 here, which
llama.cpp does not have. When the column loop reaches such a super-block, all of these numbers are
chosen, and the codes of its columns belong to them: `compress export --to gguf` writes
the same weights. Sweeps of coordinate descent then revisit codes, scales and minima, and stay on the grid. The loop is
that of gptq (arXiv 2210.17323). Super-blocks are taken in the order of their inputs' sizes, and so are the columns in
each. (Scales that are fitted before the loop lost 2% more at 4 bits and 7% more at 2 bits.)

How the grid of a super-block is fitted: compress/quant/super_blocks.py. llama.cpp rounds each weight to the nearest
point of its grid; an importance matrix there weighs the columns by their inputs, as the search of scales does here, and
errors are not fed back.

With an output metric groups of rows are quantized behind each other (compress/quant/two_sided.py).

IQ4_XS has the scales of Q3_K for groups of 32, and 16 levels that are not evenly spaced. Inputs that are no multiple of
256 but one of 32 get the type of blocks of 32 that llama.cpp falls back to (`FALLBACKS`): Q5_K becomes Q5_0, of as many
bits, where llama.cpp has Q5_1, whose offsets are floating-point numbers. Other widths are padded.

Not done: the types of llama.cpp that store codebooks of vectors (IQ1 to IQ3). Which linear gets which type is decided
by `rules` of a recipe, or by an allocation (recipe gguf-mix).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compress.formats import kquant
from compress.formats.kquant import SUPER_BLOCK, Layout, Params
from compress.numerics.linalg import upper_factor
from compress.quant import descent, feedback, two_sided
from compress.quant.grid import Grid
from compress.quant.settings import check, check_damp
from compress.quant.super_blocks import (
    CHUNK,
    SuperGrid,
    empty_grid,
    encode,
    fit_super_block,
    minimum_codes,
    nearest,
    scale_codes,
    step_dtype,
)
from compress.types import PackedWeight, Quantized, Stats, Stored

FORMAT = "kquant"
NEEDS = frozenset({"hessian"})
INCOHERENCE = False
TWO_SIDED = True
BLOCK = 32  # columns of a block of the types without super-blocks
FALLBACKS: dict[
    str, tuple[str, dict[str, object]]
] = {  # type -> method and settings, where inputs are whole blocks of 32 only
    **dict.fromkeys(("q2_k", "q3_k", "iq4_xs"), ("grid_gptq", {"type": "iq4_nl", "static_groups": False})),
    **dict.fromkeys(("q4_k", "q5_k"), ("gptq", {"bits": 5})),
    "q6_k": ("gptq", {"bits": 8}),
}


BlockType = Literal["q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs"]


@dataclass(frozen=True)
class Config:
    """Settings of K-quants."""

    type: BlockType = "q4_k"  # of llama.cpp: 2.625, 3.4375, 4.5, 5.5, 6.5625 and 4.25 bits
    damp: float = 0.01  # [fraction] of the mean diagonal, added to the diagonal of the Hessian
    sweeps: int = 1  # [sweeps] of coordinate descent after the column loop, each at twice its cost

    def __post_init__(self) -> None:
        check(self, "sweeps", type=list(kquant.LAYOUTS))
        check_damp(self.damp)


def plan_params(config: Config, shape: tuple[int, int]) -> Params:
    """Return the format's parameters."""
    return Params(config.type)


def instead(config: Config, shape: tuple[int, int]) -> tuple[str, dict[str, object]] | None:
    """Return the method, and its settings, for inputs that are whole blocks of 32 and no super-blocks; None: this."""
    columns = shape[1]
    if columns % SUPER_BLOCK == 0 or columns % BLOCK:
        return None
    method, own = FALLBACKS[config.type]
    size = {"group_size": BLOCK} if method == "gptq" else {}
    return method, {**own, **size, "damp": config.damp, "sweeps": config.sweeps}


def workspace(config: Config, shape: tuple[int, int]) -> int:
    """Return the bytes needed beside weight and Hessian.

    In the loop that is five copies of the weight, and codes; after it, three copies and codes four times, or less.
    Scales and minima of all groups, a super-block twice, and what is searched at a time are added.
    """
    numel = shape[0] * shape[1]
    beside = 4 * 4 * numel // kquant.LAYOUTS[config.type].group_size
    beside += 2 * 4 * SUPER_BLOCK * shape[0] + 16 * 4 * CHUNK
    return feedback.workspace(shape, numel * (5 * 4 + 1) + beside, ordered=False)


def quantize(weight: Tensor, stats: Stats | None, config: Config, seed: int = 0) -> Quantized:
    """Quantize weight [out, in], any float dtype, finite, by stats.hessian [in, in]. `seed` is unused."""
    assert stats is not None
    target = weight.T.float().contiguous()  # [in, out]
    params = Params(config.type, step_dtype(target, kquant.LAYOUTS[config.type]))
    hessian, notes = feedback.usable(stats)
    order = feedback.loop_order(hessian.diagonal(), SUPER_BLOCK)
    factor = upper_factor(hessian, config.damp, order)
    damping = (factor.damp * hessian.diagonal().mean()).item()

    def quantize_group(_: slice, target: Tensor) -> tuple[tuple[Tensor, SuperGrid], Tensor]:
        rounder = _Rounder(target, order, params)
        feedback.run(target[order], factor.upper, rounder)
        codes = torch.empty_like(rounder.codes).index_copy_(0, order, rounder.codes)
        grid = rounder.grid
        del rounder
        if not config.sweeps:
            return (codes, grid), _values(codes, grid, params.layout)
        state = _Descent(feedback.Objective(target, hessian, damping), codes, grid, params.layout)
        state.sweep(params.layout.group_size, config.sweeps)
        return (state.codes, state.grid), state.values

    made = two_sided.by_tiles(target, stats.output, quantize_group)
    codes = torch.cat([codes for codes, _ in made], 1)
    grid = SuperGrid(*(torch.cat(parts, 1) for parts in zip(*(grid for _, grid in made), strict=True)))
    notes += factor.notes
    scales = grid.to_scales(params.layout, getattr(torch, params.step_dtype))
    tensors = kquant.pack(codes.T.contiguous(), scales, params)
    return Quantized(PackedWeight(Stored(FORMAT, params), tensors, (weight.shape[0], weight.shape[1])), tuple(notes))


class _Rounder(feedback.Rounder):
    """The grids of all super-blocks as a Rounder; columns arrive in `order`, super-blocks of them together."""

    width, group = 1, SUPER_BLOCK

    def __init__(self, target: Tensor, order: Tensor, params: Params) -> None:
        self.order, self.dtype = order, getattr(torch, params.step_dtype)
        layout = self.layout = params.layout
        self.owner = (order // layout.group_size).tolist()  # group of the k-th column
        self.codes = torch.empty(target.shape, dtype=torch.uint8, device=target.device)
        self.grid = empty_grid(target.shape, layout, target.device)
        self.scale, self.minimum = self.grid.scale(), self.grid.minimum()

    def fit_group(self, targets: Tensor, metric: Tensor, start: int) -> None:
        columns = self.order[start : start + len(targets)]
        index, within = int(columns[0]) // SUPER_BLOCK, columns % SUPER_BLOCK
        natural, importance = targets.new_zeros(SUPER_BLOCK, targets.shape[1]), targets.new_zeros(SUPER_BLOCK)
        natural[within], importance[within] = targets, metric.diagonal().square()
        fitted = fit_super_block(natural, importance, self.layout, self.dtype)
        groups = slice(index * self.layout.groups, (index + 1) * self.layout.groups)
        self.grid.scales[groups], self.grid.steps[index] = fitted.scales, fitted.steps[0]
        self.grid.minima[groups], self.grid.minimum_steps[index] = fitted.minima, fitted.minimum_steps[0]
        self.scale[groups], self.minimum[groups] = fitted.scale(), fitted.minimum()

    def round_block(self, target: Tensor, metric: Tensor, start: int) -> Tensor:
        index = self.owner[start]
        scale, minimum = self.scale[index], self.minimum[index]
        units = nearest((target + minimum) / scale, self.layout)
        self.codes[start] = encode(units[0], self.layout)
        return units.mul_(scale).sub_(minimum)


def _values(codes: Tensor, grid: SuperGrid, layout: Layout) -> Tensor:
    """Return what codes [columns, rows] stand for, float32."""
    owner = torch.arange(len(codes), device=codes.device) // layout.group_size
    return layout.units(codes).mul_(grid.scale()[owner]).sub_(grid.minimum()[owner])


class _Descent(descent.Descent):
    """Coordinate descent whose scales and minima stay integers times the steps of their super-blocks."""

    def __init__(self, layer: feedback.Objective, codes: Tensor, grid: SuperGrid, layout: Layout) -> None:
        self.grid, self.layout, self.minimum = grid, layout, grid.minimum()
        fitted = Grid(grid.scale(), torch.full_like(grid.scales, layout.zero))
        super().__init__(layer, codes, _values(codes, grid, layout), fitted, layout.bits)

    def storable(self, index: int, scale: Tensor) -> Tensor:
        step = self.grid.steps[index // self.layout.groups]
        return scale_codes(scale / step, self.layout) * step

    def write_values(self, index: int, units: Tensor, out: Tensor) -> None:
        super().write_values(index, units, out)
        out.sub_(self.minimum[index])

    def units(self, codes: Tensor, zero: Tensor) -> Tensor:
        return self.layout.units(codes)

    def encode(self, units: Tensor, zero: Tensor) -> Tensor:
        return encode(units, self.layout)

    def step(self, units: Tensor, pull: Tensor, metric: Tensor, grid: Sequence[Tensor]) -> None:
        if not self.layout.levels:
            return super().step(units, pull, metric, grid)
        scale, inverse = grid[:2]
        for j, curvature in enumerate(metric.diagonal().tolist()):
            best = nearest(torch.addcmul(units[j], pull[j], inverse, value=1 / curvature), self.layout)
            pull[j + 1 :].addr_(metric[j, j + 1 :], (best - units[j]).mul_(scale), alpha=-1)
            units[j] = best

    def rescale(self, index: int, units: Tensor, block: Tensor, pull: Tensor) -> Tensor:
        scale = super().rescale(index, units, block, pull)
        self.grid.scales[index] = (scale / self.grid.steps[index // self.layout.groups]).round_()
        if self.layout.has_minima:
            self._shift(index, block, pull)
        return scale

    def _shift(self, index: int, block: Tensor, pull: Tensor) -> None:
        """Step the group's minima, as `rescale` does its scales: they move all columns alike."""
        old, step = self.minimum[index].clone(), self.grid.minimum_steps[index // self.layout.groups]
        product = block.sum(1)
        curvature, slope = product.sum(), -pull.sum(0)
        codes = minimum_codes((old + slope / curvature) / step, self.layout)
        moved = codes * step - old
        is_better = 2 * moved * slope - moved.square() * curvature > 0
        self.minimum[index] = torch.where(is_better, codes * step, old)
        self.grid.minima[index] = torch.where(is_better, codes, self.grid.minima[index])
        pull.addr_(product, self.minimum[index] - old)
