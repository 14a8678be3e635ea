"""Round with feedback between outputs, too: two-sided rounding (YAQA, arXiv 2505.22988; EXL3's `ldlq_2hess`).

With H the Hessian of the inputs and G that of the outputs, the second moments of the loss's gradient there, the loss of
an error E [in, out] is tr(E^T H E G): the KL to second order, if inputs and gradients are independent. Let G = D D^T, D
upper triangular, and V = D blockdiag(D_cc)^-1 with a block for each group of rows of the weight. Group c is rounded by
the one-sided loop (compress/quant/feedback.py) for the target W_c + S_c, S_c = sum over groups b before c of E_b V_bc,
E being what is lost of W itself. With H = C C^T its part of the loss is ||C^T (W_c + S_c - Q_c) D_cc||^2, and the parts
add up to tr(E^T H E G). Inside of a group errors count alike, as ever: rounding stays Euclidean, formats stay as they
are. With G the identity all codes are those of the one-sided loop.

`by_groups` does one group after the other, with whatever a method does for the rows of a group: fit scales, round,
sweep. `wavefront` does the same for paths of the trellis, which are only fast together: group c is some columns behind
group c - 1, so that in each step all groups round a column, each its own.

Differences from YAQA: groups are as long as a method's paths (96 to 256 outputs; there 16), since shorter paths lose
more than finer groups gain. Rows in different tiles (`feedback.row_tiles`) know nothing of each other, so that tiles
stay independent. Not done: groups in another order than that of the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from compress.numerics.linalg import upper_factor
from compress.types import OutputMetric

GROUP = 64  # rows that are rounded together by methods whose rows need no others
COLUMNS = 16  # columns that a group of the wavefront is behind the one before it, at most

Made = TypeVar("Made")


class Shifts:
    """What the errors of earlier groups of rows add to the targets of later ones; group c is rows c * size to ..."""

    def __init__(self, metric: Tensor, size: int) -> None:
        """Take G [rows, rows] float32, positive definite."""
        upper = upper_factor(metric, 0.0).upper
        self.groups = [slice(start, min(start + size, len(upper))) for start in range(0, len(upper), size)]
        self.columns = [  # of V above the diagonal, for each group
            torch.linalg.solve_triangular(upper[rows, rows], upper[: rows.start, rows], upper=True, left=False)
            for rows in self.groups
        ]

    def of(self, group: int, errors: Tensor) -> Tensor:
        """Return S [columns, size] of a group, from errors [columns, rows before it or more]."""
        return errors[:, : self.groups[group].start] @ self.columns[group]


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
) -> list[Made]:
    """Quantize rows in groups, each for the target that the errors of those before it leave; return what each made.

    target: [in, rows of the slice]. quantize(rows of the group, its target [in, size]) returns anything, and the values
    [in, size] that are stored. Without an output metric all rows are one group.
    """
    if output is None:
        return [quantize(rows, target)[0]]
    shifts, made = Shifts(output.block(rows), size), list[Made]()
    errors = torch.zeros_like(target)
    for number, group in enumerate(shifts.groups):
        of_group = slice(rows.start + group.start, rows.start + group.stop)
        result, values = quantize(of_group, target[:, group] + shifts.of(number, errors))
        torch.sub(target[:, group], values, out=errors[:, group])
        made.append(result)
    return made


class Front(NamedTuple):
    """What is rounded in one step of the wavefront: for each of several groups of rows, some columns of its own."""

    columns: Tensor  # [groups, width] int64
    groups: Tensor  # [groups, 1] int64: their numbers


def wavefront(
    target: Tensor,
    factor: Tensor,
    metric: Tensor,
    encode: Callable[[Front, Tensor], Tensor],
    size: int,
    width: int = 1,
) -> Tensor:
    """Round target [in, rows] in groups of `size` rows; return the values [in, rows] that are stored.

    factor: C of H = C C^T, upper [in, in]. metric: G [rows, rows]. width: columns rounded at once, a divisor of `in`.
    encode(front, targets [groups, width, size]) keeps the codes and returns their values, of the same shape. But for
    the rounding of float sums the result is that of one group after the other.
    """
    shifts, columns = Shifts(metric, size), target.shape[0]
    step = max(d for d in range(width, max(width, COLUMNS) + 1, width) if columns % d == 0)
    leaves, count = columns // step, len(shifts.groups)
    errors = torch.zeros_like(target)  # E
    fed_back = target.new_zeros(count, columns, size)  # E + S
    for time in range(leaves + count - 1):
        live = range(max(0, time - leaves + 1), min(count, time + 1))
        parts = [slice((time - group) * step, (time - group + 1) * step) for group in live]
        shift = torch.stack([shifts.of(group, errors[part]) for group, part in zip(live, parts, strict=True)])
        pending = torch.stack(
            [
                factor[: part.start, part].T @ fed_back[group, : part.start]
                for group, part in zip(live, parts, strict=True)
            ]
        )
        weight = torch.stack([target[part, shifts.groups[group]] for group, part in zip(live, parts, strict=True)])
        starts = torch.tensor([part.start for part in parts], device=target.device)
        front = Front(starts[:, None], torch.tensor(live, device=target.device)[:, None])
        factors = torch.stack([factor[part, part] for part in parts])
        residual = _round_leaves(weight + shift, factors, pending, partial(_encode_at, encode, front), width)
        for i, (group, part) in enumerate(zip(live, parts, strict=True)):
            fed_back[group, part] = residual[i]
            torch.sub(residual[i], shift[i], out=errors[part, shifts.groups[group]])
    return target - errors


def _encode_at(encode: Callable[[Front, Tensor], Tensor], front: Front, start: int, goal: Tensor) -> Tensor:
    columns = front.columns + torch.arange(start, start + goal.shape[1], device=goal.device)
    return encode(Front(columns, front.groups), goal)


def _round_leaves(
    weight: Tensor, factors: Tensor, pending: Tensor, encode: Callable[[int, Tensor], Tensor], width: int
) -> Tensor:
    """Round columns of several groups side by side; return what is lost of their weights [groups, columns, size].

    factors: their parts of C [groups, columns, columns]. pending: what columns before these have left, times C.
    encode(first column, targets [groups, width, size]) returns values.
    """
    residual = torch.empty_like(weight)
    for start in range(0, weight.shape[1], width):
        block = slice(start, start + width)
        goal, metric = pending[:, block], factors[:, block, block]
        if start:
            goal = torch.baddbmm(goal, factors[:, :start, block].mT, residual[:, :start])
        goal = torch.linalg.solve_triangular(metric.mT, goal, upper=False) if width > 1 else goal / metric
        torch.sub(weight[:, block], encode(start, goal + weight[:, block]), out=residual[:, block])
    return residual
