"""The layout of a cache in packed pages, as an engine holds them, and plain code that writes and reads it.

Engines cut the cache of a layer into pages (blocks) of N tokens and write tokens to any slot in any order, so that
every token of a KV head is coded alone. One page of one head is a run of N C bytes:

    key codes N x ck | key parameters N x pk | value codes N x cv | value parameters N x pv      C = ck + pk + cv + pv

Codes of a token, of channels in a turned space (`Turn`), are planes of 4, 2 and 1 bits that the bits are a sum of, the
widest first, which holds the lowest bits of the codes: byte j of a plane of w bits has channel j + k w d / 8 at bit
k w, for all k < 8 / w. 8 bits are a byte a channel. Parameters are float16. Uniform codes have a scale and a least
value for each group of channels, [scales, leasts]: least + scale * code. Levels have one norm: norm * level[code].

What is here is the reference: kernels read and write the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

PLANES = (8, 4, 2, 1)  # bits
LARGEST = torch.finfo(torch.float16).max
MIN_RMS = 1e-12  # root mean square of a vector that is not zero


@dataclass(frozen=True)
class PageCodes:
    """How the keys or the values of a token and KV head are coded."""

    bits: int  # [bits] of a code: 1 to 8
    width: int  # channels of a head, d
    group: int  # channels of a group; of levels, d
    levels: bool = False  # a norm and levels of a table; else uniform: scale and least of each group

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise ValueError(f"bits {self.bits} is not between 1 and 8")
        if self.width % (8 // self.planes[-1]):
            raise ValueError(f"{self.bits} bits of {self.width} channels are no whole bytes")
        if self.width % self.group or (self.levels and self.group != self.width):
            raise ValueError(f"groups of {self.group} do not fit {self.width} channels")

    @property
    def planes(self) -> tuple[int, ...]:
        """Bits of the planes, in the order of their bytes."""
        return tuple(width for width in PLANES if self.bits & width)

    @property
    def code_bytes(self) -> int:
        return self.bits * self.width // 8

    @property
    def parameter_bytes(self) -> int:
        return 2 if self.levels else 4 * (self.width // self.group)

    @property
    def nbytes(self) -> int:
        return self.code_bytes + self.parameter_bytes


class PageRows(NamedTuple):
    """What pages hold of some keys or values."""

    codes: Tensor  # uint8 [..., code_bytes]
    parameters: Tensor  # uint8 [..., parameter_bytes]


def encode(x: Tensor, layout: PageCodes, table: Tensor | None = None) -> PageRows:
    """x [..., d] float32 in the turned space -> its parts; table: float32 [2^bits] ascending, of levels."""
    if layout.levels:
        assert table is not None
        codes, parameters = _encode_levels(x.float().contiguous(), table.to(x.device))
    else:
        codes, parameters = _encode_uniform(x.float(), layout)
    return PageRows(pack(codes, layout), parameters.view(torch.uint8))


def decode(
    codes: Tensor,
    parameters: Tensor,
    layout: PageCodes,
    table: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return x [..., d] of its parts, computed in float32."""
    stored = parameters.contiguous().view(torch.float16).float()
    numbers = unpack(codes, layout)
    if layout.levels:
        assert table is not None
        return (table.to(codes.device)[numbers.int()] * stored).to(dtype)
    scale, least = stored.unflatten(-1, (2, -1)).unsqueeze(-1).unbind(-3)
    return (least + scale * numbers.unflatten(-1, (-1, layout.group))).flatten(-2).to(dtype)


def pack(numbers: Tensor, layout: PageCodes) -> Tensor:
    """numbers [..., d] of an integer type, below 2^bits -> codes uint8 [..., code_bytes]."""
    planes, shift = [], 0
    for width in layout.planes:
        fields = (numbers >> shift & (1 << width) - 1).to(torch.uint8).unflatten(-1, (8 // width, -1))
        places = torch.arange(0, 8, width, dtype=torch.uint8, device=numbers.device)
        planes.append((fields << places[:, None]).sum(-2, dtype=torch.uint8))
        shift += width
    return torch.cat(planes, -1)


def unpack(codes: Tensor, layout: PageCodes) -> Tensor:
    """Inverse of `pack`: numbers uint8 [..., d]."""
    numbers, shift, start = None, 0, 0
    for width in layout.planes:
        stop = start + layout.width * width // 8
        places = torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device)
        fields = (codes[..., None, start:stop] >> places[:, None] & (1 << width) - 1).flatten(-2) << shift
        numbers = fields if numbers is None else numbers | fields
        start, shift = stop, shift + width
    assert numbers is not None
    return numbers


def _encode_uniform(x: Tensor, layout: PageCodes) -> tuple[Tensor, Tensor]:
    """Integers between the least and the largest number of a group, both rounded to float16 first."""
    groups, most = x.unflatten(-1, (-1, layout.group)), 2**layout.bits - 1
    least = groups.amin(-1).clamp(-LARGEST, LARGEST).half()
    scale = ((groups.amax(-1) - least.float()) / most).clamp(0, LARGEST).half()
    steps = torch.where(scale > 0, scale, 1).float()[..., None]
    numbers = ((groups - least.float()[..., None]) / steps).round().clamp(0, most)
    return numbers.flatten(-2).to(torch.uint8), torch.cat((scale, least), -1)


def _encode_levels(x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest levels for the norm of least error for those that are nearest for the root mean square."""
    edges = (table[1:] + table[:-1]) / 2
    size = x.square().mean(-1, keepdim=True).sqrt().clamp(min=MIN_RMS)
    values = table[torch.bucketize(x / size, edges)]
    norm = (x * values).sum(-1, keepdim=True) / values.square().sum(-1, keepdim=True)
    norm = norm.clamp(0, LARGEST).half()
    numbers = torch.bucketize(x / norm.float().clamp(min=MIN_RMS), edges)
    return numbers.to(torch.uint8), norm


@dataclass(frozen=True)
class Turn:
    """The space in which the keys or the values of a layer are coded: x' = (x - mean) forward, x = x' inverse + mean.

    Query heads H are a multiple of the KV heads h; those of a KV head follow each other.
    """

    forward: Tensor  # float32 [d, d], or [h, d, d]
    inverse: Tensor  # alike
    mean: Tensor | None = None  # float32 [h, d]; that of keys adds the same to all scores of a query

    def into(self, x: Tensor) -> Tensor:
        """Turn x [..., h, d], in float32."""
        x = x.float() if self.mean is None else x.float() - self.mean
        return _turn(x, self.forward)

    def query(self, q: Tensor) -> Tensor:
        """q [..., H, d] -> q' float32, whose products with turned keys are the scores but for a constant."""
        return _turn(q.float(), self.inverse.mT)

    def out_of(self, x: Tensor) -> Tensor:
        """Turn sums of values x' [..., H, d], whose weights add up to 1, back."""
        x = _turn(x.float(), self.inverse)
        return x if self.mean is None else (x.unflatten(-2, (len(self.mean), -1)) + self.mean[:, None]).flatten(-3, -2)


def _turn(x: Tensor, matrix: Tensor) -> Tensor:
    """x [..., H, d] times a matrix [d, e], or that of its head of [h, d, e]."""
    if matrix.dim() == 2:
        return x @ matrix
    return (x.unflatten(-2, (len(matrix), -1)) @ matrix).flatten(-3, -2)


class PagedCodes(NamedTuple):
    """How pages hold the keys or the values of a layer."""

    codes: PageCodes
    turn: Turn  # of all KV heads
    levels: Tensor | None  # float32 [2^bits], where codes are of levels


@dataclass(frozen=True)
class Pages:
    """Pages uint8 [blocks, h, N, C] of a layer; slot s is token s % N of block s // N."""

    keys: PageCodes
    values: PageCodes
    tokens: int  # of a page, N

    @property
    def token_bytes(self) -> int:
        """C, bytes of a token and KV head."""
        return self.keys.nbytes + self.values.nbytes

    def areas(self, pages: Tensor) -> list[Tensor]:
        """Return views [blocks, h, N, bytes] of key codes, key parameters, value codes and value parameters."""
        runs, areas, start = pages.view(*pages.shape[:2], -1), [], 0
        for layout in (self.keys, self.values):
            for size in (layout.code_bytes, layout.parameter_bytes):
                areas.append(runs[..., start : start + self.tokens * size].unflatten(-1, (self.tokens, size)))
                start += self.tokens * size
        return areas

    def write(self, pages: Tensor, slots: Tensor, keys: PageRows, values: PageRows) -> None:
        """Write the parts [T, h, bytes] of T tokens to slots int64 [T]; a slot of -1 is padding."""
        kept = slots >= 0
        blocks, places = slots[kept] // self.tokens, slots[kept] % self.tokens
        for area, part in zip(self.areas(pages), (*keys, *values), strict=True):
            area[blocks, :, places] = part[kept]

    def read(self, pages: Tensor, block_table: Tensor, length: int) -> tuple[PageRows, PageRows]:
        """Return the parts [length, h, bytes] of keys and values of the first tokens of a request with these blocks."""
        blocks = block_table[: -(-length // self.tokens)].long()
        rows = [area[blocks].transpose(1, 2).flatten(0, 1)[:length] for area in self.areas(pages)]
        return PageRows(*rows[:2]), PageRows(*rows[2:])

    def encode_into(
        self, pages: Tensor, slots: Tensor, states: tuple[Tensor, Tensor], tables: tuple[Tensor | None, Tensor | None]
    ) -> None:
        """Code turned keys and values [T, h, d] and write them to slots int64 [T]; tables: levels of each."""
        layouts = self.keys, self.values
        self.write(pages, slots, *(encode(*given) for given in zip(states, layouts, tables, strict=True)))

    def decode_first(
        self, pages: Tensor, block_table: Tensor, length: int, tables: tuple[Tensor | None, Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """Return the first turned keys and values [length, h, d] float32 of a request with these blocks."""
        rows = self.read(pages, block_table, length)
        keys, values = (
            decode(*own, layout, table)
            for own, layout, table in zip(rows, (self.keys, self.values), tables, strict=True)
        )
        return keys, values
