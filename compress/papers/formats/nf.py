"""Levels at the quantiles of a normal distribution, and a size for each block that is itself stored in few bits.

    w[i, j] = size[i, j // block_size] * LEVELS[code[i, j]]
    size[k] = max(0, mean + step[k // scale_block] * scale_code[k])          k counts blocks, row by row

LEVELS are the 2^bits levels of NF-b of QLoRA (arXiv 2305.14314): quantiles of the normal distribution over [-1, 1], 0
one of them, one more above it than below. Sizes are those of the double quantization there and in LQ-LoRA (arXiv
2311.12023): their deviations from the mean of all, integers of scale_bits bits, signed, the whole range used; the
steps, which may be negative, are of type scale_dtype.

Stored tensors (B blocks in all, columns padded to whole tiles):
- `words<w>` int16, the planes of compress/numerics/packing.py;
- `scale_codes` uint8 [ceil(B scale_bits / 8)], a little-endian bit stream of codes + 2^(scale_bits - 1);
- `steps` [ceil(B / scale_block)] of scale_dtype; `mean` float32 [1].
bits per weight = bits + scale_bits / block_size + (bits of a step) / (block_size scale_block), about. Rows can be cut
anywhere, columns at blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from compress.numerics.packing import pack_planes, pack_stream, plane_fields, planes_shape, unpack_planes, unpack_stream

TILE_WORDS = (64, 32, 16, 8, 4)
CHUNK = 1 << 22  # weights decoded at a time


@dataclass(frozen=True)
class Params:
    bits: int  # [bits] of one code: 2 to 8
    block_size: int  # [columns] that share a size; the last block of a row may be shorter
    tile_words: int  # [words] of a tile along the columns, from `tile_words()`
    scale_bits: int = 8  # [bits] of a size: 2 to 8
    scale_block: int = 256  # [sizes] that share a step
    scale_dtype: str = "float32"  # of the steps: float32, bfloat16 or float16

    def __post_init__(self) -> None:
        if not (2 <= self.bits <= 8 and 2 <= self.scale_bits <= 8):
            raise ValueError(f"bits {self.bits} and scale_bits {self.scale_bits} must be 2 to 8")
        if self.block_size < 1 or self.scale_block < 1:
            raise ValueError(f"block_size {self.block_size} and scale_block {self.scale_block} must be positive")
        if self.tile_words not in TILE_WORDS:
            raise ValueError(f"tile_words {self.tile_words} is not one of {TILE_WORDS}")
        if self.scale_dtype not in ("float32", "float16", "bfloat16"):
            raise ValueError(f"scale_dtype {self.scale_dtype!r} is not float32, float16 or bfloat16")


@cache
def levels(bits: int) -> Tensor:
    """The levels [2^bits], float32, ascending from -1 to 1."""
    count = 2 ** (bits - 1)
    offset = 1 - (1 / (4 * count) + 1 / (4 * count - 2)) / 2  # 0.9677 for 4 bits, as published

    def quantiles(n: int) -> Tensor:
        p = torch.linspace(offset, 0.5, n + 1, dtype=torch.float64)[:-1]
        return torch.erfinv(2 * p - 1)

    with torch.inference_mode(False):
        values = torch.cat((-quantiles(count - 1), torch.zeros(1, dtype=torch.float64), quantiles(count).flip(0)))
        lower, upper = values[: count - 1], values[count:]
        return torch.cat((lower / upper[-1], torch.zeros(1), upper / upper[-1])).float()


def tile_words(bits: int, in_features: int) -> int:
    """The widest of the tiles that pad least."""
    return min(TILE_WORDS, key=lambda words: (-(-in_features // (words * plane_fields(bits))) * words, -words))


def blocks(params: Params, shape: tuple[int, int]) -> int:
    return shape[0] * -(-shape[1] // params.block_size)


def specs(params: Params, shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    count = blocks(params, shape)
    words = planes_shape(shape[0], _padded_columns(params, shape[1]), params.bits)
    return {
        **{name: (size, torch.int16) for name, size in words.items()},
        "scale_codes": ((-(-count * params.scale_bits // 8),), torch.uint8),
        "steps": ((-(-count // params.scale_block),), getattr(torch, params.scale_dtype)),
        "mean": ((1,), torch.float32),
    }


def pack(codes: Tensor, sizes: dict[str, Tensor], params: Params) -> dict[str, Tensor]:
    """codes [out, in] uint8, `sizes` from `pack_sizes` -> stored tensors."""
    padded = torch.nn.functional.pad(codes, (0, _padded_columns(params, codes.shape[1]) - codes.shape[1]))
    return {**pack_planes(padded.int(), params.bits, params.tile_words), **sizes}


def pack_sizes(wanted: Tensor, params: Params) -> dict[str, Tensor]:
    """Sizes of the blocks [out, blocks of a row], float32, each rounded to the nearest that can be stored."""
    flat = wanted.float().flatten()
    mean = flat.mean()[None]
    half = 2 ** (params.scale_bits - 1)
    grouped = torch.nn.functional.pad(flat - mean, (0, -len(flat) % params.scale_block)).view(-1, params.scale_block)
    largest = grouped.gather(1, grouped.abs().argmax(1, keepdim=True))[:, 0]
    steps = (largest / -half).to(getattr(torch, params.scale_dtype))  # -half is the outermost code
    codes = (grouped / torch.where(steps == 0, 1.0, steps.float())[:, None]).round_().clamp_(-half, half - 1) + half
    stream = _packed_sizes(codes.flatten()[: len(flat)].to(torch.uint8), params.scale_bits)
    return {"scale_codes": stream, "steps": steps, "mean": mean}


def sizes(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> Tensor:
    """Sizes [out, blocks of a row] as they are stored, float32."""
    count = blocks(params, shape)
    codes = _size_codes(tensors, params, shape).float() - 2 ** (params.scale_bits - 1)
    steps = tensors["steps"].float().repeat_interleave(params.scale_block)[:count]
    return (tensors["mean"] + steps * codes).clamp_(min=0).view(shape[0], -1)


def decode(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The weight [out, in]; computed in float32, rounded once to `dtype`."""
    scales, table = sizes(tensors, params, shape), levels(params.bits).to(tensors["mean"].device)
    words = {name: tensor for name, tensor in tensors.items() if name.startswith("words")}
    out = torch.empty(shape, dtype=dtype, device=scales.device)
    step = max(1, CHUNK // shape[1])
    for start in range(0, shape[0], step):
        part = {name: tensor[start : start + step] for name, tensor in words.items()}
        codes = unpack_planes(part, params.bits, params.tile_words)[:, : shape[1]]
        wide = scales[start : start + step].repeat_interleave(params.block_size, 1)[:, : shape[1]]
        out[start : start + step] = table[codes] * wide
    return out


def cut(
    tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], rows: range, columns: range
) -> tuple[Params, dict[str, Tensor]]:
    """Return some rows and columns of a weight, packed anew; compress/formats/__init__.py has the contract.

    Steps are repeated where the blocks that share one are cut apart: `scale_block` becomes smaller.
    """
    size = params.block_size
    if columns.start % size:
        raise ValueError(f"column {columns.start} lies within a block of {size} columns")
    first, last, a_row = columns.start // size, -(-columns.stop // size), -(-shape[1] // size)
    part = slice(rows.start, rows.stop)
    index = torch.arange(blocks(params, shape), device=tensors["steps"].device).view(-1, a_row)[part, first:last]
    shared = math.gcd(params.scale_block, rows.start * a_row + first)
    if last - first < a_row:
        shared = math.gcd(shared, a_row, last - first)
    chosen = replace(params, scale_block=shared, tile_words=tile_words(params.bits, len(columns)))
    sizes = {
        "scale_codes": _packed_sizes(_size_codes(tensors, params, shape)[index.flatten()], params.scale_bits),
        "steps": tensors["steps"][index.flatten()[::shared] // params.scale_block],
        "mean": tensors["mean"],
    }
    words = {name: tensor[part] for name, tensor in tensors.items() if name.startswith("words")}
    codes = unpack_planes(words, params.bits, params.tile_words)[:, columns.start : columns.stop]
    return chosen, pack(codes, sizes, chosen)


def _packed_sizes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [n] uint8 of sizes into a stream of as few bytes as hold them."""
    stream = torch.nn.functional.pad(codes, (0, -len(codes) % 8))
    return pack_stream(stream, bits)[: -(-len(codes) * bits // 8)].clone()


def _size_codes(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> Tensor:
    """Return the codes [n] uint8 of the sizes of all blocks; the inverse of `_packed_sizes`."""
    padding = -len(tensors["scale_codes"]) % params.scale_bits  # whole groups of eight codes
    stream = torch.nn.functional.pad(tensors["scale_codes"], (0, padding))
    return unpack_stream(stream, params.scale_bits)[: blocks(params, shape)]


def _padded_columns(params: Params, columns: int) -> int:
    multiple = params.tile_words * plane_fields(params.bits)
    return -(-columns // multiple) * multiple
