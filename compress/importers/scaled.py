"""Decode numbers that are multiplied by scales: of the whole weight, of rows, of groups of columns, or of blocks.

A product is made in float32 and rounded once. Readers that multiply in the 16-bit type of their scales give the same,
because codes, zero points and their differences are exact in these types.

Unpack codes: integers of 1 to 8 bits in words, the lowest bits of a word first, and e2m1 numbers of 4 bits.

An e2m1 number is a sign, two bits of exponent and one of mantissa. Two lie in a byte, the low half first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from compress.formats import grid as points
from compress.importers.source import CheckpointSource, Decoded, step
from compress.storage.checkpoint import StoredTensor

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
RUNTIME_ENDINGS = (".input_scale", ".activation_scale", ".k_scale", ".v_scale")  # scales of inputs and caches

Block = tuple[int, int]  # rows, columns
Rows = Callable[[int, int], Tensor]  # (start, stop) -> these rows, float32


class Codes(NamedTuple):
    """The numbers of a weight [..., out, in] before they are scaled."""

    stored: StoredTensor
    shape: tuple[int, ...]
    rows: Rows


class ScaleGrid(NamedTuple):
    """What the numbers are multiplied with, and what is subtracted before.

    block: the rows and columns that share a scale; without one all of a row do, or all of the weight.
    """

    stored: StoredTensor
    block: Block | None = None
    zeros: Rows | None = None  # [rows, groups of columns]
    groups: StoredTensor | None = None  # [in], the group of each column; one that is negative: they are in order
    divisor: StoredTensor | None = None  # one number that all scales are divided by
    others: tuple[StoredTensor, ...] = ()  # that zeros are read from
    factor: StoredTensor | None = None  # one number that all scales are multiplied by
    values: Callable[[Tensor], Tensor] | None = None  # stored scales -> float32, where `numbers` does not give them


def plain(stored: StoredTensor) -> Codes:
    """Return the numbers of a stored tensor."""
    return Codes(stored, stored.shape, lambda start, stop: stored.rows(start, stop).float())


def halves(stored: StoredTensor, unpack: Callable[[Tensor], Tensor] | None = None) -> Codes:
    """Return the numbers [..., n] that lie in bytes [..., n / 2], e2m1 where no `unpack` says otherwise."""
    shape = (*stored.shape[:-1], 2 * stored.shape[-1] if stored.shape else 0)
    return Codes(stored, shape, lambda start, stop: (unpack or unpack_e2m1)(stored.rows(start, stop).view(torch.uint8)))


def numbers(scale: Tensor) -> Tensor:
    """Return scales in float32; bytes are exponents with an offset of 127."""
    if scale.dtype == torch.uint8:
        return (scale.float() - 127.0).exp2()
    return scale.float()


def weight(source: CheckpointSource, name: str, codes: Codes, scales: ScaleGrid, dtype: torch.dtype) -> Decoded:
    """Return the weight [..., out, in] in `dtype`; CheckpointError for scales of another shape than it needs.

    The scales are [..., ceil(out / rows), ceil(in / columns)] for a block of rows x columns: the last block may be
    smaller.
    """
    shape = codes.shape
    if len(shape) < 2 or not all(shape):
        raise source.error(f"{codes.stored.name} has the shape {list(shape)}, a quantized weight has two dimensions")
    *outer, rows, columns = shape
    down, across = _block(shape, scales)
    grid = (*outer, -(-rows // down), -(-columns // across))
    size = scales.stored.shape
    if size not in (grid, grid[:-1] if grid[-1] == 1 else grid) and not math.prod(size) == math.prod(grid) == 1:
        raise source.error(
            f"{scales.stored.name} has the shape {list(size)}, but {codes.stored.name} {list(shape)} in blocks of "
            f"{down} x {across} needs {list(grid)}"
        )
    table = scales.stored._replace(shape=grid)

    def decode(start: int, stop: int) -> Tensor:
        first, last = (start, stop) if outer else (start // down, -(-stop // down))
        factors = (scales.values or numbers)(table.rows(first, last))
        if scales.divisor is not None:
            factors = factors / scales.divisor.read().float().reshape(())
        if scales.factor is not None:
            factors = factors * scales.factor.read().float().reshape(())
        factors = factors.repeat_interleave(down, -2)
        factors = factors[..., :rows, :] if outer else factors[start - first * down : stop - first * down]
        group = _groups(source, scales, columns, grid[-1], across)
        values = codes.rows(start, stop)
        if scales.zeros is not None:
            values.sub_(scales.zeros(start, stop).index_select(-1, group))
        return values.mul_(factors.index_select(-1, group)).to(dtype)

    extra = tuple(stored for stored in (scales.groups, scales.divisor, scales.factor) if stored is not None)
    return Decoded(name, dtype, shape, (codes.stored, scales.stored, *extra, *scales.others), decode, step(shape))


def decode_unscaled(name: str, codes: Codes, others: tuple[StoredTensor, ...] = ()) -> Decoded:
    """Return a weight whose numbers are not scaled, in the type that they are stored in."""
    dtype = codes.stored.dtype
    return Decoded(
        name, dtype, codes.shape, (codes.stored, *others), lambda a, b: codes.rows(a, b).to(dtype), step(codes.shape)
    )


def _block(shape: tuple[int, ...], scales: ScaleGrid) -> Block:
    """Return the rows and columns that share a scale."""
    *outer, rows, columns = shape
    if scales.block is not None:
        return min(scales.block[0], max(1, rows)), scales.block[1]
    return (1 if math.prod(scales.stored.shape) == math.prod(outer) * rows else rows), columns


def _groups(source: CheckpointSource, scales: ScaleGrid, columns: int, groups: int, across: int) -> Tensor:
    """Return the group of each column, int64 [columns]."""
    if scales.groups is not None:
        group = scales.groups.read().long()
        if group.numel() and group.min() >= 0:
            return check_groups(source, scales.groups.name, group, groups)
    return torch.arange(columns) // across


def check_groups(source: CheckpointSource, name: str, group: Tensor, groups: int) -> Tensor:
    """Return indices of groups; CheckpointError for one that is none."""
    low, high = (int(group.min()), int(group.max())) if group.numel() else (0, 0)
    if group.numel() and not 0 <= low <= high < groups:
        raise source.error(f"{name} speaks of group {low if low < 0 else high}, there are {groups}; download it again")
    return group


def decoded_dtype(source: CheckpointSource, scale: StoredTensor) -> torch.dtype:
    """Return the type of a decoded weight: that of its scales where they have 16 bits, else that of the model."""
    return scale.dtype if scale.dtype in (torch.float16, torch.bfloat16) else source.dtype


def unpack_codes(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the first `count` codes uint8 [..., count] of integers [..., words]; a code may lie in two words."""
    octets = words.contiguous().view(torch.uint8)
    octets = pad(octets, (0, -octets.shape[-1] % bits)).unflatten(-1, (-1, bits))  # eight codes in `bits` bytes
    codes = torch.empty(*octets.shape[:-1], 8, dtype=torch.uint8)
    for index in range(8):
        octet, shift = divmod(index * bits, 8)
        code = octets[..., octet] >> shift
        if shift + bits > 8:
            code = code | octets[..., octet + 1] << (8 - shift)
        codes[..., index] = code & ((1 << bits) - 1)
    return codes.flatten(-2)[..., :count]


def unpack_e2m1(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the numbers [..., 2 n] in a packed uint8 tensor [..., n]."""
    levels = points.value_table(points.E2M1).to(dtype)
    table = torch.stack([levels.repeat(16), levels.repeat_interleave(16)], -1)  # [byte, half]
    return table[packed.int()].flatten(-2)
