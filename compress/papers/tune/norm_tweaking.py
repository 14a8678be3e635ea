"""Train the norms of a block so that the statistics of its output are those of the full-precision model's.

Norm tweaking (Li et al. 2023, arXiv 2309.02784): once all linears of a block are quantized, the weights and biases of
its norms are trained for a few steps. The loss compares channels, not numbers: for each channel of the block's output
the distance of its mean, and of its variance, over the tokens of a batch, to those of the full-precision model's, on
average over channels. It costs some tens of forward and backward passes without gradients of the linears.

Differences: the rate is the same in all blocks, where the paper's grows with depth, since a block is not told where it
lies; tokens are those of the calibration text, not text that the model has written; a norm moves in units of the root
mean square of its tensor. What the norms were is kept unless the relative squared error of the block's output falls on
held-out batches, with the norms as they are stored. Not done: biases of linears (compress/tune/bias_correction.py).

What it brings is little. On the 8M model of the tests, 64 samples of 512 tokens, 32,193 tokens scored: KL of `int2`
0.0498 -> 0.0485 (standard error 0.0008), of rounding to nearest at the same bits 0.1041 -> 0.1002 (0.0012), for 64
and 76 CPU seconds more. Most of it comes from the first block, whose error falls by a tenth; that of the others falls
by 1%: too little for the core. At these rates it does not repair 2 bits, against what the paper reports for OPT-66B and
GLM-130B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.tune.descend import check_descent, check_held_out, descend, is_checked
from compress.tune.held_block import Batches, BlockSizes, HeldBlock
from compress.types import PackedWeight

SCOPE = "block"
CHECKS = 4  # times that the held-out error is measured
STATES = 4  # times the activations of a forward pass that a forward and a backward pass take


@dataclass(frozen=True)
class Config:
    """Settings of norm tweaking."""

    steps: int = 32  # [steps] of training
    rate: float = 0.001  # of AdamW, in units of the root mean square of each tensor
    held_out: int = 8  # [batches] of which one is not trained on

    def __post_init__(self) -> None:
        check_descent(self.steps, self.rate)
        check_held_out(self.held_out)


def workspace(config: Config, sizes: BlockSizes) -> int:
    """Return the bytes that tweaking takes beside the block."""
    return sizes.numel * (4 + 4) + 2 * STATES * sizes.states


def distance(found: Tensor, expected: Tensor) -> Tensor:
    """Return the mean over channels of |difference of means| + |difference of variances| over tokens.

    found, expected: [..., channels], float32. Returns a scalar.
    """
    (mean, variance), (of_mean, of_variance) = (_statistics(x) for x in (found, expected))
    return ((mean - of_mean).abs() + (variance - of_variance).abs()).mean()


def _statistics(states: Tensor) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(states.flatten(0, -2), 0, correction=0)
    return mean, variance


def norms(block: nn.Module) -> list[str]:
    """Return the paths of the weights and biases of the norms in a block: modules whose weight is a vector."""
    paths = []
    for path, module in block.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if "weight" in own and own["weight"].dim() == 1:
            paths += [f"{path}.{key}" if path else key for key in ("weight", "bias") if own.get(key) is not None]
    return paths


class BlockTuning(HeldBlock):
    """One block whose norms are trained when its linears are quantized."""

    def __init__(self, block: nn.Module, names: Sequence[str], batches: Batches, count: int, config: Config) -> None:
        """Take what HeldBlock takes."""
        super().__init__(block, names, batches, count, config.held_out)
        self.config = config

    @torch.no_grad()
    def finish(self) -> tuple[dict[str, PackedWeight], dict[str, Tensor], str]:
        """Train the norms; return all packed weights, the norms that have changed, and a note."""
        starts = {name: self.model.get_parameter(name).clone() for name in norms(self.model)}
        if not starts:
            return self.packed, {}, "norm tweaking: the block has no norm with a weight, nothing was done"
        units = {name: float(start.square().mean().sqrt()) or 1.0 for name, start in starts.items()}
        moved = {name: nn.Parameter(torch.zeros_like(start)) for name, start in starts.items()}
        first = best = self.error({})
        kept: dict[str, Tensor] = {}
        stream = self.portions.endless()

        def values() -> dict[str, Tensor]:
            return {name: start + units[name] * moved[name] for name, start in starts.items()}

        def loss(step: int) -> float:
            hidden, call, target = next(stream)
            with torch.enable_grad():
                error = distance(self.run(values(), hidden, call), target.float())
                error.backward()
            return error.item()

        def check(step: int) -> None:
            nonlocal best, kept
            if not is_checked(step, self.config.steps, CHECKS):
                return
            stored = {name: value.to(self.own_type(name)) for name, value in values().items()}
            if (error := self.error({name: value.float() for name, value in stored.items()})) < best:
                best, kept = error, stored

        descend(list(moved.values()), self.config.steps, self.config.rate, loss, check)
        return self.packed, kept, f"norms tweaked; held-out error of the block: {first:.3g} -> {best:.3g}"
