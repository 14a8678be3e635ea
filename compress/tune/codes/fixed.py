"""Codes stay what they are; the floating-point numbers beside them are trained.

QuIP# (Tseng et al. 2024, arXiv 2402.04396) trains the signs and scales around its codes. Here these are scales,
codebooks, lattices, gains and low-rank factors of any format: gradients go through the format's own decoding.
"""

from __future__ import annotations

from torch import Tensor

from compress.tune.trained import Rates, TrainedWeight, decode_with
from compress.types import PackedWeight

BYTES = 0  # [bytes] for each weight, beside what `fixed` takes
RATE = 1.0  # not used: no codes move


def serves(packed: PackedWeight) -> bool:
    """Return whether a weight can be trained so: every one."""
    return True


class Codes(TrainedWeight):
    """One packed weight."""

    def __init__(self, packed: PackedWeight, target: Tensor, rates: Rates) -> None:
        super().__init__(packed)

    def weight(self) -> Tensor:
        """Return the dense weight [out, in], float32."""
        return decode_with(self.packed, {name: each.value() for name, each in self.trained.items()})

    def pack(self) -> PackedWeight:
        """Return the packed weight, in the types that are stored."""
        return self._pack_with({})
