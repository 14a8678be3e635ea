"""Read modelopt's FP4, FP8 and integers: NVFP4, MXFP4, MXFP8, float8 and int8 with few scales, int4 in groups.

`weight` is uint8 [out, in / 2] (two e2m1 numbers in a byte, the low half first), float8_e4m3fn or int8 [out, in], or
uint8 [out / 2, in] (int4: the even row in the low half). Beside it lies weight_scale: float8_e4m3fn [out, in / 16] with
the factor of all, weight_scale_2 (NVFP4); exponents uint8 [out, in / 32] (MX); or floats: one, [out], [out, in / group]
(int4), or [rows, 1, columns, 1] of blocks of 128 x 128. The tensors say which of these a weight is, so that mixtures
need no names.

pre_quant_scale [in] is what inputs are multiplied with (AWQ, SmoothQuant), and svdquant_lora_a [r, in] and _b [out, r]
are added to the weight. What is read is the weight that does the same: (W + b a) pre_quant_scale, made in float32 and
rounded once. The rounding of W4A8_AWQ's products to float8 is not taken over.

Fused experts NAME [experts, in / 2, out] have NAME_weight_scale [experts, in / 16, out] beside them. They stay turned.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compress.errors import shown
from compress.importers import options, scaled
from compress.importers.source import CheckpointSource, Decoded, step
from compress.storage.checkpoint import CONFIG, Readable, StoredTensor

OPTIONS: options.Options = {
    **{"ignore": options.NAMES, "exclude_modules": options.NAMES, "quantized_layers": (dict, None)},
    **{"kv_cache_quant_algo": options.TEXT, "kv_cache_scheme": (dict, str, None), "group_size": (int, None)},
}
MIXED = "MIXED_PRECISION"
ALGORITHMS = {
    **{"FP8": "fp8", "FP8_PER_CHANNEL_PER_TOKEN": "fp8 by rows", "FP8_PB_WO": "fp8 in blocks of 128 x 128"},
    **{"FP8_BLOCK_SCALES": "fp8 in blocks of 128 x 128", "NVFP4": "nvfp4", "W4A16_NVFP4": "nvfp4"},
    **{"NVFP4_AWQ": "nvfp4 of scaled inputs", "NVFP4_SVD": "nvfp4 with a part of low rank"},
    **{"W4A16_AWQ": "int4 of scaled inputs", "W4A8_AWQ": "int4 of scaled inputs", "W8A16": "int8 by rows"},
    **{"W8A8_SQ_PER_CHANNEL": "int8 by rows of scaled inputs"},
    **{"W4A8_NVFP4_FP8": "nvfp4", "MXFP4": "mxfp4", "W4A8_MXFP4_FP8": "mxfp4", "MXFP8": "mxfp8"},
}
FUSED, FUSED_INPUT = "_proj_weight_scale", "_proj_input_scale"
BLOCK = (128, 128)
FP4_GROUP, MX_GROUP = 16, 32
LOW_RANK = ("svdquant_lora_a", "svdquant_lora_b")
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
    for name in source.ending(FUSED):
        weights[f"{name}_proj"] = _fused(source, name)
    source.drop(FUSED_INPUT)
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
    stored = source.take(f"{module}.weight", (torch.uint8, torch.int8, *scaled.FLOAT8))
    scale = source.take(f"{module}.weight_scale", (*scaled.FLOATS, torch.float8_e4m3fn, torch.uint8))
    is_int4 = stored.dtype == torch.uint8 and scale.dtype in scaled.FLOATS
    factor = _take_float(source, f"{module}.weight_scale_2")
    if is_int4:
        codes, factor = _pairs(stored), None  # which products in float8 divide by
    else:
        codes = scaled.halves(stored) if stored.dtype == torch.uint8 else scaled.plain(stored)
    grid = scaled.ScaleGrid(_squeeze(scale), _block(codes, scale), factor=factor)
    parts = [_take_float(source, f"{module}.{part}") for part in ("pre_quant_scale", *LOW_RANK)]
    if parts == [None] * len(parts):
        return scaled.weight(source, stored.name, codes, grid, source.dtype)
    return _effective(source, scaled.weight(source, stored.name, codes, grid, torch.float32), parts)


def _take_float(source: CheckpointSource, name: str) -> StoredTensor | None:
    return source.take(name, scaled.FLOATS) if name in source.stored else None


def _effective(source: CheckpointSource, plain: Decoded, parts: list[StoredTensor | None]) -> Decoded:
    """Return the weight that does the same to inputs which are not scaled, with its part of low rank."""
    scale, down, up = parts
    (out, inner), dtype = plain.shape, source.dtype
    rank = down.shape[0] if down is not None and down.shape else 0
    wanted = ((inner,), (rank, inner), (out, rank))
    for part, shape in zip(parts, wanted, strict=True):
        if part is not None and part.shape != shape:
            raise source.error(f"{part.name} has the shape {list(part.shape)}, its weight asks for {list(shape)}")
    if (down is None) != (up is None):
        raise source.error(f"{plain.name} has one half of its part of low rank; download it again")

    def decode(start: int, stop: int) -> Tensor:
        values = plain.decode(start, stop)
        if down is not None and up is not None:
            values += up.rows(start, stop).float() @ down.read().float()
        return (values if scale is None else values.mul_(scale.read().float())).to(dtype)

    used = tuple(part for part in parts if part is not None)
    return Decoded(plain.name, dtype, plain.shape, (*plain.sources, *used), decode, plain.step)


def _fused(source: CheckpointSource, name: str) -> Decoded:
    """Return the weights [experts, in, out] of experts that lie in one tensor."""
    stored = source.take(f"{name}_proj", (torch.uint8, *scaled.FLOAT8))
    scale = source.take(name + FUSED, (*scaled.FLOATS, torch.float8_e4m3fn))
    factor, dtype = _take_float(source, f"{name}{FUSED}_2"), source.dtype
    is_four = stored.dtype == torch.uint8
    if len(stored.shape) != 3:
        raise source.error(f"{stored.name} has the shape {list(stored.shape)}, fused experts have three dimensions")
    experts, rows, out = stored.shape
    shape = (experts, 2 * rows if is_four else rows, out)
    one = (math.prod(scale.shape) in (1, experts)) and not is_four
    if not one and scale.shape != (experts, -(-shape[1] // FP4_GROUP), out):
        raise source.error(f"{scale.name} has the shape {list(scale.shape)}, {stored.name} {list(stored.shape)}")
    if factor is not None and math.prod(factor.shape) not in (1, experts):
        raise source.error(f"{factor.name} has the shape {list(factor.shape)} for {experts} experts")

    def decode(start: int, stop: int) -> Tensor:
        packed = stored.rows(start, stop)
        values = scaled.unpack_e2m1(packed.transpose(1, 2)).transpose(1, 2) if is_four else packed.float()
        factors = scale.read().float().reshape(-1, 1, 1) if one else scale.read().float()
        if factor is not None:
            factors = factors * factor.read().float().reshape(-1, 1, 1)
        factors = factors[start:stop] if len(factors) == experts else factors
        if not one:
            factors = factors.repeat_interleave(FP4_GROUP, 1)[:, : shape[1]]
        return (values * factors).to(dtype).contiguous()

    parts = (stored, scale) if factor is None else (stored, scale, factor)
    return Decoded(stored.name, dtype, shape, parts, decode, step(shape))


def _pairs(stored: StoredTensor) -> scaled.Codes:
    """Return the integers of 4 bits [out, in] of which two rows lie in the bytes of one, [out / 2, in]."""
    shape = (2 * stored.shape[0] if stored.shape else 0, *stored.shape[1:])

    def rows(start: int, stop: int) -> Tensor:
        packed = stored.rows(start // 2, -(-stop // 2))
        both = torch.stack([packed & 15, packed >> 4], 1).flatten(0, 1)[start % 2 : start % 2 + stop - start]
        return (both.float() + 8).remainder_(16).sub_(8)

    return scaled.Codes(stored, shape, rows)


def _squeeze(scale: StoredTensor) -> StoredTensor:
    """Return the scales of blocks, stored as [rows, 1, columns, 1], as [rows, columns]."""
    if len(scale.shape) == 4 and scale.shape[1] == scale.shape[3] == 1:
        return scale._replace(shape=(scale.shape[0], scale.shape[2]))
    return scale


def _block(codes: scaled.Codes, scale: StoredTensor) -> scaled.Block | None:
    """Return the rows and columns that share a scale, None where rows or the whole weight do."""
    if scale.dtype == torch.uint8:
        return 1, MX_GROUP
    if codes.stored.dtype == torch.uint8 and scale.dtype not in scaled.FLOATS:
        return 1, FP4_GROUP
    if codes.stored.dtype == torch.uint8 and len(scale.shape) == 2 and len(codes.shape) == 2:
        return 1, -(-codes.shape[1] // max(1, scale.shape[1]))  # groups of one size, which divides the columns
    return BLOCK if len(scale.shape) in (2, 4) else None
