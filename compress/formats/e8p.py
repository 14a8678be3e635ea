"""Store vectors of eight columns as points of the E8 lattice: a 16-bit code each, plus a residual code at 3 and 4 bits.

    w[i, 8k : 8k+8] = scale * row_scale[i] * (point[code[i, k]] + residual_point[residual[i, k]] / rho)

The 16-bit code is E8P of QuIP# (arXiv 2402.04396): the high byte selects an entry of a table of 256 vectors of absolute
values (half-odd numbers up to 2.5; `magnitudes()`), the low byte carries signs and shift. Its parity is the shift of
all coordinates, odd: -1/4, even: +1/4; with bit 0 flipped where the parity is odd, bit i is the sign of coordinate i,
and coordinate 7 changes sign once more where the entry's sum is odd. All coordinates are therefore odd multiples of
1/4. At 3 bits the residual is one of 256 short E8 vectors (`ball()`), at 4 bits another E8P code. The published points,
in our own order of table entries (ascending by value instead of the order of the released code).

Stored tensors (N = out_features padded to a multiple of 16, K = in_features padded to a multiple of 64):
- `codes` int16 [N, K / 8], the 16 bits of each code;
- `residual` uint8 (3 bits) or int16 (4 bits) [N, K / 8]; not at 2 bits;
- `scale` float32 [1];
- `row_scales` float16 [N], relative to `scale`; only with `row_scales`.
Padding has code 0, which is not the value 0: its activations must be. Rows can be cut anywhere, columns at multiples of
8.

Not supported: the released code's permutation of codes for its own kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product

import torch
from torch import Tensor

DIM = 8  # columns of a code
ROW_MULTIPLE = 16
COLUMN_MULTIPLE = 64
DECODE_CHUNK = 1 << 22  # weights decoded at a time: bounds the float32 temporaries to a few tens of MB
RHO = {3: 2.04, 4: 3.45}  # factor on what is left for the residual code
RESIDUAL = {3: torch.uint8, 4: torch.int16}

# Positions of the three 1/2 in the 29 entries of norm^2 12, whose other coordinates are 3/2.
NORM12 = """123 023 013 012 367 357 347 356 346 345 267 257 247 256 246 245 167 157 147 156 146 045 067 057 047 056
046 014 237"""


@dataclass(frozen=True)
class Params:
    bits: int  # [bits] stored of one weight: 2, 3 or 4
    row_scales: bool  # a scale for each row, beside that of the tensor

    def __post_init__(self) -> None:
        if self.bits not in (2, *RHO):
            raise ValueError(f"bits {self.bits} is not one of {(2, *RHO)}")


@cache
def magnitudes() -> Tensor:
    """[256, 8] float32 on the CPU: absolute values before the shift, in the order of the codes' high bytes."""
    entries = {v for v in product((0.5, 1.5, 2.5), repeat=DIM) if sum(x * x for x in v) <= 10}
    entries |= {tuple(0.5 if str(i) in zeros else 1.5 for i in range(DIM)) for zeros in NORM12.split()}
    return torch.tensor(sorted(entries))


def odd_sum() -> Tensor:
    """[256] bool: table entries whose coordinates sum to an odd number."""
    return magnitudes().sum(1) % 2 == 1


@cache
def points() -> Tensor:
    """[65536, 8] int8 on the CPU: four times the point of each 16-bit code."""
    low = torch.arange(256)
    bits = low[:, None] >> torch.arange(DIM) & 1  # byte, coordinate
    parity = bits.sum(1) & 1
    bits[:, 0] ^= parity
    table = (4 * magnitudes()).to(torch.int8)
    table[:, -1] *= torch.where(odd_sum(), -1, 1).to(torch.int8)
    signed = table[:, None] * (1 - 2 * bits).to(torch.int8)  # entry, byte, coordinate
    return (signed + (1 - 2 * parity).to(torch.int8)[:, None]).reshape(-1, DIM)


@cache
def ball() -> Tensor:
    """[256, 8] float32 on the CPU: 0, the 240 roots of E8, and the vectors of two times a unit but -2 e_7."""
    signs = torch.tensor(list(product((1.0, -1.0), repeat=2)))
    whole = torch.zeros(28, 4, DIM)
    for row, pair in zip(whole, combinations(range(DIM), 2), strict=True):
        row[:, list(pair)] = signs
    halves = 0.5 * torch.tensor([s for s in product((1.0, -1.0), repeat=DIM) if s.count(-1.0) % 2 == 0])
    axes = 2 * torch.eye(DIM)
    return torch.cat([torch.zeros(1, DIM), whole.view(-1, DIM), halves, axes, -axes[:-1]])


def specs(params: Params, shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    rows, columns = padded_shape(shape)
    stored: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "codes": ((rows, columns // DIM), torch.int16),
        "scale": ((1,), torch.float32),
    }
    if params.bits in RESIDUAL:
        stored["residual"] = ((rows, columns // DIM), RESIDUAL[params.bits])
    if params.row_scales:
        stored["row_scales"] = ((rows,), torch.float16)
    return stored


def padded_shape(shape: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // ROW_MULTIPLE) * ROW_MULTIPLE, -(-shape[1] // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def pack(
    codes: Tensor, scale: Tensor, row_scales: Tensor | None, params: Params, shape: tuple[int, int]
) -> dict[str, Tensor]:
    """codes [out, blocks of 8 columns, 1 or 2] int32, scale [1], row_scales [out] or None -> stored tensors.

    Row scales must already be representable in float16.
    """
    rows, columns = padded_shape(shape)
    missing = rows - codes.shape[0]
    grown = torch.nn.functional.pad(codes, (0, 0, 0, columns // DIM - codes.shape[1], 0, missing))
    first, *second = (part.contiguous() for part in grown.unbind(-1))
    tensors = {"codes": _int16(first), "scale": scale.float()}
    if params.bits in RESIDUAL:
        tensors["residual"] = second[0].to(torch.uint8) if params.bits == 3 else _int16(second[0])
    if params.row_scales:
        assert row_scales is not None
        stored = row_scales.half()
        assert torch.equal(stored.to(row_scales.dtype), row_scales), "row scales were not rounded to float16"
        tensors["row_scales"] = torch.nn.functional.pad(stored, (0, missing))
    return tensors


def decode(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return the dequantized weight [out, in]; computed in float32, rounded once to `dtype`."""
    out_features, in_features = shape
    device = tensors["codes"].device
    weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
    blocks = -(-in_features // DIM)
    step = max(1, DECODE_CHUNK // (blocks * DIM))
    for start in range(0, out_features, step):
        part = slice(start, min(start + step, out_features))
        columns = [_widen(tensors["codes"][part, :blocks])]
        if params.bits in RESIDUAL:
            columns.append(_widen(tensors["residual"][part, :blocks]))
        scale = tensors["scale"]
        if params.row_scales:
            scale = row_scale(scale, tensors["row_scales"][part])[:, None]
        values = lookup(torch.stack(columns, -1), params.bits).flatten(1)  # row, column
        weight[part] = values[:, :in_features] * scale
    return weight


def cut(
    tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], rows: range, columns: range
) -> tuple[Params, dict[str, Tensor]]:
    """Return some rows and columns of a weight; compress/formats/__init__.py has the contract."""
    if columns.start % DIM:
        raise ValueError(f"column {columns.start} lies within a code of {DIM} columns")
    blocks = slice(columns.start // DIM, -(-columns.stop // DIM))
    part = slice(rows.start, rows.stop)
    codes = torch.stack([_widen(tensors[name][part, blocks]) for name in ("codes", "residual") if name in tensors], -1)
    row_scales = tensors["row_scales"][part] if params.row_scales else None
    return params, pack(codes, tensors["scale"], row_scales, params, (len(rows), len(columns)))


def levels(params: Params) -> tuple[int, ...]:
    """Return the levels: with 3 and 4 bits the first code alone is one of 2 bits."""
    return (2, params.bits) if params.bits in RESIDUAL else ()


def at_level(params: Params, level: int) -> tuple[str, Params]:
    """Return format and parameters of one of `levels`."""
    return "e8p", Params(level, params.row_scales)


def lookup(codes: Tensor, bits: int) -> Tensor:
    """Points [..., 8] float32 of codes [..., 1 or 2] int32, before the scales."""
    table = _on_device(points, codes.device)
    values = table[codes[..., 0]].float().mul_(0.25)
    if bits == 3:
        values += _on_device(ball, codes.device)[codes[..., 1]] / RHO[3]
    elif bits == 4:
        values += table[codes[..., 1]].float().mul_(0.25) / RHO[4]
    return values


@cache
def _on_device(table: Callable[[], Tensor], device: torch.device) -> Tensor:
    """Return a table on a device, where it stays: copied at every look-up, a GPU would be waited for."""
    with torch.inference_mode(False):
        return table().to(device)


def row_scale(scale: Tensor, row_scales: Tensor) -> Tensor:
    """The factor of each row, [rows] float32: one product of scale [1] and row_scales [rows] float16."""
    return scale * row_scales.float()


def _int16(codes: Tensor) -> Tensor:
    """Codes 0..65535 as the int16 of the same 16 bits."""
    return torch.where(codes < 32768, codes, codes - 65536).to(torch.int16)


def _widen(stored: Tensor) -> Tensor:
    """Inverse of `_int16`, and plain widening of uint8: int32."""
    return stored.int() & 0xFFFF
