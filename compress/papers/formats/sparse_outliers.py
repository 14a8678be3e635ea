"""Integers in small groups whose scales and zero points are integers too, and single weights added to them (SpQR).

    w[i, j] = scale[i, g(j)] * (code[i, j] - zero[i, g(j)]) + outlier[i, j]
    scale[i, g] = scale_low[b(i), g] + scale_step[b(i), g] * scale_code[i, g], and so zero

b(i) is the block of `block_rows` rows that a row lies in. Outliers are a sparse matrix in compressed rows, of as many
numbers as `outliers` says (SpQR, arXiv 2306.03078).

Stored tensors (G groups of a row, B blocks of rows, columns padded to whole tiles):
- `words<w>` int16, the planes of compress/numerics/packing.py;
- `scale_codes`, `zero_codes` uint8 [B, G * block_rows * code_bits / 8], little-endian bit streams of [G, block_rows];
- `scale_grid`, `zero_grid` float16 [B, G, 2]: low end and step;
- `row_starts` int32 [out + 1], `outlier_columns` int16 and `outlier_values` float16 [outliers]: those of row i are
  from row_starts[i] to row_starts[i + 1], columns ascending.
bits per weight = bits + 2 code_bits / group_size + 64 / (group_size block_rows) + 32 times the share of outliers,
about. Rows can be cut at blocks, columns at groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.numerics.packing import pack_planes, pack_stream, plane_fields, planes_shape, unpack_planes, unpack_stream

TILE_WORDS = (64, 32, 16, 8, 4)
MOST_COLUMNS = 1 << 15  # int16
GRIDS = ("scale", "zero")


@dataclass(frozen=True)
class Params:
    bits: int  # [bits] of one code: 2 to 8
    group_size: int  # [columns] that share a scale and a zero point; the last group of a row may be shorter
    tile_words: int  # [words] of a tile along the columns, from `tile_words()`
    outliers: int = 0  # single weights with a float16 number of their own
    code_bits: int = 3  # [bits] of a scale, and of a zero point: 1 to 8
    block_rows: int = 16  # [rows] whose scales share a low end and a step: a multiple of 8

    def __post_init__(self) -> None:
        if not (2 <= self.bits <= 8 and 1 <= self.code_bits <= 8):
            raise ValueError(f"bits {self.bits} must be 2 to 8, and code_bits {self.code_bits} 1 to 8")
        if self.group_size < 1:
            raise ValueError(f"group_size {self.group_size} is not positive")
        if self.block_rows < 8 or self.block_rows % 8:
            raise ValueError(f"block_rows {self.block_rows} is not a positive multiple of 8")
        if self.tile_words not in TILE_WORDS:
            raise ValueError(f"tile_words {self.tile_words} is not one of {TILE_WORDS}")
        if self.outliers < 0:
            raise ValueError(f"outliers {self.outliers} is negative")

    def counts(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the blocks of rows, and the groups of a row."""
        return -(-shape[0] // self.block_rows), -(-shape[1] // self.group_size)


def tile_words(bits: int, in_features: int) -> int:
    """The widest of the tiles that pad least."""
    return min(TILE_WORDS, key=lambda words: (-(-in_features // (words * plane_fields(bits))) * words, -words))


def specs(params: Params, shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    if shape[1] > MOST_COLUMNS:
        raise ValueError(f"{shape[1]} columns are more than {MOST_COLUMNS}, which int16 counts")
    if params.outliers > shape[0] * shape[1]:
        raise ValueError(f"outliers {params.outliers} are more than there are weights")
    blocks, groups = params.counts(shape)
    words = planes_shape(shape[0], _padded_columns(params, shape[1]), params.bits)
    stored: dict[str, tuple[tuple[int, ...], torch.dtype]] = {name: (size, torch.int16) for name, size in words.items()}
    for name in GRIDS:
        stored[f"{name}_codes"] = ((blocks, groups * params.block_rows * params.code_bits // 8), torch.uint8)
        stored[f"{name}_grid"] = ((blocks, groups, 2), torch.float16)
    if params.outliers:
        stored["row_starts"] = ((shape[0] + 1,), torch.int32)
        stored["outlier_columns"] = ((params.outliers,), torch.int16)
        stored["outlier_values"] = ((params.outliers,), torch.float16)
    return stored


def check(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> None:
    """Check that outliers are different columns of each row, in order; ValueError."""
    if not params.outliers:
        return
    starts, columns = tensors["row_starts"].long(), tensors["outlier_columns"].long()
    if starts[0] != 0 or starts[-1] != params.outliers or bool((starts.diff() < 0).any()):
        raise ValueError(f"row_starts do not rise from 0 to {params.outliers}")
    places = _rows_of_outliers(starts) * shape[1] + columns
    if bool((columns < 0).any()) or bool((columns >= shape[1]).any()) or bool((places.diff() <= 0).any()):
        raise ValueError(f"outlier_columns are not different ones of {shape[1]} in each row, ascending")


def pack_grid(values: Tensor, params: Params) -> dict[str, Tensor]:
    """Round scales, or zero points, [out, G] float32 to the nearest that can be stored: `codes` and `grid`."""
    padding = -values.shape[0] % params.block_rows
    last = values[-1:].expand(padding, -1)
    blocks = torch.cat((values, last)).view(-1, params.block_rows, values.shape[1]).transpose(1, 2)  # block, group, row
    low, high = blocks.aminmax(dim=2)
    top = 2**params.code_bits - 1
    limit = torch.finfo(torch.float16).max
    grid = torch.stack((low, (high - low) / top), 2).clamp(-limit, limit).half()
    step = torch.where(grid[..., 1:] == 0, 1.0, grid[..., 1:].float())
    codes = ((blocks - grid[..., :1].float()) / step).round_().clamp_(0, top)
    return {"codes": pack_stream(codes.to(torch.uint8).flatten(1), params.code_bits), "grid": grid}


def unpack_grid(stored: Mapping[str, Tensor], params: Params, rows: int) -> Tensor:
    """Return scales, or zero points, [rows, G] float32 as they are stored."""
    grid = stored["grid"].float()
    codes = unpack_stream(stored["codes"], params.code_bits).view(len(grid), -1, params.block_rows).float()
    values = codes * grid[..., 1:] + grid[..., :1]  # block, group, row
    return values.transpose(1, 2).flatten(0, 1)[:rows]


def pack(
    codes: Tensor, grids: Mapping[str, Mapping[str, Tensor]], mask: Tensor, values: Tensor, params: Params
) -> dict[str, Tensor]:
    """Return stored tensors: codes [out, in], `scale` and `zero` of `pack_grid`, where outliers are, and all values.

    mask [out, in] bool with `outliers` true; values [out, in] float16: what is added there.
    """
    padded = torch.nn.functional.pad(codes, (0, _padded_columns(params, codes.shape[1]) - codes.shape[1]))
    tensors = pack_planes(padded.int(), params.bits, params.tile_words)
    for name in GRIDS:
        tensors |= {f"{name}_{part}": tensor.contiguous() for part, tensor in grids[name].items()}
    if params.outliers:
        assert int(mask.sum()) == params.outliers
        starts = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
        tensors["row_starts"] = starts.to(torch.int32)
        tensors["outlier_columns"] = mask.nonzero()[:, 1].to(torch.int16)
        tensors["outlier_values"] = values[mask].half()
    return tensors


def decode(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The weight [out, in]; computed in float32, rounded once to `dtype`."""
    scales, zeros = (_numbers(tensors, name, params, shape[0]) for name in GRIDS)
    owner = torch.arange(shape[1], device=scales.device) // params.group_size
    values = (_codes(tensors, params, slice(0, shape[0]))[:, : shape[1]].float() - zeros[:, owner]) * scales[:, owner]
    if params.outliers:
        rows = _rows_of_outliers(tensors["row_starts"].long())
        place = rows, tensors["outlier_columns"].long()
        values = values.index_put(place, tensors["outlier_values"].float(), accumulate=True)
    return values.to(dtype)


def cut(
    tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], rows: range, columns: range
) -> tuple[Params, dict[str, Tensor]]:
    """Return some rows and columns of a weight, packed anew; compress/formats/__init__.py has the contract."""
    if columns.start % params.group_size:
        raise ValueError(f"column {columns.start} lies within a group of {params.group_size} columns")
    if rows.start % params.block_rows:
        raise ValueError(f"row {rows.start} lies within a block of {params.block_rows} rows")
    part, across = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
    blocks = slice(rows.start // params.block_rows, -(-rows.stop // params.block_rows))
    groups = slice(columns.start // params.group_size, -(-columns.stop // params.group_size))
    grids = {}
    for name in GRIDS:
        codes = unpack_stream(tensors[f"{name}_codes"], params.code_bits)
        codes = codes.view(len(codes), -1, params.block_rows)[blocks, groups]
        stream = pack_stream(codes.flatten(1), params.code_bits)
        grids[name] = {"codes": stream, "grid": tensors[f"{name}_grid"][blocks, groups]}
    mask = torch.zeros(shape, dtype=torch.bool, device=tensors["scale_grid"].device)
    values = torch.zeros(shape, dtype=torch.float16, device=mask.device)
    if params.outliers:
        place = _rows_of_outliers(tensors["row_starts"].long()), tensors["outlier_columns"].long()
        mask[place], values[place] = True, tensors["outlier_values"]
    mask, values = mask[part, across], values[part, across]
    count = int(mask.sum())
    chosen = replace(params, outliers=count, tile_words=tile_words(params.bits, len(columns)))
    return chosen, pack(_codes(tensors, params, part)[:, across], grids, mask, values, chosen)


def _numbers(tensors: Mapping[str, Tensor], name: str, params: Params, rows: int) -> Tensor:
    return unpack_grid({"codes": tensors[f"{name}_codes"], "grid": tensors[f"{name}_grid"]}, params, rows)


def _rows_of_outliers(starts: Tensor) -> Tensor:
    """Return the row [outliers] of each outlier, of starts [out + 1]."""
    rows = torch.arange(len(starts) - 1, device=starts.device)
    return rows.repeat_interleave(starts.diff())


def _codes(tensors: Mapping[str, Tensor], params: Params, rows: slice) -> Tensor:
    """Return the codes [rows, padded columns] int32 of some rows."""
    words = {name: tensor[rows] for name, tensor in tensors.items() if name.startswith("words")}
    return unpack_planes(words, params.bits, params.tile_words)


def _padded_columns(params: Params, columns: int) -> int:
    tile = params.tile_words * plane_fields(params.bits)
    return -(-columns // tile) * tile
