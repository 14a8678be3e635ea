"""RTN, round to nearest: each weight becomes the nearest point of its group's grid, without calibration data.

The baseline of every comparison, and at 8 bits all that is needed. The grid is found by the clip search of
compress/quant/grid.py (plain squared error); `clip_search: false` gives the classical min-max grid. Symmetric grids use
the full signed range, where most tools leave one level unused.

Which of the two is better depends on the model. Asymmetric, 3 bits, groups of 128: on books-8m the search has KL 0.020,
min-max 0.026; on SmolLM2-135M-Instruct 1.97 and 1.62 (4 bits: 0.38 and 0.35).

Not done: any use of activations; the error of one column is not compensated by the others (that is gptq).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from compress.quant import grid
from compress.types import Quantized, Stats, Work

FORMAT = "int"
NEEDS: frozenset[str] = frozenset()
INCOHERENCE = False


@dataclass(frozen=True)
class Config(grid.GridConfig):
    """Settings of round-to-nearest; see GridConfig."""


plan_params = grid.params


def workspace(config: Config, shape: tuple[int, int]) -> int:
    """Return the bytes needed beside the stored weight: float32 copy (transposed), its magnitudes, codes, packing."""
    return shape[0] * shape[1] * (4 + 4 + 1 + 4)


def work(config: Config, shape: tuple[int, int]) -> Work:
    """Return what `quantize` takes: most of it is the search for scales."""
    return Work(0, grid.WEIGHT_STEPS * shape[0] * shape[1])


def quantize(
    weight: Tensor, stats: Stats | None, config: Config, seed: int = 0, scale_dtype: str | None = None
) -> Quantized:
    """Quantize weight [out, in], any float dtype, finite. `stats` and `seed` are unused.

    scale_dtype: of the scales, for readers that turn all numbers into one type; None: that which holds them best.
    """
    shape = (weight.shape[0], weight.shape[1])
    codes, fitted, params = grid.nearest(weight.T.float().contiguous(), config, scale_dtype)
    return Quantized(grid.pack(codes, fitted, params, shape))
