"""Apply the Hadamard transform of compress/numerics/hadamard.py on a GPU in one launch, diagonals included.

For sizes K * 2^k with a table of +-1 of order K the table is multiplied first, by tensor cores and exactly, then the
power of two follows in registers.
"""

# ruff: noqa: PLR0913, PLR0917 (signatures of kernels)
# mypy: disallow-untyped-defs = False, disable-error-code = "annotation-unchecked,assignment,misc"

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.formats.transforms import SCALE8_BIAS, SCALE8_SHIFT, Diagonal
from compress.kernels.triton import products
from compress.numerics import hadamard

LARGEST = 1 << 15  # numbers that fit in the registers of a program, and in its shared memory
SMALLEST = 16  # power of two
LARGEST_TABLE = 128
MIN_PROGRAM_NUMBERS = 1 << 12  # of a program at least, if there are rows enough
PER_THREAD = 16  # numbers that a thread holds, more above 2^14: a row is one program, and few rows want short ones


DIAGONALS = {None: 0, "signs": 1, "channel_scale16": 2, "channel_scale8": 3}  # name -> BEFORE and AFTER of a kernel


def transform(x: Tensor, before: Diagonal | None = None, after: Diagonal | None = None) -> Tensor:
    """x [..., n] of any floating type -> diag(after) H diag(before) x for each vector, of the same type.

    before, after: signs, channel_scale16 or channel_scale8 of n channels as stored; None: ones. Sums are those of
    float32; where a table is multiplied, x is rounded behind `before`. Sizes with tables that are not of +-1 or large
    are left to compress/numerics/hadamard.py.
    """
    if not supports(x):
        y = hadamard.transform(x if before is None else before.times(x))
        return y if after is None else after.times(y)
    return _launch(x, before, after)


def supports(x: Tensor) -> bool:
    """Return whether the transforms of x take one launch."""
    order = hadamard.order(x.shape[-1])
    numbers = _padded_table_rows(order.K) << order.power
    known = order.kind != "hartley" and order.K <= LARGEST_TABLE and x.dtype in (torch.float16, torch.bfloat16)
    fits = numbers <= LARGEST and 4 * numbers <= products.properties(x.device).shared and 1 << order.power >= SMALLEST
    return fits and (known or order.K == 1 and x.dtype == torch.float32)


def configuration(n: int) -> dict[str, int]:
    """The kernel's constants but for BEFORE and AFTER: lines of SIZE numbers, of which TABLE make a row."""
    order = hadamard.order(n)
    size = 1 << order.power
    block = max(1, MIN_PROGRAM_NUMBERS // size) if order.K == 1 else _padded_table_rows(order.K)
    return {"TABLE": order.K, "SIZE": size, "BITS": order.power, "BLOCK": block}


def warps(constants: dict[str, int]) -> int:
    """Of a program."""
    return min(32, max(1, constants["BLOCK"] * constants["SIZE"] // (32 * PER_THREAD)))


def _launch(x: Tensor, before: Diagonal | None, after: Diagonal | None) -> Tensor:
    n = x.shape[-1]
    constants = configuration(n)
    lines = x.reshape(-1, constants["SIZE"]).contiguous()
    out = torch.empty_like(lines)
    of_program = constants["BLOCK"] if constants["TABLE"] == 1 else constants["TABLE"]
    table = out if constants["TABLE"] == 1 else _table(n, x.dtype, x.device)
    kinds = [DIAGONALS[None if diagonal is None else diagonal.name] for diagonal in (before, after)]
    stored = [out if diagonal is None else diagonal.stored for diagonal in (before, after)]
    transform_rows[(-(-lines.shape[0] // of_program),)](
        lines, table, stored[0], stored[1], out, lines.shape[0], n**-0.5,
        BEFORE=kinds[0], AFTER=kinds[1], num_warps=warps(constants), **constants,
    )  # fmt: skip
    return out.view(x.shape)


@cache
def _table(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return hadamard.table(hadamard.order(n)).to(device, dtype).contiguous()


def _padded_table_rows(K: int) -> int:
    """The least power of two that holds a table; tensor cores want 16."""
    return 1 if K == 1 else max(16, 1 << (K - 1).bit_length())


# What runs on the device.

_SHIFT, _BIAS = tl.constexpr(SCALE8_SHIFT), tl.constexpr(SCALE8_BIAS)


@triton.jit
def _times_diagonal(values, stored, i, KIND: tl.constexpr):
    """Values times what is stored of a diagonal at i."""
    if KIND == 1:
        negative = (tl.load(stored + i // 8).to(tl.int32) >> i % 8) & 1
        return tl.where(negative != 0, -values, values)
    if KIND == 2:
        factors = tl.load(stored + i).to(tl.float32)
    else:
        code = tl.load(stored + i).to(tl.int32)
        factors = (((code & 127) << _SHIFT) + _BIAS | (code & 128) << 24).to(tl.float32, bitcast=True)
    return (values.to(tl.float32) * factors).to(values.dtype)


@triton.jit
def transform_rows(x, table, before, after, out, count, factor, TABLE: tl.constexpr, SIZE: tl.constexpr,
                   BITS: tl.constexpr, BLOCK: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr):  # fmt: skip
    """out [count, SIZE] = x [count, SIZE] H, times factor, and diagonals before and after; program (BLOCK lines).

    With TABLE > 1, that many lines are a row and one program's, and the table [TABLE, TABLE] is multiplied to them.
    Each stage of H sums and subtracts neighbours and puts all sums before all differences: the stages are alike, and
    after BITS of them everything is back in its place.
    """
    line = tl.arange(0, BLOCK)
    j = tl.arange(0, SIZE)[None, :]
    i = j
    if TABLE > 1:
        known = (line < TABLE)[:, None]
        i = tl.minimum(line, TABLE - 1)[:, None] * SIZE + j
        at = tl.program_id(0).to(tl.int64) * TABLE * SIZE + line[:, None] * SIZE + j
    else:
        first = tl.program_id(0).to(tl.int64) * BLOCK + line
        known = (first < count)[:, None]
        at = first[:, None] * SIZE + j
    values = tl.load(x + at, mask=known, other=0.0)
    if TABLE == 1:
        values = values.to(tl.float32)
    if BEFORE:
        values = _times_diagonal(values, before, i, BEFORE)
    if TABLE > 1:
        mask = known & (line < TABLE)[None, :]
        values = tl.dot(tl.load(table + line[:, None] * TABLE + line[None, :], mask=mask, other=0.0), values)
    for _ in tl.static_range(BITS):
        a, b = tl.split(tl.reshape(values, (BLOCK, SIZE // 2, 2)))
        values = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (BLOCK, SIZE))
    values *= factor
    if AFTER:
        values = _times_diagonal(values, after, i, AFTER)
    tl.store(out + at, values.to(out.dtype.element_ty), mask=known)
