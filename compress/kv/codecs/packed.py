"""Pack codes along the channels of each token: all of the same bits, or with bits that differ between channels.

`PackedCodes`: codes of 1 to 8 bits in the planar words that the kernels read. A token of a head is one row of words of
compress/numerics/packing.py with a single tile: for width channels and planes of w bits TW = channels / F words, field
f of word j holding channel f * TW + j, so that consecutive tokens are consecutive in memory. Channels are padded to a
multiple of F. Width 3 keeps its three words of a unit as three fields.

`Pieces`: codes of 0 to 7 bits in pieces that compiled code (compress/kernels/cpu/kv_mixed.py) unpacks with a few
instructions. All heads share one row of bytes for each token. A piece holds 16 channels of a head that have equal bits,
or the last of them, filled up with zeros to 8 or 16; channels of 0 bits are in none. A piece has a plane of 4, 2 and 1
bits for each that its bits are a sum of, highest bits first, so that 16 fields of w bits are one little-endian number
of 16 w bits. In a row the pieces of 8 come first: reading 16 fields of them goes past their end, but not past the row's
unless there are no others (`reach`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kernels.contract import MOST_MIXED_BITS, PIECE, PLANES
from compress.kv.codec import Block, Field
from compress.numerics.packing import FIELDS, pack_planar, plane_fields, plane_widths, unpack_planar

TRIPLE = ("codes3a", "codes3b", "codes3c")


@dataclass(frozen=True)
class PackedCodes:
    """Layout of stored codes [B, h, n, channels]."""

    channels: int
    bits: int
    prefix: str = ""  # of the names of the fields, where a codec has several kinds of codes

    @property
    def padded_channels(self) -> int:
        fields = plane_fields(self.bits)
        return -(-self.channels // fields) * fields

    @property
    def fields(self) -> dict[str, Field]:
        return {name: Field("codes") for width in plane_widths(self.bits) for name in self._names(width)}

    def pack(self, codes: Tensor) -> dict[str, Tensor]:
        """codes [B, h, n, channels] of an integer type, below 2**bits -> int16 words [B, h, n, TW] by name."""
        lead = codes.shape[:3]
        padded = torch.nn.functional.pad(codes, (0, self.padded_channels - self.channels)).reshape(
            -1, self.padded_channels
        )
        words_by_name: dict[str, Tensor] = {}
        low = self.bits
        for width in plane_widths(self.bits):
            low -= width
            plane = ((padded >> low) & ((1 << width) - 1)).to(torch.uint8)
            words = pack_planar(plane, width, self.padded_channels // FIELDS[width])
            planes = [words] if width != 3 else [part.contiguous() for part in words.unbind(1)]
            words_by_name |= {n: rows.view(*lead, -1) for n, rows in zip(self._names(width), planes, strict=True)}
        return words_by_name

    def unpack(self, block: Block) -> Tensor:
        """Return codes [B, h, n, channels] uint8."""
        whole = None
        for width in plane_widths(self.bits):
            parts = [block[name] for name in self._names(width)]
            rows = [part.reshape(-1, part.shape[-1]) for part in parts]
            words = rows[0] if width != 3 else torch.stack(rows, 1)
            plane = unpack_planar(words, width, self.padded_channels // FIELDS[width])
            plane = plane.view(*parts[0].shape[:3], self.padded_channels)
            whole = plane if whole is None else whole << width | plane
        assert whole is not None
        return whole[..., : self.channels]

    def _names(self, width: int) -> tuple[str, ...]:
        return tuple(self.prefix + name for name in (TRIPLE if width == 3 else (f"codes{width}",)))


@dataclass(frozen=True)
class ChannelPiece:
    head: int
    bits: int
    channels: tuple[int, ...]  # of the head, in the order of fields
    fields: int  # 8 or 16: channels, then zeros

    @property
    def nbytes(self) -> int:
        return self.fields * self.bits // 8


class Pieces:
    """Where the codes of channels with bits [h, width] (0 to MOST_MIXED_BITS) lie in a row of `nbytes` bytes.

    A row that would be shorter than `least` bytes is filled with zeros.

    `pieces` are ordered by head, then by falling bits. `starts` int32 [pieces, 4] says where their planes begin (-1:
    there is none), and the last column how many fields of the head are before them. `bounds` int32 [h, most bits + 1]
    says at which piece those of a head with the most bits, one bit less, ... begin, and where the head ends. `lanes`
    int64 [h, width] says where a channel is among registers of 16 for each piece of its head, `columns` where among its
    fields; -1: nowhere.
    """

    def __init__(self, bits: Tensor, least: int = 0) -> None:
        self.shape = (int(bits.shape[0]), int(bits.shape[1]))
        self.pieces = _pieces(bits)
        self.starts, used = self._lay_out()
        self.nbytes = max(used, least)
        self.bounds = torch.empty(self.shape[0], MOST_MIXED_BITS + 1, dtype=torch.int32)
        for head in range(self.shape[0]):
            before = sum(piece.head < head for piece in self.pieces)
            for place in range(MOST_MIXED_BITS + 1):
                count = sum(piece.head == head and piece.bits > MOST_MIXED_BITS - place for piece in self.pieces)
                self.bounds[head, place] = before + count
        self.lanes, self.columns = torch.full(self.shape, -1), torch.full(self.shape, -1)
        for index, piece in enumerate(self.pieces):
            channels, fields = torch.tensor(piece.channels), torch.arange(len(piece.channels))
            self.lanes[piece.head, channels] = PIECE * (index - int(self.bounds[piece.head, 0])) + fields
            self.columns[piece.head, channels] = int(self.starts[index, -1]) + fields
        self._planes = [self._plane(column, width) for column, width in enumerate(PLANES)]

    @property
    def most(self) -> int:
        """Pieces of the head that has most."""
        return int((self.bounds[:, -1] - self.bounds[:, 0]).max())

    @property
    def reach(self) -> int:
        """Bytes of a row that are read where 16 fields are read of each piece."""
        starts = self.starts[:, :-1]
        ends = (starts + PIECE // 8 * torch.tensor(PLANES)) * (starts >= 0)
        return int(ends.max()) if self.pieces else 0

    def pack(self, codes: Tensor) -> Tensor:
        """codes [..., h, width] of an integer type, below 2^bits -> uint8 [..., nbytes]."""
        codes = torch.nn.functional.pad(codes.to(torch.uint8).flatten(-2), (0, 1))
        rows = torch.zeros(*codes.shape[:-1], self.nbytes, dtype=torch.uint8, device=codes.device)
        for width, (source, shift, place) in zip(PLANES, self._on(codes), strict=True):
            if len(place):
                fields = (codes[..., source] >> shift) & ((1 << width) - 1)
                moved = torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device)
                rows[..., place] = (fields.unflatten(-1, (-1, 8 // width)) << moved).sum(-1, dtype=torch.uint8)
        return rows

    def unpack(self, rows: Tensor) -> Tensor:
        """Inverse of `pack`: codes [..., h, width] uint8."""
        count = self.shape[0] * self.shape[1]
        codes = torch.zeros(*rows.shape[:-1], count + 1, dtype=torch.uint8, device=rows.device)
        for width, (source, shift, place) in zip(PLANES, self._on(rows), strict=True):
            if len(place):
                moved = torch.arange(0, 8, width, dtype=torch.uint8, device=rows.device)
                fields = ((rows[..., place, None] >> moved) & ((1 << width) - 1)).flatten(-2)
                codes[..., source] += fields << shift
        return codes[..., :-1].unflatten(-1, self.shape)

    def _lay_out(self) -> tuple[Tensor, int]:
        starts, at = torch.full((len(self.pieces), len(PLANES) + 1), -1, dtype=torch.int32), 0
        for index in sorted(range(len(self.pieces)), key=lambda i: self.pieces[i].fields):
            for column, width in enumerate(PLANES):
                if self.pieces[index].bits & width:
                    starts[index, column] = at
                    at += self.pieces[index].fields * width // 8
        before = [0] * self.shape[0]
        for index, piece in enumerate(self.pieces):
            starts[index, -1] = before[piece.head]
            before[piece.head] += piece.fields
        return starts, at

    def _plane(self, column: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return channels (that past the last for zeros), shifts of the codes, and bytes of the fields of a width."""
        source: list[int] = []
        shift: list[int] = []
        place: list[int] = []
        for index, piece in enumerate(self.pieces):
            if piece.bits & width:
                channels = [piece.head * self.shape[1] + channel for channel in piece.channels]
                source += channels + [self.shape[0] * self.shape[1]] * (piece.fields - len(channels))
                shift += [piece.bits & (width - 1)] * piece.fields
                start = int(self.starts[index, column])
                place += range(start, start + piece.fields * width // 8)
        return torch.tensor(source).long(), torch.tensor(shift, dtype=torch.uint8), torch.tensor(place).long()

    def _on(self, like: Tensor) -> list[list[Tensor]]:
        return [[tensor.to(like.device) for tensor in plane] for plane in self._planes]


def row_nbytes(bits: Tensor) -> int:
    """Return the bytes that the codes of a token take for such bits [h, width]."""
    return sum(piece.nbytes for piece in _pieces(bits))


def _pieces(bits: Tensor) -> list[ChannelPiece]:
    return [piece for head, row in enumerate(bits.tolist()) for piece in _of_head(head, row)]


def _of_head(head: int, bits: list[int]) -> list[ChannelPiece]:
    pieces = []
    for b in range(MOST_MIXED_BITS, 0, -1):
        channels = [channel for channel, channel_bits in enumerate(bits) if channel_bits == b]
        for start in range(0, len(channels), PIECE):
            run = tuple(channels[start : start + PIECE])
            pieces.append(ChannelPiece(head, b, run, PIECE if len(run) > PIECE // 2 else PIECE // 2))
    return pieces
