"""Pack codes of 1 to 8 bits along the channels of each token, in the planar words that the kernels read.

A token of a head is one row of words of compress/numerics/packing.py with a single tile: for width channels and planes
of w bits TW = channels / F words, field f of word j holding channel f * TW + j, so that consecutive tokens are
consecutive in memory. Channels are padded to a multiple of F. Width 3 keeps its three words of a unit as three fields.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kv.codec import Block, Field
from compress.numerics.packing import FIELDS, pack_planar, plane_fields, plane_widths, unpack_planar

TRIPLE = ("codes3a", "codes3b", "codes3c")


@dataclass(frozen=True)
class Codes:
    """Layout of stored codes [B, h, n, channels]."""

    channels: int
    bits: int
    prefix: str = ""  # of the names of the fields, where a codec has several kinds of codes

    @property
    def padded(self) -> int:
        fields = plane_fields(self.bits)
        return -(-self.channels // fields) * fields

    @property
    def fields(self) -> dict[str, Field]:
        return {name: Field("codes") for width in plane_widths(self.bits) for name in self._names(width)}

    def pack(self, codes: Tensor) -> dict[str, Tensor]:
        """codes [B, h, n, channels] of an integer type, below 2**bits -> int16 words [B, h, n, TW] by name."""
        lead = codes.shape[:3]
        padded = torch.nn.functional.pad(codes, (0, self.padded - self.channels)).reshape(-1, self.padded)
        found: dict[str, Tensor] = {}
        low = self.bits
        for width in plane_widths(self.bits):
            low -= width
            plane = ((padded >> low) & ((1 << width) - 1)).to(torch.uint8)
            words = pack_planar(plane, width, self.padded // FIELDS[width])
            parts = [words] if width != 3 else [part.contiguous() for part in words.unbind(1)]
            found |= {n: part.view(*lead, -1) for n, part in zip(self._names(width), parts, strict=True)}
        return found

    def unpack(self, block: Block) -> Tensor:
        """Return codes [B, h, n, channels] uint8."""
        whole = None
        for width in plane_widths(self.bits):
            parts = [block[name] for name in self._names(width)]
            rows = [part.reshape(-1, part.shape[-1]) for part in parts]
            words = rows[0] if width != 3 else torch.stack(rows, 1)
            plane = unpack_planar(words, width, self.padded // FIELDS[width])
            plane = plane.view(*parts[0].shape[:3], self.padded)
            whole = plane if whole is None else whole << width | plane
        assert whole is not None
        return whole[..., : self.channels]

    def _names(self, width: int) -> tuple[str, ...]:
        return tuple(self.prefix + name for name in (TRIPLE if width == 3 else (f"codes{width}",)))
