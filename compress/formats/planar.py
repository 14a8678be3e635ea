"""Lay out codes of uniform integers in planes of bits, with scales and zero points: what `int` and `sliced` share.

compress/formats/int.py says what is stored, and in which order; compress/formats/sliced.py stores some of the planes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeVar

import torch
from torch import Tensor

from compress.numerics.packing import (
    FIELDS,
    pack_planar,
    pack_stream,
    planar_shape,
    plane_widths,
    unpack_planar,
    unpack_stream,
)

PLANES = {bits: plane_widths(bits) for bits in range(2, 9)}  # widths, high bits first
ROW_MULTIPLE = 16
TILE_WORDS = (128, 64, 32, 16)
TILE_COLUMNS = 512
NARROW = 32  # columns of a tile of the tail
LEAST_GROUP = 16  # columns that share a scale in a weight that was cut within a group
DECODE_CHUNK = 1 << 22  # weights decoded at a time: bounds the float32 temporaries to a few tens of MB

Z = TypeVar("Z", float, Tensor)  # a zero point, or those of many groups


@dataclass(frozen=True)
class PlanarParams:
    bits: int  # [bits] of one code: 2 to 8
    group_size: int  # [columns] that share a scale; -1: the whole row
    symmetric: bool  # no zero points are stored: the middle code stands for 0
    tile_words: int  # [words] of a tile along K, from `params_for`
    scale_dtype: str = "float16"  # of the scales
    narrow_tail: bool = False  # columns behind the last whole tile are padded to a multiple of 32 only

    def __post_init__(self) -> None:
        if self.bits not in PLANES:
            raise ValueError(f"bits {self.bits} is not one of {sorted(PLANES)}")
        if self.group_size != -1 and self.group_size < 1:
            raise ValueError(f"group_size {self.group_size} is neither positive nor -1 (the whole row)")
        if self.tile_words not in TILE_WORDS:
            raise ValueError(f"tile_words {self.tile_words} is not one of {TILE_WORDS}")
        if self.scale_dtype not in ("float16", "bfloat16"):
            raise ValueError(f"scale_dtype {self.scale_dtype!r} is not float16 or bfloat16")
        if self.narrow_tail and self.group_size != -1 and self.group_size % NARROW:
            raise ValueError(f"group_size {self.group_size} with a narrow tail is not a multiple of {NARROW}")

    @property
    def planes(self) -> dict[str, int]:
        """Names and widths of the stored planes of codes, high bits first."""
        return {f"words{width}": width for width in PLANES[self.bits]}

    @property
    def low_bits(self) -> int:
        """Bits of a code below all that is stored of it (compress/formats/sliced.py)."""
        return 0

    @property
    def tile_columns(self) -> int:
        """Columns of a whole tile."""
        return self.tile_words * max(FIELDS[width] for width in self.planes.values())

    @property
    def zero(self) -> float:
        """What stands for 0 in stored codes where no zero points are stored."""
        return self.prefix_zero(2 ** (self.bits - 1))

    def prefix_zero(self, zero: Z) -> Z:
        """Return what stands for 0 in the stored bits of codes that have this zero point, their cells' middle."""
        return (zero - (2**self.low_bits - 1) / 2) / 2**self.low_bits if self.low_bits else zero

    def for_rows(self, group_size: int, in_features: int) -> Self:
        """Return the parameters of such codes for rows of another length, with groups of another size.

        The tile is that which pads a row least. Of those one within a group, so that a field meets one scale; of those
        one of at most TILE_COLUMNS, whose fields a GPU kernel keeps in registers; of those the widest. Where all pad
        more than to a multiple of 32, the tail of the row is narrow, if groups allow it; then the tile that leaves the
        shortest tail.
        """

        def cost(tiling: Self) -> tuple[int, int, bool, bool, int]:
            stored = padded_shape(tiling, (ROW_MULTIPLE, in_features))[1]
            split = group_size != -1 and group_size % tiling.tile_words != 0
            _, tail = tiling.split(in_features)
            return stored, tail, split, tiling.tile_columns > TILE_COLUMNS, -tiling.tile_words

        tails = (False, True) if group_size == -1 or group_size % NARROW == 0 else (False,)
        tilings = (
            replace(self, group_size=group_size, tile_words=words, narrow_tail=tail)
            for tail in tails
            for words in TILE_WORDS
        )
        return min(tilings, key=cost)

    def split(self, in_features: int) -> tuple[int, int]:
        """Return the number of whole tiles of a row, and of tiles of 32 columns behind them."""
        if not self.narrow_tail:
            return -(-in_features // self.tile_columns), 0
        whole, rest = divmod(_round_up(in_features, NARROW), self.tile_columns)
        return whole, rest // NARROW

    def group(self, in_features: int) -> int:
        """Columns of a group, the whole row if group_size is -1."""
        return in_features if self.group_size == -1 else self.group_size


P = TypeVar("P", bound=PlanarParams)


def groups(params: PlanarParams, shape: tuple[int, int]) -> int:
    """Return the number of scale groups of a row, those of padded columns included."""
    _, columns = padded_shape(params, shape)
    return 1 if params.group_size == -1 else -(-columns // params.group_size)


def padded_shape(params: PlanarParams, shape: tuple[int, int]) -> tuple[int, int]:
    """Return the rows and columns that are stored."""
    whole, narrow = params.split(shape[1])
    return _round_up(shape[0], ROW_MULTIPLE), whole * params.tile_columns + narrow * NARROW


def specs(params: PlanarParams, shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    rows, columns = padded_shape(params, shape)
    stored: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        name: (planar_shape(rows, columns, width), torch.int16) for name, width in params.planes.items()
    }
    count = groups(params, shape)
    stored["scales"] = ((count, rows), getattr(torch, params.scale_dtype))
    if not params.symmetric:
        stored["zeros"] = ((count, rows * params.bits // 8), torch.uint8)
    return stored


def pack(codes: Tensor, scales: Tensor, zeros: Tensor | None, params: PlanarParams) -> dict[str, Tensor]:
    """codes [out, in] uint8, scales [out, groups], zeros [out, groups] uint8 (None if symmetric) -> stored tensors.

    Scales must already be representable in `scale_dtype`: codes that were chosen for other scales would be wrong.
    """
    shape = (codes.shape[0], codes.shape[1])
    rows, columns = padded_shape(params, shape)
    count = groups(params, shape)
    padded = torch.nn.functional.pad(codes, (0, columns - shape[1], 0, rows - shape[0]))
    tensors = _pack_codes(padded, params)
    stored_scales = scales.to(getattr(torch, params.scale_dtype))
    assert torch.equal(stored_scales.to(scales.dtype), scales), "scales were not rounded to their storage type"
    tensors["scales"] = _pad_groups(stored_scales, rows, count)
    if not params.symmetric:
        assert zeros is not None
        tensors["zeros"] = pack_stream(_pad_groups(zeros, rows, count), params.bits)
    return tensors


def unpack(
    tensors: Mapping[str, Tensor], params: PlanarParams, shape: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Inverse of `pack` without the padding: codes [out, in] uint8, scales [out, groups], zeros or None."""
    out_features, in_features = shape
    count = 1 if params.group_size == -1 else -(-in_features // params.group_size)
    codes = _codes(tensors, params, slice(None))[:out_features, :in_features]
    scales = tensors["scales"].T[:out_features, :count]
    if params.symmetric:
        return codes, scales, None
    return codes, scales, unpack_stream(tensors["zeros"], params.bits).T[:out_features, :count]


def decode(tensors: Mapping[str, Tensor], params: PlanarParams, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return the dequantized weight [out, in]; computed in float32, rounded once to `dtype`."""
    out_features, in_features = shape
    rows, columns = padded_shape(params, shape)
    group = params.group(columns)
    scales = tensors["scales"].T.float() * 2**params.low_bits  # [N, G]
    if params.symmetric:
        zeros = torch.full_like(scales, params.zero)
    else:
        zeros = params.prefix_zero(unpack_stream(tensors["zeros"], params.bits).T.float())
    weight = torch.empty(out_features, in_features, dtype=dtype, device=scales.device)
    step, whole = max(1, DECODE_CHUNK // columns), in_features - in_features % group
    for start in range(0, out_features, step):
        part = slice(start, min(start + step, out_features))
        codes = _codes(tensors, params, part)[:, :in_features].float()
        for first, last in ((0, whole), (whole, in_features)):  # whole groups, then a shorter last one
            if first < last:
                grouped = codes[:, first:last].unflatten(1, (-1, min(group, last - first)))  # row, group, column
                groups = slice(first // group, first // group + grouped.shape[1])
                grouped.sub_(zeros[part, groups, None]).mul_(scales[part, groups, None])
        weight[part] = codes
    return weight


def _pack_codes(codes: Tensor, params: PlanarParams) -> dict[str, Tensor]:
    """codes [padded rows, padded columns], of the stored bits alone -> the words of all planes."""
    whole = params.split(codes.shape[1])[0] * params.tile_columns
    tensors, low = {}, sum(params.planes.values())
    for name, width in params.planes.items():
        low -= width
        plane = (codes >> low) & ((1 << width) - 1)
        tensors[name] = pack_planar(plane[:, :whole], width, params.tile_words)
        if whole < codes.shape[1]:
            tail = pack_planar(plane[:, whole:], width, NARROW // FIELDS[width])
            tensors[name] = torch.cat([tensors[name], tail], dim=-1)
    return tensors


def decode_rows(
    tensors: Mapping[str, Tensor], params: PlanarParams, shape: tuple[int, int], rows: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return rows [n] int64 of the dequantized weight, [n, in], as `decode` gives them; no other row is decoded."""
    columns = shape[1]
    if not rows.numel():
        return torch.empty(0, columns, dtype=dtype, device=rows.device)
    codes = _codes(tensors, params, rows)[:, :columns].float()
    scales = tensors["scales"].index_select(1, rows).T.float() * 2**params.low_bits  # [n, G]
    zeros = torch.full_like(scales, params.zero)
    if not params.symmetric:
        zeros = params.prefix_zero(_zeros(tensors, params, rows))
    owner = torch.arange(columns, device=codes.device) // params.group(columns)
    return codes.sub_(zeros[:, owner]).mul_(scales[:, owner]).to(dtype)


def join_rows(parts: Sequence[Mapping[str, Tensor]], params: PlanarParams) -> dict[str, Tensor]:
    """Return the tensors of a weight from those of its rows, in order; all parts but the last have 16 n rows."""
    return {
        name: torch.cat([part[name] for part in parts], dim=0 if name.startswith("words") else 1) for name in parts[0]
    }


def group_from(group_size: int, start: int) -> int:
    """Return the columns that share a scale where a weight is cut at the column `start`; ValueError if too few do."""
    group = math.gcd(group_size, start) if start and group_size != -1 else group_size
    if group < min(group_size, LEAST_GROUP):
        raise ValueError(f"column {start} lies within a group of {group_size} columns")
    return group


def cut(
    tensors: Mapping[str, Tensor], params: P, shape: tuple[int, int], rows: range, columns: range
) -> tuple[P, dict[str, Tensor]]:
    """Return some rows and columns of a weight, packed anew; compress/formats/__init__.py has the contract.

    Where the columns do not begin with a group, groups become smaller, down to LEAST_GROUP columns.
    """
    group = group_from(params.group_size, columns.start)
    part = slice(rows.start, rows.stop)
    first = torch.arange(columns.start, columns.stop, len(columns) if group == -1 else group, device="cpu")
    owner = (first // params.group(shape[1])).to(tensors["scales"].device)  # the group of the weight, of each new one
    scales = tensors["scales"].T[part][:, owner]
    zeros = None if params.symmetric else unpack_stream(tensors["zeros"], params.bits).T[part][:, owner]
    codes = _codes(tensors, params, part)[:, columns.start : columns.stop]
    chosen = params.for_rows(group, len(columns))
    return chosen, pack(codes, scales, zeros, chosen)


def _zeros(tensors: Mapping[str, Tensor], params: PlanarParams, rows: Tensor) -> Tensor:
    """Return the zero points [n, G] of rows [n], float32: eight rows share `bits` bytes of the stored stream."""
    stream = tensors["zeros"]
    octets = stream.view(stream.shape[0], -1, params.bits).index_select(1, rows // 8)  # [G, n, bits]
    return unpack_stream(octets, params.bits).take_along_dim((rows % 8)[None, :, None], 2)[..., 0].T.float()


def _codes(tensors: Mapping[str, Tensor], params: PlanarParams, rows: slice | Tensor) -> Tensor:
    """Return the codes [rows, padded columns], uint8, of all planes."""
    codes: Tensor | None = None
    for name, width in params.planes.items():
        plane = _plane(tensors[name][rows], width, params)
        codes = plane if codes is None else codes << width | plane
    assert codes is not None
    return codes


def _plane(words: Tensor, width: int, params: PlanarParams) -> Tensor:
    """Return the codes [rows, padded columns], uint8, of one plane."""
    count = params.split(words.shape[-1] * FIELDS[width])[0] * params.tile_columns // FIELDS[width]
    codes = unpack_planar(words[..., :count], width, params.tile_words)
    if count == words.shape[-1]:
        return codes
    tail = unpack_planar(words[..., count:], width, NARROW // FIELDS[width])
    return torch.cat([codes, tail], dim=1)


def _pad_groups(values: Tensor, rows: int, count: int) -> Tensor:
    """[out, groups] -> [count, rows], zero filled."""
    return torch.nn.functional.pad(values.T, (0, rows - values.shape[0], 0, count - values.shape[1])).contiguous()


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
