"""Multiply `int` weights with up to 64 rows of activations on a GPU, read as they are stored.

float16 and bfloat16 activations are multiplied as they are; codes are exact in both types, sums are float32, scales
and zero points are applied in float32 to the sums of each group. Other activations are rounded to float16. The kernels
of products and decoding are in `_int.py`.
"""

# ruff: noqa: PLR0913, PLR0917 (signatures of kernels)
# mypy: disallow-untyped-defs = False, disable-error-code = "annotation-unchecked,assignment,misc"

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.formats.int import PLANES, Params, padded_shape
from compress.kernels.contract import Shape
from compress.kernels.triton import _int, _parts, products
from compress.kernels.triton._int import stored_zero
from compress.kernels.triton.products import GpuProduct
from compress.kernels.triton.unpack import fields, narrow_words
from compress.numerics.packing import FIELDS, WORDS

LEAST_WORDS = 16  # of a step: the tensor cores multiply 16 columns at a time


@dataclass(frozen=True)
class Config:
    block_n: int  # rows of the weight
    block_words: int  # words of a tile in one step, at most
    warps: int
    stages: int
    programs: int  # that a multiprocessor of sm_90 runs at once, by registers and shared memory
    with_zeros: int = 0  # the same where the loop takes sums for zero points (8 rows), if it is fewer


# Chosen by the instructions, registers and shared memory of the code compiled for sm_90, not by timings: a sweep on a
# device may replace any row. tests/kernels/test_triton_int_code.py compiles all of them. Steps of 512 columns of every
# width: fewer pay more for each step, more do not leave the registers that several rows of activations need.
# (bits, rows of activations, at most) -> configurations from many to few rows of the weight: the first that fills the
# device is taken. More rows than the table has are computed in several launches.
TABLE: dict[tuple[int, int], tuple[Config, ...]] = {
    (2, 8): (Config(64, 64, 4, 4, 3), Config(16, 64, 1, 4, 7)),
    (2, 16): (Config(64, 64, 4, 3, 3),),
    (2, 32): (Config(64, 64, 4, 3, 2),),
    (2, 64): (Config(128, 64, 8, 2, 1), Config(64, 64, 4, 2, 1)),
    (3, 8): (Config(64, 32, 4, 4, 3), Config(16, 32, 1, 4, 6)),
    (3, 16): (Config(64, 32, 4, 3, 3),),
    (3, 32): (Config(64, 32, 4, 2, 2),),
    (3, 64): (Config(128, 32, 8, 2, 1), Config(64, 32, 4, 2, 1)),
    (4, 8): (Config(64, 128, 4, 3, 4), Config(16, 128, 1, 3, 9)),
    (4, 16): (Config(64, 128, 4, 3, 2), Config(64, 64, 4, 3, 4)),
    (4, 32): (Config(64, 128, 4, 2, 2), Config(64, 64, 4, 3, 3)),
    (4, 64): (Config(128, 128, 8, 2, 1), Config(64, 64, 4, 2, 2)),
    (5, 8): (Config(64, 32, 4, 3, 3),),
    (5, 16): (Config(64, 32, 4, 3, 2),),
    (5, 32): (Config(64, 32, 4, 2, 2),),
    (5, 64): (Config(128, 32, 8, 2, 1),),
    (6, 8): (Config(64, 64, 4, 3, 3, 2),),
    (6, 16): (Config(64, 64, 4, 3, 2),),
    (6, 32): (Config(64, 64, 4, 2, 2),),
    (6, 64): (Config(128, 64, 8, 2, 1),),
    (7, 8): (Config(64, 32, 4, 3, 3),),
    (7, 16): (Config(64, 32, 4, 3, 2),),
    (7, 32): (Config(64, 32, 4, 2, 2),),
    (7, 64): (Config(128, 32, 8, 2, 1),),
    (8, 8): (Config(64, 128, 4, 3, 5, 4), Config(16, 128, 1, 3, 13)),
    (8, 16): (Config(64, 128, 4, 3, 4), Config(64, 64, 4, 3, 6)),
    (8, 32): (Config(64, 128, 4, 2, 3), Config(64, 64, 4, 3, 4)),
    (8, 64): (Config(128, 128, 8, 2, 1), Config(64, 64, 4, 2, 2)),
}

# For 16 rows elsewhere, by bits. Other devices multiply more rows in several launches: their tensor cores take weights
# from registers for few rows (sm_80), or for less than a warpgroup (sm_100), only.
ELSEWHERE = {
    2: Config(32, 64, 2, 3, 5),
    3: Config(16, 32, 1, 3, 5),
    4: Config(32, 128, 2, 3, 4),
    5: Config(32, 32, 2, 3, 4),
    6: Config(32, 64, 2, 3, 3),
    7: Config(16, 32, 1, 3, 4),
    8: Config(32, 128, 2, 3, 6),
}


# Rows up to which the loop itself sums the activations for the zero points; more have no registers left for that.
LOOP_SUMS = 8
DECODE_ROWS = 16  # of the weight, in one program of the decoder
ROW_BLOCK = 512  # columns of a program that looks up rows: four for each of its 128 threads
SUMS_BLOCK = 2048  # activations that a program of the sums takes at a time


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> GpuProduct | None:
    """Return the product with codes of any width; groups must be whole runs of the 16 columns that a step can take."""
    fits = params.group_size == -1 or params.group_size % LEAST_WORDS == 0
    return _Int(tensors, params, shape) if fits else None


def look_up(
    tensors: Mapping[str, Tensor], params: Params, shape: Shape, ids: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Return rows [n, in] in float16, bfloat16 or float32, None for other types; see `dispatch.rows`.

    An id outside of the table gives a row of NaN: saying more would take a wait for the device.
    """
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return None
    scales, (rows, columns) = tensors["scales"], shape
    whole, narrow = params.split(columns)
    stored_rows, stored = padded_shape(params, shape)
    out = torch.empty(len(ids), columns, dtype=dtype, device=ids.device)
    read_rows[len(ids), -(-columns // ROW_BLOCK)](
        ids, *planes(tensors, params), scales, tensors.get("zeros", scales), out, rows, columns, stored_rows,
        whole * params.tile_columns, stored, **layout(params), NARROW=narrow > 0, BLOCK=ROW_BLOCK,
    )  # fmt: skip
    return out


class _Int(GpuProduct):
    # The most that one launch has registers for. At 64 rows it issues 2.5 to 3.5 instructions a weight, about what an
    # H200 has time for while it reads 4 bits; the crossover to decoding, estimated at 128 to 256 rows for 4 bits, is
    # not measured.
    most = 64
    most_rank = 128  # the loop over it is unrolled

    def multiply(self, x: Tensor, out: Tensor) -> None:
        self._multiply(x, out, None)

    def plus(self, x: Tensor, hidden: Tensor, factor: Tensor) -> Tensor:
        out = torch.empty(*x.shape[:-1], self.shape[0], dtype=x.dtype, device=x.device)
        added = hidden.reshape(-1, hidden.shape[-1]), factor
        self._multiply(x.reshape(-1, x.shape[-1]), out.view(-1, self.shape[0]), added)
        return out

    def _multiply(self, x: Tensor, out: Tensor, added: tuple[Tensor, Tensor] | None) -> None:
        """Launch kernels only: graphs can capture it.

        added: hidden [rows, rank] and factor [rank, out] of the type that is multiplied, whose product is added.
        """
        params, shape = self.params, self.shape
        if x.dtype not in (torch.float16, torch.bfloat16):
            x = x.half()
        padding = padded_shape(params, shape)[1] - shape[1]
        if padding:  # of widths that are no multiple of 32
            x = torch.nn.functional.pad(x, (0, padding))
        device = products.properties(x.device)
        most = max(configurations(params.bits, device.major))
        for first in range(0, x.shape[0], most):
            rows = slice(first, min(first + most, x.shape[0]))
            plan = choose(params, shape, rows.stop - first, device)
            some = None if added is None else (added[0][rows], added[1])
            launch(x[rows], self.tensors, params, out[rows], plan, some)

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in], computed in float32 and rounded once, as formats/int.py does; in one pass."""
        params, tensors, (outputs, inputs) = self.params, self.tensors, self.shape
        rows, _ = padded_shape(params, self.shape)
        tiles, narrow = params.split(self.shape[1])
        scales, block = tensors["scales"], most_words(params)
        out = torch.empty(self.shape, dtype=dtype, device=scales.device)
        _int.decode[-(-outputs // DECODE_ROWS), tiles * (params.tile_words // block) + narrow](
            *planes(tensors, params), scales, tensors.get("zeros", scales), out, inputs, outputs, rows, tiles,
            **layout(params), NARROW=narrow, BLOCK_N=DECODE_ROWS, BLOCK_WORDS=block,
        )  # fmt: skip
        return out


class Launch(NamedTuple):
    """How one launch is cut up."""

    config: Config
    rows: int  # of activations that a program computes
    parts: int  # of the columns


@cache
def choose(params: Params, shape: tuple[int, int], rows: int, device: products.Device) -> Launch:
    """The first configuration that can give every multiprocessor its programs, split as far as they run at once."""
    stored_rows, columns = padded_shape(params, shape)
    block_m, known = next(item for item in configurations(params.bits, device.major).items() if rows <= item[0])
    for config in known:
        config = fit(config, params.bits, block_m, most_words(params), device.shared)
        tiles = -(-stored_rows // config.block_n)
        counts = not params.symmetric and block_m <= LOOP_SUMS
        slots = device.multiprocessors * (config.with_zeros if counts and config.with_zeros else config.programs)
        steps = max(1, columns // (_fields(params) * config.block_words))
        parts = products.count(tiles, steps, slots, config.block_n * block_m)
        if tiles * parts * 3 >= slots * 2:
            break
    return Launch(config, block_m, parts)


def launch(
    x: Tensor,
    tensors: Mapping[str, Tensor],
    params: Params,
    out: Tensor,
    plan: Launch,
    added: tuple[Tensor, Tensor] | None = None,
) -> None:
    """out [rows, out] = x [rows, stored columns] W^T, at most plan.rows rows; x is float16 or bfloat16."""
    rows, _ = padded_shape(params, (out.shape[1], x.shape[1]))
    tiles, narrow = params.split(x.shape[1])
    config, workspace, scales = plan.config, products.workspace(x.device), tensors["scales"]
    static = constants(params, plan)
    sums = _sums(x, params, scales.shape[0]) if static["SUMMED"] else scales
    hidden, factor = (x, x) if added is None else added
    _int.multiply[-(-rows // config.block_n), plan.parts](
        x, *planes(tensors, params), scales, tensors.get("zeros", scales), sums, hidden, factor,
        out, workspace.partials, workspace.counters,
        x.shape[0], out.shape[1], rows, tiles, plan.parts,
        **static, RANK=0 if added is None else hidden.shape[1], NARROW=narrow, BF16=x.dtype == torch.bfloat16,
        USE_ASM=_int.COMPILED,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip


@cache
def constants(params: Params, plan: Launch) -> dict[str, Any]:
    """The constants of the kernel that depend on the weight and the plan only."""
    return {
        **layout(params),
        "SUMMED": not params.symmetric and plan.rows > LOOP_SUMS,
        "BLOCK_N": plan.config.block_n,
        "BLOCK_M": plan.rows,
        "BLOCK_WORDS": plan.config.block_words,
        "SPLIT": plan.parts > 1,
    }


def most_words(params: Params) -> int:
    """Words of a tile that a step can take, a power of two: their columns in each field share a group."""
    words = params.tile_words
    while params.group_size != -1 and params.group_size % words:
        words //= 2
    return words


def layout(params: Params) -> dict[str, Any]:
    """Return the constants of a kernel that say how codes, scales and zero points lie."""
    a, b, c = (*PLANES[params.bits], 0, 0)[:3]
    group = 0 if params.group_size == -1 else params.group_size
    return {"A": a, "B": b, "C": c, "GROUP": group, "SYMMETRIC": params.symmetric, "TILE_WORDS": params.tile_words}


def _fields(params: Params) -> int:
    """Columns that a tile has for each of its words."""
    return max(FIELDS[width] for width in PLANES[params.bits])


def planes(tensors: Mapping[str, Tensor], params: Params) -> tuple[Tensor, Tensor, Tensor]:
    """Return the planes of words, the first in place of those that the width does not have."""
    known = [tensors[f"words{width}"] for width in PLANES[params.bits]]
    first, second, third = (known + known[:1] * 2)[:3]
    return first, second, third


def _sums(x: Tensor, params: Params, count: int) -> Tensor:
    """Sums of x [rows, in] over each of `count` groups: float32 [count, rows]."""
    group = params.group(x.shape[1])
    sums = torch.empty(count, x.shape[0], dtype=torch.float32, device=x.device)
    block = min(1 << (group - 1).bit_length(), SUMS_BLOCK)
    many = SUMS_BLOCK // block
    _parts.add_up[x.shape[0], -(-count // many)](
        x, sums, x.shape[0], x.shape[1], count, GROUP=group, BLOCK=block, MANY=many
    )
    return sums


def configurations(bits: int, major: int) -> dict[int, tuple[Config, ...]]:
    """Rows of activations, ascending -> configurations, for devices of compute capability `major`."""
    by_rows = {rows: TABLE[width, rows] for width, rows in sorted(TABLE) if width == bits}
    return by_rows if major == 9 else {8: by_rows[8], 16: (ELSEWHERE[bits],)}


def fit(config: Config, bits: int, rows: int, most_words: int, shared: int) -> Config:
    """The configuration for steps of at most `most_words` words, a power of two, and `shared` bytes of memory."""
    config = replace(config, block_words=min(config.block_words, most_words))
    while shared_bytes(config, bits, rows) > shared and config.stages > 2:
        config = replace(config, stages=config.stages - 1)
    while shared_bytes(config, bits, rows) > shared and config.block_words > LEAST_WORDS:
        config = replace(config, block_words=config.block_words // 2)
    return config


def shared_bytes(config: Config, bits: int, rows: int) -> int:
    """Shared memory of a program, at most: words and activations of the steps in flight, and the split's barrier."""
    fields = max(FIELDS[width] for width in PLANES[bits])
    words = sum(WORDS[width] * fields // FIELDS[width] for width in PLANES[bits])  # of a row of the weight
    held = (config.stages - 1) * config.block_n * words + (config.stages - (rows == 8)) * rows * fields
    return 2 * config.block_words * held + 1024


# The kernel that looks up rows: a program makes BLOCK columns of one row, in their order. Each column finds the words
# that hold its code, so that groups may have any size and a row may end in a narrow tail. Columns that share a word
# read it together, from the cache. Nothing waits for the device, and nothing is allocated but the result.


@triton.jit
def _plane(words, row, c, mask, whole, stored, WIDTH: tl.constexpr, TILE_WORDS: tl.constexpr, NARROW: tl.constexpr):
    """Codes int32 of the columns c of a plane; a row has `stored` columns, those from `whole` on in narrow tiles."""
    F: tl.constexpr = fields(WIDTH)
    field = c // TILE_WORDS % F
    at = c // (TILE_WORDS * F) * TILE_WORDS + c % TILE_WORDS
    if NARROW:
        COUNT: tl.constexpr = narrow_words(WIDTH, 1)
        k = c - whole
        field = tl.where(k < 0, field, k // COUNT % F)
        at = tl.where(k < 0, at, whole // F + k // 32 * COUNT + k % COUNT)
    many = stored // F
    if WIDTH == 3:
        start = words + row * (3 * many) + at
        code = tl.load(start + tl.minimum(field // 5, 2) * many, mask=mask, other=0).to(tl.int32) >> field % 5 * 3 & 7
        last = mask & (field == 15)
        spare = tl.load(start, mask=last, other=0).to(tl.int32) >> 15 & 1
        spare |= tl.load(start + many, mask=last, other=0).to(tl.int32) >> 14 & 2
        spare |= tl.load(start + 2 * many, mask=last, other=0).to(tl.int32) >> 13 & 4
        return tl.where(last, spare, code)
    else:
        word = tl.load(words + row * many + at, mask=mask, other=0).to(tl.int32)
        return word >> field * WIDTH & ((1 << WIDTH) - 1)


@triton.jit
def read_rows(ids, words_a, words_b, words_c, scales, zeros, out, rows, in_features, stored_rows, whole, stored,
              A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr, SYMMETRIC: tl.constexpr,
              TILE_WORDS: tl.constexpr, NARROW: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """out [n, in_features] = the rows ids [n] of scale * (code - zero); program (id, block of columns).

    The weight has `rows` rows, `stored_rows` with padding. An id that is none of them gives a row of NaN.
    """
    i = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < in_features
    row = tl.load(ids + i).to(tl.int64)  # a table may have more than 2**31 words
    is_row = (row >= 0) & (row < rows)
    row = tl.where(is_row, row, 0)
    BITS: tl.constexpr = A + B + C
    code = _plane(words_a, row, c, mask, whole, stored, A, TILE_WORDS, NARROW)
    if B != 0:
        code = code << B | _plane(words_b, row, c, mask, whole, stored, B, TILE_WORDS, NARROW)
    if C != 0:
        code = code << C | _plane(words_c, row, c, mask, whole, stored, C, TILE_WORDS, NARROW)
    if GROUP == 0:
        group = row * 0  # one number: a scale for the whole row
    else:
        group = (tl.minimum(c, in_features - 1) // GROUP).to(tl.int64)
    if SYMMETRIC:
        code -= 1 << (BITS - 1)
    else:
        code -= stored_zero(zeros, group, row, stored_rows, BITS).to(tl.int32)
    scale = tl.load(scales + (group * stored_rows + row)).to(tl.float32)
    value = tl.where(is_row, code.to(tl.float32) * scale, float("nan"))
    tl.store(out + i * in_features + c, value.to(out.dtype.element_ty), mask=mask)
