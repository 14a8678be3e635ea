"""Store uniform integers in planes of bits below one scale, so that the high planes alone are integers of fewer bits.

    w = scale * (code - zero),    code = plane_1 * 2^b + plane_2 + ...,    each plane of bits of its own

The first planes, which leave out the low b bits, stand for the middle of what a code may have been:

    w = scale * 2^b * (code >> b - z),    z = (zero - (2^b - 1) / 2) / 2^b

With zero = 8 of symmetric codes of 4 bits in planes of 2 and 2, z is 1.625; the whole code is that of `int`, to the
bit. This is the nesting of Any-Precision LLM (arXiv 2402.10517) for uniform integers, and of MatQuant (arXiv
2502.06786), which rounds what is cut off where we take the middle: a rounded code needs the bit below. One scale cannot
suit 2 bits and 8: sums of parts with scales of their own (compress/formats/nested.py) cost 16 bits a group for each.

Stored tensors are those of compress/formats/int.py, but for the names of planes of one width: the second is
`words<w>_2`. Every plane lies in tiles of its own width; the widest of them, in columns, is the tile of the row. Of a
level the other planes are absent: `kept` bits are stored of `bits`.

Not supported: bits that no plane has, between planes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from compress.formats import Shape, Spec, planar
from compress.numerics.packing import FIELDS


@dataclass(frozen=True)
class Params(planar.PlanarParams):
    planes_of: tuple[int, ...] = ()  # [bits] of each plane of the whole code, high bits first
    kept: int = 0  # [bits] of the planes that are stored, from the first on

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "planes_of", tuple(self.planes_of))  # a list after a round trip through JSON
        if sum(self.planes_of) != self.bits or not {*self.planes_of} <= FIELDS.keys():
            raise ValueError(f"planes_of {list(self.planes_of)} are not planes of 1, 2, 3, 4 or 8 of {self.bits} bits")
        if self.kept not in accumulate(self.planes_of):
            raise ValueError(f"kept {self.kept} is not the bits of the first planes of {list(self.planes_of)}")

    @property
    def planes(self) -> dict[str, int]:
        """Names and widths of the stored planes of codes, high bits first."""
        count = [*accumulate(self.planes_of)].index(self.kept) + 1
        widths = self.planes_of[:count]
        earlier = [widths[:k].count(width) for k, width in enumerate(widths)]
        return {f"words{w}_{n + 1}" if n else f"words{w}": w for w, n in zip(widths, earlier, strict=True)}

    @property
    def low_bits(self) -> int:
        """Bits of a code below all that is stored of it."""
        return self.bits - self.kept

    @property
    def tile_columns(self) -> int:
        """Columns of a whole tile, which does not depend on what is stored of a code."""
        return self.tile_words * max(FIELDS[width] for width in self.planes_of)


def params_for(
    planes: Sequence[int], group_size: int, symmetric: bool, in_features: int, scale_dtype: str = "float16"
) -> Params:
    """Return the parameters of codes in these planes whose tile pads a row of `in_features` least."""
    bits = sum(planes)
    words = planar.TILE_WORDS[0]
    any_tile = Params(bits, group_size, symmetric, words, scale_dtype, planes_of=tuple(planes), kept=bits)
    return any_tile.for_rows(group_size, in_features)


# What is stored differs in the names of planes alone, and in what stands for 0: the parameters say both.
cut, decode_rows, join_rows, pack = planar.cut, planar.decode_rows, planar.join_rows, planar.pack


def specs(params: Params, shape: Shape) -> dict[str, Spec]:
    return planar.specs(params, shape)


def decode(tensors: Mapping[str, Tensor], params: Params, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return the dequantized weight [out, in]; computed in float32, rounded once to `dtype`."""
    return planar.decode(tensors, params, shape, dtype)


def levels(params: Params) -> tuple[int, ...]:
    """Return the levels, rising: the bits of the first planes, those of all that is stored last."""
    known = tuple(kept for kept in accumulate(params.planes_of) if kept <= params.kept)
    return known if len(known) > 1 else ()


def at_level(params: Params, level: int) -> tuple[str, Any]:
    """Return format and parameters of one of `levels`."""
    return "sliced", replace(params, kept=level)
