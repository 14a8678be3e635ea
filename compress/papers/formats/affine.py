"""Uniform integers with a scale and a minimum for each group of columns of each row, both floating-point numbers.

    w[i, j] = (scale[i, g(j)] * code[i, j] + minimum[i, g(j)]) * column_scale[j]

A zero point z of any value is the minimum -scale * z: it need not be an integer, as that of the format `int` must. The
scales of columns are there only if `column_scales` says so.

Stored tensors (G groups of a row, columns padded to whole tiles):
- `words<w>` int16, the planes of compress/numerics/packing.py;
- `scales`, `minima` [out, G] of scale_dtype;
- `column_scales` float16 [in].
bits per weight = bits + 32 / group_size, and 16 / out_features for scales of columns. Rows can be cut anywhere, columns
at groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.numerics.packing import pack_planes, plane_fields, planes_shape, unpack_planes

TILE_WORDS = (64, 32, 16, 8, 4)
CHUNK = 1 << 22  # weights decoded at a time


@dataclass(frozen=True)
class Params:
    bits: int  # [bits] of one code: 2 to 8
    group_size: int  # [columns] that share a scale and a minimum; -1: the whole row
    tile_words: int  # [words] of a tile along the columns, from `tile_words()`
    scale_dtype: str = "float16"  # of scales and minima
    column_scales: bool = False  # each column has a factor

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"bits {self.bits} is not one of 2..8")
        if self.group_size != -1 and self.group_size < 1:
            raise ValueError(f"group_size {self.group_size} is neither positive nor -1 (the whole row)")
        if self.tile_words not in TILE_WORDS:
            raise ValueError(f"tile_words {self.tile_words} is not one of {TILE_WORDS}")
        if self.scale_dtype not in ("float16", "bfloat16"):
            raise ValueError(f"scale_dtype {self.scale_dtype!r} is not float16 or bfloat16")

    def group(self, in_features: int) -> int:
        """Columns of a group, the whole row if group_size is -1."""
        return in_features if self.group_size == -1 else self.group_size

    def groups(self, in_features: int) -> int:
        """Groups of a row; the last may be shorter."""
        return -(-in_features // self.group(in_features))


def tile_words(bits: int, in_features: int) -> int:
    """The widest of the tiles that pad least."""
    return min(TILE_WORDS, key=lambda words: (-(-in_features // (words * plane_fields(bits))) * words, -words))


def padded_columns(params: Params, columns: int) -> int:
    """Columns that are stored."""
    tile = params.tile_words * plane_fields(params.bits)
    return -(-columns // tile) * tile


def specs(params: Params, shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    words = planes_shape(shape[0], padded_columns(params, shape[1]), params.bits)
    stored: dict[str, tuple[tuple[int, ...], torch.dtype]] = {name: (size, torch.int16) for name, size in words.items()}
    for name in ("scales", "minima"):
        stored[name] = ((shape[0], params.groups(shape[1])), getattr(torch, params.scale_dtype))
    if params.column_scales:
        stored["column_scales"] = ((shape[1],), torch.float16)
    return stored


def pack(
    codes: Tensor, scales: Tensor, minima: Tensor, params: Params, column_scales: Tensor | None = None
) -> dict[str, Tensor]:
    """codes [out, in] of any integer type, scales and minima [out, G], column_scales [in] -> stored tensors.

    Floating-point numbers must already be values of the types that are stored: codes belong to these.
    """
    padded = torch.nn.functional.pad(codes, (0, padded_columns(params, codes.shape[1]) - codes.shape[1]))
    tensors = pack_planes(padded.int(), params.bits, params.tile_words)
    given = {"scales": scales, "minima": minima, "column_scales": column_scales}
    for name, (_, dtype) in specs(params, (codes.shape[0], codes.shape[1])).items():
        if name in given:
            values = given[name]
            assert values is not None
            tensors[name] = values.to(dtype).contiguous()
            assert torch.equal(tensors[name].to(values.dtype), values), f"{name} were not rounded to what is stored"
    return tensors


def unpack_codes(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> Tensor:
    """Codes [out, in] int32."""
    return _codes(tensors, params, slice(0, shape[0]))[:, : shape[1]]


def decode(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The weight [out, in]; computed in float32, rounded once to `dtype`."""
    scales, minima = tensors["scales"].float(), tensors["minima"].float()
    owner = torch.arange(shape[1], device=scales.device) // params.group(shape[1])
    out = torch.empty(shape, dtype=dtype, device=scales.device)
    step = max(1, CHUNK // shape[1])
    for start in range(0, shape[0], step):
        rows = slice(start, min(start + step, shape[0]))
        values = _codes(tensors, params, rows)[:, : shape[1]].float()
        values = values * scales[rows][:, owner] + minima[rows][:, owner]  # the product is exact
        out[rows] = values * tensors["column_scales"].float() if params.column_scales else values
    return out


def cut(
    tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], rows: range, columns: range
) -> tuple[Params, dict[str, Tensor]]:
    """Return some rows and columns of a weight, packed anew; compress/formats/__init__.py has the contract."""
    size = params.group(shape[1])
    if params.group_size != -1 and columns.start % size:
        raise ValueError(f"column {columns.start} lies within a group of {size} columns")
    part, groups = slice(rows.start, rows.stop), slice(columns.start // size, -(-columns.stop // size))
    chosen = replace(params, tile_words=tile_words(params.bits, len(columns)))
    codes = _codes(tensors, params, part)[:, columns.start : columns.stop]
    sides = tensors["column_scales"][columns.start : columns.stop] if params.column_scales else None
    return chosen, pack(codes, tensors["scales"][part, groups], tensors["minima"][part, groups], chosen, sides)


def _codes(tensors: Mapping[str, Tensor], params: Params, rows: slice) -> Tensor:
    """Return the codes [rows, padded columns] int32 of some rows."""
    words = {name: tensor[rows] for name, tensor in tensors.items() if name.startswith("words")}
    return unpack_planes(words, params.bits, params.tile_words)
