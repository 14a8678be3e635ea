"""Fit the grids of K-quants: scales and minima of a super-block, as integers times steps that 256 columns share.

Scales of a super-block are integers times a step that 256 columns share. Each group first gets the scale and the
minimum that it would have by itself: for several shares of its range, codes are rounded and both numbers fitted to them
in closed form. The largest scale of a super-block takes the largest code, which gives the step; likewise for minima.
Then, in turn, each group tries the codes next to that of its scale, each with the minimum that keeps the group's mean
and with those next to it, and both steps are fitted to all codes of the super-block in closed form. New steps are kept
only where they lower the loss of their row. All losses are squared errors, weighted by column. (llama.cpp fits the
groups likewise, then rounds their scales and minima to the nearest that can be stored.)
"""

from __future__ import annotations

from itertools import product as pairs
from typing import NamedTuple

import torch
from torch import Tensor

from compress.formats.grid import IQ4_NL
from compress.formats.kquant import SUPER_BLOCK, Layout, Scales
from compress.quant import grid_types

CHUNK = 1 << 18  # weights searched at a time: temporaries stay in the cache
MIN_FLOAT16_STEP = 2.0**-20  # a smaller float16 has fewer than five bits of a number
MAX_FLOAT16_SCALE = 2.0**14  # a scale that is searched is up to twice what the largest weight needs
MIN_STEPS = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-126}  # no step is 0: every scale can be divided by
MAX_STEPS = {torch.float16: 65504.0, torch.bfloat16: 2.0**127}
RANGE_SHARES = tuple(1.08 - 0.06 * i for i in range(10))  # a group's scale covers one of these shares of its range
NEIGHBOURS = (-1, 0, 1)  # codes of a scale, and of a minimum, that are tried
FITTING_ROUNDS = 3  # each fits the steps and chooses codes again


def _repeat_steps(steps: Tensor, like: Tensor) -> Tensor:
    """Return the step of each group; steps [rows] are those of all groups."""
    return steps if steps.dim() == 1 else steps.repeat_interleave(len(like) // len(steps), 0)


class SuperGrid(NamedTuple):
    """Scales and minima as integers and steps, float32 all of them; one super-block, or several one after the other."""

    scales: Tensor  # [groups, rows], signed integers, none of them 0
    steps: Tensor  # [super-blocks, rows], numbers that 16 bits hold, none of them 0
    minima: Tensor  # [groups, rows], integers, 0 for types without minima
    minimum_steps: Tensor  # [super-blocks, rows], numbers that 16 bits hold

    def scale(self) -> Tensor:
        """Return the scales [groups, rows]."""
        return self.scales * _repeat_steps(self.steps, self.scales)

    def minimum(self) -> Tensor:
        """Return what is subtracted [groups, rows]."""
        return self.minima * _repeat_steps(self.minimum_steps, self.minima)

    def to_scales(self, layout: Layout, dtype: torch.dtype) -> Scales:
        """Return the scales in the order and types of the format; dtype: that of the steps."""
        scales = self.scales
        if layout.levels:  # none of which is 0: where there are only zeros the scales are
            scales = torch.where(_repeat_steps(self.steps, scales).abs() <= MIN_STEPS[dtype], 0, scales)
        codes = (scales.T + layout.scale_zero).to(torch.uint8)
        if not layout.has_minima:
            return Scales(codes, self.steps.T.to(dtype), None, None)
        return Scales(codes, self.steps.T.to(dtype), self.minima.T.to(torch.uint8), self.minimum_steps.T.to(dtype))


def empty_grid(shape: tuple[int, ...], layout: Layout, device: torch.device) -> SuperGrid:
    """Return grids for a target [columns, rows] that are still to be fitted."""
    count = -(-shape[0] // SUPER_BLOCK)
    groups, blocks = ((count * each, shape[1]) for each in (layout.groups, 1))
    return SuperGrid(*(torch.ones(size, device=device) for size in (groups, blocks, groups, blocks)))


def step_dtype(target: Tensor, layout: Layout) -> str:
    """Return the storage type for the steps of target [columns, rows]: float16 unless it does not hold most of them."""
    low, high = limits(layout)
    levels = high if layout.has_minima else -low
    scale_levels = (1 << layout.scale_bits) - 1 if layout.has_minima else 1 << (layout.scale_bits - 1)
    steps = target.abs().amax(0) / (levels * scale_levels)
    steps = steps[steps > 0]
    is_far = bool(steps.numel()) and (
        steps.max() * scale_levels > MAX_FLOAT16_SCALE or steps.median() < MIN_FLOAT16_STEP
    )
    return "bfloat16" if is_far else "float16"


def fit_super_block(
    target: Tensor, importance: Tensor, layout: Layout, dtype: torch.dtype = torch.float16
) -> SuperGrid:
    """Fit the grid of one super-block to target [256, rows] float32, some rows at a time; importance [256] >= 0.

    dtype: that of the steps.
    """
    grids, importance = [], importance / importance.mean()
    for part in target.split(CHUNK // SUPER_BLOCK, dim=1):
        search = _GridSearch(
            part.unflatten(0, (layout.groups, -1)), importance.view(layout.groups, -1, 1), layout, dtype
        )
        for _ in range(FITTING_ROUNDS):
            search.refit()
        best = search.best
        grids.append(SuperGrid(best.scales, best.steps[None], best.minima, best.minimum_steps[None]))
    return SuperGrid(*(torch.cat(parts, 1) for parts in zip(*grids, strict=True)))


class _GridSearch:
    """The best grid so far of one super-block: weights [groups, columns, rows], importance [groups, columns, 1]."""

    def __init__(self, x: Tensor, importance: Tensor, layout: Layout, dtype: torch.dtype) -> None:
        self.x, self.importance, self.layout, self.dtype = x, importance, layout, dtype
        self.neighbours = tuple(pairs(NEIGHBOURS, NEIGHBOURS if layout.has_minima else (0,)))
        self.low, self.high = limits(layout)
        scale, minimum = self._alone()
        half = 1 << (layout.scale_bits - 1)
        largest = scale.gather(0, scale.abs().argmax(0, keepdim=True))[0]
        steps = self._step(largest / (2 * half - 1 if layout.has_minima else -half))
        minimum_steps = self._step(minimum.amax(0) / (2 * half - 1))
        minima = minimum_codes(minimum / minimum_steps, layout)
        start = SuperGrid(scale_codes(scale / steps, layout), steps, minima, minimum_steps)
        self.best, self.loss = self._choose_scales(start)

    def refit(self) -> None:
        """Fit both steps to all codes, choose anew for them, and keep what has become better."""
        grid, loss = self._choose_scales(self._with_steps(self.best))
        better = loss < self.loss
        self.best = SuperGrid(*(torch.where(better, new, old) for new, old in zip(grid, self.best, strict=True)))
        self.loss = torch.where(better, loss, self.loss)

    def _alone(self) -> tuple[Tensor, Tensor]:
        """Return the scale and the minimum [groups, rows] that each group would have by itself."""
        lowest, highest = self.x.amin(1).clamp_(max=0), self.x.amax(1)
        if self.layout.has_minima:
            span, ratios = (torch.maximum(highest, lowest) - lowest) / self.high, RANGE_SHARES
        else:
            span, lowest = torch.maximum(highest, -lowest) / -self.low, torch.zeros_like(lowest)
            ratios = (
                *RANGE_SHARES,
                *(-ratio for ratio in RANGE_SHARES),
            )  # the level that is not mirrored on either side
        least, best, best_minimum = torch.full_like(span, torch.inf), span, lowest
        for ratio in ratios:
            scale = self._step(span * ratio)
            scale, minimum = self._fit_to_codes(self._codes(scale, lowest * -ratio), scale)
            codes = self._codes(scale, minimum)
            error = (codes * scale[:, None]).sub_(minimum[:, None]).sub_(self.x).square_().mul_(self.importance).sum(1)
            better = error < least
            least = torch.where(better, error, least)
            best, best_minimum = torch.where(better, scale, best), torch.where(better, minimum, best_minimum)
        return best, best_minimum

    def _fit_to_codes(self, codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scale and minimum [groups, rows] of least loss for codes; `scale` where they do not tell it."""
        weighted = codes * self.importance
        squares, product = (weighted * codes).sum(1), (weighted * self.x).sum(1)
        alone = torch.where(squares > 0, product / squares, scale)
        if not self.layout.has_minima:
            return alone, torch.zeros_like(scale)
        total = self.importance.sum(1).clamp_min(torch.finfo(torch.float32).tiny)
        codes_sum, weights_sum = weighted.sum(1), (self.importance * self.x).sum(1)
        spread = total * squares - codes_sum.square()
        both = (total * product - codes_sum * weights_sum) / spread
        both = torch.where((spread > 1e-6 * total * squares) & (both > 0), both, scale)
        minimum = (both * codes_sum - weights_sum) / total
        alone = torch.where(alone > 0, alone, scale)
        return torch.where(minimum > 0, both, alone), minimum.clamp_(min=0)

    def _choose_scales(self, grid: SuperGrid) -> tuple[SuperGrid, Tensor]:
        """Return the grid with the best scales and minima for its steps, and its loss [rows]."""
        scales, minima, least = grid.scales, grid.minima, self._loss(grid)
        share = self.importance / self.importance.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        mean = (self.x * share).sum(1)
        mean_code = (self._codes(grid.scale(), grid.minimum()) * share).sum(1)
        for change, shift in self.neighbours:
            offered = grid._replace(scales=scale_codes(grid.scales + change, self.layout))
            if self.layout.has_minima:  # the mean of the group stays, or moves by a step of its minimum
                wanted = (mean_code * offered.scale() - mean) / grid.minimum_steps
                offered = offered._replace(minima=minimum_codes(wanted + shift, self.layout))
            loss = self._loss(offered)
            better = loss < least
            least = torch.where(better, loss, least)
            scales = torch.where(better, offered.scales, scales)
            minima = torch.where(better, offered.minima, minima)
        return grid._replace(scales=scales, minima=minima), least.sum(0)

    def _with_steps(self, grid: SuperGrid) -> SuperGrid:
        """Return the grid with the steps [rows] of least loss for its codes; where these do not tell, as it is."""
        codes = self._codes(grid.scale(), grid.minimum()) * grid.scales[:, None]
        weighted = codes * self.importance
        squares, product = (weighted * codes).sum((0, 1)), (weighted * self.x).sum((0, 1))
        if not self.layout.has_minima:
            return grid._replace(steps=torch.where(squares > 0, self._step(product / squares), grid.steps))
        minima = grid.minima
        cross = (weighted.sum(1) * minima).sum(0)
        minima_squares = (self.importance.sum(1) * minima.square()).sum(0)
        minima_product = ((self.importance * self.x).sum(1) * minima).sum(0)
        determinant = squares * minima_squares - cross.square()
        steps = (product * minima_squares - minima_product * cross) / determinant
        minimum_steps = (product * cross - minima_product * squares) / determinant
        is_known = (determinant > 1e-6 * squares * minima_squares) & (steps > 0) & (minimum_steps > 0)
        return grid._replace(
            steps=torch.where(is_known, self._step(steps), grid.steps),
            minimum_steps=torch.where(is_known, self._step(minimum_steps), grid.minimum_steps),
        )

    def _codes(self, scale: Tensor, minimum: Tensor) -> Tensor:
        """Return the nearest codes [groups, columns, rows] on grids [groups, rows]."""
        return nearest((self.x + minimum[:, None]).div_(scale[:, None]), self.layout)

    def _loss(self, grid: SuperGrid) -> Tensor:
        """Return the weighted squared error [groups, rows] of the nearest codes."""
        scale, minimum = grid.scale(), grid.minimum()
        error = self._codes(scale, minimum).mul_(scale[:, None]).sub_(minimum[:, None]).sub_(self.x)
        return error.square_().mul_(self.importance).sum(1)

    def _step(self, values: Tensor) -> Tensor:
        """Round steps to their storage type; what would be 0 becomes the smallest one of its sign."""
        least, largest = MIN_STEPS[self.dtype], MAX_STEPS[self.dtype]
        rounded = values.clamp(-largest, largest).to(self.dtype).float()
        return torch.where(rounded == 0, torch.where(values < 0, -least, least), rounded)


def limits(layout: Layout) -> tuple[int, int]:
    """Return the least and the largest unit that a code stands for."""
    if layout.levels:
        return layout.levels[0], layout.levels[-1]
    return -layout.zero, (1 << layout.bits) - 1 - layout.zero


def nearest(units: Tensor, layout: Layout) -> Tensor:
    """Return the units of the codes that are nearest to `units` of any shape, float32, which may be overwritten."""
    return grid_types.points(units, IQ4_NL) if layout.levels else units.round_().clamp_(*limits(layout))


def encode(units: Tensor, layout: Layout) -> Tensor:
    """Return the codes uint8 of units that codes stand for."""
    return grid_types.nearest(units, IQ4_NL) if layout.levels else (units + layout.zero).to(torch.uint8)


def scale_codes(values: Tensor, layout: Layout) -> Tensor:
    """Round scales, in steps, to integers that the type can hold; 0 becomes 1."""
    lowest = 1 if layout.has_minima else -layout.scale_zero
    rounded = values.round().clamp_(lowest, (1 << layout.scale_bits) - 1 - layout.scale_zero)
    return torch.where(rounded == 0, 1.0, rounded)


def minimum_codes(values: Tensor, layout: Layout) -> Tensor:
    """Round minima, in steps, to integers that the type can hold."""
    return values.round().clamp_(0, (1 << layout.scale_bits) - 1)
