"""Multiply `ternary` weights with up to 16 rows of activations on a GPU, read as they are stored.

A step takes some units of some rows of the weight: four bytes beside each other are four columns of a row, and each
digit of them is an operand of the tensor cores, out^T [n, m] = W [n, k] x^T [k, m]. Activations are float16, times a
power of two for each row (compress/kernels/triton/_parts.py), and sums float32. Scales of rows and of the tensor meet
the sums; so do those of groups of whole steps: 64 and 128 columns of planar weights. In other groups, as any of base 3
but multiples of 80, float16 scales meet the digits, which is exact and takes three times the instructions. Other scales
are decoded there.
"""

# ruff: noqa: PLR0913, PLR0917 (signatures of kernels)
# mypy: disallow-untyped-defs = False, disable-error-code = "annotation-unchecked,assignment,misc"

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.formats.ternary import BASE3, BINARY, BYTE_DIGITS, LARGEST_ZERO, ROW_MULTIPLE, TOGETHER, Params
from compress.kernels.contract import Shape
from compress.kernels.triton import products
from compress.kernels.triton._parts import COMPILED, columns_of, finish, row_powers
from compress.kernels.triton.products import GpuProduct, Grid, tile_rows

BLOCK_ROWS = 64
BLOCK_UNITS = (8, 4)  # units in a step, the first that fits in groups: 32 or 16 bytes of a row
WARPS = 4
OCCUPANCY = 4  # programs that a multiprocessor holds
DECODED = (16, 16)  # rows, and units of each, of a program of the decoder


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> GpuProduct | None:
    """Return the product with a weight of any width, if its groups are whole runs of the columns of neighbours."""
    fits = params.group_size == -1 or params.group_size % TOGETHER == 0
    return _TernaryOnGpu(tensors, params, shape) if fits else None


def step_units(params: Params) -> tuple[int, bool]:
    """Return the units of a step, and whether they all lie in one group of columns (False where a row is one)."""
    for units in BLOCK_UNITS:
        if params.group_size != -1 and params.group_size % (units * params.unit) == 0:
            return units, True
    return BLOCK_UNITS[0], False


def constants(params: Params) -> dict[str, Any]:
    """Return the constants of both kernels that say how codes and scales lie."""
    return {
        "DIGITS": BYTE_DIGITS[params.packing],
        "IS_BASE3": params.packing == BASE3, "IS_BINARY": params.packing == BINARY,
        "GROUP": 0 if params.group_size == -1 else params.group_size, "ONE_SCALE": params.tensor_scale,
    }  # fmt: skip


class _TernaryOnGpu(GpuProduct):
    def most_rows(self, dtype: torch.dtype) -> int:
        """Return `most`, or 0 where groups have scales that float16 does not hold."""
        is_held = self.params.group_size == -1 or self.params.scale_dtype == "float16"
        return self.most if is_held or step_units(self.params)[1] else 0

    def multiply(self, x: Tensor, out: Tensor) -> None:
        codes, block_m = self.tensors["codes"], tile_rows(x.shape[0])
        blocks, units, _ = codes.shape
        together, in_group = step_units(self.params)
        steps = -(-units // together)
        products.launch(
            multiply,
            (x, codes, self.tensors["scales"]), out,
            (x.shape[0], *self.shape[::-1], ROW_MULTIPLE * blocks, units),
            Grid(-(-ROW_MULTIPLE * blocks // BLOCK_ROWS), steps, block_m * BLOCK_ROWS, OCCUPANCY),
            **constants(self.params), BLOCK_N=BLOCK_ROWS, BLOCK_M=block_m, UNITS=together, IN_GROUP=in_group,
            USE_HALF=COMPILED, num_warps=WARPS,
        )  # fmt: skip

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in], computed in float32 and rounded once, as formats/ternary.py does."""
        codes, (rows, columns) = self.tensors["codes"], DECODED
        blocks, units, _ = codes.shape
        out = torch.empty(self.shape, dtype=dtype, device=codes.device)
        decode[-(-units // columns), -(-self.shape[0] // rows)](
            codes, self.tensors["scales"], out, *self.shape[::-1], ROW_MULTIPLE * blocks, units,
            **constants(self.params), BLOCK_N=rows, UNITS=columns,
        )  # fmt: skip
        return out


# What runs on the device.

ZERO = tl.constexpr(LARGEST_ZERO)


@triton.jit
def _octets(codes, stored, unit, c, units):
    """The bytes [n, j] of rows `stored` that lie at columns c [j] of units [j], as signed int32; 0 past the last."""
    row = (stored // 16).to(tl.int64) * units * 64 + stored % 16 * 4
    known = (unit < units)[None, :]
    octets = tl.load(codes + row[:, None] + (unit * 64 + c)[None, :], mask=known, other=0)
    return octets.to(tl.int8, bitcast=True).to(tl.int32)


@triton.jit
def _trit(octets, K: tl.constexpr, IS_BASE3: tl.constexpr, IS_BINARY: tl.constexpr):
    """Digit K of bytes as float32; of base 3 the bytes are those of `_next`."""
    if IS_BASE3:
        return tl.where(octets > ZERO, 1.0, tl.where(octets < -ZERO, -1.0, 0.0))
    elif IS_BINARY:
        return ((octets >> K & 1) * 2 - 1).to(tl.float32)
    else:
        return ((octets >> 2 * K & 3) - 1).to(tl.float32)


@triton.jit
def _next(octets, IS_BASE3: tl.constexpr):
    """Three times the bytes, modulo 256, signed."""
    if IS_BASE3:
        return (octets * 3 << 24) >> 24
    else:
        return octets


@triton.jit
def _scales(scales, stored, column, in_features, stored_rows, GROUP: tl.constexpr):
    """The scales [n, j] of the groups of columns [j], in their type."""
    group = tl.minimum(column, in_features - 1) // GROUP
    return tl.load(scales + group[None, :].to(tl.int64) * stored_rows + stored[:, None])


@triton.jit(do_not_specialize=["rows", "stored_rows", "units", "steps", "parts"])
def multiply(x, codes, scales, out, partials, counters, rows, in_features, out_features, stored_rows, units, steps,
             parts, DIGITS: tl.constexpr, IS_BASE3: tl.constexpr, IS_BINARY: tl.constexpr, GROUP: tl.constexpr,
             ONE_SCALE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, UNITS: tl.constexpr,
             IN_GROUP: tl.constexpr, SPLIT: tl.constexpr, USE_HALF: tl.constexpr):  # fmt: skip
    """out [rows, out_features] = x [rows, in_features] W^T; program (BLOCK_N rows of W, part of the columns).

    IN_GROUP: the columns of a step share a scale, in groups.
    """
    block, part = tl.program_id(0), tl.program_id(1)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    j = tl.arange(0, 4 * UNITS)
    stored = tl.minimum(n, stored_rows - 1)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    start, end = steps * part // parts, steps * (part + 1) // parts
    up, down = row_powers(x, start * (UNITS * 4 * DIGITS), end * (UNITS * 4 * DIGITS), m, rows, in_features)
    for step in range(start, end):
        unit = step * UNITS + j // 4
        octets = _octets(codes, stored, unit, j % 4, units)
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32) if IN_GROUP else acc
        for k in tl.static_range(DIGITS):
            column = unit * (4 * DIGITS) + 4 * k + j % 4
            columns = columns_of(x, column, m, up, rows, in_features, True)
            trits = _trit(octets, k, IS_BASE3, IS_BINARY).to(tl.float16)
            if GROUP != 0 and not IN_GROUP:
                trits *= _scales(scales, stored, column, in_features, stored_rows, GROUP)
            if USE_HALF:
                sums = tl.dot(trits, columns, sums)
            else:
                sums = tl.dot(trits.to(tl.float32), columns.to(tl.float32), sums)
            octets = _next(octets, IS_BASE3)
        if IN_GROUP:
            group = step * (UNITS * 4 * DIGITS) // GROUP
            acc += sums * tl.load(scales + group * stored_rows + stored).to(tl.float32)[:, None]
        else:
            acc = sums
    total = tl.trans(acc) * down[:, None]
    factor = tl.load(scales).to(tl.float32) if ONE_SCALE else 1.0
    finish(total, factor, scales, out, partials, counters, block, part, parts, n, m, rows, out_features,
           GROUP == 0 and not ONE_SCALE, SPLIT)  # fmt: skip


@triton.jit
def decode(codes, scales, out, in_features, out_features, stored_rows, units, DIGITS: tl.constexpr,
           IS_BASE3: tl.constexpr, IS_BINARY: tl.constexpr, GROUP: tl.constexpr, ONE_SCALE: tl.constexpr,
           BLOCK_N: tl.constexpr, UNITS: tl.constexpr):  # fmt: skip
    """out [out_features, in_features]; program (UNITS units of BLOCK_N rows)."""
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, 4 * UNITS)
    stored = tl.minimum(n, stored_rows - 1)
    unit = tl.program_id(0) * UNITS + j // 4
    octets = _octets(codes, stored, unit, j % 4, units)
    start = out + n.to(tl.int64)[:, None] * in_features
    for k in tl.static_range(DIGITS):
        column = unit * (4 * DIGITS) + 4 * k + j % 4
        values = _trit(octets, k, IS_BASE3, IS_BINARY)
        if ONE_SCALE:
            values *= tl.load(scales).to(tl.float32)
        elif GROUP == 0:
            values *= tl.load(scales + stored).to(tl.float32)[:, None]
        else:
            values *= _scales(scales, stored, column, in_features, stored_rows, GROUP).to(tl.float32)
        mask = (n < out_features)[:, None] & (column < in_features)[None, :]
        tl.store(start + column[None, :], values.to(out.dtype.element_ty), mask=mask)
        octets = _next(octets, IS_BASE3)
