"""Read float8 weights with scales of blocks, of rows, or of a whole weight.

A weight is W[i, j] = codes[i, j] * scale[i // rows, j // columns], in float32, rounded once. What is called an inverse
scale is a multiplier. Blocks are counted by their configured size: the last ones may be smaller. Scales are floats, or
exponents in a byte. Weights of experts may have 4 bits: two numbers of e2m1 in a byte, a scale for 32 of a row.
"""

from __future__ import annotations

import torch

from compress.errors import shown
from compress.importers import options, scaled
from compress.importers.source import CheckpointSource
from compress.storage.checkpoint import CONFIG, Readable, StoredTensor

OPTIONS: options.Options = {
    **options.PLAIN_MODULES,
    **{"fmt": ("e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2", None), "activation_scheme": ("dynamic", "static", None)},
    **{"scale_fmt": ("ue8m0", "float", None), "expert_dtype": ("fp4", "fp8", None), "weight_block_size": (list, None)},
    **{"dequantize": options.FLAG},
}
GROUP = 32  # numbers of 4 bits that share a scale


def describe(source: CheckpointSource) -> str:
    """Return how the weights are stored; CheckpointError for a block size that is none."""
    block = _block(source)
    experts = " and experts of 4 bits" if source.settings.get("expert_dtype") == "fp4" else ""
    return (f"fp8 in blocks of {block[0]} x {block[1]}" if block is not None else "fp8") + experts


def tensors(source: CheckpointSource) -> dict[str, Readable]:
    """Return the weights by name; CheckpointError for one whose scales are missing or do not fit."""
    block, weights = _block(source), dict[str, Readable]()
    is_packed = source.settings.get("expert_dtype") == "fp4"
    names = [
        name
        for name, stored in source.stored.items()
        if stored.dtype in scaled.FLOAT8 or (is_packed and stored.dtype == torch.int8)
    ]
    for name in names:
        stored, scale = source.take(name), _scale(source, name)
        if stored.dtype == torch.int8 and stored.shape:
            codes, scales = scaled.halves(stored), scaled.ScaleGrid(scale, (1, GROUP))
        else:
            codes, scales = scaled.plain(stored), scaled.ScaleGrid(scale, block)
        weights[name] = scaled.weight(source, name, codes, scales, source.dtype)
    source.drop(*scaled.RUNTIME_ENDINGS)
    return weights


def _block(source: CheckpointSource) -> scaled.Block | None:
    """Return the rows and columns that share a scale, None where whole rows or weights do."""
    value = source.settings.get("weight_block_size", [128, 128])
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or any(type(n) is not int or n < 1 for n in value):
        raise source.error(f"{CONFIG}: weight_block_size {shown(value)} is no pair of sizes")
    return value[0], value[1]


def _scale(source: CheckpointSource, name: str) -> StoredTensor:
    """Take the scales of a weight, which several tools name in ways of their own."""
    module = name.removesuffix("weight")
    names = [f"{name}_scale_inv", f"{name}_scale", f"{module}scale", f"{module}qscale_weight"]
    stored = next((other for other in names if other in source.stored), names[0])
    return source.take(stored, (*scaled.FLOATS, *scaled.EXPONENTS))
