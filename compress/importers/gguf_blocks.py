"""Decode the block formats of GGUF files to float32, with the operations of their reference reader in its order.

A row of a tensor is a sequence of blocks. Each block holds the codes of 32 or 256 weights and their scales; in "K"
formats the scales are coded too, with a float16 scale of their own. `pack` writes blocks of the types that hold signed
integers and one scale, `pack_k` those of the "K" types; those of FP4 and of three values are in gguf_points.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.errors import CheckpointError
from compress.formats.kquant import LEVELS, Scales
from compress.importers import gguf_points

Bytes = NDArray[np.uint8]  # [blocks, bytes of a block], or a part of these columns
Values = NDArray[np.float32]

IQ4_LEVELS = np.array(LEVELS, np.float32)
PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16, 28: torch.float64}  # types that are no blocks


class BlockType(NamedTuple):
    """A block format: its name, what a block holds, and how to decode blocks to [blocks, elements]."""

    name: str
    elements: int
    nbytes: int
    decode: Callable[[Bytes], Values] | None  # None: the package gguf decodes it


def decode(raw: Tensor, number: int) -> Tensor:
    """Decode whole blocks, uint8 [bytes], of the type with this number: float32 [elements].

    Raises CheckpointError for a format that only the package gguf decodes, where that is not installed.
    """
    block = BLOCKS[number]
    blocks = raw.numpy().reshape(-1, block.nbytes)
    with np.errstate(all="ignore"):  # damaged scales may be infinite; whether values are finite is checked later
        values = _of_package(blocks, number) if block.decode is None else block.decode(blocks)
    return torch.from_numpy(np.ascontiguousarray(values, np.float32).reshape(-1))


def _of_package(blocks: Bytes, number: int) -> Values:
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(
            f"weights of type {BLOCKS[number].name} need the package gguf: pip install 'compress-llm[gguf]'"
        ) from error
    values: Values = gguf.dequantize(blocks, gguf.GGMLQuantizationType(number))
    return values


def _half(raw: Bytes) -> Values:
    """Float16 numbers -> float32 [blocks, numbers]."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _fields(raw: Bytes, bits: int, width: int) -> Bytes:
    """Codes of `bits` bits, from the lowest bits of `width` bytes to the highest, then of the next: [blocks, codes]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    codes: Bytes = (raw.reshape(len(raw), -1, 1, width) >> shifts) & np.uint8((1 << bits) - 1)
    return codes.reshape(len(raw), -1)


def _multiply(scales: Values, codes: NDArray[np.generic], minima: Values | None = None) -> Values:
    """Multiply codes [blocks, elements] by scales [blocks, groups] and subtract minima [blocks, groups]."""
    groups = codes.reshape(*scales.shape, -1).astype(np.float32)
    values: Values = scales[..., None] * groups
    if minima is not None:
        values = values - minima[..., None]
    return values.reshape(len(codes), -1)


def _as_signed(codes: Bytes, zero: int) -> NDArray[np.int8]:
    return codes.astype(np.int8) - np.int8(zero)


def _q1_0(raw: Bytes) -> Values:
    return _multiply(_half(raw[:, :2]), _as_signed(_fields(raw[:, 2:], 1, 1) << np.uint8(1), 1))


def _q4_0(raw: Bytes) -> Values:
    return _multiply(_half(raw[:, :2]), _as_signed(_fields(raw[:, 2:], 4, 16), 8))


def _q4_1(raw: Bytes) -> Values:
    values: Values = _half(raw[:, :2]) * _fields(raw[:, 4:], 4, 16).astype(np.float32) + _half(raw[:, 2:4])
    return values


def _five_bits(high: Bytes, low: Bytes) -> Bytes:
    """Codes of 5 bits: one bit of each in 4 bytes, four in 16 bytes."""
    return _fields(low, 4, 16) | (_fields(high, 1, 1) << np.uint8(4))


def _q5_0(raw: Bytes) -> Values:
    return _multiply(_half(raw[:, :2]), _as_signed(_five_bits(raw[:, 2:6], raw[:, 6:]), 16))


def _q5_1(raw: Bytes) -> Values:
    codes = _five_bits(raw[:, 4:8], raw[:, 8:]).astype(np.float32)
    values: Values = _half(raw[:, :2]) * codes + _half(raw[:, 2:4])
    return values


def _q8_0(raw: Bytes) -> Values:
    return _multiply(_half(raw[:, :2]), np.ascontiguousarray(raw[:, 2:]).view(np.int8))


def _q2_k(raw: Bytes) -> Values:
    scales = raw[:, :16]
    scale, minimum = _half(raw[:, 80:82]), _half(raw[:, 82:84])
    return _multiply(
        scale * (scales & np.uint8(15)).astype(np.float32),
        _fields(raw[:, 16:80], 2, 32),
        minimum * (scales >> np.uint8(4)).astype(np.float32),
    )


def _q3_k(raw: Bytes) -> Values:
    scales = _fields(raw[:, 96:104], 4, 8) | (_fields(raw[:, 104:108], 2, 4) << np.uint8(4))
    absent = _fields(raw[:, :32], 1, 32) ^ np.uint8(1)  # 4 is subtracted where the bit is not set
    codes = _as_signed(_fields(raw[:, 32:96], 2, 32), 0) - (absent << np.uint8(2)).astype(np.int8)
    return _multiply(_half(raw[:, 108:]) * _as_signed(scales, 32).astype(np.float32), codes)


def _k_scales(raw: Bytes) -> tuple[Values, Values]:
    """Scales and minima of the eight groups of a block, [blocks, 8] each, from a header of 16 bytes.

    These are 6 bits each: those of the first four groups lie whole in bytes, whose upper bits help out the others.
    """
    first, second, both = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    upper, six, four = np.uint8(0x30), np.uint8(63), np.uint8(15)
    scales = np.concatenate([first & six, (both & four) | ((first >> np.uint8(2)) & upper)], -1)
    minima = np.concatenate([second & six, (both >> np.uint8(4)) | ((second >> np.uint8(2)) & upper)], -1)
    return _half(raw[:, :2]) * scales.astype(np.float32), _half(raw[:, 2:4]) * minima.astype(np.float32)


def _q4_k(raw: Bytes) -> Values:
    scales, minima = _k_scales(raw)
    return _multiply(scales, _fields(raw[:, 16:], 4, 32), minima)


def _q5_k(raw: Bytes) -> Values:
    scales, minima = _k_scales(raw)
    codes = _fields(raw[:, 48:], 4, 32) | (_fields(raw[:, 16:48], 1, 32) << np.uint8(4))
    return _multiply(scales, codes, minima)


def _q6_k(raw: Bytes) -> Values:
    codes = _fields(raw[:, :128], 4, 64) | (_fields(raw[:, 128:192], 2, 32) << np.uint8(4))
    scales = np.ascontiguousarray(raw[:, 192:208]).view(np.int8).astype(np.float32)
    return _multiply(_half(raw[:, 208:]) * scales, _as_signed(codes, 32))


def _iq4_nl(raw: Bytes) -> Values:
    return _multiply(_half(raw[:, :2]), IQ4_LEVELS[_fields(raw[:, 2:], 4, 16)])


def _iq4_xs(raw: Bytes) -> Values:
    scales = _fields(raw[:, 4:8], 4, 1) | (_fields(raw[:, 2:4], 2, 1) << np.uint8(4))
    return _multiply(
        _half(raw[:, :2]) * _as_signed(scales, 32).astype(np.float32), IQ4_LEVELS[_fields(raw[:, 8:], 4, 16)]
    )


BLOCKS = {
    2: BlockType("Q4_0", 32, 18, _q4_0),
    3: BlockType("Q4_1", 32, 20, _q4_1),
    6: BlockType("Q5_0", 32, 22, _q5_0),
    7: BlockType("Q5_1", 32, 24, _q5_1),
    8: BlockType("Q8_0", 32, 34, _q8_0),
    10: BlockType("Q2_K", 256, 84, _q2_k),
    11: BlockType("Q3_K", 256, 110, _q3_k),
    12: BlockType("Q4_K", 256, 144, _q4_k),
    13: BlockType("Q5_K", 256, 176, _q5_k),
    14: BlockType("Q6_K", 256, 210, _q6_k),
    16: BlockType("IQ2_XXS", 256, 66, None),
    17: BlockType("IQ2_XS", 256, 74, None),
    18: BlockType("IQ3_XXS", 256, 98, None),
    19: BlockType("IQ1_S", 256, 50, None),
    20: BlockType("IQ4_NL", 32, 18, _iq4_nl),
    21: BlockType("IQ3_S", 256, 110, None),
    22: BlockType("IQ2_S", 256, 82, None),
    23: BlockType("IQ4_XS", 256, 136, _iq4_xs),
    29: BlockType("IQ1_M", 256, 56, None),
    gguf_points.TQ1_0: BlockType("TQ1_0", 256, 54, None),
    gguf_points.TQ2_0: BlockType("TQ2_0", 256, 66, None),
    gguf_points.MXFP4: BlockType("MXFP4", 32, 17, gguf_points.decode_mxfp4),
    gguf_points.NVFP4: BlockType("NVFP4", 64, 36, gguf_points.decode_nvfp4),
    41: BlockType("Q1_0", 128, 18, _q1_0),
}
SIGNED = {2: 4, 6: 5, 8: 8}  # types whose blocks are a float16 scale and signed codes -> bits of a code
UNKNOWN = {4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64"}


def pack(codes: Tensor, scales: Tensor, number: int) -> Tensor:
    """Pack signed codes, int8 [rows, columns], as blocks of a type of `SIGNED`: uint8 [rows, bytes of a row].

    scales float16 [rows, columns / 32]; the weights are scale * code. Every code fits the bits of the type.
    """
    elements, bits = BLOCKS[number].elements, SIGNED[number]
    signed = codes.numpy().reshape(-1, elements)
    parts = [scales.numpy().reshape(-1, 1).view(np.uint8)]
    if bits == 8:
        parts.append(signed.view(np.uint8))
    else:
        fields = (signed + np.int8(1 << (bits - 1))).view(np.uint8)
        if bits == 5:
            parts.append(np.packbits(fields >> np.uint8(4), axis=1, bitorder="little"))
        half, low = elements // 2, fields & np.uint8(15)
        parts.append(low[:, :half] | (low[:, half:] << np.uint8(4)))
    return torch.from_numpy(np.concatenate(parts, 1).reshape(len(codes), -1))


def k_type(name: str) -> int:
    """Return the number of the "K" type of which a format of ours is named, such as q4_k."""
    return next(number for number, block in BLOCKS.items() if block.name == name.upper())


def pack_k(codes: Tensor, scales: Scales, number: int) -> Tensor:
    """Pack codes, uint8 [rows, columns], and their scales as blocks of a "K" type: uint8 [rows, bytes of a row].

    All are as compress/formats/kquant.py stores them, without padding.
    """
    elements = BLOCKS[number].elements
    fields = codes.numpy().reshape(-1, elements)

    def in_blocks(values: Tensor | None) -> Bytes:
        """Those of one block in a row of bytes; none where the type has none."""
        if values is None:
            return np.empty((len(fields), 0), np.uint8)
        return np.ascontiguousarray(values.numpy()).reshape(len(fields), -1).view(np.uint8)

    parts = _K_PARTS[number](fields, *(in_blocks(values) for values in scales))
    return torch.from_numpy(np.concatenate(parts, 1).reshape(len(codes), -1))


def _pack_fields(codes: Bytes, bits: int, width: int) -> Bytes:
    """Pack codes [blocks, codes] as `_fields` reads them."""
    split = codes.reshape(len(codes), -1, 8 // bits, width)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    packed: Bytes = np.bitwise_or.reduce(split << shifts, axis=2)
    return packed.reshape(len(codes), -1)


def _q2_k_parts(codes: Bytes, scales: Bytes, steps: Bytes, minima: Bytes, minimum_steps: Bytes) -> list[Bytes]:
    return [scales | (minima << np.uint8(4)), _pack_fields(codes, 2, 32), steps, minimum_steps]


def _q3_k_parts(codes: Bytes, scales: Bytes, steps: Bytes, *_: Bytes) -> list[Bytes]:
    low = [_pack_fields(codes & np.uint8(3), 2, 32), _pack_fields(scales & np.uint8(15), 4, 8)]
    return [_pack_fields(codes >> np.uint8(2), 1, 32), *low, _pack_fields(scales >> np.uint8(4), 2, 4), steps]


def _k_header(scales: Bytes, steps: Bytes, minima: Bytes, minimum_steps: Bytes) -> list[Bytes]:
    """The 16 bytes that `_k_scales` reads."""
    upper, four, six = np.uint8(4), np.uint8(15), np.uint8(6)
    whole = [values[:, :4] | ((values[:, 4:] >> upper) << six) for values in (scales, minima)]
    return [steps, minimum_steps, *whole, (scales[:, 4:] & four) | ((minima[:, 4:] & four) << upper)]


def _q4_k_parts(codes: Bytes, *scales: Bytes) -> list[Bytes]:
    return [*_k_header(*scales), _pack_fields(codes, 4, 32)]


def _q5_k_parts(codes: Bytes, *scales: Bytes) -> list[Bytes]:
    return [*_k_header(*scales), _pack_fields(codes >> np.uint8(4), 1, 32), _pack_fields(codes & np.uint8(15), 4, 32)]


def _q6_k_parts(codes: Bytes, scales: Bytes, steps: Bytes, *_: Bytes) -> list[Bytes]:
    signed = scales ^ np.uint8(128)  # less 128, as two's complement has it
    return [_pack_fields(codes & np.uint8(15), 4, 64), _pack_fields(codes >> np.uint8(4), 2, 32), signed, steps]


def _iq4_xs_parts(codes: Bytes, scales: Bytes, steps: Bytes, *_: Bytes) -> list[Bytes]:
    low, high = _pack_fields(scales & np.uint8(15), 4, 1), _pack_fields(scales >> np.uint8(4), 2, 1)
    return [steps, high, low, _pack_fields(codes, 4, 16)]


_K_PARTS: dict[int, Callable[..., list[Bytes]]] = {
    10: _q2_k_parts,
    11: _q3_k_parts,
    12: _q4_k_parts,
    13: _q5_k_parts,
    14: _q6_k_parts,
    23: _iq4_xs_parts,
}


def type_name(number: int) -> str:
    """Return the name of a type of GGUF files, known or not."""
    if number in PLAIN:
        return str(PLAIN[number]).removeprefix("torch.")
    return BLOCKS[number].name if number in BLOCKS else UNKNOWN.get(number, f"number {number}")
