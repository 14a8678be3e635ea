"""Hold weights to what they were where the model's loss feels it (ULB-SAPR, arXiv 2504.13932).

Saliency-aware partial retraining adds to the loss of a block, for each of its linears,

    lambda * sum g^2 (W_eff - W)^2

with W the original weight, W_eff the quantized one and the low-rank part beside it, and g the gradient of the model's
loss on the calibration text. A block's output says little of what the blocks behind it do with it; g knows.

Differences: g^2 is a product of a row's and a column's weight (`Fisher`, compress/calib/fisher.py), not a number for
each weight, since gradients come from the last block to the first and blocks are quantized from the first to the last:
rows and columns of all linears stay in memory, numbers for all weights would not. The term of a linear is divided by
sum g^2 W^2, and the mean over the linears of a block is taken, so that lambda depends on no size; the paper scales g^2
of a linear to mean 1, which cancels here.

Measured on one block in 2 bits: lambda 0.01 and 0.1 raise the KL from 0.00092 to 0.00093 and 0.00099 (docs/tuning.md).

Not done: the stages of the paper, which train by this term alone before, or by the output alone behind; W_eff without
the low-rank part; a lambda that changes from block to block; its term of sliced Wasserstein distances.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from compress.types import Fisher

BYTES = 3 * 4  # of a weight: a difference, weighed, and its gradient


class Preserved:
    """The original weights of a block's linears, and how much each counts."""

    def __init__(self, block: nn.Module, names: Sequence[str], fisher: Mapping[str, Fisher]) -> None:
        """names: paths of linears in the block, which has its original weights. fisher: by these names.

        All weights of a linear without an entry in `fisher` count alike.
        """
        self.originals = {name: block.get_parameter(f"{name}.weight").detach() for name in names}
        self.sides = {name: fisher[name] for name in names if name in fisher}
        self.sizes = {name: self._weighed(name, weight.float()) for name, weight in self.originals.items()}

    def error(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the mean over linears of the relative squared error of their weights, weighed; a scalar, float32.

        parameters: has `<name>.weight` [out, in], float32, of each linear.
        """
        tiny = torch.finfo(torch.float32).tiny
        errors = [
            self._weighed(name, parameters[f"{name}.weight"] - weight) / self.sizes[name].clamp(min=tiny)
            for name, weight in self.originals.items()
        ]
        return torch.stack(errors).mean()

    def _weighed(self, name: str, change: Tensor) -> Tensor:
        """Return the sum of the squares of a matrix [out, in], each times the square of its gradient."""
        if name in self.sides:
            rows, columns = (side.to(change.device) for side in self.sides[name])
            change = change * rows[:, None] * columns
        return change.square().sum()
