"""Read modelopt's FP4 and FP8: NVFP4, MXFP4, MXFP8, and float8 with a scale of the weight, of rows or of blocks.

`weight` is uint8 [out, in / 2] (two e2m1 numbers in a byte, the low half first) or float8_e4m3fn [out, in]. Beside it
lies weight_scale: float8_e4m3fn [out, in / 16] with the factor of all, weight_scale_2 (NVFP4); exponents uint8
[out, in / 32] (MX); float32, one, [out], or [rows, 1, columns, 1] of blocks of 128 x 128. The tensors say which of
these a weight is, so that mixtures need no names. Integers, weights whose inputs are scaled first (AWQ) and parts of
low rank are refused.
"""

from __future__ import annotations

import torch

from compress.errors import shown
from compress.importers import options, scaled
from compress.importers.source import CheckpointSource, Decoded
from compress.storage.checkpoint import CONFIG, Readable, StoredTensor

OPTIONS: options.Options = {
    **{"ignore": options.NAMES, "exclude_modules": options.NAMES, "quantized_layers": (dict, None)},
    **{"kv_cache_quant_algo": options.TEXT, "kv_cache_scheme": (dict, str, None), "group_size": (int, None)},
}
MIXED = "MIXED_PRECISION"
ALGORITHMS = {
    **{"FP8": "fp8", "FP8_PER_CHANNEL_PER_TOKEN": "fp8 by rows", "FP8_PB_WO": "fp8 in blocks of 128 x 128"},
    **{"FP8_BLOCK_SCALES": "fp8 in blocks of 128 x 128", "NVFP4": "nvfp4", "W4A16_NVFP4": "nvfp4"},
    **{"W4A8_NVFP4_FP8": "nvfp4", "MXFP4": "mxfp4", "W4A8_MXFP4_FP8": "mxfp4", "MXFP8": "mxfp8"},
}
BLOCK = (128, 128)
FP4_GROUP, MX_GROUP = 16, 32
UNUSED = (*scaled.RUNTIME_ENDINGS, ".k_bias", ".v_bias")


def describe(source: CheckpointSource) -> str:
    """Return how the weights are stored; CheckpointError for an algorithm that cannot be read."""
    words = {_words(source, name) for name in _algorithms(source)}
    return f"modelopt {' and '.join(sorted(words))}"


def tensors(source: CheckpointSource) -> dict[str, Readable]:
    """Return the weights by name; CheckpointError for one that lacks a part, or has one of another shape."""
    weights: dict[str, Readable] = {}
    for module in source.ending(".weight_scale"):
        weights[f"{module}.weight"] = _weight(source, module)
    quantized = tuple(f"{name.removesuffix('.weight')}." for name in weights)
    for name in [name for name in source.stored if name.endswith(UNUSED)]:
        if not name.endswith((".k_bias", ".v_bias")) or name.startswith(quantized):
            del source.stored[name]
    return weights


def _algorithms(source: CheckpointSource) -> list[str]:
    """Return the names of all algorithms that the settings speak of."""
    named = source.settings.get("quant_algo")
    if str(named).upper() != MIXED:
        return [str(named)]
    layers = source.settings.get("quantized_layers")
    listed = list(layers.values()) if isinstance(layers, dict) else []
    if not listed or not all(isinstance(layer, dict) for layer in listed):
        raise source.error(f"{CONFIG}: quant_algo {MIXED} has no quantized_layers that can be read; download it again")
    return [str(layer.get("quant_algo")) for layer in listed]


def _words(source: CheckpointSource, algorithm: str) -> str:
    words = ALGORITHMS.get(algorithm.upper())
    if words is None:
        raise source.error(
            f"{CONFIG}: quant_algo {shown(algorithm)} cannot be read; what can be: {', '.join(ALGORITHMS)}"
        )
    return words


def _weight(source: CheckpointSource, module: str) -> Decoded:
    for part in (".pre_quant_scale", ".svdquant_lora_a"):
        if f"{module}{part}" in source.stored:
            raise source.error(f"{module}{part}: weights with this beside them cannot be read; give the original model")
    stored = source.take(f"{module}.weight", (torch.uint8, *scaled.FLOAT8))
    scale = source.take(f"{module}.weight_scale", (*scaled.FLOATS, torch.float8_e4m3fn, torch.uint8))
    factor = None
    if f"{module}.weight_scale_2" in source.stored:
        factor = source.take(f"{module}.weight_scale_2", scaled.FLOATS)
    codes = scaled.halves(stored) if stored.dtype == torch.uint8 else scaled.plain(stored)
    grid = scaled.ScaleGrid(_squeeze(scale), _block(codes, scale), factor=factor)
    return scaled.weight(source, stored.name, codes, grid, source.dtype)


def _squeeze(scale: StoredTensor) -> StoredTensor:
    """Return the scales of blocks, stored as [rows, 1, columns, 1], as [rows, columns]."""
    if len(scale.shape) == 4 and scale.shape[1] == scale.shape[3] == 1:
        return scale._replace(shape=(scale.shape[0], scale.shape[2]))
    return scale


def _block(codes: scaled.Codes, scale: StoredTensor) -> scaled.Block | None:
    """Return the rows and columns that share a scale, None where rows or the whole weight do."""
    if scale.dtype == torch.uint8:
        return 1, MX_GROUP
    if codes.stored.dtype == torch.uint8:
        return 1, FP4_GROUP
    return BLOCK if len(scale.shape) in (2, 4) else None
