"""Replace codes of E8P: eight columns of a row take the nearest point of the lattice, with its residual code.

What a unit is, is scale * row scale * point, so that its nearest point is found in units of these scales. Behind each
of the CANDIDATES nearest first points of either shift the nearest residual point is taken, and the best sum of both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.formats import e8p as e8p_format
from compress.formats.e8p import DIM
from compress.quant.e8p import Nearest
from compress.tune.codes.units import Units, in_scales
from compress.types import PackedWeight

CANDIDATES = {2: 1, 3: 8, 4: 8}  # bits of a weight -> first points of each shift
PART = 1 << 14  # vectors that are encoded at a time


def serves(packed: PackedWeight) -> bool:
    """Return whether codes of a weight can be replaced: those of the format `e8p`."""
    return packed.format == "e8p"


class LatticePoints(Units):
    """One weight of the format `e8p`; `codes` has those of each stage, int32 [out, blocks of 8 columns]."""

    by_columns = True

    def __init__(self, packed: PackedWeight) -> None:
        (rows, columns), tensors = packed.shape, packed.tensors
        names = ("codes", "residual")[: 1 if packed.params.bits == 2 else 2]
        blocks = -(-columns // DIM)
        super().__init__(packed, [tensors[name][:rows, :blocks].int() & 0xFFFF for name in names])
        self.search = Nearest(tensors["codes"].device)

    def set_codes(self, codes: list[Tensor]) -> None:
        """Take these codes, and pack them."""
        self.codes = [each.clone() for each in codes]
        params, shape, tensors = self.packed.params, self.packed.shape, self.packed.tensors
        row_scales = tensors["row_scales"][: shape[0]] if params.row_scales else None
        packed = e8p_format.pack(torch.stack(codes, -1), tensors["scale"], row_scales, params, shape)
        self.packed = PackedWeight(self.packed.stored, {**tensors, **packed}, shape)

    def units(self, matrix: Tensor) -> Tensor:
        """Return the vectors [vectors, 8] of a matrix [out, in], zeros behind its end."""
        return torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % DIM)).unflatten(1, (-1, DIM)).flatten(0, 1)

    @torch.no_grad()
    def encode(self, wanted: Tensor, chosen: Tensor) -> None:
        """Encode some vectors anew, those at the right edge as if what is behind it were to stay as it is."""
        held = torch.stack(self.codes, -1).flatten(0, 1)  # vector, stage
        factors, bits = self._factors(), self.packed.params.bits
        vectors, blocks = self.units(wanted), self.codes[0].shape[1]
        places = torch.arange(DIM, device=wanted.device)
        for part in chosen.split(PART):
            factor, old = factors[part // blocks], held[part]
            before = e8p_format.lookup(old, bits)
            x = in_scales(vectors[part], factor)
            is_stored = (part % blocks * DIM)[:, None] + places < wanted.shape[1]
            x = torch.where(is_stored, x, before)
            codes = self.search.staged(x, bits, CANDIDATES[bits])  # vector, candidate, stage
            errors = (e8p_format.lookup(codes, bits) - x[:, None]).square().sum(-1)
            least, best = errors.min(1)
            nearer = least < (before - x).square().sum(-1)
            found = codes[torch.arange(len(part), device=part.device), best]
            held[part] = torch.where(nearer[:, None], found, old)
        self.set_codes([each.contiguous() for each in held.view(*self.codes[0].shape, -1).unbind(-1)])

    def _factors(self) -> Tensor:
        """Return the factor of each row's points as it is now, [out, 1]."""
        tensors, rows = self.tensors(), self.packed.shape[0]
        if self.packed.params.row_scales:
            return e8p_format.row_scale(tensors["scale"], tensors["row_scales"][:rows])[:, None]
        return tensors["scale"].expand(rows, 1)
