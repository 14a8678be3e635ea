"""NF with double quantization: levels at normal quantiles, a size for each small block (QLoRA, arXiv 2305.14314).

Each weight becomes the nearest of the levels of its block (compress/papers/formats/nf.py). The size of a block is the
best of some that are up to 40% smaller than its largest magnitude, which is the published size; it is stored in few
bits, and codes are chosen for what is stored. The quantized part of LQ-LoRA (arXiv 2311.12023) beside a low-rank one is
this method with `lowrank: {metric: none, iterations: N}`.

Not in the core: `lq-lora2.75` has KL 0.0456 at 2.75 bits a weight, 0.0258 with its low-rank part at 3.544, where `int3`
has 0.0104 at 3.125 (its recipe). It is made to be trained on.

Differences from the papers: deviations of sizes are rounded to uniform integers (QLoRA: an 8-bit floating type).

Not done: any use of activations; feedback of the errors of one column to the others (that is gptq). On a GPU
there is no kernel: products decode the weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.papers.formats import nf
from compress.types import PackedWeight, Quantized, Stats, Stored

FORMAT = "nf"
NEEDS: frozenset[str] = frozenset()
INCOHERENCE = False
SIZE_RATIOS = tuple(1 - step / 20 for step in range(9))  # sizes that are tried: these times the largest magnitude
WEIGHTS_AT_A_TIME = 1 << 20


@dataclass(frozen=True)
class Config:
    bits: int = 4  # [bits] of a weight: 2 to 8
    block_size: int = 64  # [columns] that share a size, the largest magnitude of the block
    scale_bits: int = 8  # [bits] of a size, which is quantized itself: 2 to 8
    scale_block: int = 256  # [sizes] that share a step

    REMOVED_KEYS: ClassVar[dict[str, Any]] = {"scale_dtype": "float32", "clip_search": True}

    def __post_init__(self) -> None:
        plan_params(self, (1, 1))


def plan_params(config: Config, shape: tuple[int, int]) -> nf.Params:
    """Return the format's parameters for a weight [out, in]: enough for the exact stored bytes."""
    words = nf.tile_words(config.bits, shape[1]) if 1 <= config.bits <= 16 else nf.TILE_WORDS[0]
    return nf.Params(config.bits, config.block_size, words, config.scale_bits, config.scale_block)


def workspace(config: Config, shape: tuple[int, int]) -> int:
    """Return the bytes needed beside the stored weight: a float32 copy, its scales, codes, their packing."""
    return shape[0] * shape[1] * (4 + 4 + 1 + 4 + 4) + 24 * WEIGHTS_AT_A_TIME


def quantize(weight: Tensor, stats: Stats | None, config: Config, seed: int = 0) -> Quantized:
    """Quantize weight [out, in], any float dtype, finite. `stats` and `seed` are unused."""
    shape = (weight.shape[0], weight.shape[1])
    params, target = plan_params(config, shape), weight.float()
    step = max(1, WEIGHTS_AT_A_TIME // shape[1])
    fitted = torch.cat([_fit_sizes(rows, params) for rows in target.split(step)])
    stored = nf.pack_sizes(fitted, params)
    scales = nf.sizes(stored, params, shape)
    codes = [_nearest(*pair, params) for pair in zip(target.split(step), scales.split(step), strict=True)]
    return Quantized(PackedWeight(Stored(FORMAT, params), nf.pack(torch.cat(codes), stored, params), shape))


def _fit_sizes(rows: Tensor, params: nf.Params) -> Tensor:
    """Return block sizes [rows, blocks], before they are rounded."""
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % params.block_size))
    grouped = padded.unflatten(1, (-1, params.block_size))  # row, block, column
    largest = grouped.abs().amax(2)
    best, sizes = torch.full_like(largest, torch.inf), largest
    for shrink in SIZE_RATIOS:
        size = largest * shrink
        codes = _codes(grouped, size[..., None], params.bits)
        error = (nf.levels(params.bits).to(rows.device)[codes] * size[..., None] - grouped).square_().sum(2)
        better = error < best
        best, sizes = torch.where(better, error, best), torch.where(better, size, sizes)
    return sizes


def _nearest(rows: Tensor, sizes: Tensor, params: nf.Params) -> Tensor:
    """Return codes [rows, in] uint8 of the nearest levels."""
    wide = sizes.repeat_interleave(params.block_size, 1)[:, : rows.shape[1]]
    return _codes(rows, wide, params.bits).to(torch.uint8)


def _codes(values: Tensor, sizes: Tensor, bits: int) -> Tensor:
    """Return the numbers of the levels nearest to values / sizes; sizes of 0 give the level 0."""
    table = nf.levels(bits).to(values.device)
    scaled = torch.where(sizes > 0, values / sizes, 0.0)
    return torch.bucketize(scaled, (table[1:] + table[:-1]) / 2)
