"""Store the weights that a mask keeps, and the mask: every row keeps `keep` of each `of` consecutive columns.

    w[i, j] = values[i, n]     where the mask keeps column j of row i, as the n-th that it keeps there; 0 elsewhere

values [out_features, columns / of * keep] is stored by an inner format under the names of its own: `int`, codes of 2 to
8 bits whose groups count kept weights, or `dense`, 16 bits. All sizes follow from the shape of the weight. Columns are
padded to a multiple of `of`; of a row's last columns padding is kept only where there are fewer than `keep` others.
An entry of the mask stands for `block_rows` x `block_columns` weights; rows are padded to a multiple too.

Stored tensors beside those of the inner format:
- `mask` uint8 [out / block_rows, ...], a little-endian bit stream for each row of entries, padded with zeros to bytes.
  2:4 without blocks has 3 bits for each four columns, the place of what they keep in `PATTERNS`; a row is padded to 32
  columns, 12 bytes for 128. All others have one bit for each entry, 1 where it is kept.
Rows can be cut anywhere, columns at multiples of `of` where the inner format can be cut.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress import formats
from compress.numerics.packing import pack_stream, unpack_stream

PATTERNS = tuple(itertools.combinations(range(4), 2))  # the columns that are kept, by the code of a pattern
CHUNK = 1 << 22  # weights decoded or checked at a time


@dataclass(frozen=True)
class Params:
    keep: int  # [columns] of each `of` that a row keeps
    of: int  # [columns] that a pattern spans
    inner: str  # format of what is kept: int or dense
    block_rows: int = 1  # [rows] that an entry of the mask stands for
    block_columns: int = 1  # [columns] that an entry of the mask stands for
    dtype: str = "bfloat16"  # of kept weights, inner dense
    bits: int = 4  # [bits] of one code, inner int, as are those below
    group_size: int = -1  # [kept weights] of a row that share a scale; -1: all of them
    symmetric: bool = True  # no zero points are stored
    tile_words: int = 16  # [words] of a tile along the kept weights of a row
    scale_dtype: str = "float16"  # of the scales
    narrow_tail: bool = False  # kept weights behind the last whole tile are padded to a multiple of 32 only

    def __post_init__(self) -> None:
        if self.of < 2:
            raise ValueError(f"of {self.of} is less than 2")
        if not 0 < self.keep < self.of:
            raise ValueError(f"keep {self.keep} is not between 1 and {self.of - 1}")
        if self.block_rows < 1:
            raise ValueError(f"block_rows {self.block_rows} is not positive")
        if self.block_columns < 1 or self.keep % self.block_columns or self.of % self.block_columns:
            raise ValueError(f"block_columns {self.block_columns} does not divide {self.keep} and {self.of}")
        if self.inner not in ("int", "dense"):
            raise ValueError(f"inner {self.inner!r} is not int or dense")
        _ = self.inner_params

    @property
    def inner_params(self) -> Any:
        """`Params` of the inner format, for what is kept."""
        cls = formats.get(self.inner).Params
        return cls(**{field.name: getattr(self, field.name) for field in dataclasses.fields(cls)})

    @property
    def has_patterns(self) -> bool:
        """Whether the mask is stored in 3 bits for each four columns."""
        return (self.keep, self.of, self.block_rows, self.block_columns) == (2, 4, 1, 1)

    def kept_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns of what is kept of a weight [out, in]."""
        return shape[0], -(-shape[1] // self.of) * self.keep

    def mask_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and bytes of a row of the stored mask of a weight [out, in]."""
        rows, groups = -(-shape[0] // self.block_rows), -(-shape[1] // self.of)
        return rows, -(-groups // 8) * 3 if self.has_patterns else -(-groups * self.of // self.block_columns // 8)


def params_for(keep: int, of: int, inner: str, kept: Any, block_rows: int = 1, block_columns: int = 1) -> Params:
    """Return the parameters around those of the inner format."""
    return Params(keep, of, inner, block_rows, block_columns, **dataclasses.asdict(kept))


def specs(params: Params, shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {
        "mask": (params.mask_shape(shape), torch.uint8),
        **formats.get(params.inner).specs(params.inner_params, params.kept_shape(shape)),
    }


def pack(mask: Tensor, kept: Mapping[str, Tensor], params: Params) -> dict[str, Tensor]:
    """mask [out, padded columns] bool, and the tensors of what it keeps in the inner format -> stored tensors."""
    entries = mask[:: params.block_rows, :: params.block_columns]
    if params.has_patterns:
        groups = entries.unflatten(1, (-1, 4)).byte()
        weights = torch.tensor([2**j for j in range(4)], dtype=torch.uint8, device=mask.device)
        by_bits = torch.zeros(16, dtype=torch.uint8, device=mask.device)
        for code, columns in enumerate(PATTERNS):
            by_bits[sum(2**j for j in columns)] = code
        codes = by_bits[(groups * weights).sum(-1)]
        stream = pack_stream(torch.nn.functional.pad(codes, (0, -codes.shape[1] % 8)), 3)
    else:
        stream = pack_stream(torch.nn.functional.pad(entries.byte(), (0, -entries.shape[1] % 8)), 1)
    return {"mask": stream, **kept}


def decode_mask(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], rows: slice) -> Tensor:
    """Return what the mask keeps of some rows of a weight [out, in]: bool [rows, padded columns]."""
    start, stop, _ = rows.indices(shape[0])
    first = start // params.block_rows
    stream = tensors["mask"][first : -(-stop // params.block_rows)]
    groups = -(-shape[1] // params.of)
    if params.has_patterns:
        kept = torch.zeros(8, 4, dtype=torch.bool, device=stream.device)
        for code, columns in enumerate(PATTERNS):
            kept[code, list(columns)] = True
        return kept[unpack_stream(stream, 3)[:, :groups].long()].flatten(1)
    entries = unpack_stream(stream, 1)[:, : groups * params.of // params.block_columns].bool()
    mask = entries.repeat_interleave(params.block_rows, 0).repeat_interleave(params.block_columns, 1)
    return mask[start - first * params.block_rows :][: stop - start]


def decode(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in]; what is kept is computed in float32 and rounded once to `dtype`."""
    kept = formats.get(params.inner).decode(tensors, params.inner_params, params.kept_shape(shape), dtype)
    weight = torch.empty(shape, dtype=dtype, device=kept.device)
    for rows in _parts(shape):
        mask = decode_mask(tensors, params, shape, rows)
        weight[rows] = torch.zeros(mask.shape, dtype=dtype, device=kept.device).masked_scatter_(mask, kept[rows])[
            :, : shape[1]
        ]
    return weight


def check(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> None:
    """Check that every row keeps `keep` of each `of` columns, and that nothing is said beyond them; ValueError."""
    stored, of = tensors["mask"], params.of // params.block_columns
    groups = -(-shape[1] // params.of)
    width, entries = (3, groups) if params.has_patterns else (1, groups * of)
    for rows in _parts((stored.shape[0], params.of * groups)):
        codes = unpack_stream(stored[rows], width)
        if bool(codes[:, entries:].any()):
            raise ValueError(f"mask has bits behind the {shape[1]} columns of the weight")
        if params.has_patterns and int(codes.amax()) >= len(PATTERNS):
            raise ValueError(f"mask has pattern {int(codes.amax())}, expected 0 to {len(PATTERNS) - 1}")
        counts = codes[:, :entries].unflatten(1, (groups, of)).sum(-1) if not params.has_patterns else None
        if counts is not None and bool((counts * params.block_columns != params.keep).any()):
            wrong = int(counts[counts * params.block_columns != params.keep][0]) * params.block_columns
            raise ValueError(f"mask keeps {wrong} of {params.of} columns, expected {params.keep}")


def cut(
    tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], rows: range, columns: range
) -> tuple[Params, dict[str, Tensor]]:
    """Return some rows and columns of a weight; compress/formats/__init__.py has the contract.

    Where the rows do not begin with a block, blocks have fewer rows.
    """
    if columns.start % params.of or (columns.stop % params.of and columns.stop != shape[1]):
        raise ValueError(f"columns {columns.start} to {columns.stop} are not whole patterns of {params.of} columns")
    part = range(columns.start // params.of * params.keep, -(-columns.stop // params.of) * params.keep)
    inner: Any = formats.get(params.inner)
    chosen, kept = inner.cut(tensors, params.inner_params, params.kept_shape(shape), rows, part)
    high = math.gcd(params.block_rows, rows.start)
    cut_params = params_for(params.keep, params.of, params.inner, chosen, high, params.block_columns)
    mask = decode_mask(tensors, params, shape, slice(rows.start, rows.stop))
    padded = -(-columns.stop // params.of) * params.of
    return cut_params, pack(mask[:, columns.start : padded], kept, cut_params)


def _parts(shape: tuple[int, int]) -> Iterator[slice]:
    """Yield the rows of a weight [out, in] that are decoded at a time."""
    step = max(1, CHUNK // max(1, shape[1]))
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))
