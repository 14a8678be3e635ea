"""LoRD: replace each weight by a product of two thin matrices, fitted to the layer's outputs (arXiv 2309.14021).

W -> V V^T W with V the first k eigenvectors of the outputs' second moments W H W^T, H = sum x x^T: the product of rank
k whose outputs are nearest to those of W (compress/numerics/linalg.py). The whitening of SVD-LLM (arXiv 2403.07378)
gives the same matrix. k = floor(ratio m n / (m + n)), so that `ratio` is the share of the parameters that is left.

Settings for comparison: `metric: sizes` scales inputs by the square root of their root mean square (ASVD, arXiv
2312.05821, which takes the mean magnitude), `metric: none` is the plain SVD.

Differences from the paper, and why: the second moments are not centred, and no bias makes up for the mean of the
outputs. A tenth of the squared inputs of tests/models/books-8m is their mean, but that takes one direction of the k:
with centred moments and a bias, errors of linears on held-out text are 0.4% smaller, and the KL is no better, 0.0319
against 0.0316 at `ratio: 0.8` and 0.256 against 0.249 at 0.5 (64 samples of 512 tokens, 8176 tokens scored). Most
linears have no bias that could hold it, either. Linears of one shape have one rank; others come from rules or an
allocator (recipe `lord-search`). Factors can be stored in 8 or 4 bits; those of 16 bits are healed by
compress/tune/end_to_end.py.

Not in the core: at 12.75 bits a weight `lord20` has KL 0.0279, where 8 bits have 0.00003 (docs/low_bit.md).

Not done: tuning after truncation (SVD-LLM's two rounds of LoRA).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from compress.formats import lowrank
from compress.lowrank.correct import metric, split
from compress.numerics.linalg import truncation_workspace
from compress.types import PackedWeight, Quantized, Stats, Stored

FORMAT = "lowrank"
NEEDS = frozenset({"hessian"})
INCOHERENCE = False
SIZES_POWER = 0.5  # exponent of the sizes of inputs, with `metric: sizes`


@dataclass(frozen=True)
class Config:
    ratio: float = 0.8  # [fraction] of the parameters that are left; factors of full rank would have 2 of a square
    # weight
    bits: int = 16  # [bits] of an entry of the factors: 16, 8 or 4
    group_size: int = 64  # [entries] that share a scale, where they have fewer than 16 bits; -1: the whole row
    dtype: Literal["bfloat16", "float16"] = "bfloat16"  # of entries with 16 bits; of the scales otherwise
    metric: Literal["inputs", "sizes", "none"] = "inputs"  # error to minimize: weighted by the Hessian of the inputs,
    # by its diagonal (sizes), or none (plain SVD)

    REMOVED_KEYS: ClassVar[dict[str, Any]] = {"alpha": SIZES_POWER}

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 2:
            raise ValueError(f"ratio {self.ratio} is not above 0 and at most 2")
        lowrank.Params(1, self.bits, self.group_size)


def plan_params(config: Config, shape: tuple[int, int]) -> lowrank.Params:
    """Return the format's parameters for a weight [out, in]: enough for the exact stored bytes."""
    rank = int(config.ratio * shape[0] * shape[1] / sum(shape))
    return lowrank.Params(max(1, min(rank, *shape)), config.bits, config.group_size, config.dtype)


def workspace(config: Config, shape: tuple[int, int]) -> int:
    """Return the bytes needed beside weight and Hessian: the solver's, a copy, factors, their product."""
    return truncation_workspace(shape) + 6 * 4 * shape[0] * shape[1]


def quantize(weight: Tensor, stats: Stats | None, config: Config, seed: int = 0) -> Quantized:
    """Quantize weight [out, in], any float dtype, finite, by stats.hessian [in, in]."""
    shape = (weight.shape[0], weight.shape[1])
    weighting = metric(stats, config.metric, SIZES_POWER)
    factors = split(weight.float(), weighting, plan_params(config, shape), seed)
    unseen = config.metric != "none" and weighting.hessian is None
    notes = ("no calibration token gave this input a size: plain SVD",) if unseen else ()
    return Quantized(PackedWeight(Stored(FORMAT, factors.stored), factors.tensors, shape), notes)
