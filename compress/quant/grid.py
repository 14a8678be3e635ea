"""Fit scales and zero points of the `int` format, for the methods that write it, and round to them.

A group of weights t is stored as s * (code - z), code in 0 .. 2^bits - 1. Asymmetric grids have an integer zero point
z; symmetric ones use the full range: z = 2^(bits-1) and a signed scale, so that the level without a mirror image falls
on the side of the largest weight (reference: SignRound, arXiv 2309.05516). The clip search shrinks the min-max range,
tries both signs or the neighbouring zero points, and keeps the grid with the least weighted squared error; it never
returns a grid that is worse than min-max. Scales are rounded to their storage type before they are judged, so that
codes always belong to the stored scales.

Arrays are transposed, [columns of the group, rows], as in the column loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from compress.formats import int as int_format
from compress.kernels.loops import columns as column_loops
from compress.types import PackedWeight, Stored

WEIGHTS_AT_A_TIME = 1 << 17  # temporaries stay in the cache
COMPILED_WEIGHTS_AT_A_TIME = 1 << 20  # compiled loops have no temporaries
WEIGHT_STEPS = 100  # measured: its scale is fitted, and it is rounded
OFFERED_WEIGHTS = 1 << 18  # weights times grids whose errors are taken at a time
# Shares of the min-max scale that are tried; those above 1 use the mirrored levels only.
SYMMETRIC_RATIOS = tuple(1.1 - 0.08 * i for i in range(10))
ASYMMETRIC_RATIOS = tuple(1.0 - 0.09 * i for i in range(8))
REFINEMENTS = 2  # halvings of the step between ratios, around the best


@dataclass(frozen=True)
class GridConfig:
    """Recipe keys that every method with an integer grid has."""

    bits: int = 4  # [bits] of one code: 2 to 8
    group_size: int = 128  # [columns] that share a scale; -1: the whole row
    symmetric: bool = True  # full-range signed scale; false: integer zero points, stored beside the scales
    clip_search: bool = True  # search the scale with the least error; false: take the range of the weights

    def __post_init__(self) -> None:
        if self.bits not in int_format.PLANES:
            raise ValueError(f"bits {self.bits} is not one of 2..8")
        if self.group_size != -1 and self.group_size < 1:
            raise ValueError(f"group_size {self.group_size} is neither positive nor -1 (one scale for the whole row)")


class Grid(NamedTuple):
    """Scales and zero points, [rows] or [groups, rows]."""

    scale: Tensor  # float32, values representable in the storage type, never 0
    zero: Tensor  # float32, integers

    def values(self, codes: Tensor, group: int) -> Tensor:
        """Return the values of codes [columns, rows] on grids [groups, rows] of `group` columns, float32."""
        owner = torch.arange(len(codes), device=codes.device) // group
        return codes.float().sub_(self.zero[owner]).mul_(self.scale[owner])


def params(config: GridConfig, shape: tuple[int, int], scale_dtype: str = "float16") -> int_format.Params:
    """Return the format's parameters for a weight [out, in]; a group longer than the row is the whole row."""
    group = -1 if config.group_size >= shape[1] else config.group_size
    return int_format.params_for(config.bits, group, config.symmetric, shape[1], scale_dtype)


def fit(target: Tensor, importance: Tensor | None, config: GridConfig, dtype: torch.dtype) -> Grid:
    """Fit the grid of one group, [rows], to target [columns, rows] float32; importance [columns] >= 0 or None."""
    return Grid(*(values[0] for values in fit_all(target, importance, config, dtype, len(target))))


def fit_all(target: Tensor, importance: Tensor | None, config: GridConfig, dtype: torch.dtype, group: int) -> Grid:
    """Fit the grids [groups, rows] of all groups of `group` columns to target [columns, rows]."""
    most = COMPILED_WEIGHTS_AT_A_TIME if column_loops.supports(target) else WEIGHTS_AT_A_TIME
    weights = importance.split(group) if importance is not None else [None] * -(-len(target) // group)
    grids = [
        _fit([one.contiguous() for one in part.split(group)], weights, config, dtype)
        for part in target.split(max(16, most // len(target)), dim=1)
    ]
    return Grid(torch.cat([one.scale for one in grids], 1), torch.cat([one.zero for one in grids], 1))


def codes(target: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Return the codes nearest to target [columns, rows] on grids [rows], as float32."""
    return (target / scale).round_().add_(zero).clamp_(0, 2**bits - 1)


def nearest(
    target: Tensor, config: GridConfig, scale_dtype: str | None = None
) -> tuple[Tensor, Grid, int_format.Params]:
    """Round target [columns, rows] float32 to nearest: codes uint8, grids of all groups, the format's parameters.

    scale_dtype: of the scales; None: that which holds them best.
    """
    columns, rows = target.shape
    scale_dtype = scale_dtype or int_format.scale_dtype(target.abs().amax(0), config.bits)
    format_params = params(config, (rows, columns), scale_dtype)
    group = format_params.group(columns)
    fitted = fit_all(target, None, config, getattr(torch, format_params.scale_dtype), group)
    rounded = torch.empty(target.shape, dtype=torch.uint8, device=target.device)
    for index, start in enumerate(range(0, columns, group)):
        part = slice(start, start + group)
        rounded[part] = codes(target[part], fitted.scale[index], fitted.zero[index], config.bits)
    return rounded, fitted, format_params


def pack(codes: Tensor, grid: Grid, format_params: int_format.Params, shape: tuple[int, int]) -> PackedWeight:
    """Pack codes [columns, rows] uint8 and grids [groups, rows]."""
    zeros = None if format_params.symmetric else grid.zero.T.to(torch.uint8)
    tensors = int_format.pack(codes.T.contiguous(), grid.scale.T, zeros, format_params)
    return PackedWeight(Stored("int", format_params), tensors, shape)


def storable(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round scales to their storage type; 0 (an all-zero group, underflow) becomes 1: the group then decodes to 0."""
    rounded = scale.to(dtype).float()
    return torch.where(rounded == 0, torch.ones_like(rounded), rounded)


def _fit(
    targets: Sequence[Tensor], importances: Sequence[Tensor | None], config: GridConfig, dtype: torch.dtype
) -> Grid:
    """Fit the grids [groups, rows] of groups [columns, rows] with columns of these importances [columns]."""
    search = _Search(targets, importances, config, dtype)
    first = torch.ones_like(search.low)
    plain = [(first, 1 if config.symmetric else 0)]
    if not config.clip_search:
        search.offer(plain)
        return search.best
    ratios = SYMMETRIC_RATIOS if config.symmetric else ASYMMETRIC_RATIOS
    variants = (1, -1) if config.symmetric else (0, 1, -1)
    search.offer(plain + [(first * ratio, variant) for ratio in ratios for variant in variants])
    step = ratios[0] - ratios[1]
    for _ in range(REFINEMENTS):
        step /= 2
        centre, variant = search.best_ratio, search.best_variant
        search.offer([(centre - step, variant), (centre + step, variant)])
    return search.best


class _Search:
    """The best grids among the offered ones, of each row of several groups of columns: tensors [groups, rows]."""

    def __init__(
        self, targets: Sequence[Tensor], importances: Sequence[Tensor | None], config: GridConfig, dtype: torch.dtype
    ) -> None:
        self.groups, self.dtype = list(zip(targets, importances, strict=True)), dtype
        columns = sum(map(len, targets))
        self.is_compiled = column_loops.supports(targets[0][:1].expand(columns, -1))
        self.symmetric, self.half, self.top = config.symmetric, 2 ** (config.bits - 1), 2**config.bits - 1
        self.low = torch.stack([target.amin(0) for target in targets]).clamp_(max=0)
        self.high = torch.stack([target.amax(0) for target in targets]).clamp_(min=0)
        self.largest = torch.where(-self.low > self.high, self.low, self.high)  # signed weight of largest magnitude
        ones, zeros = torch.ones_like(self.low), torch.zeros_like(self.low)
        self.loss = torch.full_like(self.low, float("inf"))
        self._kept = torch.stack([ones, zeros, ones, zeros])  # scale, zero point, ratio and variant of the best

    @property
    def best(self) -> Grid:
        """The grids with the least errors."""
        return Grid(self._kept[0], self._kept[1])

    @property
    def best_ratio(self) -> Tensor:
        """Their ratios."""
        return self._kept[2]

    @property
    def best_variant(self) -> Tensor:
        """Their variants."""
        return self._kept[3]

    def losses(self, scale: Tensor, zero: Tensor) -> Tensor:
        """Return the weighted squared errors of grids, all [grids, groups, rows], in steps of each."""
        losses = torch.empty_like(scale)
        for index, (target, importance) in enumerate(self.groups):
            for part in torch.arange(len(scale)).split(max(1, OFFERED_WEIGHTS // max(1, target.numel()))):
                some = slice(int(part[0]), int(part[-1]) + 1)
                losses[some, index] = self._losses(target, importance, scale[some, index], zero[some, index])
        return losses

    def _losses(self, target: Tensor, importance: Tensor | None, scale: Tensor, zero: Tensor) -> Tensor:
        """Return those of one group [columns, rows], of grids [grids, rows]."""
        if self.is_compiled:
            side_by_side = target.repeat(1, len(scale)) if len(scale) > 1 else target
            grids = [bound.flatten() for bound in (scale, -zero, self.top - zero)]
            return column_loops.grid_loss(side_by_side, grids, importance).view(scale.shape)
        units = target / scale[:, None]
        error = units.round().clamp_(-zero[:, None], self.top - zero[:, None]).sub_(units).square_()
        return error.sum(1) if importance is None else torch.stack([importance @ e for e in error])

    def offer(self, grids: Sequence[tuple[Tensor, Tensor | int]]) -> None:
        """Try a ratio [groups, rows] of the min-max scale and a variant for each grid; of equal ones the first is kept.

        The variant is the sign (symmetric) or the shift of the zero point.
        """
        ratio = torch.stack([ratio for ratio, _ in grids])
        variant = torch.stack(
            [self.low.new_tensor(v).expand_as(self.low) if isinstance(v, int) else v for _, v in grids]
        )
        if self.symmetric:
            scale = storable(self.largest / -self.half * ratio * variant, self.dtype)
            zero = torch.full_like(scale, self.half)
        else:
            scale = storable((self.high - self.low) / self.top * ratio, self.dtype)
            zero = ((-self.low * ratio / scale).round_() + variant).clamp_(0, self.top)
        losses = self.losses(scale, zero) * scale.square()
        loss, index = torch.where(losses.isnan(), float("inf"), losses).min(0)
        better = loss < self.loss
        self.loss = torch.where(better, loss, self.loss)
        offered = torch.stack([scale, zero, ratio, variant])
        chosen = offered.gather(1, index.expand(len(offered), 1, *index.shape))[:, 0]
        self._kept = torch.where(better, chosen, self._kept)
