"""Binary weights with error feedback: a scale times -1 or 1, rounded column by column as GPTQ does (arXiv 2210.17323).

MC-MoE (arXiv 2410.06270) stores the experts that matter least in one bit: signs, and the mean magnitude of a group as
its scale. The signs of a column are those of its targets, and its error is folded into the targets of the rest
(compress/quant/feedback.py). The scale with the least weighted error of a group is the weighted mean of its magnitudes,
taken when the loop reaches it. Sweeps of coordinate descent then revisit every column and refit the scales in closed
form (compress/quant/descent.py).

Differences from the paper and its code: scales are weighted and refitted; groups of GPTQ's columns are those of the
scale; signs of all weights, without a part that keeps more bits.

Not in the core, because nothing was measured with it: no whole model, and no comparison with trellis codes of one bit.

Not done: rounding fed back between outputs; tiles of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.formats import int as int_format
from compress.formats import ternary
from compress.numerics.linalg import upper_factor
from compress.quant import descent, feedback, grid
from compress.quant.settings import check, check_damp
from compress.types import PackedWeight, Quantized, Stats, Stored

FORMAT = "ternary"
NEEDS = frozenset({"hessian"})
INCOHERENCE = False
MIDDLE = 0.5  # the zero point between the codes 0 and 1: a grid's step is twice the scale


@dataclass(frozen=True)
class Config:
    """Settings of binary rounding."""

    group_size: int = 128  # [columns] that share a scale; -1: the whole row
    damp: float = 0.01  # [fraction] of the mean diagonal, added to the diagonal of the Hessian
    sweeps: int = 2  # [sweeps] of coordinate descent after the column loop

    def __post_init__(self) -> None:
        check(self, "sweeps")
        check_damp(self.damp)
        ternary.Params(ternary.BINARY, self.group_size)


def plan_params(config: Config, shape: tuple[int, int], scale_dtype: str = "float16") -> ternary.Params:
    """Return the format's parameters for a weight [out, in]; a group longer than the row is the whole row."""
    group = -1 if config.group_size >= shape[1] else config.group_size
    return ternary.Params(ternary.BINARY, group, scale_dtype)


def workspace(config: Config, shape: tuple[int, int]) -> int:
    """Return a bound of the bytes needed beside weight and Hessian: eight copies of the weight."""
    return feedback.workspace(shape, 8 * 4 * shape[0] * shape[1])


def quantize(weight: Tensor, stats: Stats | None, config: Config, seed: int = 0) -> Quantized:
    """Quantize weight [out, in], any float dtype, finite, by stats.hessian [in, in]. `seed` is unused."""
    assert stats is not None
    shape, target = (weight.shape[0], weight.shape[1]), weight.T.float().contiguous()
    params = plan_params(config, shape, int_format.scale_dtype(target.abs().amax(0), 1))
    hessian, notes = feedback.usable(stats)
    order = feedback.loop_order(hessian.diagonal(), 0 if params.group_size == -1 else params.group_size)
    factor = upper_factor(hessian, config.damp, order)
    rounder = _SignRounder(target, order, factor.upper, params)
    feedback.run(target[order], factor.upper, rounder)
    codes = torch.empty_like(rounder.codes).index_copy_(0, order, rounder.codes)
    layer = feedback.Objective(target, hessian, (factor.damp * hessian.diagonal().mean()).item())
    state = _OnSigns(layer, codes, rounder.grid, params)
    state.sweep(params.group(shape[1]), config.sweeps)
    tensors = ternary.pack((2 * state.codes.to(torch.int8) - 1).T, (state.scale / 2).T, params)
    return Quantized(PackedWeight(Stored(FORMAT, params), tensors, shape), (*notes, *factor.notes))


def best_scale(target: Tensor, importance: Tensor) -> Tensor:
    """Return the scale [rows] of the least weighted error of signs: target [columns, rows], importance [columns]."""
    total = importance.sum().clamp(min=torch.finfo(torch.float32).tiny)
    return (target.abs() * importance[:, None]).sum(0) / total


class _SignRounder(feedback.ColumnRounder):
    """Signs as a Rounder; columns arrive in `order`, groups are counted in the original order."""

    width = 1

    def __init__(self, target: Tensor, order: Tensor, factor: Tensor, params: ternary.Params) -> None:
        columns, rows = target.shape
        self.dtype, size = getattr(torch, params.scale_dtype), params.group(columns)
        self.owner = (order // size).tolist()  # group of the k-th column
        self.codes = torch.empty(columns, rows, dtype=torch.uint8, device=target.device)
        scale = torch.empty(params.groups(columns), rows).to(target)
        self.grid = grid.Grid(scale, torch.full_like(scale, MIDDLE))
        self.group = size
        if params.group_size == -1:
            self.group = 0
            self._fit(target[order], factor, 0)

    def fit_group(self, targets: Tensor, metric: Tensor, start: int) -> None:
        self._fit(targets, metric, self.owner[start])

    def _fit(self, targets: Tensor, metric: Tensor, index: int) -> None:
        self.grid.scale[index] = 2 * grid.storable(best_scale(targets, metric.diagonal().square()), self.dtype)

    def round_columns(self, leaf: feedback.Leaf) -> bool:
        return False  # signs are no integer grid: columns are rounded one by one

    def round_block(self, target: Tensor, metric: Tensor, start: int) -> Tensor:
        self.codes[start] = target[0] >= 0
        return (self.codes[start].float() - MIDDLE)[None] * self.grid.scale[self.owner[start]]


class _OnSigns(descent.Descent):
    """Signs whose scales are floating-point numbers."""

    def __init__(self, layer: feedback.Objective, codes: Tensor, fitted: grid.Grid, params: ternary.Params) -> None:
        super().__init__(layer, codes, fitted.values(codes, params.group(len(codes))), fitted, bits=1)
        self.dtype = getattr(torch, params.scale_dtype)

    def storable(self, index: int, scale: Tensor) -> Tensor:
        return 2 * grid.storable((scale / 2).clamp(min=0), self.dtype)

    def step(self, units: Tensor, pull: Tensor, metric: Tensor, grid: Sequence[Tensor]) -> None:
        scale, inverse = grid[:2]
        for j, curvature in enumerate(metric.diagonal().tolist()):
            best = torch.addcmul(units[j], pull[j], inverse, value=1 / curvature)
            change = torch.where(best >= 0, MIDDLE, -MIDDLE) - units[j]
            units[j] += change
            pull[j + 1 :].addr_(metric[j, j + 1 :], change * scale, alpha=-1)
