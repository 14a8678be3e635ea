"""Multiply with the `grid` format on a GPU: points times the factors of blocks become operands of tensor cores.

    out^T [n, m] = sum over columns of point(code) factor(block) x, for a few rows

Numbers of e2m1 and e4m3 are those of float16 with the same bits, times a power of two: a shift and a mask turn a code
into one. Points of other tables are loaded. A byte of two codes gives two operands, of the even and of the odd columns,
which meet activations picked likewise. Weights are rounded to the type of the activations, as a decoded weight is.

In the interpreter, which multiplies bfloat16 wrongly, all is float32.
"""

# ruff: noqa: PLR0913, PLR0917 (signatures of kernels)
# mypy: disallow-untyped-defs = False, disable-error-code = "annotation-unchecked,assignment,misc"

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.formats import grid as grid_format
from compress.formats.grid import Params
from compress.kernels.contract import Shape
from compress.kernels.triton import products
from compress.kernels.triton._parts import COMPILED, finish
from compress.kernels.triton.products import GpuProduct, Grid, tile_rows

BLOCK_ROWS = 64  # rows of the weight in a program
STEP = 128  # columns of a step at most
LEAST_STEP = 32  # columns of 4 bits that fill an operand
WARPS = 4
OCCUPANCY = 4  # programs that a multiprocessor holds
DECODED = (8, 256)  # rows and columns of a program of the decoder
ROW_BLOCK = 512  # columns of a program that looks up rows


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> GpuProduct | None:
    """Return the product with a weight whose blocks fit to steps: 2, 4, 8 or 16 columns, whole 32, or the whole row."""
    return _GridOnGpu(tensors, params, shape) if step_columns(params, shape, STEP) >= LEAST_STEP else None


def look_up(
    tensors: Mapping[str, Tensor], params: Params, shape: Shape, ids: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Return rows [n, in] in float16, bfloat16 or float32, None for other types and blocks; see `dispatch.rows`.

    An id outside of the table gives a row of NaN: saying more would take a wait for the device.
    """
    columns = step_columns(params, shape, ROW_BLOCK)
    if columns < LEAST_STEP or not grid_format.has_rows(params):
        return None
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return None
    out = torch.empty(len(ids), shape[1], dtype=dtype, device=ids.device)
    read_rows[len(ids), -(-shape[1] // columns)](
        ids, *_pointers(tensors, params), out, *_sizes(params, shape), **constants(params, shape, columns),
        num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def step_columns(params: Params, shape: Shape, most: int) -> int:
    """Columns that are read together: `most`, or as many as divide a block or hold whole ones."""
    block = _block_columns(params, shape)
    while block and block % most and most % block:
        most //= 2
    return most


def _block_columns(params: Params, shape: Shape) -> int:
    """Columns of a block; 0: the whole row."""
    _, columns = params.block(shape)
    return 0 if columns >= shape[1] else columns


def constants(params: Params, shape: Shape, columns: int) -> dict[str, Any]:
    """Return the constants that all kernels have in common."""
    return {
        "VALUES": params.values, "BITS": params.bits, "SCALE_TYPE": params.scale_type, "TENSOR": params.tensor_scale,
        "BLOCK_ROWS": 0 if params.block_rows == -1 else params.block_rows, "BLOCK": _block_columns(params, shape),
        "BLOCK_K": columns,
    }  # fmt: skip


def configuration(params: Params, rows: int, shape: Shape) -> dict[str, Any]:
    """Return the constants of `multiply` but for SPLIT."""
    columns = step_columns(params, shape, STEP)
    tiles = {"BLOCK_N": BLOCK_ROWS, "BLOCK_M": tile_rows(rows), "MASKED": shape[1] % columns != 0}
    return constants(params, shape, columns) | tiles | {"COMPILED": COMPILED}


def decode_constants(params: Params, shape: Shape) -> dict[str, Any]:
    """Return the constants of `decode`."""
    rows, columns = DECODED
    return constants(params, shape, step_columns(params, shape, columns)) | {"BLOCK_N": rows}


@cache
def table(values: str, device: torch.device) -> Tensor:
    """Return the points of a table on a device, float32."""
    return grid_format.value_table(values).to(device)


def _pointers(tensors: Mapping[str, Tensor], params: Params) -> tuple[Tensor, ...]:
    """Return codes, points, scales, and what scales are made of; another one in place of what there is not."""
    device, scales = tensors["codes"].device, tensors["scales"]
    points = table(params.values, device)
    stored = scales.view(torch.uint8) if scales.dtype == torch.float8_e4m3fn else scales
    others = [tensors.get(name, points) for name in ("scale_sizes", "scale_mean", "tensor_scale")]
    return tensors["codes"].view(torch.uint8), points, stored, table(grid_format.DYNAMIC8, device), *others


def _sizes(params: Params, shape: Shape) -> tuple[int, int, int, int]:
    """Return inputs, outputs, bytes of a row and blocks of a row."""
    return shape[1], shape[0], -(-shape[1] * params.bits // 8), params.blocks(shape)[1]


class _GridOnGpu(GpuProduct):
    def multiply(self, x: Tensor, out: Tensor) -> None:
        known = configuration(self.params, x.shape[0], self.shape)
        tiles, steps = -(-self.shape[0] // BLOCK_ROWS), -(-self.shape[1] // known["BLOCK_K"])
        products.launch(
            multiply, (x, *_pointers(self.tensors, self.params)), out, (x.shape[0], *_sizes(self.params, self.shape)),
            Grid(tiles, steps, known["BLOCK_M"] * BLOCK_ROWS, OCCUPANCY), num_warps=WARPS, **known,
        )  # fmt: skip

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in], computed in float32 and rounded once, as formats/grid.py does; in one pass."""
        out = torch.empty(self.shape, dtype=dtype, device=self.tensors["codes"].device)
        known = decode_constants(self.params, self.shape)
        decode[-(-self.shape[1] // known["BLOCK_K"]), -(-self.shape[0] // known["BLOCK_N"])](
            *_pointers(self.tensors, self.params), out, *_sizes(self.params, self.shape), **known, num_warps=WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip
        return out


# What runs on the device.

E2M1_POWER = tl.constexpr(2.0**14)  # exponents of float16 and of the types have different biases
E4M3_POWER = tl.constexpr(2.0**8)
SCALES_PER_SIZE = tl.constexpr(grid_format.SCALES_PER_SIZE)


@triton.jit
def _e4m3(code):
    """Numbers of e4m3 as float32; code: int32 of any shape."""
    bits = (code & 0x80) << 8 | (code & 0x7F) << 7
    value = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * E4M3_POWER
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _points(code, points, VALUES: tl.constexpr):
    """Points float32 of codes int32 of any shape."""
    if VALUES == "e2m1":
        bits = (code & 8) << 12 | (code & 7) << 9
        return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * E2M1_POWER
    elif VALUES == "e4m3":
        return _e4m3(code)
    else:
        return tl.load(points + code)


@triton.jit
def _factors(n, first, scales, dynamic, sizes, mean, tensor_scale, blocks, SCALE_TYPE: tl.constexpr,
             TENSOR: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Factors float32 [n, blocks of the columns from `first` on] of rows n, which exist."""
    count: tl.constexpr = BLOCK_K // BLOCK if BLOCK != 0 and BLOCK < BLOCK_K else 1
    block = tl.arange(0, count) + (first // BLOCK if BLOCK != 0 else 0)
    row = n // BLOCK_ROWS if BLOCK_ROWS != 0 else n * 0
    at = row.to(tl.int64)[:, None] * blocks + tl.minimum(block, blocks - 1)[None, :]
    stored = tl.load(scales + at)
    if SCALE_TYPE == "e8m0":
        word = stored.to(tl.int32) << 23
        factor = tl.where(word == 0, 1 << 22, word).to(tl.float32, bitcast=True)  # 2^-127 is no normal number
    elif SCALE_TYPE == "e4m3":
        factor = _e4m3(stored.to(tl.int32))
    elif SCALE_TYPE == "nested":
        size = tl.load(sizes + at // SCALES_PER_SIZE)
        factor = tl.load(dynamic + stored.to(tl.int32)) * size + tl.load(mean)
    else:
        factor = stored.to(tl.float32)
    if TENSOR:
        factor *= tl.load(tensor_scale)
    return factor


@triton.jit
def _scale(value, factor):
    """Values [n, k] times factors [n, s] of s blocks beside each other."""
    n: tl.constexpr = value.shape[0]
    k: tl.constexpr = value.shape[1]
    s: tl.constexpr = factor.shape[1]
    if s == 1:
        return value * factor
    else:
        return tl.reshape(tl.reshape(value, (n, s, k // s)) * factor[:, :, None], (n, k))


@triton.jit
def _weights(n, first, codes, points, factor, row_bytes, VALUES: tl.constexpr, BITS: tl.constexpr,
             BLOCK_K: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Weights float32 of rows n from column `first` on: [n, BLOCK_K] twice, or of 4 bits the even and the odd ones."""
    count: tl.constexpr = BLOCK_K * BITS // 8
    place = first * BITS // 8 + tl.arange(0, count)
    mask = (place < row_bytes)[None, :] if MASKED else None
    at = codes + n.to(tl.int64)[:, None] * row_bytes + place[None, :]
    code = (tl.load(at, mask=mask, other=0) if MASKED else tl.load(at)).to(tl.int32)
    if BITS == 4:
        low = _scale(_points(code & 15, points, VALUES), factor)
        return low, _scale(_points(code >> 4, points, VALUES), factor)
    else:
        value = _scale(_points(code, points, VALUES), factor)
        return value, value


@triton.jit
def _operand(value, x, COMPILED: tl.constexpr):
    """The value in the type in which it is multiplied."""
    return value.to(x.dtype.element_ty) if COMPILED else value.to(tl.float32)


@triton.jit
def _add(acc, weights, x, k, m, rows, in_features, MASKED: tl.constexpr, COMPILED: tl.constexpr):
    """acc [n, m] + weights [n, k] times the columns k of the rows m of x."""
    mask = (m < rows)[None, :]
    if MASKED:
        mask = mask & (k < in_features)[:, None]
    columns = tl.load(x + m[None, :] * in_features + k[:, None], mask=mask, other=0.0)
    weights, columns = _operand(weights, x, COMPILED), _operand(columns, x, COMPILED)
    return tl.dot(weights, columns, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["rows", "steps", "parts"])
def multiply(x, codes, points, scales, dynamic, sizes, mean, tensor_scale, out, partials, counters,
             rows, in_features, out_features, row_bytes, blocks, steps, parts,
             VALUES: tl.constexpr, BITS: tl.constexpr, SCALE_TYPE: tl.constexpr, TENSOR: tl.constexpr,
             BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
             BLOCK_M: tl.constexpr, MASKED: tl.constexpr, COMPILED: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """out [rows, out_features] = x [rows, in_features] W^T; program (BLOCK_N rows of W, part of the columns).

    x and out have one type; MASKED: the columns do not fill the last step. With SPLIT, `parts` programs share the
    steps.
    """
    block, part = tl.program_id(0), tl.program_id(1)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    row = tl.minimum(n, out_features - 1)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(steps * part // parts, steps * (part + 1) // parts):
        first = step * BLOCK_K
        factor = _factors(row, first, scales, dynamic, sizes, mean, tensor_scale, blocks, SCALE_TYPE, TENSOR,
                          BLOCK_ROWS, BLOCK, BLOCK_K)  # fmt: skip
        low, high = _weights(row, first, codes, points, factor, row_bytes, VALUES, BITS, BLOCK_K, MASKED)
        if BITS == 4:
            k = first + 2 * tl.arange(0, BLOCK_K // 2)
            acc = _add(acc, low, x, k, m, rows, in_features, MASKED, COMPILED)
            acc = _add(acc, high, x, k + 1, m, rows, in_features, MASKED, COMPILED)
        else:
            acc = _add(acc, low, x, first + tl.arange(0, BLOCK_K), m, rows, in_features, MASKED, COMPILED)
    finish(tl.trans(acc), 1.0, x, out, partials, counters, block, part, parts, n, m, rows, out_features, False, SPLIT)


@triton.jit
def _write(n, known, target, first, codes, points, scales, dynamic, sizes, mean, tensor_scale, out, in_features,
           row_bytes, blocks, VALUES: tl.constexpr, BITS: tl.constexpr, SCALE_TYPE: tl.constexpr, TENSOR: tl.constexpr,
           BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Write columns of rows n to the rows `target` of out; NaN for those that are not known."""
    row = tl.where(known, n, 0)
    factor = _factors(row, first, scales, dynamic, sizes, mean, tensor_scale, blocks, SCALE_TYPE, TENSOR, BLOCK_ROWS,
                      BLOCK, BLOCK_K)  # fmt: skip
    low, high = _weights(row, first, codes, points, factor, row_bytes, VALUES, BITS, BLOCK_K, True)
    value = tl.reshape(tl.join(low, high), (n.shape[0], BLOCK_K)) if BITS == 4 else low
    value = tl.where(known[:, None], value, float("nan"))
    k = first + tl.arange(0, BLOCK_K)
    at = out + target.to(tl.int64)[:, None] * in_features + k[None, :]
    tl.store(at, value.to(out.dtype.element_ty), mask=(k < in_features)[None, :] & (target >= 0)[:, None])


@triton.jit
def decode(codes, points, scales, dynamic, sizes, mean, tensor_scale, out, in_features, out_features, row_bytes, blocks,
           VALUES: tl.constexpr, BITS: tl.constexpr, SCALE_TYPE: tl.constexpr, TENSOR: tl.constexpr,
           BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """out [out_features, in_features]; program (BLOCK_K columns of BLOCK_N rows)."""
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    known = n < out_features
    _write(n, known, tl.where(known, n, -1), tl.program_id(0) * BLOCK_K, codes, points, scales, dynamic, sizes, mean,
           tensor_scale, out, in_features, row_bytes, blocks, VALUES, BITS, SCALE_TYPE, TENSOR, BLOCK_ROWS, BLOCK,
           BLOCK_K)  # fmt: skip


@triton.jit
def read_rows(ids, codes, points, scales, dynamic, sizes, mean, tensor_scale, out, in_features, out_features, row_bytes,
              blocks, VALUES: tl.constexpr, BITS: tl.constexpr, SCALE_TYPE: tl.constexpr, TENSOR: tl.constexpr,
              BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """out [ids, in_features]; program (BLOCK_K columns of one row)."""
    target = tl.program_id(0) + tl.arange(0, 1)
    n = tl.load(ids + target).to(tl.int64)
    known = (n >= 0) & (n < out_features)
    _write(n, known, target, tl.program_id(1) * BLOCK_K, codes, points, scales, dynamic, sizes, mean, tensor_scale, out,
           in_features, row_bytes, blocks, VALUES, BITS, SCALE_TYPE, TENSOR, BLOCK_ROWS, BLOCK, BLOCK_K)  # fmt: skip
