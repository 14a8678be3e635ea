"""SpQR: small groups whose scales are quantized too, and the most sensitive weights kept in 16 bits (arXiv 2306.03078).

A few weights make most of the error of a layer: they force a wide range on the group that they lie in, or their inputs
are large. SpQR (Dettmers et al. 2023) keeps them as a sparse matrix and rounds the rest by the column loop of GPTQ in
groups of few columns, of which scales and zero points are integers of 3 bits for blocks of 16 rows. How sensitive a
weight is says how much less its group loses without it: the errors of the group with a range of all its weights, less
those of the others with their own range, each error multiplied by the squared diagonal of the Hessian's factor.

Differences from the paper and its code, and why:
- The most sensitive weights are chosen before the loop, of the weight as it is, so many as `outliers` says (there: in
  the loop, all above a threshold), so that the bytes of a checkpoint are known before it is made.
- Ranges are searched by compress/quant/grid.py on the targets of the loop, outliers replaced by the mean of their group
  (there: plain ranges). Groups with the largest inputs are rounded first, as in gptq.
- An outlier is stored as its difference to the rounded weight, with the errors of the columns before it made up for.

Not in the core: on the bundled model it has KL 0.0058 at 3.889 bits a weight, where `trellis` has 0.0048 at 3.006 and
`gptq` 0.0026 at 4.125 (docs/results/low_bit.md).

Not done: outlier rows and columns; kernels, so that products decode the weight; coordinate descent behind the loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.numerics.linalg import upper_factor
from compress.papers.formats import sparse_outliers
from compress.quant import feedback, grid
from compress.quant.settings import check, check_damp
from compress.types import PackedWeight, Quantized, Stats, Stored

FORMAT = "sparse_outliers"
NEEDS = frozenset({"hessian"})
INCOHERENCE = False
WEIGHTS_AT_A_TIME = 1 << 16  # each of them is left out in turn


@dataclass(frozen=True)
class Config:
    """Settings of SpQR."""

    bits: int = 3  # [bits] of one code: 2 to 8
    group_size: int = 16  # [columns] that share a scale and a zero point
    outliers: float = 0.005  # [fraction] of the weights that are kept in 16 bits
    damp: float = 0.01  # [fraction] of the mean diagonal, added to the diagonal of the Hessian

    def __post_init__(self) -> None:
        check(self, bits=range(2, 9))
        check(self, "group_size", least=1)
        check_damp(self.damp)
        if not 0 <= self.outliers < 1:
            raise ValueError(f"outliers {self.outliers} is not a fraction in [0, 1)")


def plan_params(config: Config, shape: tuple[int, int]) -> sparse_outliers.Params:
    """Return the format's parameters for a weight [out, in]: enough for the exact stored bytes."""
    count = round(config.outliers * shape[0] * shape[1])
    group = min(config.group_size, shape[1])
    return sparse_outliers.Params(config.bits, group, sparse_outliers.tile_words(config.bits, shape[1]), count)


def workspace(config: Config, shape: tuple[int, int]) -> int:
    """Return a bound for the bytes needed beside weight and Hessian: copies of both, groups without one weight."""
    copies = 4 * shape[0] * shape[1] * 10
    return feedback.workspace(shape, copies) + 8 * 4 * WEIGHTS_AT_A_TIME * config.group_size


def quantize(weight: Tensor, stats: Stats | None, config: Config, seed: int = 0) -> Quantized:
    """Quantize weight [out, in], any float dtype, finite, by stats.hessian [in, in]. `seed` is unused."""
    assert stats is not None
    shape = (weight.shape[0], weight.shape[1])
    params = plan_params(config, shape)
    hessian, notes = feedback.usable(stats)
    target = weight.T.float().contiguous()
    order = feedback.loop_order(hessian.diagonal(), params.group_size)
    factor = upper_factor(hessian, config.damp, order)
    importance = torch.empty(shape[1], device=target.device)
    importance[order] = factor.upper.diagonal().square()
    mask = choose_outliers(target, importance, params)
    rounder = _LeftOutRounder(target, order, mask, params)
    feedback.run(target[order], factor.upper, rounder)
    rounder.values[order] = rounder.values.clone()
    codes = torch.empty_like(rounder.codes).index_copy_(0, order, rounder.codes)
    tensors = sparse_outliers.pack(codes.T, rounder.pack_numbers(), mask.T, rounder.values.T, params)
    return Quantized(PackedWeight(Stored(FORMAT, params), tensors, shape), (*notes, *factor.notes))


def choose_outliers(target: Tensor, importance: Tensor, params: sparse_outliers.Params) -> Tensor:
    """Return where the most sensitive weights are, [in, out] bool: `outliers` of them; importance [in]."""
    mask = torch.zeros_like(target, dtype=torch.bool)
    if not params.outliers:
        return mask
    parts = []
    for columns, weights in zip(target.split(params.group_size), importance.split(params.group_size), strict=True):
        step = max(1, WEIGHTS_AT_A_TIME // len(columns))
        parts.append(torch.cat([sensitivity(rows.T, weights, params.bits) for rows in columns.split(step, 1)]).T)
    chosen = torch.cat(parts).flatten().topk(params.outliers).indices
    mask.view(-1)[chosen] = True
    return mask


def sensitivity(group: Tensor, importance: Tensor, bits: int) -> Tensor:
    """Return by how much a group [rows, columns] loses less without each of its weights, [rows, columns]."""
    columns = group.shape[1]
    whole = _range_errors(group, bits).mul_(importance).sum(1, keepdim=True)
    if columns == 1:
        return whole
    index = torch.arange(columns, device=group.device)
    others = index[1:] - (index[:, None] >= index[1:]).long()  # of each column
    lost = _range_errors(group[:, others], bits).mul_(importance[others]).sum(2)
    return whole - lost


def _range_errors(values: Tensor, bits: int) -> Tensor:
    """Return squared errors of rounding values [..., n] to integers over their range, with 0 in it."""
    low, high = values.aminmax(dim=-1, keepdim=True)
    low, high = low.clamp(max=0), high.clamp(min=0)
    step = torch.where(high > low, (high - low) / (2**bits - 1), torch.ones_like(low))
    zero = (-low / step).round()
    rounded = ((values / step).round() + zero).clamp_(0, 2**bits - 1).sub_(zero).mul_(step)
    return rounded.sub_(values).square_()


class _LeftOutRounder(feedback.Rounder):
    """Small groups with quantized scales; outliers lose nothing. Columns arrive in `order`, groups stay together."""

    width = 1

    def __init__(self, target: Tensor, order: Tensor, mask: Tensor, params: sparse_outliers.Params) -> None:
        columns, rows = target.shape
        self.params, self.group, self.mask = params, params.group_size, mask[order]
        self.owner = (order // params.group_size).tolist()
        count = -(-columns // params.group_size)
        self.numbers = {name: torch.zeros(count, rows, device=target.device) for name in sparse_outliers.GRIDS}
        self.stored: dict[str, dict[int, dict[str, Tensor]]] = {name: {} for name in sparse_outliers.GRIDS}  # by group
        self.codes = torch.empty(columns, rows, dtype=torch.uint8, device=target.device)
        self.values = torch.zeros(columns, rows, dtype=torch.float16, device=target.device)  # of outliers
        self.search = grid.GridConfig(params.bits, params.group_size, symmetric=False)

    def fit_group(self, targets: Tensor, metric: Tensor, start: int) -> None:
        """Fit scales and zero points without the outliers, and round both to what is stored."""
        mask = self.mask[start : start + len(targets)]
        mean = (targets * ~mask).sum(0) / (~mask).sum(0).clamp(min=1)
        fitted = grid.fit(torch.where(mask, mean, targets), metric.diagonal().square(), self.search, torch.float32)
        group, rows = self.owner[start], targets.shape[1]
        for name, numbers in zip(sparse_outliers.GRIDS, fitted, strict=True):
            stored = self.stored[name][group] = sparse_outliers.pack_grid(numbers[:, None], self.params)
            self.numbers[name][group] = sparse_outliers.unpack_grid(stored, self.params, rows)[:, 0]

    def pack_numbers(self) -> dict[str, dict[str, Tensor]]:
        """Return the scales and zero points of all groups, as they are stored."""
        return {
            name: {part: torch.cat([stored[group][part] for group in range(len(stored))], 1) for part in stored[0]}
            for name, stored in self.stored.items()
        }

    def round_block(self, target: Tensor, metric: Tensor, start: int) -> Tensor:
        group = self.owner[start]
        scale, zero = (self.numbers[name][group] for name in sparse_outliers.GRIDS)
        safe = torch.where(scale == 0, torch.ones_like(scale), scale)
        codes = (target / safe + zero).round_().clamp_(0, 2**self.params.bits - 1)
        self.codes[start] = codes[0]
        rounded = codes.sub_(zero).mul_(scale)
        limit = torch.finfo(torch.float16).max
        self.values[start] = torch.where(self.mask[start], (target - rounded).clamp(-limit, limit), 0.0)[0].half()
        return rounded + self.values[start].float()
