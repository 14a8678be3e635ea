"""Store uniform integers with a scale, and optionally a zero point, for each group of columns of each row.

    w[i, j] = scale[g(j), i] * (code[i, j] - zero[g(j), i])

Codes are unsigned, 2 to 8 bits. Symmetric weights use the whole range: zero = 2**(bits-1) is implied, not stored, and
the scale may be negative, so that the one level that is not mirrored falls on the side that needs it. Asymmetric
weights store the zero point in `bits` bits.

Stored tensors (N = out_features padded to a multiple of 16, K = in_features padded to whole tiles, or to a multiple of
32 with `narrow_tail`, G groups):
- `words<w>` int16, the planar words of compress/numerics/packing.py, one tensor for each plane of w bits (`PLANES`),
  whole tiles of `tile_words` first; with `narrow_tail` the columns behind them lie in tiles of 32 columns;
- `scales` float16 or bfloat16 [G, N];
- `zeros` uint8 [G, N * bits / 8], a little-endian bit stream, asymmetric only.
The layout is what a matmul kernel reads: N and K are padded here, so that no kernel masks them. Rows can be cut
anywhere, columns at groups and at parts of groups that are multiples of 16.

Not supported: column orders stored with the weight (activation order is resolved by the methods, groups stay
contiguous).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from compress import formats
from compress.formats import Shape, Spec, planar

FP16_TINY = 2.0**-14  # smallest normal float16
FP16_MAX = 65504.0

NARROW, PLANES, ROW_MULTIPLE, TILE_WORDS = planar.NARROW, planar.PLANES, planar.ROW_MULTIPLE, planar.TILE_WORDS
cut, decode_rows, join_rows, pack, unpack = planar.cut, planar.decode_rows, planar.join_rows, planar.pack, planar.unpack
groups, padded_shape = planar.groups, planar.padded_shape


@dataclasses.dataclass(frozen=True)
class Params(planar.PlanarParams):
    """Codes all of whose planes are stored."""


def params_for(bits: int, group_size: int, symmetric: bool, in_features: int, scale_dtype: str = "float16") -> Params:
    """Return the parameters whose tile pads a row of `in_features` least."""
    any_tile = Params(bits, group_size, symmetric, TILE_WORDS[0], scale_dtype)
    return any_tile.for_rows(group_size, in_features)


def scale_dtype(amax: Tensor, bits: int) -> str:
    """Return the storage type for scales of groups with these maxima: float16 unless they leave its normal range."""
    step = amax[amax > 0].float() / 2 ** (bits - 1)  # an asymmetric or searched scale is up to 4/3 of it
    if step.numel() and (step.max() > FP16_MAX / 2 or step.median() < 4 * FP16_TINY):
        return "bfloat16"
    return "float16"


def specs(params: Params, shape: Shape) -> dict[str, Spec]:
    return planar.specs(params, shape)


def decode(tensors: Mapping[str, Tensor], params: Params, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Return the dequantized weight [out, in]; computed in float32, rounded once to `dtype`."""
    return planar.decode(tensors, params, shape, dtype)


def levels(params: Params) -> tuple[int, ...]:
    """Return the levels: codes of 5, 6 and 7 bits lie in planes, of which the first is a code of 4 bits."""
    return tuple(accumulate(params.planes.values())) if len(params.planes) > 1 else ()


def at_level(params: Params, level: int) -> tuple[str, Any]:
    """Return format and parameters of the first planes of the codes."""
    values = dataclasses.asdict(params)
    return "sliced", formats.get("sliced").Params(**values, planes_of=tuple(params.planes.values()), kept=level)
