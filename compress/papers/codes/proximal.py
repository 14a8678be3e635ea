"""Codes move to near entries that the gradient favours (JLCM, joint learning of codebooks and mapping).

The method learns which entry a weight names together with the entries. The straight-through estimate treats all
entries alike; JLCM weighs a move by how near the new entry is, since a gradient says little about far ones. For a
vector with entry c and gradient h of the loss, an entry e has the score

    h . (e - c) exp(-|e - c| / reach)

and the vector takes the entry with the least score, if it is below 0. Of the vectors the share with the least scores
moves, behind every EVERY-th step, by the mean gradient since. Entries, scales and norms are trained along with it, by
AdamW. `reach` is `codes_rate` times the root mean square of the quantization error of a vector.

Differences: the abstract of the paper leaves the form of the weight open; the exponential is ours. The loss is that of
a block. Rows are not put into an order by their distribution: methods that write the format `codebook` have groups of
their own. Not done: formats other than `codebook`, which keep their codes (compress/tune/codes/fixed.py).

Not in the core because it gained nothing: `gptvq2bit` has KL 0.0332 with it as it has untuned, 0.0300 with `fixed`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compress.tune.codes import vectors
from compress.tune.codes.vectors import CodebookVectors
from compress.tune.trained import Rates, strip_surroundings
from compress.types import PackedWeight

BYTES = (
    8 + 4 * 4
)  # [bytes] for each weight, beside what `fixed` takes: a gradient, and what the choice of entries takes
RATE = 2.0  # default of `codes_rate`
EVERY = 5  # steps between moves
MAX_MOVED_SHARE = 0.002  # share of the vectors that move at a time
CONSIDERED = 4  # times as many have their entries scored: those with the largest gradients


def serves(packed: PackedWeight) -> bool:
    """Return whether codes of a weight can move: those of a format `codebook` with stored entries."""
    return vectors.serves(packed)


class Codes(CodebookVectors):
    """One packed weight of the format `codebook`."""

    def __init__(self, packed: PackedWeight, target: Tensor, rates: Rates) -> None:
        super().__init__(packed)
        with torch.no_grad():
            start = self.matrix()
            wanted = strip_surroundings(target, packed)
            error = self.vectors(start if wanted is None else wanted - start)
        self.reach = rates.codes_rate * (float(error.square().sum(-1).mean().sqrt()) or 1.0)
        self.probe = nn.Parameter(torch.zeros_like(start))

    def weight(self) -> Tensor:
        """Return the dense weight [out, in], float32."""
        return self.around(self.matrix() + self.probe)

    @torch.no_grad()
    def behind(self, step: int) -> None:
        """Move the codes that the gradients since the last move favour most."""
        if (step + 1) % EVERY or self.probe.grad is None:
            return
        slopes = self.vectors(self.probe.grad).flatten(0, 1)
        count = max(1, int(MAX_MOVED_SHARE * len(slopes)))
        chosen = slopes.square().sum(-1).topk(min(len(slopes), CONSIDERED * count)).indices
        scored = [self._scores(slopes[chosen], chosen, stage) for stage in range(len(self.codes))]
        least, stages = torch.stack([scores for _, scores in scored]).min(0)
        moving = torch.zeros_like(least, dtype=torch.bool)
        moving[least.topk(min(len(least), count), largest=False).indices] = True
        moving &= least < 0
        codes = [each.clone() for each in self.codes]
        for stage, (by_vector, _) in enumerate(scored):
            moved = moving & (stages == stage)
            codes[stage].view(-1)[chosen[moved]] = by_vector[moved]
        self.set_codes(codes)
        self.probe.grad = None

    def _scores(self, slopes: Tensor, chosen: Tensor, stage: int) -> tuple[Tensor, Tensor]:
        """Return the entry with the least score for each of some vectors [n], and the scores [n]; slopes [n, d]."""
        by_vector, least = torch.empty(len(chosen), dtype=torch.long), torch.empty(len(chosen))
        for part, steps in self.steps_to(chosen, stage):
            scores = (steps * slopes[part, None]).sum(-1) * torch.exp(-steps.norm(dim=-1) / self.reach)
            least[part], by_vector[part] = scores.min(1)
        return by_vector, least
