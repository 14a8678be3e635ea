"""Multiply the format `columns` with up to four tokens on a GPU; columns of inputs that are left out are not loaded.

A program takes some outputs, a token and a part of the columns. A column in which the token's input is below its
threshold is masked, so that nothing of it is fetched. Sums are float32 and have the same order in every launch. The
codes of a step of columns are summed before they meet the scale of their group.
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

from compress.formats.columns import TILE, Params, decode
from compress.kernels.contract import Shape
from compress.kernels.triton import products
from compress.kernels.triton._parts import sum_parts
from compress.kernels.triton.products import GpuProduct, Grid

STEP = 32  # columns of a step: groups are multiples
BLOCK = 128  # bytes of a column of codes in a program, or its 16-bit values
WARPS = 4
OCCUPANCY = 8  # programs that a multiprocessor holds


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> ColumnsOnGpu | None:
    """Return the product with a weight whose groups are whole steps of columns."""
    fits = params.bits == 16 or params.group_size == -1 or params.group_size % STEP == 0
    return ColumnsOnGpu(tensors, params, shape) if fits else None


def constants(params: Params) -> dict[str, Any]:
    """Return the constants of the kernel that say how codes and scales lie."""
    return {
        "BITS": params.bits, "FIELDS": 1 if params.bits == 16 else 8 // params.bits,
        "GROUP": 0 if params.bits == 16 or params.group_size == -1 else params.group_size,
        "SYMMETRIC": params.symmetric, "STEP": STEP, "BLOCK": BLOCK,
    }  # fmt: skip


class ColumnsOnGpu(GpuProduct):
    """A weight of the format `columns` on a GPU."""

    types = (torch.bfloat16, torch.float16, torch.float32)
    most = 4

    def multiply(self, x: Tensor, out: Tensor) -> None:
        self._launch(x, torch.zeros(1, device=x.device), out)

    def sparse(self, x: Tensor, threshold: Tensor | None) -> Tensor:
        """Return x [1 to 4, in] times the weight, of inputs whose magnitude reaches threshold [1] or [in] float32."""
        out = torch.empty(len(x), self.shape[0], dtype=x.dtype, device=x.device)
        self._launch(x, torch.zeros(1, device=x.device) if threshold is None else threshold, out)
        return out

    def _launch(self, x: Tensor, threshold: Tensor, out: Tensor) -> None:
        stored = self.tensors["values" if self.params.bits == 16 else "codes"]
        scales, zeros = self.stored("scales", stored), self.stored("zeros", stored)
        outputs, inputs = self.shape
        stride, blocks = stored.shape[1], -(-stored.shape[1] // BLOCK)
        chosen = constants(self.params)
        products.launch(
            multiply, (x, threshold, stored, scales, zeros), out,
            (int(threshold.numel() > 1), inputs, outputs, stride, blocks),
            Grid(len(x) * blocks, -(-inputs // STEP), BLOCK * chosen["FIELDS"], OCCUPANCY), **chosen, num_warps=WARPS,
        )  # fmt: skip

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in]: of 16 bits as it lies, for a product that does not mind."""
        if self.params.bits == 16:
            return self.tensors["values"].T.to(dtype)
        return decode(self.tensors, self.params, self.shape, dtype)


# What runs on the device.

SIXTEEN = tl.constexpr(TILE)


@triton.jit
def _codes(octets, BITS: tl.constexpr, FIELDS: tl.constexpr):
    """The codes [FIELDS, n, BLOCK] of bytes [n, BLOCK], float32."""
    shifts = tl.arange(0, FIELDS)[:, None, None] * BITS
    return ((octets.to(tl.int32)[None, :, :] >> shifts) & ((1 << BITS) - 1)).to(tl.float32)


@triton.jit(do_not_specialize=["each", "blocks", "steps", "parts"])
def multiply(x, thresholds, stored, scales, zeros, out, partials, counters, each, in_features, out_features, stride,
             blocks, steps, parts, BITS: tl.constexpr, FIELDS: tl.constexpr, GROUP: tl.constexpr,
             SYMMETRIC: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """out [rows, out_features]; program (row and BLOCK elements of a column, part of the columns)."""
    tile, part = tl.program_id(0), tl.program_id(1)
    row, block = tile // blocks, tile % blocks
    at = block * BLOCK + tl.arange(0, BLOCK)  # elements of a column
    field = tl.arange(0, FIELDS)
    if BITS == 16:
        n = at[None, :] + field[:, None]
    else:
        n = (at // SIXTEEN * (SIXTEEN * FIELDS) + at % SIXTEEN)[None, :] + field[:, None] * SIXTEEN
    known = (at < stride)[None, :]
    acc = tl.zeros((FIELDS, BLOCK), tl.float32)
    for step in range(steps * part // parts, steps * (part + 1) // parts):
        k = step * STEP + tl.arange(0, STEP)
        inside = k < in_features
        value = tl.load(x + row * in_features + k, mask=inside, other=0.0).to(tl.float32)
        least = tl.load(thresholds + k * each, mask=inside, other=0.0)
        is_kept = inside & ~(tl.abs(value) < least)  # so is NaN
        value = tl.where(is_kept, value, 0.0)
        here = stored + k.to(tl.int64)[:, None] * stride + at[None, :]
        read = tl.load(here, mask=is_kept[:, None] & known, other=0)
        if BITS == 16:
            acc += tl.sum(read.to(tl.float32) * value[:, None], 0)[None, :]
        else:
            sums = tl.sum(_codes(read, BITS, FIELDS) * value[None, :, None], 1)
            group = 0 if GROUP == 0 else step * STEP // GROUP
            if SYMMETRIC:
                zero = tl.full((FIELDS, BLOCK), 1 << (BITS - 1), tl.float32)
            else:
                packed = tl.load(zeros + group * stride + at, mask=at < stride, other=0)
                zero = tl.sum(_codes(packed[None, :], BITS, FIELDS), 1)
            scale = tl.load(scales + group * stride * FIELDS + n, mask=known, other=0.0).to(tl.float32)
            acc += scale * (sums - zero * tl.sum(value, 0))
    mask = known & (n < out_features)
    if SPLIT:
        last, acc = sum_parts(acc, partials, counters, tile, part, parts, known)
        if last:
            tl.store(out + row * out_features + n, acc.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(out + row * out_features + n, acc.to(out.dtype.element_ty), mask=mask)
