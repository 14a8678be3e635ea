"""Store a tensor of a cache in one of three ways, and read it back, whole or some of its tokens.

    raw    as it is
    bytes  without loss: each byte of a token is a column of columns.py; for codes and for exact keys and values
    grid   keys and values [B, h, tokens, width] rounded to multiples of one step; tokens are rows, channels columns

The grid has the same step for all channels of a tensor. That is the least squared error at the bits that entropy coding
gives, and large channels get more bits by themselves; a step in proportion to each channel's deviation had 3.7 times
the KL at 0.15 bits more (docs/kv_saved.md). CacheGen's scale is one for each token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from compress.errors import NumericalError
from compress.kv.saved import columns
from compress.kv.saved.columns import CodedMatrix, Columns
from compress.storage.checkpoint import DTYPES, NAMES

Way = Literal["raw", "bytes", "grid"]
TOKENS = 2  # the axis of tokens
SMALL = 1 << 13  # bytes of a tensor that is stored raw: tables and places of chunks would cost as much
CODED = ("stream", "chunks", "columns")  # tensors of a part that is coded


@dataclass(frozen=True)
class SavedPart:
    """How a tensor is stored in a file: way, shape, type, step of the grid."""

    way: Way
    shape: tuple[int, ...]
    dtype: torch.dtype
    step: float = 0.0  # of the grid

    @property
    def rows(self) -> int:
        return self.shape[TOKENS]

    @property
    def width(self) -> int:
        """Columns of its matrix."""
        count = math.prod(self.shape[:TOKENS]) * math.prod(self.shape[TOKENS + 1 :])
        return count if self.way == "grid" else count * self.dtype.itemsize

    @property
    def kind(self) -> torch.dtype:
        """Type of its matrix."""
        return torch.int16 if self.way == "grid" else torch.uint8

    @property
    def chunks(self) -> int:
        return -(-self.rows // columns.CHUNK)

    def plain(self) -> dict[str, Any]:
        """Return plain data for JSON, which `read_part` reads."""
        return {"way": self.way, "shape": list(self.shape), "dtype": NAMES[self.dtype], "step": self.step}

    def matrix(self, tensor: Tensor) -> Tensor:
        """Return the integers of a tensor of this shape, [rows, width]."""
        rows = tensor.movedim(TOKENS, 0).reshape(self.rows, -1)
        if self.way == "bytes":
            return rows.contiguous().view(torch.uint8)
        return (rows.float() / self.step).round().clamp(-columns.MAX_INTEGER, columns.MAX_INTEGER).to(torch.int16)

    def tensor(self, matrix: Tensor) -> Tensor:
        """Return some tokens from their integers [n, width]: `shape` with n tokens, `dtype`; a grid in float32."""
        rows = matrix.float() * self.step if self.way == "grid" else matrix.contiguous().view(self.dtype)
        others = (*self.shape[:TOKENS], *self.shape[TOKENS + 1 :])
        return rows.reshape(len(matrix), *others).movedim(0, TOKENS)


def lossless(tensor: Tensor) -> SavedPart:
    """Return the part of a tensor that must come back bit for bit."""
    is_coded = tensor.dim() > TOKENS and tensor.numel() * tensor.element_size() > SMALL
    return SavedPart("bytes" if is_coded else "raw", tuple(tensor.shape), tensor.dtype)


def round_part(x: Tensor, noise: float, dtype: torch.dtype, where: str) -> SavedPart:
    """Return the part of keys or values x [B, h, tokens, width] that may be changed a little.

    noise: squared error relative to the mean variance of the channels. dtype: of the tensor that comes back. Raises
    NumericalError for numbers that are not finite.
    """
    rows = x.movedim(TOKENS, 0).flatten(1).float()
    if not bool(torch.isfinite(rows).all()):
        raise NumericalError(f"{where} of the cache are not finite; the model overflows, or its weights are damaged")
    variance = rows.var(0, unbiased=False).mean().item() if rows.numel() else 0.0
    largest = rows.abs().max().item() if rows.numel() else 0.0
    step = max(math.sqrt(12 * noise * variance), largest / columns.MAX_INTEGER) or 1.0
    stored_step = torch.tensor(step).item()  # as float32, which decoding multiplies by
    return SavedPart("grid", tuple(x.shape), dtype, stored_step)


def read_part(plain: Mapping[str, Any]) -> SavedPart:
    """Read what `Part.plain` wrote. Raises ValueError for what it never writes."""
    way, shape, dtype, step = (plain[key] for key in ("way", "shape", "dtype", "step"))
    sizes_fit = all(type(size) is int and size >= 0 for size in shape)
    if type(step) is float and not 0 <= step < math.inf:
        raise ValueError(f"the step {step} of a part of it is none")
    if way not in ("raw", "bytes", "grid") or dtype not in DTYPES or not sizes_fit or type(step) is not float:
        raise ValueError("a part of it is of no known kind")
    if way != "raw" and len(shape) <= TOKENS:
        raise ValueError("a coded part of it has no tokens")
    return SavedPart(way, tuple(shape), DTYPES[dtype], step)


def is_finite(tensor: Tensor) -> bool:
    """Return whether all numbers of a tensor are finite; integers are."""
    if not tensor.is_floating_point():
        return True
    return bool(torch.isfinite(tensor if tensor.dtype.itemsize > 1 else tensor.float()).all())


def check_finite(tensor: Tensor) -> Tensor:
    """Return a tensor that is to be saved; NumericalError for numbers that are not finite, which no cache loads."""
    if not is_finite(tensor):
        raise NumericalError("numbers of the cache are not finite; the model overflows, or its weights are damaged")
    return tensor


def check(described: SavedPart, tensors: Mapping[str, Any], tables: int) -> None:
    """Compare small tensors of a coded part with its entry in the file, because compiled code relies on them.

    tensors: "chunks" int64 and "columns" int16, loaded; tables: how many the file has. Raises ValueError.
    """
    chunks, kinds = tensors["chunks"], tensors["columns"]
    if chunks.shape != (described.chunks, 3) or kinds.shape != (3, described.width):
        raise ValueError("the shapes of its parts do not belong together")
    if chunks.dtype != torch.int64 or kinds.dtype != torch.int16 or bool((chunks < 0).any()):
        raise ValueError("the places of its chunks are none")
    _, predict, table = kinds
    is_known = (table >= 0) & (table < tables) & (predict >= 0) & (predict < columns.SIXTEENTHS)
    if not bool(is_known.all()):
        raise ValueError("it names tables that it does not have")


def join_coded(tensors: Mapping[str, Tensor]) -> CodedMatrix:
    """Put the tensors of a coded part together."""
    return CodedMatrix(tensors["stream"], tensors["chunks"], Columns(*tensors["columns"]))
