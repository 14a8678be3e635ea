"""Rounding offsets and clip factors are moved by the signs of gradients (AutoRound, arXiv 2309.05516).

SignRound (Cheng et al. 2023) serves the format `int`. It adds an offset V to each weight before it is rounded, and a
factor to both ends of the range of each group:

    scale = (high * beta - low * alpha) / (2**bits - 1),    zero = round(-low * alpha / scale)
    code = clamp(round(weight / scale + V) + zero, 0, 2**bits - 1)

Every step moves V, alpha and beta by the sign of the gradient, and the rate falls to 0 along a line, so that they
travel `codes_rate` at most: 0.5 at the paper's first rate of 1 / steps. So V needs no limit.

Differences: training starts from the codes of the method that quantized the weight, V being the least that gives
them; from round-to-nearest codes that is V = 0, the paper's start. The ends of the range are those of the stored scale
and zero point, and a factor is at most MAX_CLIP_FACTOR, not 1, because a search has made the range smaller before.
Symmetric weights have one factor. Norms, biases and low-rank factors are trained, too, by AdamW.

Not in the core because `straight_through` does better: 100 steps take the error of the third block of the bundled model
in int4 to 80% with that, to 83% with this (docs/results/tuning.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.tune.codes.latent import Latent
from compress.tune.trained import Rates, Trained
from compress.types import PackedWeight

BYTES = (
    16 + 5 * 4
)  # [bytes] for each weight, beside what `fixed` takes: a trained number, and what a backward pass keeps
RATE = 2.0  # default of `codes_rate`
MAX_CLIP_FACTOR = 1.5


def serves(packed: PackedWeight) -> bool:
    """Return whether a weight can be trained so."""
    return packed.format == "int"


class Codes(Latent):
    """One packed weight of the format `int`."""

    def __init__(self, packed: PackedWeight, target: Tensor, rates: Rates) -> None:
        super().__init__(packed, target, rates.start)
        self.steps, self.rate = rates.steps, 2 * rates.codes_rate / rates.steps
        self.values = self.latent * self.safe(self.scales)
        self.offset = Trained(torch.zeros_like(self.latent), unit=1.0)
        ends = ("beta",) if packed.params.symmetric else ("alpha", "beta")
        self.clips = {name: Trained(torch.ones_like(self.scales), unit=1.0) for name in ends}
        self.signed = [self.offset, *self.clips.values()]

    def _now(self) -> tuple[Tensor, Tensor, Tensor]:
        ends = {name: each.value() for name, each in self.clips.items()}
        scales, zeros = self.clip_grid(ends["beta"], ends.get("alpha"))
        return self.values / self.safe(scales) + self.offset.value(), scales, zeros

    def weight(self) -> Tensor:
        """Return the dense weight [out, in], float32."""
        return self._around(self._dense(*self._now()))

    @torch.no_grad()
    def behind(self, step: int) -> None:
        """Move by the signs of the gradients, and forget these."""
        rate = self.rate * (1 - step / self.steps)
        for each in self.signed:
            if each.moved.grad is not None:
                each.moved.sub_(each.moved.grad.sign_(), alpha=rate)
                each.moved.grad = None
        for each in self.clips.values():
            each.moved.clamp_(-1, MAX_CLIP_FACTOR - 1)

    def parts(self) -> list[Trained]:
        """Return all that moves, by AdamW or not."""
        return [*super().parts(), *self.signed]

    def pack(self) -> PackedWeight:
        """Return the packed weight, in the types that are stored."""
        return self._pack_latent(*self._now())

    def changed_share(self) -> float:
        """Return the share of codes that moved, apart from what a zero point that moved does."""
        return self.shift(self._now()[0])
