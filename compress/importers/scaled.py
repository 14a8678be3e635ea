"""Decode numbers of 8 bits that are multiplied by scales: of the tensor, of rows, or of blocks of both dimensions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compress.importers.source import Decoded, Source, step
from compress.storage.checkpoint import StoredTensor

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
AUXILIARY = (
    ".input_scale",
    ".activation_scale",
    ".k_scale",
    ".v_scale",
)  # of inputs, of caches

Block = tuple[int, int]  # rows, columns


def numbers(scale: Tensor) -> Tensor:
    """Return scales in float32; bytes are exponents with an offset of 127."""
    if scale.dtype == torch.uint8:
        return (scale.float() - 127.0).exp2()
    return scale.float()


def weight(
    source: Source, name: str, stored: StoredTensor, scale: StoredTensor, block: Block | None, dtype: torch.dtype
) -> Decoded:
    """Return a weight [..., out, in] stored as numbers of its own shape, times scales, rounded once to `dtype`.

    block: rows and columns that share a scale, scales [..., ceil(out / rows), ceil(in / columns)]; the last block may
    be smaller. Without one there is a scale for each row, or one for all. Raises CheckpointError for another shape.
    """
    shape = stored.shape
    if len(shape) < 2:
        raise source.error(f"{stored.name} has the shape {list(shape)}, a quantized weight has two dimensions")
    *outer, rows, columns = shape
    count = math.prod(scale.shape)
    down, across = block or (1 if count == math.prod(outer) * rows else rows, columns)
    grid = (*outer, -(-rows // down), -(-columns // across))
    if scale.shape not in (grid, grid[:-1] if grid[-1] == 1 else grid) and not count == math.prod(grid) == 1:
        blocks = f"in blocks of {down} x {across}" if block else "with a scale for each row or one for all"
        raise source.error(
            f"{scale.name} has the shape {list(scale.shape)}, but {stored.name} {list(shape)} {blocks} needs "
            f"{list(grid)}"
        )
    scale = scale._replace(shape=grid)

    def decode(start: int, stop: int) -> Tensor:
        values = stored.rows(start, stop).float()
        if outer:
            scales = numbers(scale.rows(start, stop)).repeat_interleave(down, -2)[..., :rows, :]
        else:
            first = start // down
            scales = numbers(scale.rows(first, -(-stop // down))).repeat_interleave(down, 0)
            scales = scales[start - first * down : stop - first * down]
        return values.mul_(scales.repeat_interleave(across, -1)[..., :columns]).to(dtype)

    return Decoded(name, dtype, shape, (stored, scale), decode, step(shape))
