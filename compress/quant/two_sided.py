"""Round with feedback between outputs, too: two-sided rounding (YAQA, arXiv 2505.22988; EXL3's `ldlq_2hess`).

With H the Hessian of the inputs and G that of the outputs, the second moments of the loss's gradient there, the loss of
an error E [in, out] is tr(E^T H E G): the KL to second order, if inputs and gradients are independent. Let G = D D^T, D
upper triangular, and V = D blockdiag(D_cc)^-1 with a block for each group of rows of the weight. Group c is rounded by
the one-sided loop (compress/quant/feedback.py) for the target W_c + S_c, S_c = sum over groups b before c of E_b V_bc,
E being what is lost of W itself. With H = C C^T its part of the loss is ||C^T (W_c + S_c - Q_c) D_cc||^2, and the parts
add up to tr(E^T H E G). Inside of a group errors count alike, as ever: rounding stays Euclidean, formats stay as they
are. With G the identity all codes are those of the one-sided loop.

`by_groups` does one group after the other, with whatever a method does for the rows of a group: fit scales, round,
sweep; `by_tiles` does so for a method that takes whole weights. `wavefront` does the same for paths of the trellis,
which are only fast together: group c is some columns behind group c - 1, so that in each step all groups round a
column, each its own.

Differences from YAQA: groups are as long as a method's paths (96 to 256 outputs; there 16), since shorter paths lose
more than finer groups gain. Rows in different tiles (`feedback.row_tiles`) know nothing of each other, so that tiles
stay independent. Not done: groups in another order than that of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from compress.numerics.linalg import squares, upper_factor
from compress.quant import feedback
from compress.types import OutputMetric, Work

PADDING = 256  # rows that a method may add to those of a weight, at most
GROUP = 64  # rows that are rounded together by methods whose rows need no others
WEIGHT_STEPS = 400  # measured: few rows are rounded at a time
COLUMNS = 16  # columns that a group of the wavefront is behind the one before it, at most

Made = TypeVar("Made")


class Shifts:
    """What the errors of earlier groups of rows add to the targets of later ones."""

    def __init__(self, metric: Tensor, groups: Sequence[slice]) -> None:
        """Take G [rows, rows] float32, positive definite; groups: all of its rows, in order."""
        upper = upper_factor(metric, 0.0).upper
        self.groups = groups
        self.columns = [  # of V above the diagonal, for each group
            torch.linalg.solve_triangular(upper[rows, rows], upper[: rows.start, rows], upper=True, left=False)
            for rows in groups
        ]

    def of(self, group: int, errors: Tensor) -> Tensor:
        """Return S [columns, size] of a group, from errors [columns, rows before it or more]."""
        return errors[:, : self.groups[group].start] @ self.columns[group]


def workspace(shape: tuple[int, int]) -> int:
    """Return the bytes that a method takes for a weight [out, in], beside those that it takes one-sided.

    Of the rows of a tile these are G, three copies and two of the factor; of the whole weight G, where entries are
    fitted, and targets, errors, what is fed back, and codes.
    """
    rows, columns = shape[0] + PADDING, shape[1]
    tile = feedback.row_tiles((rows, columns))[0].stop
    return squares(tile, 2) + 4 * 4 * tile**2 + 4 * rows * tile + 4 * 4 * rows * columns


def work(shape: tuple[int, int]) -> Work:
    """Return what feeding errors back between outputs takes beside the one-sided loop."""
    rows, columns = shape
    return Work(feedback.FACTORING * rows**3 + rows**2 * columns, WEIGHT_STEPS * rows * columns)


def pad_rows(output: OutputMetric, outputs: int) -> OutputMetric:
    """Return the metric of rows behind each of which there may be padding: rows from `outputs` on."""

    def block(rows: slice) -> Tensor:
        return padded_metric(output, slice(rows.start, min(rows.stop, outputs)), rows.stop - rows.start)

    return OutputMetric(block)


def padded_metric(output: OutputMetric, rows: slice, padded: int) -> Tensor:
    """Return G of some rows [padded, padded]; rows of padding do not matter to others."""
    metric = output.block(rows)
    grown = torch.eye(padded, dtype=metric.dtype, device=metric.device)
    grown[: len(metric), : len(metric)] = metric
    return grown


def by_groups(
    target: Tensor,
    output: OutputMetric | None,
    rows: slice,
    quantize: Callable[[slice, Tensor], tuple[Made, Tensor]],
    size: int = GROUP,
    cut: int = 0,
) -> list[Made]:
    """Quantize rows in groups, each for the target that the errors of those before it leave; return what each made.

    target: [in, rows of the slice]. quantize(rows of the group, its target [in, size]) returns anything, and the values
    [in, size] that are stored. cut: a group ends at each multiple of so many rows, too. Without an output metric all
    rows are one group.
    """
    if output is None:
        return [quantize(rows, target)[0]]
    groups = _groups(rows, size, cut or rows.stop)
    shifts = Shifts(output.block(rows), [slice(x.start - rows.start, x.stop - rows.start) for x in groups])
    made, errors = list[Made](), torch.zeros_like(target)
    for number, (group, of_group) in enumerate(zip(shifts.groups, groups, strict=True)):
        result, values = quantize(of_group, target[:, group] + shifts.of(number, errors))
        torch.sub(target[:, group], values, out=errors[:, group])
        made.append(result)
    return made


def _groups(rows: slice, size: int, cut: int) -> list[slice]:
    """Return rows in groups of at most `size`, none of which has a multiple of `cut` inside."""
    groups = []
    for start in range(rows.start - rows.start % cut, rows.stop, cut):
        part = range(max(start, rows.start), min(start + cut, rows.stop))
        groups += [slice(first, min(first + size, part.stop)) for first in part[::size]]
    return groups


def by_tiles(
    target: Tensor,
    output: OutputMetric | None,
    quantize: Callable[[slice, Tensor], tuple[Made, Tensor]],
    unit: int = 1,
    cut: int = 0,
) -> list[Made]:
    """Do `by_groups` for all rows of target [in, out], tile after tile, so that no G is larger than that of a tile.

    unit: a group and a tile have a multiple of so many rows, but for the last ones.
    """
    if output is None:
        return [quantize(slice(0, target.shape[1]), target)[0]]
    made = list[Made]()
    for rows in feedback.row_tiles((target.shape[1], len(target)), unit):
        made += by_groups(target[:, rows], output, rows, quantize, max(1, GROUP // unit) * unit, cut)
    return made


@dataclass(frozen=True)
class TwoSidedObjective(feedback.Objective):
    """The loss tr(R^T H R G), without what rows of different tiles have in common."""

    blocks: Sequence[tuple[slice, Tensor]]  # rows of each tile, and their part of G

    def pull(self, values: Tensor) -> Tensor:
        """Return H @ values @ G for values [in, out]."""
        pulled = super().pull(values)
        for rows, metric in self.blocks:
            pulled[:, rows] = pulled[:, rows] @ metric
        return pulled


def objective(layer: feedback.Objective, output: OutputMetric, unit: int = 1) -> TwoSidedObjective:
    """Return the loss with an output metric of a layer; unit as of `by_tiles`."""
    tiles = feedback.row_tiles((layer.weight.shape[1], len(layer.weight)), unit)
    blocks = [(rows, output.block(rows)) for rows in tiles]
    return TwoSidedObjective(layer.weight, layer.hessian, layer.damping, blocks)


class Front(NamedTuple):
    """What is rounded in one step of the wavefront: columns of several groups of rows, each behind the one before."""

    groups: range
    start: int  # first column of the first of them
    behind: int  # columns between two of them
    width: int  # columns that are rounded

    def of(self, kept: Tensor) -> Tensor:
        """Return the view [groups, width, n] of what is kept of all [groups, columns, n], contiguous."""
        _, columns, size = kept.shape
        first = (self.groups.start * columns + self.start) * size + kept.storage_offset()
        strides = ((columns - self.behind) * size, size, 1)
        return kept.as_strided((len(self.groups), self.width, size), strides, first)


def wavefront(
    target: Tensor,
    factor: Tensor,
    metric: Tensor,
    encode: Callable[[Front, Tensor], Tensor],
    size: int,
    width: int = 1,
) -> Tensor:
    """Round target [in, rows] in groups of `size` rows, a divisor; return the values [in, rows] that are stored.

    factor: C of H = C C^T, upper [in, in]. metric: G [rows, rows]. width: columns rounded at once, a divisor of `in`.
    encode(front, targets [groups, width, size]) keeps the codes and returns their values, of the same shape. But for
    the rounding of float sums the result is that of one group after the other.
    """
    rows = slice(0, target.shape[1])
    shifts, columns = Shifts(metric, _groups(rows, size, rows.stop)), target.shape[0]
    count = len(shifts.groups)
    step = _columns_behind(columns, width)
    leaves = columns // step
    backwards = torch.stack([factor[x : x + step, x : x + step] for x in range(columns - step, -1, -step)])
    weight = target.view(columns, count, size).transpose(0, 1).contiguous()
    errors, fed_back = torch.zeros_like(target), torch.zeros_like(weight)  # E; E + S by groups
    for time in range(leaves + count - 1):
        live = range(max(0, time - leaves + 1), min(count, time + 1))
        front = Front(live, (time - live.start) * step, step, step)
        shift, pending = target.new_empty(2, len(live), step, size)
        for i, group in enumerate(live):
            part = slice((time - group) * step, (time - group + 1) * step)
            torch.mm(errors[part, : shifts.groups[group].start], shifts.columns[group], out=shift[i])
            torch.mm(factor[: part.start, part].T, fed_back[group, : part.start], out=pending[i])
        residual, factors = front.of(fed_back), backwards[leaves - 1 - time + live.start :][: len(live)]
        encode_at = partial(_encode_at, encode, front)
        _round_leaves(front.of(weight) + shift, factors, pending, residual, encode_at, width)
        for i, group in enumerate(live):
            part = slice((time - group) * step, (time - group + 1) * step)
            torch.sub(residual[i], shift[i], out=errors[part, shifts.groups[group]])
    return target - errors


def _columns_behind(columns: int, width: int) -> int:
    """Return how many columns a group is behind the one before it.

    With fewer, fewer steps have not all groups, and there are more products of several columns; the square root of
    `columns` evens out what both take.
    """
    most = max(width, min(COLUMNS, isqrt(columns) // 3))
    return max(d for d in range(width, most + 1, width) if columns % d == 0)


def _encode_at(encode: Callable[[Front, Tensor], Tensor], front: Front, start: int, goal: Tensor) -> Tensor:
    return encode(front._replace(start=front.start + start, width=goal.shape[1]), goal)


def _round_leaves(
    weight: Tensor,
    factors: Tensor,
    pending: Tensor,
    residual: Tensor,
    encode: Callable[[int, Tensor], Tensor],
    width: int,
) -> None:
    """Round columns of several groups side by side; write what is lost of their weights [groups, columns, size].

    factors: their parts of C [groups, columns, columns]. pending: what columns before these have left, times C.
    encode(first column, targets [groups, width, size]) returns values.
    """
    for start in range(0, weight.shape[1], width):
        block = slice(start, start + width)
        goal, metric = pending[:, block], factors[:, block, block]
        if start:
            goal = torch.baddbmm(goal, factors[:, :start, block].mT, residual[:, :start])
        goal = torch.linalg.solve_triangular(metric.mT, goal, upper=False) if width > 1 else goal / metric
        torch.sub(weight[:, block], encode(start, goal + weight[:, block]), out=residual[:, block])
