"""Round columns one by one and fold each error into the columns still to come; make a layer ready for that.

The column loop minimizes tr(R H R^T), R = W - Q, over codes, one block of columns after the other, each block with the
best target given the errors already made. With H = C C^T, C upper triangular, the loss is ||R C||^2; column block B of
R C is R_B C_BB + P_B, where P_B = sum over earlier columns of R_j C_jB is fixed, so the target of block B is W_B + P_B
C_BB^-1 and its exact contribution to the loss ||(target - Q_B) C_BB||^2. The sum of the contributions equals tr(R H
R^T). This is GPTQ (arXiv 2210.17323) and LDLQ in one left-looking form: W stays intact, nothing is inverted.

Matrices are transposed ([in_features, out_features]) so that a column of the weight is contiguous. The range of columns
is halved recursively, at group boundaries as long as there are several groups: errors of the left half reach the right
half in one matrix product, and when a half is entered all errors from its left are in place, so that a group's scales
can be fitted on exact targets whatever the group size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from compress.numerics.linalg import squares, upper_factor
from compress.types import OutputMetric, Stats, Work

LEAF_COLUMNS = 32  # fewer are not halved: errors are propagated one block at a time
ROWS_PER_TILE = 4096  # the loop and the trellis search take 5 to 30% more a row with half as many
FACTORING = 2  # multiply-adds of a float32 product that take as long as factoring, for n^3
MAX_WEIGHTS_PER_TILE = 1 << 25  # a larger tile has half the rows, so that eight processes find as much to do


class Leaf(NamedTuple):
    """Columns that are rounded one by one; views of what the loop holds."""

    start: int  # the first column
    weight: Tensor  # [columns, rows]
    factor: Tensor  # [columns, columns], upper triangular
    residual: Tensor  # [columns, rows]: to be set to weight - result
    pending: Tensor  # [columns, rows]: P of the columns before these; to be set to target - result


class Rounding(Protocol):
    """What the rows of a weight have in common, made by the `prepare` of a method that quantizes rows in tiles.

    Rows do not hear of each other once the order of columns, the factor of the Hessian and the scale of the tensor are
    known. Tiles depend on the weight's shape alone: one process makes the same ones as several do.
    """

    def release(self) -> None:
        """Drop the tensors that `quantize_rows` needs and `join` does not."""


@dataclass
class ColumnRounding(Rounding):
    """A weight, the order of its columns and the factor of its Hessian, for methods that round column by column."""

    config: Any  # of the method
    params: Any  # of the format
    target: Tensor  # [in, out] float32
    hessian: Tensor  # [in, in]
    damping: float
    order: Tensor  # [in] int64: the column of the weight at each place of the loop
    upper: Tensor  # [in, in], the factor of the damped Hessian in this order
    notes: tuple[str, ...]
    output: OutputMetric | None

    def release(self) -> None:
        self.output = None
        del self.target, self.hessian, self.upper


class Rounder(Protocol):
    """How a method turns a target into codes. It keeps its codes and state itself."""

    width: int  # columns rounded together
    group: int = 0  # columns that share fitted state; 0: nothing is fitted inside the loop

    def fit_group(self, targets: Tensor, metric: Tensor, start: int) -> None:
        """Fit the state of columns [start, start + len(targets)) on targets [columns, rows]; metric = C_gg.

        A rounder without groups is not asked to.
        """
        raise AssertionError("a rounder whose `group` is not 0 has to fit its groups")

    @abstractmethod
    def round_block(self, target: Tensor, metric: Tensor, start: int) -> Tensor:
        """Return quantized values [width, rows] for target [width, rows]; metric = C_BB [width, width]."""


@runtime_checkable
class ColumnRounder(Rounder, Protocol):
    """A rounder of single columns that may do more than one of them."""

    @abstractmethod
    def round_columns(self, leaf: Leaf) -> bool:
        """Do for all columns of a leaf what the loop does with `round_block` for each; False: nothing was done."""


@dataclass(frozen=True)
class Objective:
    """The loss tr(R H R^T) of quantized values Q: R = weight - Q, H = hessian + damping * I."""

    weight: Tensor  # [in, out] float32
    hessian: Tensor  # [in, in] float32
    damping: float

    def times_hessian(self, values: Tensor) -> Tensor:
        """Return H @ values for values [in, out]."""
        return (self.hessian @ values).add_(values, alpha=self.damping)

    def pull(self, values: Tensor) -> Tensor:
        """Return what the loss is a product of, with values [in, out]: H @ values, summed in one call."""
        return torch.addmm(values, self.hessian, values, beta=self.damping)

    def loss(self, values: Tensor) -> float:
        """Return the loss of values [in, out]."""
        residual = self.weight - values
        return (residual * self.pull(residual)).sum(dtype=torch.float64).item()


@dataclass(frozen=True)
class Layer(Objective):
    """A layer ready for the loop: columns in the order in which they are rounded, padded to whole blocks."""

    factor: Tensor  # [in, in] float32, the upper factor C of H
    order: Tensor  # [in] int64: the column of the weight at each place of the loop
    notes: Sequence[str]

    def natural(self, codes: Tensor) -> Tensor:
        """Return codes [blocks, ...] of the loop in the order of the weight's columns."""
        return codes[torch.argsort(self.order[:: len(self.order) // len(codes)])]


def usable(stats: Stats) -> tuple[Tensor, list[str]]:
    """Return the Hessian [in, in], the identity (plain rounding) where no token gave one; and notes for the report."""
    diagonal = stats.hessian.diagonal()
    if stats.count == 0 or not (diagonal > 0).any():
        reason = "no calibration token reached this input" if stats.count == 0 else "all calibration inputs were zero"
        return torch.eye(diagonal.shape[0], device=diagonal.device), [f"{reason}: rounded to nearest"]
    dead = int((diagonal == 0).sum())
    notes = [f"{dead} input channels were always zero: their weights are rounded to nearest"] if dead else []
    return stats.hessian, notes


def pad_columns(weight: Tensor, hessian: Tensor, multiple: int) -> tuple[Tensor, Tensor]:
    """Pad `in` of weight [in, out] and Hessian [in, in] to a multiple: zero weights, independent mean inputs."""
    columns = weight.shape[0]
    extra = -columns % multiple
    if not extra:
        return weight, hessian
    grown = torch.nn.functional.pad(hessian, (0, extra, 0, extra))
    grown.diagonal()[columns:] = hessian.diagonal().mean()
    return torch.nn.functional.pad(weight, (0, 0, 0, extra)), grown


def factor_layer(
    weight: Tensor, hessian: Tensor, damp: float, notes: Sequence[str], order: Tensor | None = None
) -> Layer:
    """Return the layer of weight [in, out] and Hessian [in, in], its columns in `order` (None: as they are).

    `damp` is the fraction of the mean diagonal that is added to the Hessian, or more where that is not enough.
    """
    factor = upper_factor(hessian, damp, order)
    damping = factor.damp * hessian.diagonal().mean().item()
    if order is None:
        order = torch.arange(len(weight), device=weight.device)
    else:
        weight, hessian = weight[order], hessian[order][:, order]
    return Layer(weight, hessian, damping, factor.upper, order, [*notes, *factor.notes])


def loop_order(diagonal: Tensor, *groups: int) -> Tensor:
    """Return the columns [in] int64, those with the largest inputs first: entries of the Hessian's diagonal [in].

    groups: columns that stay together, groups in the order of their means, a last, shorter one last; 0: each column
    goes where it belongs by itself. Of several sizes each is a multiple of the one before it, whose groups are sorted
    within. Ties keep the original order.
    """
    columns = diagonal.shape[0]
    order = torch.argsort(diagonal, descending=True, stable=True)
    for group in filter(None, groups):
        owner = torch.arange(columns, device=order.device) // group
        mean = torch.zeros(int(owner[-1]) + 1, dtype=diagonal.dtype, device=order.device)
        mean.index_add_(0, owner, diagonal)
        if columns % group:
            mean[-1] = -1
        rank = torch.argsort(torch.argsort(mean, descending=True, stable=True))
        order = order[torch.argsort(rank[owner[order]], stable=True)]
    return order


def prepare(weight: Tensor, stats: Stats, damp: float, width: int, group: int = 0) -> Layer:
    """Return the layer of weight [out, in], of any float type: blocks of `width` columns, the largest inputs first.

    Groups of `group` columns, if there are any, stay together and are whole, the last one padded.
    """
    hessian, notes = usable(stats)
    columns, group = weight.shape[1], group or width
    target, hessian = pad_columns(weight.T.float().contiguous(), hessian, group)
    hessian.diagonal()[columns:] = 0  # of padding, which `pad_columns` copied: it must not matter to what is fitted
    sizes = hessian.diagonal().view(-1, group // width, width).mean(2)  # group, block
    within = torch.argsort(sizes, dim=1, descending=True, stable=True)
    first = torch.argsort(sizes.mean(1), descending=True, stable=True)
    blocks = (within + torch.arange(len(sizes), device=within.device)[:, None] * sizes.shape[1])[first].flatten()
    order = (blocks[:, None] * width + torch.arange(width, device=blocks.device)).flatten()
    return factor_layer(target, hessian, damp, notes, order)


def workspace(shape: tuple[int, int], beside: int, ordered: bool = True) -> int:
    """Return the bytes that factoring the Hessian of a weight [out, in] takes, and then the loop, beside both of them.

    beside: bytes that a method holds beside the factor while its loop runs. ordered: a copy of the Hessian is held in
    the order of the loop, which takes three matrices beside two copies of the weight while it is made.
    """
    n, copies = shape[1], 2 * 4 * shape[0] * shape[1]
    factoring = max(squares(n, 2), 12 * n * n if ordered else 0)
    return max(factoring + copies, (8 if ordered else 4) * n * n + beside)


def work(shape: tuple[int, int], sweeps: int = 0) -> Work:
    """Return what factoring the Hessian of a weight [out, in], the loop, and sweeps behind it take."""
    rows, columns = shape
    return Work(FACTORING * columns**3 + rows * columns**2 * (1 + 2 * sweeps), 0)


def row_tiles(shape: tuple[int, int], unit: int = 1) -> list[slice]:
    """Return the rows of each tile of a weight [out, in]; each but the last has a multiple of `unit` rows."""
    rows = ROWS_PER_TILE if ROWS_PER_TILE * shape[1] <= MAX_WEIGHTS_PER_TILE else ROWS_PER_TILE // 2
    step = max(1, rows // unit) * unit
    return [slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


class Result:
    """What the loop has made."""

    def __init__(self, loop: _Loop) -> None:
        self.residual = loop.residual  # R = W - Q, [in_features, out_features] float32
        self._loop = loop

    @property
    def loss(self) -> float:
        """tr(R H R^T), H the damped Hessian; summed up when it is asked for."""
        return self._loop.loss()


def run(weight: Tensor, factor: Tensor, rounder: Rounder, leaf: int = LEAF_COLUMNS) -> Result:
    """Quantize weight [in_features, out_features] float32, given the upper factor [in, in] of the Hessian.

    The result does not depend on `leaf` beyond rounding of float sums. in_features must be a multiple of rounder.width.
    """
    assert rounder.group % rounder.width == 0, "a scale group must hold whole blocks"
    loop = _Loop(weight, factor, rounder, max(leaf, rounder.width))
    for start, end in loop.leaves(0, weight.shape[0]):
        loop.round_leaf(start, end)
    return Result(loop)


class _Loop:
    def __init__(self, weight: Tensor, factor: Tensor, rounder: Rounder, leaf: int) -> None:
        assert weight.shape[0] % rounder.width == 0, "columns are not a multiple of the block width"
        self.weight, self.factor, self.rounder, self.leaf = weight, factor, rounder, leaf
        self.by_columns = rounder if isinstance(rounder, ColumnRounder) else None  # asked once: that is slow
        self.residual = torch.zeros_like(weight)  # R = W - Q of the columns done
        self.pending = torch.zeros_like(weight)  # P, complete for columns when their half is entered

    def leaves(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of few columns in order, each when the errors of all columns before it are in `pending`."""
        group, width = self.rounder.group, self.rounder.width
        if group and start % group == 0 and end == min(start + group, len(self.weight)):
            self._fit(start, end)
        several = group > 0 and end - start > group
        if end - start <= self.leaf and not several:
            yield start, end
            return
        unit = group if several else width
        middle = start + (-(-(end - start) // unit) + 1) // 2 * unit
        yield from self.leaves(start, middle)
        cross = self.factor[start:middle, middle:end]
        self.pending[middle:end].addmm_(cross.T, self.residual[start:middle])
        yield from self.leaves(middle, end)

    def _fit(self, start: int, end: int) -> None:
        metric = self.factor[start:end, start:end]
        shift = torch.linalg.solve_triangular(metric.T, self.pending[start:end], upper=False)
        self.rounder.fit_group(self.weight[start:end] + shift, metric, start)

    def round_leaf(self, start: int, end: int) -> None:
        """Round the columns of a leaf one block after the other."""
        width, factor, residual, all_of_it = self.rounder.width, self.factor, self.residual, slice(start, end)
        leaf = (self.weight[all_of_it], factor[all_of_it, all_of_it], residual[all_of_it], self.pending[all_of_it])
        is_done = self.by_columns is not None and self.by_columns.round_columns(Leaf(start, *leaf))
        for b in range(start, start if is_done else end, width):
            block = slice(b, b + width)
            metric = factor[block, block]
            pending = torch.addmm(self.pending[block], factor[start:b, block].T, residual[start:b])
            if width == 1:
                target = pending.div_(metric).add_(self.weight[block])
            else:
                target = torch.linalg.solve_triangular(metric.T, pending, upper=False).add_(self.weight[block])
            quantized = self.rounder.round_block(target, metric, b)
            torch.sub(self.weight[block], quantized, out=residual[block])
            torch.sub(target, quantized, out=self.pending[block])

    def loss(self) -> float:
        """Return the sum of the losses ||(target - Q) C_BB||^2, when `pending` holds target - Q of all columns."""
        width, columns = self.rounder.width, len(self.weight)
        total = torch.zeros((), dtype=torch.float64, device=self.weight.device)  # read once: a GPU would be waited for
        for start in range(0, columns, width if width > 1 else LEAF_COLUMNS):
            block = slice(start, start + (width if width > 1 else LEAF_COLUMNS))
            if width > 1:
                lost = (self.factor[block, block].T @ self.pending[block]).double()
            else:
                lost = self.pending[block].double() * self.factor.diagonal()[block, None]
            total += lost.square_().sum()
        return total.item()
