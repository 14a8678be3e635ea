"""Share what formats have in common whose codes can be replaced: units of a weight that are encoded by themselves.

A unit is the least part of the stored matrix that its codes give without those of other parts: a vector of a codebook,
eight columns of E8P, the path of a trellis. `Units` cuts a matrix into them, and encodes some of them anew in the
metric of the stored weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress import formats
from compress.tune.trained import TrainedWeight, around
from compress.types import PackedWeight

FAR = 1e4  # units in those of their scales are cut here: searches take numbers whose squares are finite
TINY = 1e-30  # instead of a scale or a gradient of zero in divisions


def in_scales(values: Tensor, factors: Tensor) -> Tensor:
    """Return units of a matrix in units of their scales, for a search."""
    return (values / torch.where(factors.abs() < TINY, TINY, factors)).clamp_(-FAR, FAR)


class Units(TrainedWeight):
    """One packed weight with its codes, one tensor of integers for each stage or stored plane.

    How PV-Tuning moves them (compress/tune/codes/pv.py) depends on how large units are.
    """

    share = 0.003  # of the units that are encoded anew in a move
    keeps_copy = False  # whether a dense copy of the weight is kept and moved by AdamW
    by_columns = False  # whether gradients are in units of their root mean square over each column

    def __init__(self, packed: PackedWeight, codes: list[Tensor]) -> None:
        super().__init__(packed)
        self.codes = codes
        self.first = [each.clone() for each in codes]
        self.best = self.first

    def units(self, matrix: Tensor) -> Tensor:
        """Return the units [units, numbers of each] of a matrix [out, in], zeros behind its end."""
        raise NotImplementedError

    def encode(self, wanted: Tensor, chosen: Tensor) -> None:
        """Encode some units anew, where that brings them nearer to those of a matrix.

        wanted [out, in] float32; chosen [n] int64: numbers of units.
        """
        raise NotImplementedError

    def set_codes(self, codes: list[Tensor]) -> None:
        """Take these codes, and pack them."""
        raise NotImplementedError

    def keep(self) -> None:
        """Remember the present state as the best."""
        super().keep()
        self.best = [codes.clone() for codes in self.codes]

    def restore(self) -> None:
        """Return to the best state."""
        super().restore()
        self.set_codes(self.best)

    def changed(self) -> float:
        """Return the share of codes that moved, of all stages."""
        pairs = list(zip(self.codes, self.first, strict=True))
        return sum(int((now != first).sum()) for now, first in pairs) / sum(now.numel() for now, _ in pairs)

    def rounded(self) -> PackedWeight:
        """Return the packed weight, in the types that are stored."""
        return self._rounded({})

    def tensors(self) -> dict[str, Tensor]:
        """Return the stored tensors with what is trained as it is now, float32."""
        return {**self.packed.tensors, **{name: each.value() for name, each in self.trained.items()}}

    def matrix(self) -> Tensor:
        """Return the stored matrix [out, in], float32, without what is around it; gradients reach what is trained."""
        packed = PackedWeight(self.packed.stored, self.tensors(), self.packed.shape)
        return formats.decode_stored(packed, torch.float32)

    def around(self, matrix: Tensor) -> Tensor:
        """Return the dense weight [out, in] of a stored matrix."""
        return around(matrix, self.packed, self.tensors())
