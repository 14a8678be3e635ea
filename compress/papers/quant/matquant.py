"""MatQuant: one code for several widths, whose high bits are chosen for themselves, too (arXiv 2502.06786).

The high bits of an integer code are a code of fewer bits with the same scale (the format `sliced`). Matryoshka
quantization chooses codes for the sum over levels l of lambda_l L_l, L_l being the loss of the weight that the first l
bits stand for. Here L_l = tr(R_l H R_l^T) of one linear, with R_l = W - Q_l, and H of its inputs. All levels have the
same H, so that the column loop with feedback (compress/quant/feedback.py) runs once over the weight side by side in a
copy for each level, times the root of lambda_l: the errors of each level reach its own later targets, and a column
takes the code with the least sum of losses. Sweeps of coordinate descent do the same, and refit the scales between.

Differences from the paper, which trains weights with gradients through rounding (OmniQuant, QAT): codes are chosen by
the Hessian, in minutes and without training; what is cut off stands for the middle of its cell, where MatQuant rounds,
which takes the bit below the cut. With level_weights [0] it is gptq in `bits`, sliced.

Not in the core: on four rotated layers of books-8m the losses of 2 and 4 bits are 2.66 and 1.00 times those of gptq in
2 and in 4 bits with weight 0, 2.33 and 1.03 with 0.01, 1.45 and 1.32 with 0.05. Sums of trellises, at half a bit more,
lose nothing on either level (docs/nested.md). The divergence of whole models is not measured.

Not done: errors fed back between outputs; distilling high levels into low ones; a bit for what overflows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from compress.formats import int as int_format
from compress.formats import sliced
from compress.numerics.linalg import upper_factor
from compress.quant import descent, feedback, grid
from compress.quant.settings import check, check_damp
from compress.types import PackedWeight, Quantized, Stats, Stored

FORMAT = "sliced"
NEEDS = frozenset({"hessian"})
INCOHERENCE = False
# Scales over that of the highest level alone that are tried: lower levels want larger ones.
RATIOS = tuple(0.92 + 0.08 * i for i in range(14))
WEIGHTS_AT_A_TIME = 1 << 18


@dataclass(frozen=True)
class Config(grid.GridConfig):
    """Settings of MatQuant."""

    bits: int = 4  # [bits] of a whole code
    levels: tuple[int, ...] = (2,)  # [bits] of the levels below, rising
    level_weights: tuple[float, ...] = (0.05,)  # of the losses of these levels, beside 1 of the whole code
    damp: float = 0.01  # [fraction] of the mean diagonal, added to the diagonal of the Hessian
    sweeps: int = 1  # [sweeps] of coordinate descent after the column loop; 0: none

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, "sweeps")
        check_damp(self.damp)
        if not self.levels or [0, *self.levels, self.bits] != sorted({0, *self.levels, self.bits}):
            raise ValueError(f"levels {list(self.levels)} are not rising numbers below bits {self.bits}")
        if len(self.level_weights) != len(self.levels) or min(self.level_weights) < 0:
            raise ValueError(f"level_weights {list(self.level_weights)} are not a number of at least 0 for each level")

    @property
    def planes(self) -> tuple[int, ...]:
        """Bits of the planes of a code, high bits first."""
        return tuple(high - low for low, high in pairwise((0, *self.levels, self.bits)))


def plan_params(config: Config, shape: tuple[int, int], scale_dtype: str = "float16") -> sliced.Params:
    """Return the format's parameters for a weight [out, in]: enough for the exact stored bytes."""
    group = -1 if config.group_size >= shape[1] else config.group_size
    return sliced.params_for(config.planes, group, config.symmetric, shape[1], scale_dtype)


def workspace(config: Config, shape: tuple[int, int]) -> int:
    """Return a bound for the bytes needed beside the stored weight: copies of it for each level, and of the Hessian."""
    copies = 6 * (1 + len(config.planes))
    return 4 * copies * shape[0] * shape[1] + 4 * 6 * shape[1] ** 2 + 16 * 4 * WEIGHTS_AT_A_TIME


def quantize(weight: Tensor, stats: Stats | None, config: Config, seed: int = 0) -> Quantized:
    """Quantize weight [out, in], any float dtype, finite, by stats.hessian [in, in]. `seed` is unused."""
    assert stats is not None
    hessian, notes = feedback.usable(stats)
    target = weight.T.float().contiguous()  # [in, out]
    shape = (weight.shape[0], weight.shape[1])
    params = plan_params(config, shape, int_format.scale_dtype(target.abs().amax(0), config.bits))
    order = feedback.loop_order(hessian.diagonal())
    factor = upper_factor(hessian, config.damp, order)
    choice = JointChoice(config)
    importance = torch.empty(shape[1], device=weight.device)
    importance[order] = factor.upper.diagonal().square()
    fitted = fit(target, importance, choice, params)
    stacked = choice.copies(target)  # [in, out * levels]
    rounder = _JointRounder(choice, fitted, order // params.group(shape[1]), shape)
    feedback.run(stacked[order], factor.upper, rounder)
    codes = torch.empty_like(rounder.codes).index_copy_(0, order, rounder.codes)
    layer = feedback.Objective(stacked, hessian, (factor.damp * hessian.diagonal().mean()).item())
    state = JointDescent(layer, codes, fitted, choice, params)
    state.sweep(params.group(shape[1]), config.sweeps)
    zeros = None if params.symmetric else fitted.zero.T.to(torch.uint8)
    tensors = sliced.pack(state.codes.T.contiguous(), state.scale.T, zeros, params)
    return Quantized(PackedWeight(Stored(FORMAT, params), tensors, shape), (*notes, *factor.notes))


class JointChoice:
    """The choice of a code by all of its levels: arrays have a last dimension of levels, the whole code last.

    Numbers of level l are times the root of its weight, so that squared errors add up to the weighed loss.
    """

    def __init__(self, config: Config) -> None:
        self.bits, self.levels = config.bits, (*config.levels, config.bits)
        self.roots = torch.tensor([*config.level_weights, 1.0]).sqrt()

    def copies(self, values: Tensor) -> Tensor:
        """Return values [..., n] for each level, [..., n * levels]."""
        return (values[..., None] * self.roots.to(values)).flatten(-2)

    def units(self, codes: Tensor, zero: Tensor) -> Tensor:
        """Return what codes [..., n] stand for at each level in units of the scale, [..., n, levels]."""
        codes = codes.to(torch.int32)
        shifts = [self.bits - level for level in self.levels]
        middles = [((codes >> low) << low) + (2**low - 1) / 2 for low in shifts]
        return (torch.stack(middles, -1) - zero[..., None]) * self.roots.to(zero)

    def nearest(self, wanted: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes [..., n], float32, with the least squared error, and their units, both for wanted units.

        wanted [..., n, levels]; zero [..., n]. All codes of the levels below the highest are tried, each with the last
        plane that suits the highest level best.
        """
        low = self.bits - self.levels[-2]
        best = (wanted[..., -1] + zero).round_()
        least = torch.full_like(best, torch.inf)
        code, units = torch.zeros_like(best), torch.zeros_like(wanted)
        for prefix in range(2 ** self.levels[-2]):
            tried = best.clamp(prefix << low, ((prefix + 1) << low) - 1)
            offered = self.units(tried, zero)
            loss = (offered - wanted).square_().sum(-1)
            wins = loss < least
            least = torch.where(wins, loss, least)
            code = torch.where(wins, tried, code)
            units = torch.where(wins[..., None], offered, units)
        return code, units


def fit(target: Tensor, importance: Tensor, choice: JointChoice, params: sliced.Params) -> grid.Grid:
    """Return grids [groups, rows] for target [columns, rows] by the weighed loss of all levels, importance [columns].

    The zero points, and the scale that ratios are of, are those that suit the highest level alone.
    """
    group, dtype = params.group(len(target)), getattr(torch, params.scale_dtype)
    config = grid.GridConfig(choice.bits, params.group_size, params.symmetric)
    first = grid.fit_all(target, importance, config, dtype, group)
    if not choice.roots[:-1].any():
        return first
    chosen = first.scale.clone()
    for index, start in enumerate(range(0, len(target), group)):
        part = slice(start, start + group)
        size = max(1, WEIGHTS_AT_A_TIME // len(target[part]))
        for rows in torch.arange(target.shape[1], device=target.device).split(size):
            some = target[part, rows]
            zero = first.zero[index, rows].expand_as(some)
            scales = torch.stack([grid.storable(first.scale[index, rows] * ratio, dtype) for ratio in RATIOS])
            losses = []
            for scale in scales:
                wanted = choice.copies(some / scale).unflatten(-1, (-1, len(choice.levels)))
                units = choice.nearest(wanted, zero)[1]
                losses.append(scale.square() * (importance[part] @ (units - wanted).square_().sum(-1)))
            best = torch.stack(losses).argmin(0)
            chosen[index, rows] = scales.gather(0, best[None])[0]
    return grid.Grid(chosen, first.zero)


class _JointRounder(feedback.Rounder):
    """Codes for all levels as a Rounder: one column of all copies at a time, in the order of the loop."""

    width = 1

    def __init__(self, choice: JointChoice, fitted: grid.Grid, owner: Tensor, shape: tuple[int, int]) -> None:
        self.choice, self.grid, self.owner = choice, fitted, owner.tolist()
        self.codes = torch.empty(shape[1], shape[0], dtype=torch.uint8, device=owner.device)

    def round_block(self, target: Tensor, metric: Tensor, start: int) -> Tensor:
        index = self.owner[start]
        scale = self.grid.scale[index][:, None]
        wanted = target[0].view(-1, len(self.choice.levels)) / scale
        codes, units = self.choice.nearest(wanted, self.grid.zero[index])
        self.codes[start] = codes.to(torch.uint8)
        return (units * scale).view(1, -1)


class JointDescent(descent.Descent):
    """Coordinate descent over codes and scales by the weighed loss; units, values and pull hold all copies."""

    def __init__(
        self,
        layer: feedback.Objective,
        codes: Tensor,
        fitted: grid.Grid,
        choice: JointChoice,
        params: sliced.Params,
    ) -> None:
        self.choice, self.dtype = choice, getattr(torch, params.scale_dtype)
        owner = torch.arange(len(codes), device=codes.device) // params.group(len(codes))
        values = choice.units(codes, fitted.zero[owner]) * fitted.scale[owner][..., None]
        super().__init__(layer, codes, values.flatten(-2), fitted, params.bits)

    def units(self, codes: Tensor, zero: Tensor) -> Tensor:
        """Return the units [columns, rows * levels] of codes [columns, rows]."""
        return self.choice.units(codes, zero.expand(codes.shape)).flatten(-2)

    def encode(self, units: Tensor, zero: Tensor) -> Tensor:
        """Return the codes uint8 of units: those of the highest level, whose weight is 1."""
        return (units.unflatten(-1, (-1, len(self.choice.levels)))[..., -1] + zero).round_().to(torch.uint8)

    def step(self, units: Tensor, pull: Tensor, metric: Tensor, grid: Sequence[Tensor]) -> None:
        """Set one column of codes after the other to the best, and keep the pull of those to come up to date."""
        scale, inverse, low, _ = grid
        levels = len(self.choice.levels)
        for j, curvature in enumerate(metric.diagonal().tolist()):
            wanted = torch.addcmul(units[j], pull[j], inverse, value=1 / curvature)
            best = self.choice.nearest(wanted.view(-1, levels), -low)[1].flatten()
            change = best - units[j]
            units[j] = best
            pull[j + 1 :].addr_(metric[j, j + 1 :], change.mul_(scale), alpha=-1)

    def storable(self, index: int, scale: Tensor) -> Tensor:
        """Return scales as they are stored."""
        return grid.storable(scale, self.dtype)

    def write_values(self, index: int, units: Tensor, out: Tensor) -> None:
        """Write the values of units, [columns, rows * levels]."""
        torch.mul(units, self.scale[index].repeat_interleave(len(self.choice.levels)), out=out)

    def rescale(self, index: int, units: Tensor, block: Tensor, pull: Tensor) -> Tensor:
        """Return the group's new scales for all copies, [rows * levels]; updates `pull` in place."""
        old, levels = self.scale[index], len(self.choice.levels)
        product = block @ units
        curvature = (units * product).sum(0).view(-1, levels).sum(1)
        slope = (units * pull).sum(0).view(-1, levels).sum(1)
        step = torch.where(curvature > 0, slope / curvature.clamp_min(torch.finfo(torch.float32).tiny), 0.0)
        new = self.storable(index, old + step)
        moved = new - old
        new = torch.where(2 * moved * slope - moved.square() * curvature > 0, new, old)
        pull.sub_(product * (new - old).repeat_interleave(levels))
        self.scale[index] = new
        return new.repeat_interleave(levels)
