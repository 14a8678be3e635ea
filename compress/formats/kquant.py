"""Store integers whose scales, and offsets if any, are integers too: the grids of llama.cpp's K-quants.

    w[i, j] = scale[i, g] * (code[i, j] - ZERO) - minimum[i, g]           g = j // group_size
    scale[i, g] = step[i, s] * (scale_code[i, g] - SCALE_ZERO)            s = j // 256
    minimum[i, g] = minimum_step[i, s] * minimum_code[i, g]

A super-block of 256 columns of a row has one step of 16 bits, and a second one for minima. `LAYOUTS` has what differs
between the types. Those with minima (Q2_K, Q4_K, Q5_K) have unsigned codes and scales, the zeros above are 0. Those
without (Q3_K, Q6_K) have signed ones, half of the range is subtracted. A code of IQ4_XS stands for one of 16 `LEVELS`
in the place of code - ZERO. Both products are exact in float32, and so is
scale * code: a weight with a minimum is rounded once, another never, so that every reader gives the same bits.

Stored tensors (N = out_features padded to a multiple of 16, K = in_features padded to whole super-blocks, G groups and
S super-blocks of a row):
- `words<w>` int16, the planar words of compress/numerics/packing.py, a tile of 256 columns for each super-block;
- `scales` and `minima` uint8 [G, N * scale_bits / 8], little-endian bit streams of codes;
- `steps` and `minimum_steps` float16 [S, N], bfloat16 where they leave the normal range of float16.
Where rows and columns need no padding these are as many bits as the blocks of llama.cpp have. Rows can be cut anywhere
and looked up, columns are cut at super-blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from compress.numerics.packing import pack_planes, pack_stream, plane_fields, planes_shape, unpack_planes, unpack_stream

SUPER_BLOCK = 256  # columns that share a step
ROW_MULTIPLE = 16
CHUNK = 1 << 22  # weights decoded at a time
_SCALES, _MINIMA = ("scales", "steps"), ("minima", "minimum_steps")
_NAMES = (*_SCALES, *_MINIMA)  # the order is that of `Scales`


class Layout(NamedTuple):
    """The numbers of a type of K-quants."""

    bits: int  # of a code
    group_size: int  # [columns] that share a scale
    scale_bits: int  # of a scale, and of a minimum
    has_minima: bool  # codes and scales are unsigned, and a minimum is subtracted; false: both are signed
    levels: tuple[int, ...] = ()  # what codes stand for; () for code - zero

    @property
    def zero(self) -> int:
        """Return what is subtracted from a stored code."""
        return 0 if self.has_minima else 1 << (self.bits - 1)

    def units(self, codes: Tensor) -> Tensor:
        """Return what codes stand for in units of their scales, float32."""
        if self.levels:
            return torch.tensor(self.levels, dtype=torch.float32, device=codes.device)[codes.int()]
        return codes.float().sub_(self.zero)

    @property
    def scale_zero(self) -> int:
        """Return what is subtracted from a stored code of a scale."""
        return 0 if self.has_minima else 1 << (self.scale_bits - 1)

    @property
    def groups(self) -> int:
        """Groups of a super-block."""
        return SUPER_BLOCK // self.group_size

    @property
    def tile_words(self) -> int:
        """Words of a tile of one super-block."""
        return SUPER_BLOCK // plane_fields(self.bits)


LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
LAYOUTS = {
    "q2_k": Layout(2, 16, 4, True),
    "q3_k": Layout(3, 16, 6, False),
    "q4_k": Layout(4, 32, 6, True),
    "q5_k": Layout(5, 32, 6, True),
    "q6_k": Layout(6, 16, 8, False),
    "iq4_xs": Layout(4, 32, 6, False, LEVELS),
}


@dataclass(frozen=True)
class Params:
    type: Literal["q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs"]  # of llama.cpp, whose grid it is
    step_dtype: str = "float16"  # of the steps; llama.cpp has float16 only

    def __post_init__(self) -> None:
        if self.step_dtype not in ("float16", "bfloat16"):
            raise ValueError(f"step_dtype {self.step_dtype!r} is not float16 or bfloat16")

    @property
    def layout(self) -> Layout:
        """Return the numbers of the type."""
        return LAYOUTS[self.type]


class Scales(NamedTuple):
    """Stored scales of a weight; the last two are None for types without minima."""

    codes: Tensor  # uint8 [out, groups]
    steps: Tensor  # 16 bits [out, super-blocks]
    minima: Tensor | None  # uint8 [out, groups]
    minimum_steps: Tensor | None  # 16 bits [out, super-blocks]


def padded_shape(shape: tuple[int, int]) -> tuple[int, int]:
    """Return the rows and columns that are stored."""
    return -(-shape[0] // ROW_MULTIPLE) * ROW_MULTIPLE, -(-shape[1] // SUPER_BLOCK) * SUPER_BLOCK


def specs(params: Params, shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    layout, (rows, columns) = params.layout, padded_shape(shape)
    words = planes_shape(rows, columns, layout.bits)
    stored: dict[str, tuple[tuple[int, ...], torch.dtype]] = {name: (size, torch.int16) for name, size in words.items()}
    for codes, steps in (_SCALES, _MINIMA) if layout.has_minima else (_SCALES,):
        stored[codes] = ((columns // layout.group_size, rows * layout.scale_bits // 8), torch.uint8)
        stored[steps] = ((columns // SUPER_BLOCK, rows), getattr(torch, params.step_dtype))
    return stored


def pack(codes: Tensor, scales: Scales, params: Params) -> dict[str, Tensor]:
    """Return the stored tensors of codes uint8 [out, in] and their scales, groups and super-blocks of whole columns."""
    layout, shape = params.layout, (codes.shape[0], codes.shape[1])
    rows, columns = padded_shape(shape)
    padded = torch.nn.functional.pad(codes, (0, columns - shape[1], 0, rows - shape[0]))
    tensors = pack_planes(padded, layout.bits, layout.tile_words)
    for name, values in zip(_NAMES, scales, strict=True):
        if values is not None:
            across = torch.nn.functional.pad(values.T, (0, rows - shape[0])).contiguous()
            tensors[name] = across if values.is_floating_point() else pack_stream(across, layout.scale_bits)
    return tensors


def unpack(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> tuple[Tensor, Scales]:
    """Return codes uint8 [out, K] and scales of all columns that are stored, the inverse of `pack` for whole rows."""
    layout, rows = params.layout, shape[0]

    def read(name: str) -> Tensor | None:
        stored = tensors.get(name)
        if stored is None:
            return None
        values = stored if stored.is_floating_point() else unpack_stream(stored, layout.scale_bits)
        return values.T[:rows].contiguous()

    return _codes(tensors, layout, slice(rows)), Scales(*(read(name) for name in _NAMES))  # type: ignore[arg-type]


def decode(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return the dequantized weight [out, in]; computed in float32, rounded once to `dtype`."""
    weight = torch.empty(shape, dtype=dtype, device=tensors["steps"].device)
    scale, minimum = _grids(tensors, params.layout)
    step = max(1, CHUNK // padded_shape(shape)[1])
    for start in range(0, shape[0], step):
        part = slice(start, min(start + step, shape[0]))
        codes = _codes(tensors, params.layout, part)
        weight[part] = _values(codes, scale[part], None if minimum is None else minimum[part], params)[:, : shape[1]]
    return weight


def has_rows(params: Params) -> bool:
    """Return whether each row has all that it is made of to itself: always."""
    return True


def decode_rows(
    tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], rows: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return rows [n] int64 of the weight, [n, in]."""
    layout = params.layout
    planes = {name: tensor[rows] for name, tensor in tensors.items() if name.startswith("words")}
    codes = unpack_planes(planes, layout.bits, layout.tile_words).to(torch.uint8)

    def products(codes: str, steps: str, zero: int) -> Tensor:
        stream, first = tensors[codes], rows * layout.scale_bits
        octets = torch.stack([first // 8, (first // 8 + 1).clamp(max=stream.shape[1] - 1)])
        low, high = stream[:, octets.flatten()].int().unflatten(1, (2, -1)).unbind(1)
        integers = ((low | high << 8) >> first % 8) & ((1 << layout.scale_bits) - 1)
        wide = tensors[steps][:, rows].float().repeat_interleave(layout.groups, 0)
        return integers.float().sub_(zero).mul_(wide).T

    scale = products(*_SCALES, layout.scale_zero)
    minimum = products(*_MINIMA, 0) if layout.has_minima else None
    return _values(codes, scale, minimum, params)[:, : shape[1]].to(dtype)


def join_rows(parts: Sequence[Mapping[str, Tensor]], params: Params) -> dict[str, Tensor]:
    """Return the tensors of a weight from those of its rows; all parts but the last are of whole `ROW_MULTIPLE`s."""
    return {name: torch.cat([part[name] for part in parts], int(not name.startswith("words"))) for name in parts[0]}


def cut(
    tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], rows: range, columns: range
) -> tuple[Params, dict[str, Tensor]]:
    """Return some rows and columns of a weight, packed anew; compress/formats/__init__.py has the contract."""
    if columns.start % SUPER_BLOCK:
        raise ValueError(f"column {columns.start} lies within a super-block of {SUPER_BLOCK} columns")
    codes, scales = unpack(tensors, params, shape)
    first, last = columns.start // SUPER_BLOCK, -(-columns.stop // SUPER_BLOCK)
    part, groups = slice(rows.start, rows.stop), params.layout.groups

    def cut_groups(values: Tensor | None) -> Tensor | None:
        each = 1 if values is not None and values.is_floating_point() else groups
        return None if values is None else values[part, first * each : last * each]

    chosen = Scales(*map(cut_groups, scales))  # type: ignore[arg-type]
    return params, pack(codes[part, columns.start : columns.stop], chosen, params)


def _codes(tensors: Mapping[str, Tensor], layout: Layout, rows: slice) -> Tensor:
    """Return the codes of some rows, uint8 [rows, K]."""
    planes = {name: tensor[rows] for name, tensor in tensors.items() if name.startswith("words")}
    return unpack_planes(planes, layout.bits, layout.tile_words).to(torch.uint8)


def _grids(tensors: Mapping[str, Tensor], layout: Layout) -> tuple[Tensor, Tensor | None]:
    """Return the scales of all groups, float32 [N, G], and their minima."""

    def products(codes: str, steps: str, zero: int) -> Tensor:
        integers = unpack_stream(tensors[codes], layout.scale_bits).float().sub_(zero)
        return integers.mul_(tensors[steps].float().repeat_interleave(layout.groups, 0)).T

    scales = products(*_SCALES, layout.scale_zero)
    return scales, products(*_MINIMA, 0) if layout.has_minima else None


def _values(codes: Tensor, scale: Tensor, minimum: Tensor | None, params: Params) -> Tensor:
    """Return the weights of codes [rows, K] whose groups have scales and minima [rows, G]: float32 [rows, K]."""
    values = params.layout.units(codes).unflatten(1, (-1, params.layout.group_size))
    values.mul_(scale[..., None])
    if minimum is not None:
        values.sub_(minimum[..., None])
    return values.flatten(1)
