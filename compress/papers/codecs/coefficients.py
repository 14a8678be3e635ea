"""Share among codecs that keep a few coefficients of a token: how many each part keeps, and how these are stored.

The numbers of a head are coefficients of unit variance. With 16 bits they are float16. With fewer they are Gaussian
Lloyd-Max levels times a norm of one byte for each token and head, which is the one of least squared error when each
number is weighed with what it stands for. A row holds the numbers of all heads one after the other, [B, 1, tokens, sum
of counts], so that heads may have different counts.

`greedy` chooses how many channels each of many parts keeps, within one budget.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from compress.kv.codec import Block, Field
from compress.kv.codecs.lloyd import MIN_RMS, Norms, levels, nearest
from compress.kv.codecs.packed import PackedCodes

NORM_STEPS_PER_OCTAVE = 16  # 4.4 % apart
FLOAT_BITS = 16  # numbers of so many bits have no norm


class Rows:
    """Rows of `counts[h]` numbers of each head h."""

    def __init__(self, counts: Sequence[int], bits: int, variances: Tensor) -> None:
        """variances [h, largest count]: the squared error that an error of 1 in a number stands for."""
        self.bits, self.most, total = bits, max(counts), sum(counts)
        self.counts = torch.tensor(counts, device="cpu")
        self.mask = torch.arange(self.most, device="cpu") < self.counts[:, None]  # heads, most
        self.weights = (variances.cpu() * self.mask)[:, None]
        self.weights = self.weights / self.weights.sum(-1, keepdim=True).clamp(min=1e-30)
        self.index = self.mask.flatten().nonzero()[:, 0]
        self.is_even = bool(self.mask.all())
        self.norms = Norms(8, NORM_STEPS_PER_OCTAVE)
        self.codes = PackedCodes(total, min(bits, 8))
        self.table = levels(self.codes.bits) if bits < FLOAT_BITS else torch.empty(0, device="cpu")
        if bits == FLOAT_BITS:
            self.fields = {"rows": Field("codes")}
        else:
            self.fields = {**self.codes.fields, "norms": Field("scales")}

    def encode(self, z: Tensor) -> dict[str, Tensor]:
        """z [B, h, n, most] float32, of which the first `counts` of a head are kept -> rows of all fields."""
        if self.bits == FLOAT_BITS:
            limit = torch.finfo(torch.float16).max
            return {"rows": self._flat(z).clamp(-limit, limit).half()}
        weights, table = self.weights.to(z.device, z.dtype), self.table.to(z.device)
        size = (z.square() * weights).sum(-1, keepdim=True).sqrt()
        values = table[nearest(z / size.clamp(min=MIN_RMS), table)]
        norms = (z * values * weights).sum(-1, keepdim=True) / (values.square() * weights).sum(-1, keepdim=True)
        stored = self.norms.store(norms.nan_to_num(0.0).clamp(min=0))
        codes = nearest(z / self.norms.load(stored).clamp(min=MIN_RMS), table)
        return {**self.codes.pack(self._flat(codes)), "norms": stored}

    def decode(self, block: Block) -> Tensor:
        """Return the numbers [B, h, n, most] float32; those behind the count of a head are 0."""
        if self.bits == FLOAT_BITS:
            return self._by_head(block["rows"].float())
        values = self.table.to(block["norms"].device)[self.codes.unpack(block).int()]
        return self._by_head(values) * self.norms.load(block["norms"])

    def _flat(self, z: Tensor) -> Tensor:
        """[B, h, n, most] -> [B, 1, n, sum of counts]."""
        flat = z.transpose(1, 2).flatten(2)
        return (flat if self.is_even else flat[..., self.index.to(z.device)])[:, None]

    def _by_head(self, rows: Tensor) -> Tensor:
        """[B, 1, n, sum of counts] -> [B, h, n, most]."""
        flat = rows[:, 0]
        if not self.is_even:
            whole = flat.new_zeros(*flat.shape[:2], self.mask.numel())
            whole[..., self.index.to(flat.device)] = flat
            flat = whole
        return flat.unflatten(-1, self.mask.shape).transpose(1, 2)


def grid(width: int, unit: int) -> list[int]:
    """Return the ranks that a part of so many channels may have, ascending: multiples of `unit`, and all channels."""
    return [*range(unit, width, unit), width]


def greedy(damages: Sequence[Tensor], grids: Sequence[list[int]], budget: int) -> list[int]:
    """Return a rank for each part, with a sum of at most `budget` where the least ranks allow it.

    damages: for each part, its damage at each rank of its grid. From the largest ranks on, the step down whose damage
    by channel is least is taken; ties go to the first part.
    """
    curves = [curve.tolist() for curve in damages]
    places = [len(ranks) - 1 for ranks in grids]
    total = sum(ranks[-1] for ranks in grids)
    heap: list[tuple[float, int]] = []

    def push(index: int) -> None:
        at = places[index]
        if at:
            size = grids[index][at] - grids[index][at - 1]
            heapq.heappush(heap, ((curves[index][at - 1] - curves[index][at]) / size, index))

    for index in range(len(grids)):
        push(index)
    while total > budget and heap:
        _, index = heapq.heappop(heap)
        total -= grids[index][places[index]] - grids[index][places[index] - 1]
        places[index] -= 1
        push(index)
    return [ranks[at] for ranks, at in zip(grids, places, strict=True)]
