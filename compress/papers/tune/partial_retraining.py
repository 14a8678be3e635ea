"""Retrain a quantized block while salient weights are held to what they were (ULB-SAPR, arXiv 2504.13932).

Saliency-aware partial retraining keeps ApiQ (compress/papers/tune/apiq.py): the weights stay, and clip factors and
low-rank factors are trained against the output of the block. To this it adds, instead of more bits for salient weights,

    weight * sum over linears of sum g^2 (W_eff - W)^2

with W the original weight, W_eff the quantized one (`held: before_lora`) or the quantized one and the low-rank part
(`held: after_lora`), and g the gradient of the model's loss on the calibration text: where the loss feels a weight, it
stays. There are three stages for each block: `held_steps` with this term alone, then steps with both, then
`output_steps` with the output alone. The paper's budgets, in shares of all steps, are three quarters of the first and a
quarter of the last, or both terms all the time (the default).

Differences, beside those of ApiQ: g^2 is a product of a row's and a column's number (calib/fisher.py), since gradients
come from the last block to the first and blocks are quantized from the first to the last, so that they stay in memory.
The term of a linear is divided by sum g^2 W^2 and the mean over linears is taken (`Preserved` in
compress/tune/blockwise.py), so that `weight` depends on no size; the paper takes sums, and numbers from 0.05 on. What
is kept is what was best on batches that no step takes, by the output of the block, of whichever stage.

Figures: docs/studies/adapter_starts.md. Not done: a weight that changes from block to block; sliced Wasserstein
distances in the place of a part of the squared error; the binary codes of the paper's backbones (DB-LLM, BinaryMoS).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from compress.papers.tune import apiq
from compress.tune.blockwise import PRESERVED_NBYTES, Preserved
from compress.tune.held_block import BlockSizes

SCOPE = "block"


@dataclass(frozen=True)
class Config(apiq.Config):
    """Settings of saliency-aware partial retraining: those of ApiQ, and its term."""

    weight: float = 0.1  # of the change of salient weights, against the error of the output
    held: Literal["after_lora", "before_lora"] = "after_lora"  # which change: with the low-rank part, or without
    held_steps: int = 0  # [steps] at the beginning with that term alone
    output_steps: int = 0  # [steps] at the end without it

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scope == "linear":
            raise ValueError("scope: linear has no output of a block; saliency-aware retraining is of scope: block")
        if not 0 <= self.weight < float("inf"):
            raise ValueError(f"weight {self.weight} must not be negative, nor infinite")
        if self.held_steps and not self.weight:
            raise ValueError(f"held_steps {self.held_steps} with weight 0 would train by nothing; set held_steps: 0")
        if min(self.held_steps, self.output_steps) < 0 or self.held_steps + self.output_steps > self.steps:
            asked = f"held_steps {self.held_steps} and output_steps {self.output_steps}"
            raise ValueError(f"{asked} must not be negative, nor more than the {self.steps} steps")

    @property
    def needs_gradients(self) -> bool:
        """Return whether linears are weighed by the gradients of the model's loss."""
        return self.weight > 0


def workspace(config: Config, sizes: BlockSizes) -> int:
    """Return the bytes that training takes beside the block: a bound."""
    return apiq.workspace(config, sizes) + PRESERVED_NBYTES * sizes.numel


class BlockTuning(apiq.BlockTuning):
    """One block that is retrained when all linears are quantized."""

    config: Config
    preserved: Preserved | None = None

    def _output_share(self, step: int) -> float:
        return 0.0 if step < self.config.held_steps else 1.0

    def _penalty(self, step: int, weights: Mapping[str, apiq.ClippedWeight]) -> Tensor | None:
        config = self.config
        if not config.weight or step >= config.steps - config.output_steps:
            return None
        if self.preserved is None:
            self.preserved = Preserved(self.block, list(weights), self.fisher)
        is_bare = config.held == "before_lora"
        now = {f"{name}.weight": each.effective(has_part=not is_bare) for name, each in weights.items()}
        return config.weight * self.preserved.error(now)
