"""Define how low-rank parts beside weights are stored and made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LowRank:
    """Storage of a product of two thin matrices B^T A: A [rank, in_features], B [rank, out_features].

    With less than 16 bits an entry is an integer times the scale of its group, consecutive entries of one row.
    """

    rank: int  # of the product
    bits: int = 16  # [bits] of an entry: 16, 8 or 4
    group_size: int = 64  # [entries] that share a scale, where they have fewer than 16 bits; -1: the whole row
    dtype: str = "float16"  # of entries with 16 bits, of the scales otherwise: float16 or bfloat16

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank {self.rank} is not positive")
        if self.bits not in (16, 8, 4):
            raise ValueError(f"bits {self.bits} of a low-rank factor is not 16, 8 or 4")
        if self.group_size != -1 and self.group_size < 1:
            raise ValueError(f"group_size {self.group_size} is neither positive nor -1 (the whole row)")
        if self.dtype not in ("float16", "bfloat16"):
            raise ValueError(f"dtype {self.dtype!r} is not float16 or bfloat16")


@dataclass(frozen=True)
class Correction:
    """A low-rank part that makes up for the rounding of a weight (compress/lowrank/correct.py)."""

    rank: int = 16  # of the low-rank part
    bits: int = 16  # [bits] of an entry of its factors: 16, 8 or 4
    group_size: int = 64  # [entries] that share a scale, where they have fewer than 16 bits; -1: the whole row
    iterations: int = 1  # [rounds] in which the weight less the low-rank part so far is rounded; the best one is kept
    start: Literal["weight", "rounding"] = "weight"  # fit the part to the weight, or to what rounding has left of it
    metric: Literal["inputs", "sizes", "fisher", "none"] = "inputs"  # error to minimize: weighted by the Hessian of the
    # inputs, by its diagonal (sizes), by the gradients of the loss (fisher), or none (plain SVD)
    train: int = 0  # [steps] in which all parts, once packed, are trained against the logits of the original
    train_blocks: int = 0  # [steps] in which the parts of a block are trained against the output of the original block
    train_rate: float = 1e-3  # learning rate of both kinds of training, at its largest

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ValueError(f"iterations {self.iterations} is not positive")
        if min(self.train, self.train_blocks) < 0 or self.train_rate <= 0:
            raise ValueError(f"train {self.train}, train_blocks {self.train_blocks}: steps, at a rate above 0")
        if (self.train or self.train_blocks) and self.bits != 16:
            raise ValueError(f"bits {self.bits} of a low-rank factor cannot be trained; set bits: 16")
        _ = self.stored

    @property
    def stored(self) -> LowRank:
        return LowRank(self.rank, self.bits, self.group_size)

    @property
    def tokens_factor(self) -> float:
        """Times the tokens of calibration that a Hessian takes (calib/enough.py): trained parts fit to few tokens."""
        return 4.0 if self.train or self.train_blocks else 1.0
