"""Lay out the matrices that turn codes into keys in the order in which compiled code multiplies with them.

With AMX the product takes levels in bfloat16, in which they are exact, and `back` in bfloat16, with its error as a
second number: for all channels of the codes where keys are float32, else for the first SECOND * STEP, where nearly all
of the energy is (the error, relative to the keys, is then a third of that of their rounding). Sums are float32. Without
AMX it is a float32 product where keys are float32. Else levels and `back` are int16, of which processors multiply and
add up twice as many at a time: each channel of a head has a scale of its own, as small as sums in int32 allow, so that
an error is some 2^-13 of the keys.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from compress.kernels import llvm
from compress.kernels.cpu.emitter import LANES, LARGEST

SECOND = 1  # steps of channels of the codes whose rows of `back` are a sum of two numbers
STEP = 32  # fields of a tile
TILE = 512  # bfloat16 numbers: 16 rows of STEP
PAIR = 2 * TILE  # a step reads two tiles
MAX_INT_SUM = 2.0**31 - 2.0**24  # sums of levels and `back` in integers; rounding takes the rest


class KeyTransform(NamedTuple):
    """Of all heads, as the kernel reads it; `transform` makes it."""

    back: Tensor
    firsts: Tensor  # int64 [2, h]: where a head begins in it, in elements; fields of the head
    mean: Tensor  # [h, width] float32
    pitch: int  # fields of a head
    second: int  # steps that have a second number
    scales: Tensor  # [h, width] float32: what a product in integers is multiplied with; ones of other products


@cache
def has_tiles() -> bool:
    """Return whether this process may use AMX."""
    start = getattr(torch.cpu, "_init_amx", None)
    return {"amx-tile", "amx-bf16"} <= llvm.features() and start is not None and bool(start())


def transform(
    back: Tensor, mean: Tensor, largest: Tensor, columns: Tensor, rotary: int, is_exact: bool
) -> KeyTransform:
    """back [h, width (of codes), width], a row for each channel of the codes, in units of the tables; mean [h, width];
    largest [h, width]: of the levels of a channel of the codes; columns int64 [h, width]: where a channel is among the
    fields of its head, -1: nowhere; rotary: channels that turn; is_exact: to float32.
    """
    heads, _, width = back.shape
    lanes = torch.zeros(heads, _pitch(columns) + 1, width, dtype=torch.float32, device="cpu")
    index = columns.where(columns >= 0, lanes.shape[1] - 1)
    lanes.scatter_(1, index[..., None].expand(-1, -1, width), back.float())
    lanes, fields = lanes[:, :-1], columns.amax(1) + 1
    second = lanes.shape[1] // STEP if is_exact else SECOND
    scales = torch.ones_like(mean, dtype=torch.float32)
    if has_tiles():
        high = lanes.bfloat16()
        low = (lanes - high.float())[:, : second * STEP].bfloat16()
        back = _tiles(torch.cat((high, low), 1), rotary, LANES)
    elif is_exact:
        back = lanes.contiguous()
    else:
        sums = (back.abs() * (columns >= 0)[..., None] * largest[..., None]).sum(1)
        scales = torch.maximum(lanes.abs().amax(1) / LARGEST, sums / MAX_INT_SUM).float().clamp(min=1e-30)
        back = _tiles((lanes / scales[:, None]).round().short(), rotary, 1)
    firsts = torch.arange(heads, device="cpu") * back[0].numel()
    return KeyTransform(back, torch.stack((firsts, fields)), mean.float().contiguous(), lanes.shape[1], second, scales)


def _tiles(rows: Tensor, rotary: int, together: int) -> Tensor:
    """[h, fields, width] -> the order in which the kernel reads them: [h, pair, step, side, together, 16, 2]."""
    tiles = (
        rows[..., pair_channels(rotary, rows.shape[2])].unflatten(2, (-1, 2, LANES)).unflatten(1, (-1, together, 2))
    )  # h, s, row, k, n, side, c
    return tiles.permute(0, 4, 1, 5, 2, 6, 3).contiguous()


def pair_channels(rotary: int, width: int) -> Tensor:
    """Return the channels of a head in the order in which two times 16 of them are turned together."""
    turning = rotary // 2
    sides = [range(0, turning, LANES), range(turning, rotary, LANES)]
    rest = [range(rotary + side * LANES, width, 2 * LANES) for side in range(2)]
    firsts = [first for pair in (*zip(*sides, strict=True), *zip(*rest, strict=True)) for first in pair]
    return torch.cat([torch.arange(first, first + LANES) for first in firsts])


def _pitch(columns: Tensor) -> int:
    """Of a row of `a`: fields of a head, in whole steps, and what the last piece of 8 writes too much."""
    return -(-(int(columns.max()) + 1 + LANES // 2) // STEP) * STEP


@cache
def tile_config() -> Tensor:
    """Eight tiles of 16 rows of 64 bytes."""
    config = torch.zeros(64, dtype=torch.uint8, device="cpu")
    config[0] = 1
    config[16:32].view(torch.int16)[:] = 64
    config[48:56] = 16
    return config
