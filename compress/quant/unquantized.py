"""Keep 16-bit weights as they are, for what lies around or beside them, such as activation sparsity.

Numbers of another type are rounded to the nearest of it. Where nothing is around the weights, `keep: true` does the
same without packing them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from compress.formats import dense
from compress.types import PackedWeight, Quantized, Stats, Stored, Work

FORMAT = "dense"
NEEDS: frozenset[str] = frozenset()
INCOHERENCE = False


@dataclass(frozen=True)
class Config:
    """Settings of weights that stay plain numbers."""

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"  # of what is stored


def plan_params(config: Config, shape: tuple[int, int]) -> dense.Params:
    return dense.Params(config.dtype)


def workspace(config: Config, shape: tuple[int, int]) -> int:
    """Return the bytes needed beside the stored weight."""
    return 4 * shape[0] * shape[1]


def work(config: Config, shape: tuple[int, int]) -> Work:
    """Return what `quantize` takes."""
    return Work(0, shape[0] * shape[1])


def quantize(weight: Tensor, stats: Stats | None, config: Config, seed: int = 0) -> Quantized:
    """Store weight [out, in], any float dtype. `stats` and `seed` are unused."""
    params = dense.Params(config.dtype)
    return Quantized(
        PackedWeight(Stored(FORMAT, params), dense.pack(weight, params), (weight.shape[0], weight.shape[1]))
    )
