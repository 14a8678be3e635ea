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

Not done: E8P, lattices and trellises, which keep their codes (compress/tune/codes/fixed.py): a code of these stands
for many weights, or is decided by those before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.tune.codes import vectors
from compress.tune.codes.vectors import Vectors
from compress.tune.trained import Rates, Trained, within
from compress.types import PackedWeight

BYTES = 24 + 4 * 4  # of a weight, beside what `fixed` takes: a trained number, and what encoding takes
EVERY = 5  # steps between moves
SHARE = 0.01  # of the vectors that are encoded anew in a move


def serves(packed: PackedWeight) -> bool:
    """Return whether codes of a weight can move: those of a format `codebook` with stored entries."""
    return vectors.serves(packed)


class Codes(Vectors):
    """One packed weight of the format `codebook`."""

    def __init__(self, packed: PackedWeight, target: Tensor, rates: Rates) -> None:
        super().__init__(packed)
        with torch.no_grad():
            start = self.matrix()
            wanted = within(target, packed)
        error = start if wanted is None else wanted - start
        travel = 2 * rates.codes_rate / (rates.steps * rates.rate)  # the mean of the rate over steps is half of it
        self.dense = Trained(start, unit=travel * (float(error.square().mean().sqrt()) or 1.0))
        self.trained["dense"] = self.dense

    def tensors(self) -> dict[str, Tensor]:
        """Return the stored tensors with what is trained as it is now, float32."""
        return {name: tensor for name, tensor in super().tensors().items() if name != "dense"}

    def weight(self) -> Tensor:
        """Return the dense weight [out, in], float32."""
        dense = self.dense.value()
        return self.around(self.matrix() + (dense - dense.detach()))

    @torch.no_grad()
    def behind(self, step: int) -> None:
        """Encode the vectors anew that are furthest from the dense copy."""
        if (step + 1) % EVERY:
            return
        wanted, before = self.dense.value(), self.matrix()
        distance = self.vectors(wanted - before).square().sum(-1).flatten()
        chosen = distance.topk(max(1, int(SHARE * distance.numel()))).indices
        for _ in self.codes:  # as often as there are stages
            self._encode(wanted, chosen)
        now = self.matrix()
        moved = now != before
        self.dense.moved[moved] = ((now - self.dense.start) / self.dense.unit)[moved]

    def _encode(self, wanted: Tensor, chosen: Tensor) -> None:
        """Give some vectors the entry, of one stage, that brings them nearest to a matrix."""
        found = [self.best_entries(wanted, chosen, stage) for stage in range(len(self.codes))]
        stages = torch.stack([gains for _, gains in found]).argmax(0)
        codes = [each.clone() for each in self.codes]
        for stage, (entries, gains) in enumerate(found):
            moved = (stages == stage) & (gains > 0)
            codes[stage].view(-1)[chosen[moved]] = entries[moved]
        self.set_codes(codes)

    def rounded(self) -> PackedWeight:
        """Return the packed weight, in the types that are stored."""
        dense = self.trained.pop("dense")
        try:
            return super().rounded()
        finally:
            self.trained["dense"] = dense
