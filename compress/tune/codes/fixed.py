"""Codes stay what they are; the floating-point numbers beside them are trained.

QuIP# (Tseng et al. 2024, arXiv 2402.04396) trains the signs and scales around its codes. Here these are scales,
codebooks, lattices, gains and low-rank factors of any format: gradients go through the format's own decoding.

Where all that is trained multiplies rows of the stored matrix or channels around everything else, nothing is decoded in
a step: a dense matrix without these numbers is kept. A single scale of a weight stays as it is where there are scales
of channels, since they can do what it does; then nothing is turned in a step either.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compress import formats
from compress.formats import transforms
from compress.tune.stored_linear import cut_scales, decode_codes, row_factors, turned_effective
from compress.tune.trained import Rates, TrainedWeight, decode_with
from compress.types import PackedWeight

BYTES = 4  # [bytes] for each weight: the dense matrix
RATE = 1.0  # not used: no codes move


def serves(packed: PackedWeight) -> bool:
    """Return whether a weight can be trained so: every one."""
    return True


class Codes(TrainedWeight):
    """One packed weight.

    `core`: the dense matrix [out, in] without what is trained, None if more than factors is. `has_scales`: it is turned
    already, and scales of channels are all that is trained.
    """

    def __init__(self, packed: PackedWeight, target: Tensor, rates: Rates | None = None) -> None:
        """target and rates are not used."""
        super().__init__(packed)
        first, self.inner, last = cut_scales(packed.stored.ops)
        self.sides = {"in": [f"in_{name}" for name in first], "out": [f"out_{name}" for name in last]}
        around = {name for names in self.sides.values() for name in names} & set(self.trained)
        factors = set(row_factors(packed.stored))
        of_rows = {name for name in factors & set(self.trained) if packed.tensors[name].numel() > 1}
        self.has_scales = bool(around) and set(self.trained) <= around | factors - of_rows
        self.core: Tensor | None = None
        with torch.no_grad():
            if self.has_scales:
                self.trained = {name: each for name, each in self.trained.items() if name in around}
                matrix = formats.decode_stored(packed, torch.float32)
                self.core = turned_effective(matrix, self.inner, packed.tensors)
            elif factors and set(self.trained) <= around | factors:
                self.core = decode_codes(packed)

    def weight(self) -> Tensor:
        """Return the dense weight [out, in], float32."""
        own = {name: each.value() for name, each in self.trained.items()}
        if self.core is None:
            return decode_with(self.packed, own)
        matrix, tensors = self.core, {**self.packed.tensors, **own}
        if not self.has_scales:
            rows = [tensors[name][: len(matrix)].float() for name in row_factors(self.packed.stored) if name in tensors]
            matrix = turned_effective(matrix * math.prod(rows[1:], start=rows[0])[:, None], self.inner, tensors)
        for side, dim in (("in", 0), ("out", 1)):
            for key in self.sides[side]:
                diagonal = transforms.Diagonal(key.removeprefix(f"{side}_"), tensors[key])
                matrix = matrix * diagonal.values(matrix.shape[1 - dim], torch.float32).unsqueeze(dim)
        return matrix

    def pack(self) -> PackedWeight:
        """Return the packed weight, in the types that are stored."""
        return self._pack_with({})
