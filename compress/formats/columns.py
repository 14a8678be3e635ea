"""Store a weight column by column: what a product reads that skips the columns of inputs which are zero.

    w[i, j] = values[j, i]                                     16 bits
    w[i, j] = scale[g(j), i] * (code[j, i] - zero[g(j), i])    2, 4 or 8 bits

Codes, scales and zero points mean what they do in the format `int`; only their order differs, so that `from_int` loses
nothing. Codes of 3 bits take 4 here, those of 5 to 7 bits take 8.

Stored tensors (N = out_features padded to whole tiles, G groups of columns, M = out_features padded to 16):
- `values` bfloat16, float16 or float32 [in_features, out_features], of 16 bits;
- `codes` uint8 [in_features, N * bits / 8]. A tile is 16 bytes, which hold 16 * F consecutive outputs, F = 8 / bits:
  field f of byte b, lowest bits first, is output 16 f + b of the tile. So sixteen bytes become F vectors of sixteen
  outputs that lie behind each other, each by one shift;
- `scales` float16 or bfloat16 [G, N];
- `zeros` uint8 [G, N * bits / 8], packed like a column of codes, asymmetric only.

Not supported: single rows, which lie apart.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress import formats
from compress.types import PackedWeight

TILE = 16  # bytes of a column that hold outputs behind each other
VALUES = ("bfloat16", "float16", "float32")  # types of values
SCALES = ("float16", "bfloat16")
LEAST_GROUP = 16  # columns that share a scale in a weight that was cut within a group
DECODE_CHUNK = 1 << 22  # weights decoded at a time: bounds the float32 temporaries to a few tens of MB


@dataclass(frozen=True)
class Params:
    bits: int = 16  # [bits] of one code: 2, 4 or 8; 16: values as they are
    group_size: int = -1  # [columns] that share a scale; -1: the whole row
    symmetric: bool = True  # no zero points are stored: the middle code stands for 0
    dtype: str = "bfloat16"  # of the scales; of the values: float32, too

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8, 16):
            raise ValueError(f"bits {self.bits} is not 2, 4, 8 or 16")
        if self.group_size != -1 and self.group_size < 1:
            raise ValueError(f"group_size {self.group_size} is neither positive nor -1 (the whole row)")
        known = VALUES if self.bits == 16 else SCALES
        if self.dtype not in known:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(known)}")

    @property
    def tile(self) -> int:
        """Outputs that share sixteen bytes of a column."""
        return TILE * 8 // self.bits

    def group(self, in_features: int) -> int:
        """Columns of a group, the whole row if group_size is -1."""
        return in_features if self.group_size == -1 else self.group_size


def specs(params: Params, shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    outputs, inputs = shape
    kind = getattr(torch, params.dtype)
    if params.bits == 16:
        return {"values": ((inputs, outputs), kind)}
    stored, count = -(-outputs // params.tile) * params.tile, -(-inputs // params.group(inputs))
    codes = stored * params.bits // 8
    zeros: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"zeros": ((count, codes), torch.uint8)}
    return {
        "codes": ((inputs, codes), torch.uint8),
        "scales": ((count, stored), kind),
        **({} if params.symmetric else zeros),
    }


def pack(weight: Tensor, params: Params) -> dict[str, Tensor]:
    """weight [out_features, in_features] -> the stored tensor of 16 bits."""
    return {"values": weight.T.to(getattr(torch, params.dtype)).contiguous()}


def pack_codes(codes: Tensor, scales: Tensor, zeros: Tensor | None, params: Params) -> dict[str, Tensor]:
    """codes [out, in] uint8, scales [out, groups], zeros [out, groups] uint8 (None if symmetric) -> stored tensors."""
    padding = (0, -len(codes) % params.tile)
    tensors = {
        "codes": _pack_fields(codes.T, params),
        "scales": torch.nn.functional.pad(scales.T, padding).to(getattr(torch, params.dtype)).contiguous(),
    }
    return tensors if zeros is None else tensors | {"zeros": _pack_fields(zeros.T, params)}


def from_dense(tensors: Mapping[str, Tensor], params: Any, shape: tuple[int, int]) -> tuple[Params, dict[str, Tensor]]:
    """Return what the format `dense` stores with its parameters, column by column."""
    chosen = Params(dtype=params.dtype)
    return chosen, pack(tensors["values"], chosen)


def from_int(tensors: Mapping[str, Tensor], params: Any, shape: tuple[int, int]) -> tuple[Params, dict[str, Tensor]]:
    """Return what the format `int` stores with its parameters, column by column: the same multiples of the scales."""
    source: Any = formats.get("int")
    codes, scales, zeros = source.unpack(tensors, params, shape)
    bits = next(bits for bits in (2, 4, 8) if bits >= params.bits)
    chosen = Params(bits, params.group_size, params.symmetric, params.scale_dtype)
    if params.symmetric:
        codes = codes + (2 ** (bits - 1) - 2 ** (params.bits - 1))
    return chosen, pack_codes(codes, scales, zeros, chosen)


def params_for(format: str, params: Any) -> Params | None:
    """Return the parameters at which a weight of another format takes as many bytes here; None where it does not."""
    if format == "dense":
        return Params(dtype=params.dtype)
    if format == "int" and params.bits in (2, 4, 8):
        return Params(params.bits, params.group_size, params.symmetric, params.scale_dtype)
    return None


def repack(weight: PackedWeight) -> PackedWeight:
    """Return a weight column by column, if `params_for` can be had, with all that lies around and beside it."""
    if params_for(weight.format, weight.params) is None:
        return weight
    own = formats.get(weight.format).specs(weight.params, weight.shape)
    convert = from_dense if weight.format == "dense" else from_int
    params, tensors = convert(weight.tensors, weight.params, weight.shape)
    beside = {name: tensor for name, tensor in weight.tensors.items() if name not in own}
    stored = dataclasses.replace(weight.stored, format="columns", params=params)
    return PackedWeight(stored, {**tensors, **beside}, weight.shape)


def decode(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return the dequantized weight [out, in]; computed in float32, rounded once to `dtype`."""
    outputs, inputs = shape
    if params.bits == 16:
        return tensors["values"].T.to(dtype, copy=True, memory_format=torch.contiguous_format)
    weight = torch.empty(shape, dtype=dtype, device=tensors["scales"].device)
    step = max(1, DECODE_CHUNK // max(1, outputs))
    for start in range(0, inputs, step):
        part = slice(start, min(start + step, inputs))
        owner = torch.arange(part.start, part.stop, device=weight.device) // params.group(inputs)
        codes = _unpack_fields(tensors["codes"][part], params)[:, :outputs].float()
        if params.symmetric:
            codes -= 2 ** (params.bits - 1)
        else:
            codes -= _unpack_fields(tensors["zeros"], params)[:, :outputs].float()[owner]
        weight[:, part] = (codes * tensors["scales"][:, :outputs].float()[owner]).T.to(dtype)
    return weight


def cut(
    tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], rows: range, columns: range
) -> tuple[Params, dict[str, Tensor]]:
    """Return some rows and columns of a weight, packed anew; compress/formats/__init__.py has the contract.

    Where the columns do not begin with a group, groups become smaller, down to LEAST_GROUP columns.
    """
    part, inputs = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
    if params.bits == 16:
        return params, {"values": tensors["values"][inputs, part].contiguous()}
    group = params.group_size
    if columns.start and group != -1:
        group = math.gcd(group, columns.start)
        if group < min(params.group_size, LEAST_GROUP):
            raise ValueError(f"column {columns.start} lies within a group of {params.group_size} columns")
    first = torch.arange(columns.start, columns.stop, len(columns) if group == -1 else group, device="cpu")
    owner = (first // params.group(shape[1])).to(tensors["scales"].device)  # the group of the weight, of each new one
    chosen = Params(params.bits, group, params.symmetric, params.dtype)
    zeros = None if params.symmetric else _unpack_fields(tensors["zeros"], params)[owner, part].T
    codes = _unpack_fields(tensors["codes"][inputs], params)[:, part].T
    return chosen, pack_codes(codes, tensors["scales"][owner, part].T, zeros, chosen)


def _pack_fields(codes: Tensor, params: Params) -> Tensor:
    """codes [n, out] uint8 -> bytes [n, N * bits / 8]."""
    tiles = torch.nn.functional.pad(codes, (0, -codes.shape[1] % params.tile)).unflatten(
        1, (-1, 8 // params.bits, TILE)
    )
    packed = torch.zeros_like(tiles[:, :, 0])
    for field in range(tiles.shape[2]):
        packed |= tiles[:, :, field] << (field * params.bits)
    return packed.flatten(1).contiguous()


def _unpack_fields(packed: Tensor, params: Params) -> Tensor:
    """Inverse of `_pack_fields`, with the padding: codes [n, N] uint8."""
    tiles = packed.unflatten(1, (-1, TILE))
    fields = [(tiles >> shift) & (2**params.bits - 1) for shift in range(0, 8, params.bits)]
    return torch.stack(fields, dim=2).flatten(1)
