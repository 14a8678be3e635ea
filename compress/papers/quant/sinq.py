"""SINQ: scales of rows and of columns, found by balancing the spread of both, without data (arXiv 2509.22944).

A large weight costs the rest of its group precision. With a factor for each column beside the scale of each group it is
traded between the row and the column that it lies in. SINQ (Muller et al. 2025) divides rows and columns of a tile, all
rows by the columns of a group, by their standard deviations in turn, as Sinkhorn does, and keeps the factors with the
least imbalance: the largest of all these deviations over the smallest. What is left is rounded to nearest with a scale
and a minimum for each group of a row; the factors of columns are stored as float16. It takes no calibration text.

Differences from the code: grids are found by the clip search of compress/quant/grid.py (there: the range, or an
iteration as of `hqq`); deviations are bounded relative to that of the tile (there: 0.001 to 1000); codes are chosen for
factors and scales as they are stored.

Not in the core: on the bundled model it has KL 0.0038 at 4.547 bits a weight, where `hqq` has 0.0040 at 4.500 and `rtn`
0.0040 at 4.313 (docs/results/low_bit.md).

Not done: A-SINQ, which multiplies factors of columns by those of AWQ; square tiles; tables of levels in place of
integers; scales of 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.papers.formats import affine
from compress.papers.quant import affine_grid
from compress.quant import grid
from compress.types import Quantized, Stats

FORMAT = "affine"
NEEDS: frozenset[str] = frozenset()
INCOHERENCE = False
ITERATIONS = 16
STEP_RANGE = 0.7, 2.0  # the least and the most that one iteration multiplies a factor by
LOG_RANGE = -0.3, 10.0  # limits for the logarithm of a factor
TINY = 1e-3  # deviations below this, times that of the tile, count as this


@dataclass(frozen=True)
class Config(affine_grid.AffineConfig):
    """Settings of SINQ; see AffineConfig."""


def plan_params(config: Config, shape: tuple[int, int]) -> affine.Params:
    """Return the format's parameters for a weight [out, in]: enough for the exact stored bytes."""
    return affine_grid.params(config, shape, column_scales=True)


def workspace(config: Config, shape: tuple[int, int]) -> int:
    """Return a bound for the bytes needed beside the stored weight: float32 copies, codes, their packing."""
    return shape[0] * shape[1] * 8 * 4 + 16 * 4 * affine_grid.WEIGHTS_AT_A_TIME


def quantize(weight: Tensor, stats: Stats | None, config: Config, seed: int = 0) -> Quantized:
    """Quantize weight [out, in], any float dtype, finite. `stats` and `seed` are unused."""
    target = weight.float()
    shape = (weight.shape[0], weight.shape[1])
    group = affine_grid.params(config, shape).group(shape[1])
    factors = [balance(tile) for tile in target.split(group, 1)]
    columns = torch.cat([of_columns for of_columns, _ in factors]).half()
    rows = torch.stack([of_rows for _, of_rows in factors])  # [G, out]
    target = target / columns.float()
    params = affine_grid.params(config, shape, affine_grid.scale_dtype(target, config.bits), column_scales=True)
    balanced = target / rows.T.repeat_interleave(group, 1)[:, : shape[1]]
    search = grid.GridConfig(config.bits, group, symmetric=False)
    fitted = grid.fit_all(balanced.T.contiguous(), None, search, torch.float32, group)
    scales = fitted.scale * rows
    scales, minima = affine_grid.storable(scales.T, (-scales * fitted.zero).T, params.scale_dtype)
    codes = affine_grid.nearest(target, scales, minima, params)
    return Quantized(affine_grid.pack(codes, scales, minima, params, columns))


def balance(tile: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of columns [columns] and of rows [rows] of a tile [rows, columns] that balance it best."""
    columns, rows = torch.zeros_like(tile[0]), torch.zeros_like(tile[:, 0])  # logarithms
    if min(tile.shape) < 2 or not (whole := tile.std()) > 0:
        return columns.exp(), rows.exp()
    best, least = (columns, rows), torch.inf
    aim = torch.minimum(tile.std(0).min(), tile.std(1).min()).clamp(min=TINY * whole)
    for _ in range(ITERATIONS):
        now = tile / columns.exp() / rows.exp()[:, None]
        of_columns, of_rows = now.std(0), now.std(1)
        largest, smallest = (f(torch.stack((f(of_columns), f(of_rows)))) for f in (torch.max, torch.min))
        imbalance = float(largest / smallest.clamp(min=torch.finfo(tile.dtype).tiny))
        if imbalance > least:
            break
        best, least = (columns, rows), imbalance
        columns, rows = (
            (log + (spread.clamp(min=TINY * whole) / aim).clamp(*STEP_RANGE).log()).clamp(*LOG_RANGE)
            for log, spread in ((columns, of_columns), (rows, of_rows))
        )
    return best[0].exp(), best[1].exp()
