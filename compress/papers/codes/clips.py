"""Clip factors and low-rank factors are trained, and the weights stay what they are (ApiQ, arXiv 2402.05147).

ApiQ (Liao et al. 2024) rounds a frozen weight W to integers (the format `int`) and learns, for each group, a factor of
both ends of its range, together with a product of two thin matrices beside it:

    scale = (high * sigmoid(gamma) - low * sigmoid(beta)) / (2**bits - 1),    zero = round(-low * sigmoid(beta) / scale)
    weight = scale * (clamp(round(W / scale) + zero, 0, 2**bits - 1) - zero) + B^T A

Rounding is straight-through, and all is trained by AdamW against the output of the block, which makes this ApiQ-bw. The
product is `quantize.lowrank` of the recipe; without one only the factors of the ends are trained, and norms and biases.

Its own start, rates and stages are compress/papers/tune/apiq.py. Differences: ApiQ begins with a random A, B = 0 and
the whole range of W (factors of 0.982). Training begins here with what the method of `quantize` stored: its scales, and
the product that it fitted. What is rounded is W less that product (W itself only where there is none), in the cell of
the stored code and as near to that as MARGIN of compress/tune/codes/latent.py allows; so that the first step sees the
stored weight to the bit. A search has made the range smaller before, so that factors go up to MAX_CLIP_FACTOR, not 1:
that times sigmoid(gamma), 1 at the start.
`codes_rate` is what gamma and beta travel in the stage at most. Norms and biases are trained, too. Symmetric weights
have one factor. No weight decay, and no second term for the output of the quantized block's own inputs (`aug_loss`).

Measured on a block of tests/models/books-8m in 2 bits beside rank 16: training takes its error from 0.00278 to 0.00182,
as `fixed` codes do, so that it is not in the core; the published start and rates give 0.0036 behind 400 steps
(docs/results/tuning.md).

Not done: formats other than `int`, which keep their codes
(compress/tune/codes/fixed.py); factors of fewer than 16 bits, of which only scales are trained.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compress.formats import lowrank
from compress.tune.codes.latent import Latent
from compress.tune.trained import Rates, Trained
from compress.types import PackedWeight

BYTES = 16 + 4 * 4  # [bytes] for each weight, beside what `fixed` takes: what is rounded, its target, what a step keeps
RATE = 0.5  # default of `codes_rate`
MAX_CLIP_FACTOR = 1.5
BEGIN = -math.log(MAX_CLIP_FACTOR - 1)  # MOST * sigmoid(BEGIN) = 1
FACTORS = 4.0  # times the rate of other numbers, of low-rank factors


def serves(packed: PackedWeight) -> bool:
    """Return whether a weight can be trained so."""
    return packed.format == "int"


class Codes(Latent):
    """One packed weight of the format `int`."""

    def __init__(self, packed: PackedWeight, target: Tensor, rates: Rates) -> None:
        super().__init__(packed, target, rates.start)
        self.values = self.latent * self.safe(self.scales)
        for name, each in self.beside.items():
            if name.startswith(lowrank.PREFIX):
                each.unit *= FACTORS
        ends = ("high",) if packed.params.symmetric else ("low", "high")
        self.clips = {name: Trained(torch.zeros_like(self.scales), unit=rates.travel) for name in ends}
        self.trained.update(self.clips)

    def _now(self) -> tuple[Tensor, Tensor, Tensor]:
        ends = {name: MAX_CLIP_FACTOR * torch.sigmoid(BEGIN + each.value()) for name, each in self.clips.items()}
        scales, zeros = self.clip_grid(ends["high"], ends.get("low"))
        return self.values / self.safe(scales), scales, zeros

    def weight(self) -> Tensor:
        """Return the dense weight [out, in], float32."""
        return self._around(self._dense(*self._now()))

    def pack(self) -> PackedWeight:
        """Return the packed weight, in the types that are stored."""
        return self._pack_latent(*self._now())

    def changed_share(self) -> float:
        """Return the share of codes that moved, apart from what a zero point that moved does."""
        return self.shift(self._now()[0])
