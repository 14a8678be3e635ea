"""Read fused experts in 4 bits: numbers of e2m1, two in a byte, and an exponent for 32 of them.

NAME_blocks uint8 [experts, out, groups, 16] and NAME_scales uint8 [experts, out, groups] give NAME [experts, in, out],
turned as the model has it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.importers import options
from compress.importers.scaled import unpack_e2m1
from compress.importers.source import CheckpointSource, Decoded, step
from compress.storage.checkpoint import Readable

OPTIONS: options.Options = {**options.PLAIN_MODULES, "dequantize": options.FLAG}
BLOCKS, SCALES = "_blocks", "_scales"
GROUP_NBYTES = 16
EXPONENT_OFFSET = 127


def describe(source: CheckpointSource) -> str:
    """Return how the weights are stored."""
    return "mxfp4 in groups of 32"


def tensors(source: CheckpointSource) -> dict[str, Readable]:
    """Return the fused weights by name; CheckpointError for one whose scales are missing or do not fit."""
    return {name: _weight(source, name) for name in source.ending(BLOCKS)}


def _weight(source: CheckpointSource, name: str) -> Decoded:
    blocks = source.take(name + BLOCKS, (torch.uint8,))
    if len(blocks.shape) != 4 or blocks.shape[-1] != GROUP_NBYTES:
        raise source.error(
            f"{blocks.name} has the shape {list(blocks.shape)}, not [experts, out, groups, {GROUP_NBYTES}]"
        )
    scales = source.take(name + SCALES, (torch.uint8,), blocks.shape[:-1])
    experts, rows, groups, _ = blocks.shape
    shape, dtype = (experts, 2 * GROUP_NBYTES * groups, rows), source.dtype

    def decode(start: int, stop: int) -> Tensor:
        exponents = scales.rows(start, stop).int().unsqueeze(-1) - EXPONENT_OFFSET
        values = unpack_e2m1(blocks.rows(start, stop), dtype)
        return torch.ldexp(values, exponents, out=values).flatten(-2).transpose(1, 2).contiguous()

    return Decoded(name, dtype, shape, (blocks, scales), decode, step(shape))
