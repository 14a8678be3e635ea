"""Pack and decode the blocks of GGUF files whose numbers are points of a table: FP4, IQ4_NL, and three values.

- MXFP4: 32 numbers of e2m1, and their exponent in a byte; number j in the low half of byte j, j + 16 in the high half.
- NVFP4: 64 numbers in four parts of 16, each with a scale of e4m3 without its sign. All four scales come first. The
  values are those of the blocks times a number for the whole tensor, which is stored as one of its own.
- IQ4_NL: a float16 scale and 32 numbers, as in MXFP4 (compress/importers/gguf_blocks.py decodes it).
- TQ1_0, TQ2_0: 256 numbers -1, 0 or 1, and a float16 scale: five in a byte, as the fraction byte / 256 in base 3, or
  four in fields of 2 bits.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.formats import grid

Bytes = NDArray[np.uint8]  # [blocks, bytes of a block], or a part of these columns
Values = NDArray[np.float32]

IQ4_NL, TQ1_0, TQ2_0, MXFP4, NVFP4 = 20, 34, 35, 39, 40  # numbers of the types
TRITS = 256  # numbers of a block of three values
DOUBLED = (2 * grid.value_table(grid.E2M1) + 0.0).numpy()  # points of e2m1, times 2; -0 becomes llama.cpp's 0
POWERS = np.array((81, 27, 9, 3, 1), np.uint8)


def decode_mxfp4(raw: Bytes) -> Values:
    """Decode blocks [n, 17] to float32 [n, 32]."""
    halves = np.ldexp(np.float32(1), raw[:, :1].astype(np.int32) - 128).astype(np.float32)
    values: Values = halves * DOUBLED[_halves(raw[:, 1:])]
    return values


def decode_nvfp4(raw: Bytes) -> Values:
    """Decode blocks [n, 36] to float32 [n, 64], without the scale of the tensor."""
    scales = raw[:, :4].astype(np.int32)
    exponent, mantissa = scales >> 3 & 15, (scales & 7).astype(np.float32)
    wide = np.where(exponent == 0, mantissa / 512, np.ldexp(1 + mantissa / 8, exponent - 7))
    halves = np.where(scales == 0x7F, 0, wide / 2).astype(np.float32).reshape(-1, 1)
    values: Values = (halves * DOUBLED[_halves(raw[:, 4:].reshape(-1, 8))]).reshape(len(raw), -1)
    return values


def _halves(raw: Bytes) -> Bytes:
    """Return the low halves of the bytes of each row, then the high halves."""
    return np.concatenate([raw & np.uint8(15), raw >> np.uint8(4)], 1)


def pack_points(codes: Tensor, scales: Tensor, number: int) -> Tensor:
    """Pack codes of 4 bits, uint8 [rows, columns], as blocks of MXFP4, NVFP4 or IQ4_NL: uint8 [rows, bytes of a row].

    scales: the bytes of exponents [rows, columns / 32], of positive numbers of e4m3 [rows, columns / 16], or of numbers
    of float16 [rows, 2 columns / 32].
    """
    part = 16 if number == NVFP4 else 32  # numbers that share a scale
    count, width = (4, 4) if number == NVFP4 else (1, 2 if number == IQ4_NL else 1)  # scales of a block, their bytes
    fields = codes.numpy().reshape(-1, part)
    packed = fields[:, : part // 2] | fields[:, part // 2 :] << np.uint8(4)
    parts = [scales.numpy().reshape(-1, width), packed.reshape(-1, count * part // 2)]
    return torch.from_numpy(np.concatenate(parts, 1).reshape(len(codes), -1))


def pack_trits(trits: Tensor, scales: Tensor, number: int) -> Tensor:
    """Pack -1, 0, 1, int8 [rows, columns], as blocks of TQ1_0 or TQ2_0: uint8 [rows, bytes of a row].

    scales float16 [rows, columns / 256].
    """
    digits = (trits.numpy() + np.int8(1)).view(np.uint8).reshape(-1, TRITS)
    steps = scales.contiguous().numpy().reshape(-1, 1).view(np.uint8)
    packed = _base_3(digits) if number == TQ1_0 else _fields_of_2(digits)
    return torch.from_numpy(np.concatenate([packed, steps], 1).reshape(len(trits), -1))


def _base_3(digits: Bytes) -> Bytes:
    """Return 52 bytes of 256 digits: of five each, of columns that are 32, 16 and at last 4 apart."""
    parts = []
    for start, count, width in ((0, 5, 32), (160, 5, 16), (240, 4, 4)):
        own = digits[:, start : start + count * width].reshape(len(digits), count, width)
        parts.append((own * POWERS[:count, None]).sum(1, dtype=np.uint16))
    packed: Bytes = ((np.concatenate(parts, 1) * 256 + 242) // 243).astype(np.uint8)
    return packed


def _fields_of_2(digits: Bytes) -> Bytes:
    split = digits.reshape(len(digits), 2, 4, 32) << np.array((0, 2, 4, 6), np.uint8)[:, None]
    packed: Bytes = np.bitwise_or.reduce(split, axis=2).reshape(len(digits), -1)
    return packed
