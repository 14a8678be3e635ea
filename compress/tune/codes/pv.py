"""Codes of codebooks follow the largest gradients, a few at a time (PV-Tuning, arXiv 2405.14852).

PV-Tuning (Malinovskii et al. 2024) trains what is continuous by Adam and moves discrete codes in a subspace: a dense
copy of the weights takes the gradient steps, straight through the codes, and only the share of vectors that is
furthest from its code is encoded anew, so that each can move by a whole entry while the weight as a whole changes
little. Scales, codebooks and norms are trained along with it.

Differences: the loss is that of a block, not of the model. The dense copy starts at the stored weight and travels
`codes_rate` times the root mean square of the quantization error at most; where a code has moved, it goes on from
there, since vectors overshoot otherwise. Codes move behind every EVERY-th step, and only where another entry is
nearer. In place of a beam search, the codes of several stages move one after the other, first the one that lowers the
error most.

What a unit is, and how it is encoded, depends on the format (compress/tune/codes/units.py): a vector of `codebook`
takes the nearest entry, eight columns of `e8p` the nearest point with its residual code, and a column of a tile of
`trellis` is searched as a whole, because a code there decides those behind it.

Not done: lattices, pyramid codes, and codebooks made of factors, which keep their codes (compress/tune/codes/fixed.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compress.tune.codes import lattice_points, paths, vectors
from compress.tune.codes.lattice_points import LatticePoints
from compress.tune.codes.paths import Paths
from compress.tune.codes.units import Units
from compress.tune.codes.vectors import Vectors
from compress.tune.trained import Rates, Trained, TrainedWeight, within
from compress.types import PackedWeight

BYTES = 24 + 4 * 4  # of a weight, beside what `fixed` takes: a trained number, and what encoding takes
EVERY = 5  # steps between moves
SHARE = 0.01  # of the units that are encoded anew in a move


def _units(packed: PackedWeight) -> type[Any] | None:
    """Return what cuts a weight into units, None where its codes stay."""
    ways: tuple[tuple[Any, type[Units]], ...] = (
        (vectors, Vectors),
        (lattice_points, LatticePoints),
        (paths, Paths),
    )
    return next((units for module, units in ways if module.serves(packed)), None)


def serves(packed: PackedWeight) -> bool:
    """Return whether codes of a weight can move."""
    return _units(packed) is not None


class Codes(TrainedWeight):
    """One packed weight and its dense copy."""

    def __init__(self, packed: PackedWeight, target: Tensor, rates: Rates) -> None:
        super().__init__(packed)
        found = _units(packed)
        assert found is not None
        self.units: Units = found(packed)
        with torch.no_grad():
            start = self.units.matrix()
            wanted = within(target, packed)
        error = start if wanted is None else wanted - start
        travel = 2 * rates.codes_rate / (rates.steps * rates.rate)  # the mean of the rate over steps is half of it
        self.dense = Trained(start, unit=travel * (float(error.square().mean().sqrt()) or 1.0))
        self.trained = {**self.units.trained, "dense": self.dense}

    def matrix(self) -> Tensor:
        """Return the stored matrix [out, in], float32; gradients reach the dense copy, too, straight through."""
        dense = self.dense.value()
        return self.units.matrix() + (dense - dense.detach())

    def weight(self) -> Tensor:
        """Return the dense weight [out, in], float32."""
        return self.units.around(self.matrix())

    @torch.no_grad()
    def behind(self, step: int) -> None:
        """Encode the units anew that are furthest from the dense copy."""
        if (step + 1) % EVERY:
            return
        wanted, before = self.dense.value(), self.units.matrix()
        distance = self.units.units(wanted - before).square().sum(-1)
        chosen = distance.topk(max(1, int(SHARE * distance.numel()))).indices
        self.units.encode(wanted, chosen)
        now = self.units.matrix()
        moved = now != before
        self.dense.moved[moved] = ((now - self.dense.start) / self.dense.unit)[moved]

    def keep(self) -> None:
        """Remember the present state as the best."""
        self.units.keep()
        self.dense.keep()

    def restore(self) -> None:
        """Return to the best state."""
        self.units.restore()
        self.dense.restore()

    def changed(self) -> float:
        """Return the share of codes that moved."""
        return self.units.changed()

    def rounded(self) -> PackedWeight:
        """Return the packed weight, in the types that are stored."""
        return self.units.rounded()
