"""Drop a weight: it becomes zeros, of which nothing is stored.

`{method: drop}` in a rule takes linears away by their names. Among the options of an allocation it lets a unit go, an
attention or an MLP with `units: sublayer` (docs/allocation.md), as EvoPress (arXiv 2410.14649) and others drop them.
With a `lowrank` section of its own, that part alone takes the weight's place.

Not done: a smaller model. Its blocks and their caches stay, and what was dropped is skipped when it runs; the transform
drop_blocks writes a plain model with fewer blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from compress.formats import zero
from compress.types import PackedWeight, Quantized, Stats, Stored, Work

FORMAT = "zero"
NEEDS: frozenset[str] = frozenset()
INCOHERENCE = False
INHERITS = False  # what the recipe quantizes otherwise has activations or a low-rank part, which zeros have not


@dataclass(frozen=True)
class Config:
    """There is nothing to set."""


def plan_params(config: Config, shape: tuple[int, int]) -> zero.Params:
    """Return what there is to say of zeros."""
    return zero.Params()


def workspace(config: Config, shape: tuple[int, int]) -> int:
    """Return the bytes that measuring the error of zeros takes."""
    return shape[0] * shape[1] * 4


def work(config: Config, shape: tuple[int, int]) -> Work:
    """Return what `quantize` takes: nothing."""
    return Work(0, 0)


def quantize(weight: Tensor, stats: Stats | None, config: Config, seed: int = 0) -> Quantized:
    """Drop weight [out, in]. `stats` and `seed` are unused."""
    return Quantized(PackedWeight(Stored(FORMAT, zero.Params()), {}, (weight.shape[0], weight.shape[1])))
