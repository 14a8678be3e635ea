"""Codes of vectors and paths follow the largest gradients, a few at a time (PV-Tuning, arXiv 2405.14852).

PV-Tuning (Malinovskii et al. 2024) trains what is continuous by Adam and moves discrete codes in a subspace: a dense
copy of the weights takes the gradient steps, straight through the codes, and only the share of vectors that is
furthest from its code is encoded anew, so that each can move by a whole entry while the weight as a whole changes
little. Scales, codebooks and norms are trained along with it.

What a unit is, and how it is encoded, depends on the format (compress/tune/codes/units.py): a vector of `codebook`
takes the nearest entry, eight columns of `e8p` the nearest point with its residual code, and a column of a tile of
`trellis` is searched as a whole, because a code there decides those behind it. Codes move behind every EVERY-th step,
and only where that brings the unit nearer to the dense copy.

- Of codebooks the dense copy is kept (the paper's default): it starts at the stored weight and travels `codes_rate`
  times the root mean square of the quantization error at most; where a code has moved, it goes on from there, since
  vectors overshoot otherwise.
- Of E8P and trellises it starts at the stored weight in every move (the paper's pure V step), and takes one step along
  the gradient since the last move: of the units that are encoded anew, by STEP * codes_rate times that root mean
  square. Their units are larger, and AdamW moves all weights alike, so that a kept copy is mostly noise to them.
  Gradients of E8P are in units of their root mean square over each column; a path lies in one column.

Measured on the held-out error of the third block of tests/models/books-8m, 100 steps (`fixed`; a kept copy; a step
along the gradient; the same with scales of columns): E8P 97.7%, 94.1%, 93.5%, 91.5%; a trellis of 10 bits 97.6%, 96.4%,
94.8%, 96.8%; GPTVQ 97.9%, 92.1%, 100%, 98.9%. With three times as many units in a move E8P gained nothing. The
divergence of `e8p2bit` tuned so is 0.0301, 0.0316 with `fixed` (32,704 tokens); that of trellises was not measured.

Differences: the loss is that of a block, not of the model. In place of a beam search, the codes of several stages of a
codebook move one after the other, first the one that lowers the error most.

Not done: lattices, pyramid codes, and codebooks made of factors, which keep their codes (compress/tune/codes/fixed.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from compress.tune.codes import lattice_points, paths, vectors
from compress.tune.codes.lattice_points import LatticePoints
from compress.tune.codes.paths import Paths
from compress.tune.codes.units import TINY, Units
from compress.tune.codes.vectors import Vectors
from compress.tune.trained import Rates, Trained, TrainedWeight, within
from compress.types import PackedWeight

BYTES = 24 + 4 * 4  # of a weight, beside what `fixed` takes: a trained number, and what encoding takes
RATE = 2.0  # of `codes_rate`, unless the settings say otherwise
EVERY = 5  # steps between moves
STEP = 0.5  # of E8P and trellises: what their weights move by in a move, of `codes_rate`


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


class _Copy:
    """A dense copy that AdamW moves; it is where its codes are, and by how much they have not followed yet."""

    def __init__(self, start: Tensor, error: float, rates: Rates) -> None:
        """error: root mean square of the quantization error."""
        self.dense = Trained(start, unit=rates.travel * error)

    def straight(self) -> Tensor:
        """Return zeros [out, in] through which gradients reach the copy."""
        dense = self.dense.value()
        return dense - dense.detach()

    def wanted(self, units: Units, before: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the matrix [out, in] should be, and the numbers of the units that are to be encoded anew."""
        wanted = self.dense.value()
        distance = units.units(wanted - before).square().sum(-1)
        return wanted, _most(distance, units.share)

    def follow(self, before: Tensor, now: Tensor) -> None:
        """Go on from the matrix where codes have moved."""
        moved = now != before
        self.dense.moved[moved] = ((now - self.dense.start) / self.dense.unit)[moved]


class _Gradient:
    """A step along the gradient since the last move, from where the codes are."""

    def __init__(self, start: Tensor, error: float, rates: Rates) -> None:
        """error: root mean square of the quantization error."""
        self.length = STEP * rates.codes_rate * error
        self.probe = nn.Parameter(torch.zeros_like(start))

    def straight(self) -> Tensor:
        """Return zeros [out, in] whose gradient is that of the matrix."""
        return self.probe

    def wanted(self, units: Units, before: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the matrix [out, in] should be, and the numbers of the units that are to be encoded anew."""
        slope = self.probe.grad
        if slope is None:
            return before, torch.empty(0, dtype=torch.long, device=before.device)
        if units.by_columns:
            slope = slope / slope.square().mean(0).sqrt().clamp(min=TINY)
        power = units.units(slope).square().mean(-1)
        chosen = _most(power, units.share)
        return before - self.length / power[chosen].mean().sqrt().clamp(min=TINY) * slope, chosen

    def follow(self, before: Tensor, now: Tensor) -> None:
        """Forget the gradient."""
        self.probe.grad = None


def _most(values: Tensor, share: float) -> Tensor:
    """Return where the largest of values [n] are, a share of them and at least one."""
    return values.topk(max(1, int(share * len(values)))).indices


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
            size = float(error.square().mean().sqrt()) or 1.0
        self.trained = dict(self.units.trained)
        self.target: _Copy | _Gradient
        if found.keeps_copy:
            self.target = _Copy(start, size, rates)
            self.trained["dense"] = self.target.dense
        else:
            self.target = _Gradient(start, size, rates)

    def matrix(self) -> Tensor:
        """Return the stored matrix [out, in], float32; gradients go straight through the codes, too."""
        return self.units.matrix() + self.target.straight()

    def weight(self) -> Tensor:
        """Return the dense weight [out, in], float32."""
        return self.units.around(self.matrix())

    @torch.no_grad()
    def behind(self, step: int) -> None:
        """Encode some units anew, behind every EVERY-th step."""
        if (step + 1) % EVERY:
            return
        before = self.units.matrix()
        wanted, chosen = self.target.wanted(self.units, before)
        self.units.encode(wanted, chosen)
        self.target.follow(before, self.units.matrix())

    def keep(self) -> None:
        """Remember the present state as the best."""
        super().keep()
        self.units.keep()

    def restore(self) -> None:
        """Return to the best state."""
        super().restore()
        self.units.restore()

    def changed(self) -> float:
        """Return the share of codes that moved."""
        return self.units.changed()

    def rounded(self) -> PackedWeight:
        """Return the packed weight, in the types that are stored."""
        return self.units.rounded()
