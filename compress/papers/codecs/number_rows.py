"""Store the numbers of a token as one row for all heads, however many each head has, in 16, 8 or 4 bits.

The numbers of a head are coefficients of unit variance. With 16 bits they are float16. With fewer they are Gaussian
Lloyd-Max levels times a norm of one byte for each token and head, which is the one of least squared error when each
number is weighed with what it stands for. A row holds the numbers of all heads one after the other, [B, 1, tokens, sum
of counts], so that heads may have different counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compress.kv.codec import Block, Field
from compress.kv.codecs.lloyd import SMALLEST, Norms, levels, nearest
from compress.kv.codecs.packed import Codes

BITS = (16, 8, 4)  # of a number
STEPS = 16  # of a norm in an octave: 4.4 % apart
PLAIN = 16  # bits of numbers that have no norm


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
        self.norms = Norms(8, STEPS)
        self.codes = Codes(total, min(bits, 8))
        self.table = levels(self.codes.bits) if bits < PLAIN else torch.empty(0, device="cpu")
        if bits == PLAIN:
            self.fields = {"rows": Field("codes")}
        else:
            self.fields = {**self.codes.fields, "norms": Field("scales")}

    def encode(self, z: Tensor) -> dict[str, Tensor]:
        """z [B, h, n, most] float32, of which the first `counts` of a head are kept -> rows of all fields."""
        if self.bits == PLAIN:
            limit = torch.finfo(torch.float16).max
            return {"rows": self._flat(z).clamp(-limit, limit).half()}
        weights, table = self.weights.to(z.device, z.dtype), self.table.to(z.device)
        size = (z.square() * weights).sum(-1, keepdim=True).sqrt()
        found = table[nearest(z / size.clamp(min=SMALLEST), table)]
        norms = (z * found * weights).sum(-1, keepdim=True) / (found.square() * weights).sum(-1, keepdim=True)
        stored = self.norms.store(norms.nan_to_num(0.0).clamp(min=0))
        codes = nearest(z / self.norms.load(stored).clamp(min=SMALLEST), table)
        return {**self.codes.pack(self._flat(codes)), "norms": stored}

    def decode(self, block: Block) -> Tensor:
        """Return the numbers [B, h, n, most] float32; those behind the count of a head are 0."""
        if self.bits == PLAIN:
            return self._by_head(block["rows"].float())
        found = self.table.to(block["norms"].device)[self.codes.unpack(block).int()]
        return self._by_head(found) * self.norms.load(block["norms"])

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
