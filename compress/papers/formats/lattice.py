"""Store groups of columns with a lattice of their own: d columns of a row are a d x d matrix times small integers.

    w[i, block] = scale * row_scale[i] * expand(G[g] @ z[i, block]),    z = code - (2**bits[g] - 1) / 2

A group is `group_size` columns of all rows; it has a generation matrix G, codes of its own width (`bits` - 1, `bits` or
`bits` + 1, so that the groups' mean is `bits`), and with `compand` a mu-law curve

    expand(y) = sgn(y) ((1 + mu)^|y| - 1) / mu * limit,

mu and limit for each group; without it expand is the identity. z are odd multiples of 1/2 (GLVQ's integers, moved by
half a step: symmetric at every width).

Stored tensors (N = out_features padded to a multiple of 16, K = in_features padded to whole groups):
- `words` int16 [N, K * bits / 16]: the groups one after the other, group g in group_size * bits[g] / 16 words; a group
  is the planes of its width (compress/formats/int.py `PLANES`), each one tile of compress/numerics/packing.py;
- `group_bits` uint8 [groups], `lattices` float16 [groups, d, d];
- `curves` float16 [groups, 2]: mu and limit, only with `compand`;
- `scale` float32 [1]; `row_scales` float16 [N], relative to it, only with `row_scales`.
Rows can be cut anywhere; columns at groups, where the mean width of those that are left is `bits`. Padded columns hold
codes of no meaning: their activations must be zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.numerics import checks
from compress.numerics.packing import FIELDS, pack_planar, unpack_planar

PLANES = {1: (1,), 2: (2,), 3: (3,), 4: (4,), 5: (4, 1)}  # widths, high bits first
ROW_MULTIPLE = 16
COLUMN_MULTIPLE = 16  # a group is one, so that each plane is whole words
DECODE_CHUNK = 1 << 22  # weights decoded at a time: bounds the float32 temporaries to a few tens of MB


@dataclass(frozen=True)
class Params:
    bits: int  # [bits] of a coordinate, the mean over the groups: 2 to 4
    dim: int  # [columns] of a lattice vector
    group_size: int  # [columns] that share a lattice: a multiple of dim and 16
    compand: bool  # lattice points are bent by a mu-law curve
    row_scales: bool  # a scale for each row, beside that of the tensor

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4):
            raise ValueError(f"bits {self.bits} is not one of (2, 3, 4)")
        if self.dim not in (8, 16, 32):
            raise ValueError(f"dim {self.dim} is not one of (8, 16, 32)")
        if self.group_size < 1 or self.group_size % max(COLUMN_MULTIPLE, self.dim):
            multiple = max(COLUMN_MULTIPLE, self.dim)
            raise ValueError(f"group_size {self.group_size} is not a positive multiple of {multiple}")


def groups(params: Params, shape: tuple[int, int]) -> int:
    return -(-shape[1] // params.group_size)


def specs(params: Params, shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    rows, count = -(-shape[0] // ROW_MULTIPLE) * ROW_MULTIPLE, groups(params, shape)
    stored: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "words": ((rows, count * params.group_size * params.bits // 16), torch.int16),
        "group_bits": ((count,), torch.uint8),
        "lattices": ((count, params.dim, params.dim), torch.float16),
        "scale": ((1,), torch.float32),
    }
    if params.compand:
        stored["curves"] = ((count, 2), torch.float16)
    if params.row_scales:
        stored["row_scales"] = ((rows,), torch.float16)
    return stored


def check(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> None:
    """Check that the widths of the groups are possible ones, and fill the words; ValueError."""
    group_bits = tensors["group_bits"]
    checks.within("group_bits", group_bits, params.bits - 1, params.bits + 1)
    if (total := int(group_bits.sum())) != params.bits * len(group_bits):
        raise ValueError(f"group_bits sum to {total}, expected {params.bits} for each of {len(group_bits)} groups")


def pack(codes: Tensor, side: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> dict[str, Tensor]:
    """codes [out, padded in] uint8, and the other stored tensors, `row_scales` without padding -> stored tensors."""
    missing = -shape[0] % ROW_MULTIPLE
    padded = torch.nn.functional.pad(codes, (0, 0, 0, missing))
    words, size = [], params.group_size
    for index, bits in enumerate(side["group_bits"].tolist()):
        low, part = bits, padded[:, index * size : (index + 1) * size]
        for width in PLANES[bits]:
            low -= width
            words.append(pack_planar(part >> low & (1 << width) - 1, width, size // FIELDS[width]).flatten(1))
    tensors = {"words": torch.cat(words, 1), **side}
    if params.row_scales:
        tensors["row_scales"] = torch.nn.functional.pad(side["row_scales"], (0, missing))
    return tensors


def unpack(tensors: Mapping[str, Tensor], params: Params, rows: slice) -> Iterator[Tensor]:
    """The codes of each group, [rows, group_size] uint8."""
    start, size = 0, params.group_size
    for bits in tensors["group_bits"].tolist():
        codes = None
        for width in PLANES[bits]:
            words = tensors["words"][rows, start : start + width * size // 16]
            words = words.reshape(len(words), 3, -1) if width == 3 else words
            plane = unpack_planar(words, width, size // FIELDS[width])
            codes = plane if codes is None else codes << width | plane
            start += width * size // 16
        assert codes is not None
        yield codes


def decode(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return the dequantized weight [out, in]; computed in float32, rounded once to `dtype`."""
    out_features, in_features = shape
    weight = torch.empty(out_features, in_features, dtype=dtype, device=tensors["words"].device)
    size, all_bits = params.group_size, tensors["group_bits"].tolist()
    step = max(1, DECODE_CHUNK // size)
    for first in range(0, out_features, step):
        rows = slice(first, min(first + step, out_features))
        factors = row_factors(tensors["scale"], tensors.get("row_scales"), rows)
        for index, codes in enumerate(unpack(tensors, params, rows)):
            z = centre(codes, all_bits[index]).view(len(codes), -1, params.dim)  # row, block, d
            curve = tensors["curves"][index] if params.compand else None
            y = _product(z, tensors["lattices"][index].float())
            values = (y if curve is None else expand(y, curve[0].float(), curve[1].float())).flatten(1) * factors
            weight[rows, index * size : (index + 1) * size] = values[:, : in_features - index * size]
    return weight


def cut(
    tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], rows: range, columns: range
) -> tuple[Params, dict[str, Tensor]]:
    """Return some rows and columns of a weight; compress/formats/__init__.py has the contract."""
    size = params.group_size
    if columns.start % size or (columns.stop % size and columns.stop != shape[1]):
        raise ValueError(f"columns {columns.start} to {columns.stop} are not whole groups of {size}")
    kept = slice(columns.start // size, -(-columns.stop // size))
    side = {name: tensors[name][kept].contiguous() for name in ("group_bits", "lattices", "curves") if name in tensors}
    try:
        check(side, params, (len(rows), len(columns)))
    except ValueError as error:
        raise ValueError(f"columns {columns.start} to {columns.stop}: {error}") from error
    if params.row_scales:
        side["row_scales"] = tensors["row_scales"][rows.start : rows.stop]
    codes = torch.cat(list(unpack(tensors, params, slice(rows.start, rows.stop)))[kept], 1)
    return params, pack(codes, {**side, "scale": tensors["scale"]}, params, (len(rows), len(columns)))


def centre(codes: Tensor, bits: int) -> Tensor:
    """Lattice coordinates of codes: float32, odd multiples of 1/2."""
    return codes.float() - (2**bits - 1) / 2


def point(z: Tensor, lattice: Tensor, curve: Tensor | None) -> Tensor:
    """Values [..., d] float32 of coordinates [..., d], before the scales."""
    y = z @ lattice.float().T
    return y if curve is None else expand(y, curve[0].float(), curve[1].float())


def _product(z: Tensor, lattice: Tensor) -> Tensor:
    """z @ lattice.T, the terms summed in order: each is exact, so that every machine finds the same sums."""
    total = z[..., :1] * lattice[:, 0]
    for k in range(1, lattice.shape[1]):
        total = total + z[..., k : k + 1] * lattice[:, k]
    return total


def expand(y: Tensor, mu: Tensor, limit: Tensor) -> Tensor:
    """The mu-law curve; `limit` is the value at y = 1."""
    return torch.copysign(torch.expm1(y.abs() * torch.log1p(mu)) * (limit / mu), y)


def row_factors(scale: Tensor, row_scales: Tensor | None, rows: slice = slice(None)) -> Tensor:
    """The scale of each row: [1] or, with row scales, [rows, 1]."""
    return scale if row_scales is None else scale * row_scales[rows].float()[:, None]
