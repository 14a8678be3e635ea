"""decoupleQ: integers with fixed floats and floats with fixed integers, in turn, each solved for itself (2404.12759).

The loss tr(R H R^T) of w = s q + m, with s and m floating-point numbers of each group of a row, is split into two
problems (Guo et al. 2024). Codes with (s, m) given are chosen by the column loop with feedback of errors
(compress/quant/feedback.py): with m taken off the weight this is a plain integer grid. The numbers of a row with its
codes given solve a linear system of 2 G unknowns for G groups, in float64. Both are repeated; every row keeps the best
of all that it had, so that its loss never rises.

Differences from the paper and its code, and why:
- Grids begin with the clip search of compress/quant/grid.py, weighed by what the loop gives each column (there: 160
  shrunken ranges for a row, by the whole loss, which takes as many products with H).
- Columns are rounded in the order of falling diag(H), and sweeps of coordinate descent follow, as in gptq (there: no
  order; the `train` mode is Adam on a relaxed weight).
- The system is solved for the change of s and m with a small ridge, which near-singular groups need; the result is
  rounded to 16 bits before it is compared.
- Codes belong to what is stored. There is no mode with integer zero points: that is gptq.

The third stage, training s, m and norms against the block's output, is `tune: [{method: blockwise}]` of a recipe.

Not in the core: on the bundled model it has KL 0.0493 at 2.256 bits a weight, rotated, where one-sided `gptq` has
0.0509 at 2.281 and two-sided 0.0389; `trellis` has 0.0238 at 2.006 (docs/results/low_bit.md).

Not done: errors fed back between outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.formats import int as int_format
from compress.kernels.loops import columns as column_loops
from compress.numerics.linalg import upper_factor
from compress.papers.formats import affine
from compress.papers.quant import affine_grid
from compress.quant import descent, feedback, grid
from compress.quant.settings import check, check_damp
from compress.types import Quantized, Stats

FORMAT = "affine"
NEEDS = frozenset({"hessian"})
INCOHERENCE = False
SYSTEM_NUMBERS = 1 << 22  # float64 that systems of some rows take at a time
RIDGE = 1e-7  # fraction of the mean diagonal of a row's system


@dataclass(frozen=True)
class Config(affine_grid.AffineConfig):
    """Settings of decoupleQ."""

    bits: int = 2  # [bits] of one code: 2 to 8
    rounds: int = 4  # [rounds] of codes and then floats
    sweeps: int = 1  # [sweeps] of coordinate descent behind each column loop; 0: none
    damp: float = 0.01  # [fraction] of the mean diagonal, added to the diagonal of the Hessian

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, "sweeps")
        check(self, "rounds", least=1)
        check_damp(self.damp)


def plan_params(config: Config, shape: tuple[int, int]) -> affine.Params:
    """Return the format's parameters for a weight [out, in]: enough for the exact stored bytes."""
    return affine_grid.params(config, shape)


def workspace(config: Config, shape: tuple[int, int]) -> int:
    """Return a bound for the bytes needed beside the stored weight: copies of it and of the Hessian, systems."""
    weights, squares = shape[0] * shape[1], shape[1] ** 2
    return 4 * 10 * weights + 8 * 5 * squares + 6 * 8 * SYSTEM_NUMBERS + column_loops.compiler_nbytes()


@dataclass(frozen=True)
class DecoupledWeight:
    """What rows have: codes [in, out] uint8, scales and minima [G, out] float32 as stored, losses [out] float64."""

    codes: Tensor
    scales: Tensor
    minima: Tensor
    losses: Tensor

    def better(self, other: DecoupledWeight) -> DecoupledWeight:
        """Return, for each row, the one of two with less loss; this one if both are equal."""
        wins = other.losses < self.losses
        names = ("codes", "scales", "minima", "losses")
        return DecoupledWeight(*(torch.where(wins, getattr(other, name), getattr(self, name)) for name in names))


def quantize(weight: Tensor, stats: Stats | None, config: Config, seed: int = 0) -> Quantized:
    """Quantize weight [out, in], any float dtype, finite, by stats.hessian [in, in]. `seed` is unused."""
    assert stats is not None
    hessian, notes = feedback.usable(stats)
    target = weight.T.float().contiguous()  # [in, out]
    dtype = affine_grid.scale_dtype(weight.float(), config.bits)
    params = affine_grid.params(config, (weight.shape[0], weight.shape[1]), dtype)
    order = feedback.loop_order(hessian.diagonal())
    factor = upper_factor(hessian, config.damp, order)
    damping = (factor.damp * hessian.diagonal().mean()).item()
    problem = MatrixProblem(feedback.Objective(target, hessian, damping), order, factor.upper, config, params)
    best = problem.solve()
    packed = affine_grid.pack(best.codes.T, best.scales.T, best.minima.T, params)
    return Quantized(packed, (*notes, *factor.notes))


@dataclass(frozen=True)
class MatrixProblem:
    """A layer, the order of its columns and the factor of its Hessian in this order."""

    layer: feedback.Objective
    order: Tensor  # [in] int64
    upper: Tensor  # [in, in]
    config: Config
    params: affine.Params

    @property
    def size(self) -> int:
        """Columns of a group."""
        return self.params.group(len(self.layer.weight))

    def solve(self) -> DecoupledWeight:
        """Alternate from the searched grids; return the best of each row."""
        current = self.start()
        best = current
        for _ in range(self.config.rounds):
            current = self.choose_codes(current)
            best = best.better(current)
            current = self.solve_floats(current)
            best = best.better(current)
        return best

    def start(self) -> DecoupledWeight:
        """Return searched grids with integer zero points, and the nearest codes."""
        layer, bits = self.layer, self.config.bits
        importance = torch.empty(len(layer.weight), device=layer.weight.device)
        importance[self.order] = self.upper.diagonal().square()
        searched = grid.GridConfig(bits, self.params.group_size, symmetric=False)
        dtype = getattr(torch, self.params.scale_dtype)
        fitted = grid.fit_all(layer.weight, importance, searched, dtype, self.size)
        scales, minima = affine_grid.storable(fitted.scale, -fitted.scale * fitted.zero, self.params.scale_dtype)
        codes = affine_grid.nearest(layer.weight.T, scales.T, minima.T, self.params).T.contiguous()
        return self.judge(codes, scales, minima)

    def judge(self, codes: Tensor, scales: Tensor, minima: Tensor) -> DecoupledWeight:
        """Return a solution with the losses of its rows."""
        residual = self.layer.weight - self.values(codes, scales, minima)
        losses = (residual * self.layer.pull(residual)).sum(0, dtype=torch.float64)
        return DecoupledWeight(codes, scales, minima, losses)

    def values(self, codes: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
        """Return values [in, out] of codes [in, out], float32."""
        owner = torch.arange(len(codes), device=codes.device) // self.size
        return codes.float().mul_(scales[owner]).add_(minima[owner])

    def choose_codes(self, current: DecoupledWeight) -> DecoupledWeight:
        """Return new codes for scales and minima: the column loop, then sweeps, which also step the scales."""
        owner = torch.arange(len(self.layer.weight), device=self.order.device) // self.size
        target = self.layer.weight - current.minima[owner]  # on a grid that begins with 0
        fitted = grid.Grid(current.scales, torch.zeros_like(current.scales))
        rounder = _FittedRounder(fitted, owner[self.order], target.shape, 2**self.config.bits - 1)
        feedback.run(target[self.order], self.upper, rounder)
        codes = torch.empty_like(rounder.codes).index_copy_(0, self.order, rounder.codes)
        if self.config.sweeps:
            columns, own = len(target), self.params
            as_int = int_format.params_for(own.bits, own.group_size, True, columns, own.scale_dtype)
            layer = replace(self.layer, weight=target)
            codes, fitted = descent.improve_grid(layer, codes, fitted, as_int, self.config.sweeps)
        return self.judge(codes, fitted.scale, current.minima)

    def solve_floats(self, current: DecoupledWeight) -> DecoupledWeight:
        """Return the scales and minima that are best for the codes, rounded to what is stored."""
        residual = self.layer.weight - self.values(current.codes, current.scales, current.minima)
        pull = self.layer.pull(residual).double()
        changes = solve_systems(self.layer, current.codes, pull, self.size)
        scales, minima = (current.scales + changes[0]).float(), (current.minima + changes[1]).float()
        return self.judge(current.codes, *affine_grid.storable(scales, minima, self.params.scale_dtype))


def solve_systems(layer: feedback.Objective, codes: Tensor, pull: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the changes of scales and minima [G, out] float64 that lower the loss most.

    codes [in, out]; pull [in, out] float64: H times the present residual; size: columns of a group.
    """
    columns, rows = codes.shape
    count = -(-columns // size)
    extra = count * size - columns
    metric = layer.hessian.double()
    metric = metric + layer.damping * torch.eye(columns, dtype=metric.dtype, device=metric.device)
    blocks = torch.nn.functional.pad(metric, (0, extra, 0, extra)).view(count, size, count, size)
    both = blocks.sum((1, 3))
    wide_codes = torch.nn.functional.pad(codes.T.double(), (0, extra)).view(rows, count, size)
    wide_pull = torch.nn.functional.pad(pull.T, (0, extra)).view(rows, count, size)
    changes = []
    for some in torch.arange(rows).split(max(1, SYSTEM_NUMBERS // (count * size * count))):
        q, g = wide_codes[some], wide_pull[some]
        around = _around(blocks, q)
        system = torch.empty(len(some), 2 * count, 2 * count, dtype=q.dtype, device=q.device)
        system[:, :count, :count] = torch.einsum("rak,rakb->rab", q, around)
        system[:, count:, :count] = around.sum(2)
        system[:, :count, count:] = system[:, count:, :count].transpose(1, 2)
        system[:, count:, count:] = both
        diagonal = system.diagonal(dim1=1, dim2=2)
        diagonal.add_(RIDGE * diagonal.mean(1, keepdim=True) + torch.finfo(q.dtype).tiny)
        wanted = torch.cat(((g * q).sum(2), g.sum(2)), 1)
        changes.append(torch.linalg.solve(system, wanted))
    solved = torch.cat(changes).T
    return solved[:count], solved[count:]


def _around(blocks: Tensor, codes: Tensor) -> Tensor:
    """Return H times the codes of each group alone: [rows, G, size, G] of H [G, size, G, size], codes [rows, G, size].

    One product of matrices for each group, in place of one of all that multiplies zeros.
    """
    rows, count, size = codes.shape
    out = codes.new_empty(rows, count * size, count)
    flat = blocks.reshape(count * size, count, size)
    for group in range(count):
        out[:, :, group] = codes[:, group] @ flat[:, group].T
    return out.view(rows, count, size, count)


class _FittedRounder(feedback.ColumnRounder):
    """Fixed grids that begin with 0; columns arrive in the order of the loop."""

    width = 1

    def __init__(self, fitted: grid.Grid, owner: Tensor, shape: torch.Size, top: int) -> None:
        self.grid, self.owner, self.top = fitted, owner, top
        self.codes = torch.empty(shape, dtype=torch.uint8, device=owner.device)

    def round_columns(self, leaf: feedback.Leaf) -> bool:
        if len(leaf.weight) > column_loops.MAX_COLUMNS or not column_loops.supports(self.codes):
            return False
        part = slice(leaf.start, leaf.start + len(leaf.weight))
        column_loops.round_columns(*leaf[1:], (self.owner[part].contiguous(), *self.grid), self.codes[part], self.top)
        return True

    def round_block(self, target: Tensor, metric: Tensor, start: int) -> Tensor:
        scale = self.grid.scale[self.owner[start]]
        code = (target / scale).round_().clamp_(0, self.top)
        self.codes[start] = code[0]
        return code.mul_(scale)
