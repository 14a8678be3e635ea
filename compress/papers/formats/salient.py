"""A few whole columns in 4 bits, all others one sign a weight with scales of rows and columns (PTQ1.61).

    w[r, c] = scales[r] * (codes[r, i] - zeros[r])                           c is the i-th salient column
    w[r, c] = column_scales[j] * (alphas[r] * (+1 or -1) + means[r])         c is the j-th of the others

arXiv 2502.13179 has two scales of rows there, alpha and r1: they are stored as their product, as are r1 and the mean.

Stored tensors, for a weight [out, in] with `salient` columns in 4 bits:
- `mask` uint8 [ceil(in / 8)]: a bit for each column, lowest first, 1 where it is salient;
- `signs` uint8 [ceil(out * (in - salient) / 8)]: a bit for each weight of the other columns, row by row, 1 for +1;
- `alphas`, `means` bfloat16 [out]; `column_scales` bfloat16 [in - salient];
- `codes` uint8 [ceil(out * salient / 2)], low half first; `scales` bfloat16 [out]; `zeros` uint8 [out]; none of the
  three without salient columns.
Rows and columns can be cut anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from compress.numerics.packing import pack_stream, unpack_stream

BITS = 4  # [bits] of a code of a salient column
CHUNK = 1 << 22  # weights decoded at a time


@dataclass(frozen=True)
class Params:
    salient: int  # [columns] in 4 bits; the others have one

    def __post_init__(self) -> None:
        if self.salient < 0:
            raise ValueError(f"salient {self.salient} is negative")


class Fields(NamedTuple):
    """What the streams of a weight hold."""

    mask: Tensor  # bool [in], of the salient columns
    signs: Tensor  # uint8 [out, others], 1 for +1
    codes: Tensor  # uint8 [out, salient]


def specs(params: Params, shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return what is stored for a weight [out, in]; ValueError if it has not enough columns."""
    rows, columns = shape
    if params.salient >= columns:
        raise ValueError(f"salient {params.salient} of a weight with {columns} columns leaves no others")
    others = columns - params.salient
    stored: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "mask": ((-(-columns // 8),), torch.uint8),
        "signs": ((-(-rows * others // 8),), torch.uint8),
        "alphas": ((rows,), torch.bfloat16),
        "means": ((rows,), torch.bfloat16),
        "column_scales": ((others,), torch.bfloat16),
    }
    if params.salient:
        stored["codes"] = ((-(-rows * params.salient // 2),), torch.uint8)
        stored["scales"] = ((rows,), torch.bfloat16)
        stored["zeros"] = ((rows,), torch.uint8)
    return stored


def check(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> None:
    """Check that the mask selects as many columns as there are codes for; ValueError."""
    chosen = unpack_stream(tensors["mask"], 1)
    count = int(chosen[: shape[1]].sum())
    if count != params.salient or bool(chosen[shape[1] :].any()):
        raise ValueError(f"mask selects {int(chosen.sum())} columns, expected {params.salient} of {shape[1]}")


def pack(fields: Fields, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the stored tensors; vectors: the five that are not streams, in their stored types, or those there are."""
    stored = {
        "mask": _stream(fields.mask.to(torch.uint8), 1),
        "signs": _stream(fields.signs.flatten(), 1),
        **vectors,
    }
    return {**stored, "codes": _stream(fields.codes.flatten(), BITS)} if fields.codes.numel() else stored


def _stream(codes: Tensor, width: int) -> Tensor:
    return pack_stream(torch.nn.functional.pad(codes, (0, -len(codes) % (8 // width))), width)


def unpack(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> Fields:
    """Return what the streams hold."""
    rows, columns = shape
    others = columns - params.salient
    mask = unpack_stream(tensors["mask"], 1)[:columns].bool()
    signs = unpack_stream(tensors["signs"], 1)[: rows * others].view(rows, others)
    if not params.salient:
        return Fields(mask, signs, signs[:, :0])
    return Fields(mask, signs, unpack_stream(tensors["codes"], BITS)[: rows * params.salient].view(rows, -1))


def decode(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in]; computed in float32, rounded once to `dtype`."""
    mask, signs, codes = unpack(tensors, params, shape)
    weight = torch.empty(shape, dtype=dtype, device=mask.device)
    for start in range(0, shape[0], step := max(1, CHUNK // shape[1])):
        rows = slice(start, start + step)
        alphas, means = (tensors[name][rows, None].float() for name in ("alphas", "means"))
        binary = (alphas * (2.0 * signs[rows] - 1) + means) * tensors["column_scales"].float()
        weight[rows, ~mask] = binary.to(dtype)
        if params.salient:
            whole = codes[rows].float() - tensors["zeros"][rows, None]
            weight[rows, mask] = (tensors["scales"][rows, None].float() * whole).to(dtype)
    return weight


def cut(
    tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], rows: range, columns: range
) -> tuple[Params, dict[str, Tensor]]:
    """Return some rows and columns of a weight; compress/formats/__init__.py has the contract."""
    mask, signs, codes = unpack(tensors, params, shape)
    wanted, part = slice(columns.start, columns.stop), slice(rows.start, rows.stop)
    others = (~mask).nonzero()[:, 0]
    left = (others >= columns.start) & (others < columns.stop)
    kept = (mask.nonzero()[:, 0] >= columns.start) & (mask.nonzero()[:, 0] < columns.stop)
    chosen = Params(int(kept.sum()))
    if chosen.salient == len(columns):
        raise ValueError(f"columns {columns.start} to {columns.stop} are all in 4 bits")
    names = ("alphas", "means", *(("scales", "zeros") if chosen.salient else ()))
    vectors = {name: tensors[name][part].clone() for name in names}
    vectors["column_scales"] = tensors["column_scales"][left]
    return chosen, pack(Fields(mask[wanted], signs[part][:, left], codes[part][:, kept]), vectors)
