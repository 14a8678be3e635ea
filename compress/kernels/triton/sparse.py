"""Decode the `sparse` format on a GPU, and multiply 2:4 weights of 16 bits by the sparse tensor cores of NVIDIA GPUs.

A program of the decoder expands some patterns of a row: the sum of the bits of a mask before a column says which of the
kept weights belongs there. Codes are decoded by the kernel of the `int` format before.

torch.sparse has products of 2:4 weights in the layout of CUTLASS: the kept weights in order, as they are stored here,
and two bits for each that say where it is, which are made of the mask once, 1 bit a weight of memory. Before it is
taken, a small product is computed on each device. Where torch cannot, or finds other numbers, weights are decoded.
No measurement says yet for which numbers of tokens this beats decoding; it reads half of the weights for all of them.
"""

# ruff: noqa: PLR0913, PLR0917 (signatures of kernels)
# mypy: disallow-untyped-defs = False, disable-error-code = "annotation-unchecked,assignment,misc"

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from compress.formats import dense, sparse
from compress.formats import int as int_format
from compress.formats.sparse import PATTERNS, Params
from compress.kernels.contract import Prepared, Shape
from compress.kernels.triton import int as int_kernel
from compress.numerics.packing import unpack_stream

BLOCK = 512  # columns of a program, at most
WARPS = 4
EVERY = 1 << 30  # rows of activations
WIDTHS = (32, 64)  # what outputs and inputs of a product on sparse tensor cores are multiples of
TOKENS = 8  # tokens are padded to it
CLOSE = 1e-2  # share of the norm by which a trial may be off: results are rounded to 16 bits
TABLE = sum(1 << (4 * code + column) for code, columns in enumerate(PATTERNS) for column in columns)
_TABLE = tl.constexpr(TABLE)  # four bits for each code of a pattern: the columns that are kept


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> Prepared | None:
    """Return the decoder, of patterns of up to 512 columns, which multiplies where a device can."""
    return SparseWeight(tensors, params, shape) if params.of <= BLOCK else None


class SparseWeight(Prepared):
    """A sparse weight that is decoded as a whole, unless the device has sparse tensor cores for its type."""

    types = (torch.bfloat16, torch.float16, torch.float32)

    def __init__(self, tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> None:
        super().__init__(tensors, params, shape)
        self._places: tuple[int, Tensor] | None = None  # version of the mask, and what was made of it

    def most_rows(self, dtype: torch.dtype) -> int:
        params, device = self.params, self.tensors["mask"].device
        is_wide = all(size % multiple == 0 for size, multiple in zip(self.shape, WIDTHS, strict=True))
        if not (params.has_patterns and params.inner == "dense" and is_wide) or device.type != "cuda":
            return 0
        is_alike = dtype == getattr(torch, params.dtype) != torch.float32
        return EVERY if is_alike and not failure(dtype, device) else 0

    def __call__(self, x: Tensor) -> Tensor:
        if not self.most_rows(x.dtype):
            return F.linear(x, self.decode(x.dtype))
        mask = self.tensors["mask"]
        version = 0 if mask.is_inference() else mask._version
        if self._places is None or self._places[0] != version:
            self._places = version, places(mask, self.shape)
        return multiply(x.reshape(-1, x.shape[-1]), self.tensors["values"], self._places[1]).view(*x.shape[:-1], -1)

    def decode(self, dtype: torch.dtype) -> Tensor:
        params, (rows, columns), mask = self.params, self.shape, self.tensors["mask"]
        kept = self._decode_kept(dtype)
        groups, pitch = kept.shape[1] // params.keep, mask.shape[1]
        padded = triton.next_power_of_2(params.of)
        many = BLOCK // padded  # patterns of a program
        out = torch.empty(rows, columns, dtype=dtype, device=mask.device)
        expand[rows, -(-groups // many)](
            mask, kept, out, columns, pitch, groups, KEEP=params.keep, OF=params.of, PADDED=padded, MANY=many,
            BLOCK_ROWS=params.block_rows, BLOCK_COLUMNS=params.block_columns, PATTERNS=params.has_patterns,
            num_warps=WARPS,
        )  # fmt: skip
        return out

    def _decode_kept(self, dtype: torch.dtype) -> Tensor:
        """Return what is kept, [out, kept weights of a row]."""
        inner, shape = self.params.inner_params, self.params.kept_shape(self.shape)
        if isinstance(inner, dense.Params):
            return self.tensors["values"].to(dtype)
        kernel = int_kernel.prepare(self.tensors, inner, shape)
        return int_format.decode(self.tensors, inner, shape, dtype) if kernel is None else kernel.decode(dtype)


def places(mask: Tensor, shape: Shape) -> Tensor:
    """Return where kept weights are, int16 [out, in / 16], in the order of CUTLASS, from a stored mask of 2:4.

    Two bits for each kept weight, the lowest ones for the first. AttributeError or ImportError if torch has no such
    layout.
    """
    from torch.sparse import _semi_structured_conversions as conversions

    rows, columns = shape
    codes = unpack_stream(mask, 3)[:, : columns // 4].long()
    bits = torch.tensor([first | second << 2 for first, second in PATTERNS], dtype=torch.int32, device=mask.device)
    shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=mask.device)
    words = (bits[codes].unflatten(1, (-1, 4)) << shifts).sum(-1, dtype=torch.int32).to(torch.int16)
    order = conversions._calculate_meta_reordering_scatter_offsets(rows, columns // 16, torch.int16, mask.device)
    return torch.empty_like(words.view(-1)).scatter_(0, order, words.view(-1)).view(rows, -1)


def multiply(x: Tensor, kept: Tensor, where: Tensor) -> Tensor:
    """Return x [tokens, in] times a 2:4 weight, [tokens, out]: kept weights [out, in / 2] and their `places`."""
    count = len(x)
    padded = F.pad(x, (0, 0, 0, -count % TOKENS))
    return torch._sparse_semi_structured_mm(kept, where, padded.t())[:, :count].t().contiguous()


@cache
def failure(dtype: torch.dtype, device: torch.device) -> str:
    """Return why 2:4 products of this type cannot be taken on a device, which a small one tells once; or nothing."""
    shape, params = (128, 256), sparse.params_for(2, 4, dense.Params(str(dtype).removeprefix("torch.")))
    with torch.inference_mode(False), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        weight, x = (torch.randn(rows, shape[1], generator=generator).to(dtype) for rows in (shape[0], 13))
        mask = weight.view(-1, 4).float().argsort(-1).argsort(-1).ge(2).view(shape)
        kept = weight[mask].view(shape[0], -1)
        expected = x.float() @ torch.where(mask, weight, 0).float().T
        try:
            stored = sparse.pack(mask, {}, params)["mask"].to(device)
            y = multiply(x.to(device), kept.to(device), places(stored, shape)).cpu()
        except (RuntimeError, NotImplementedError, ImportError, AttributeError, TypeError) as error:
            return f"torch does not multiply 2:4 weights here ({str(error).splitlines()[0]})"
    is_close = bool((y.float() - expected).norm() <= CLOSE * expected.norm())
    return "" if is_close else "torch multiplies 2:4 weights with other results here"


@triton.jit
def expand(
    mask, kept, out, columns, pitch, groups, KEEP: tl.constexpr, OF: tl.constexpr, PADDED: tl.constexpr,
    MANY: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, PATTERNS: tl.constexpr,
):  # fmt: skip
    """out [rows, columns] = kept [rows, groups KEEP] where the mask says so; program (row, MANY patterns of OF)."""
    row = tl.program_id(0).to(tl.int64)
    g, j = tl.program_id(1) * MANY + tl.arange(0, MANY), tl.arange(0, PADDED)
    column = g[:, None] * OF + j[None, :]
    inside = (j < OF)[None, :] & (g < groups)[:, None]
    if PATTERNS:
        line = mask + row * pitch + g * 3 // 8
        low = tl.load(line, mask=g < groups, other=0).to(tl.int32)
        high = tl.load(line + 1, mask=g * 3 // 8 + 1 < pitch, other=0).to(tl.int32)
        codes = (low | high << 8) >> (g * 3 % 8) & 7
        bits = _TABLE >> (codes[:, None] * 4 + j[None, :]) & 1
    else:
        entry = column // BLOCK_COLUMNS
        octets = tl.load(mask + row // BLOCK_ROWS * pitch + entry // 8, mask=inside, other=0).to(tl.int32)
        bits = octets >> (entry % 8) & 1
    bits = tl.where(inside, bits, 0)
    place = row * groups * KEEP + g[:, None] * KEEP + tl.cumsum(bits, 1) - 1
    values = tl.load(kept + place, mask=bits == 1, other=0.0)
    tl.store(out + row * columns + column, values, mask=inside & (column < columns))
