"""Codes, scales and zero points are trained through rounding (EfficientQAT's Block-AP, arXiv 2407.11062).

EfficientQAT (Chen et al. 2024) trains all weights, scales and zero points of a block by AdamW, with the
straight-through gradient of rounding. Differences: training starts from the codes of the method that quantized the
weight, which it gives to the bit before the first step; the numbers behind the codes are in steps of the grid, so that
scales and codes are trained apart, and travel `codes_rate` at most; scales are rounded to their stored type in every
step. Matrices between Hadamard transforms or beside low-rank factors are trained as they are stored.

Measured on tests/models/books-8m, 2 bits, the held-out error of one block behind 200 steps at `codes_rate` 2, 0.5 and
0.1: first block 0.0487 -> 0.0466, 0.0381, 0.0368; fourth block, blocks before it unchanged: 0.00267 -> 0.00267, 0.00250
at 2 and 0.5. The divergence of `int2` with 64 samples, tuned block by block, at 2, 0.5, 0.2 and 0.08: 0.0296, 0.0269,
0.0237, 0.0252 (65,408 tokens).

Trits with a scale for groups or rows are trained alike, without zero points. Not done: other formats, which keep their
codes (compress/tune/codes/fixed.py).
"""

from __future__ import annotations

from torch import Tensor

from compress.tune.codes.latent import Latent
from compress.tune.trained import Rates, Trained
from compress.types import PackedWeight

BYTES = (
    24 + 3 * 4
)  # [bytes] for each weight, beside what `fixed` takes: a trained number, its target, what a step keeps
RATE = 0.2  # [steps of the grid] that a code travels unless the settings say otherwise


def serves(packed: PackedWeight) -> bool:
    """Return whether a weight can be trained so."""
    if packed.format == "ternary":
        return not packed.params.tensor_scale and packed.params.packing != "binary"
    return packed.format == "int"


class Codes(Latent):
    """One packed weight of the format `int` or `ternary`."""

    def __init__(self, packed: PackedWeight, target: Tensor, rates: Rates) -> None:
        super().__init__(packed, target, rates.start)
        self.trained["scales"] = Trained(self.scales)
        self.trained["latent"] = Trained(self.latent, unit=rates.travel)
        if packed.format == "int" and not packed.params.symmetric:
            self.trained["zeros"] = Trained(self.zeros, unit=rates.travel)

    def _now(self) -> tuple[Tensor, Tensor, Tensor]:
        zeros = self.trained["zeros"].value() if "zeros" in self.trained else self.zeros
        return self.trained["latent"].value(), self._as_stored(self.trained["scales"].value()), zeros

    def weight(self) -> Tensor:
        """Return the dense weight [out, in], float32."""
        return self._around(self._dense(*self._now()))

    def pack(self) -> PackedWeight:
        """Return the packed weight, in the types that are stored."""
        return self._pack_latent(*self._now())

    def changed_share(self) -> float:
        """Return the share of codes that moved."""
        return self.shift(self.trained["latent"].value())
