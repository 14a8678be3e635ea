"""Read BitNet b1.58: weights of three values in fields of 2 bits, or plain ones that are rounded to three at use.

A packed `weight` is uint8 [out / 4, in]. Row i + k out / 4 lies in bits 2 k and 2 k + 1 of its row i, as value + 1.
weight_scale is one number. Linears of the class `bitlinear` divide by it, those of `autobitlinear` multiply. In the
mode `online` weights are stored as they are trained, and W = round(clamp(W / m, -1, 1)) * m, m their mean magnitude.

Inputs are rounded to 8 bits a token by these linears, which is not taken over.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from compress.importers import options, scaled
from compress.importers.source import CheckpointSource, Decoded, step
from compress.storage.checkpoint import Readable, StoredTensor

DIVIDING, MULTIPLYING, ONLINE = "bitlinear", "autobitlinear", "online"
OPTIONS: options.Options = {
    **{"linear_class": (DIVIDING, MULTIPLYING), "quantization_mode": ("offline", ONLINE)},
    **{"use_rms_norm": (False, None), "rms_norm_eps": options.NUMBER, "modules_to_not_convert": options.NAMES},
}
FIELDS, FIELD_BITS = 4, 2
LEAST_MEAN = 1e-5  # magnitude that weights are divided by


def describe(source: CheckpointSource) -> str:
    """Return how the weights are stored."""
    return "three values, rounded at use" if _is_online(source) else "three values in 2 bits"


def tensors(source: CheckpointSource) -> dict[str, Readable]:
    """Return the weights by name; CheckpointError for one that lacks a part, or has one of another shape."""
    if _is_online(source):
        return {name: _round_at_use(source, name) for name in _plain_linears(source)}
    names = [name for name, stored in source.stored.items() if stored.dtype == torch.uint8 and name.endswith(".weight")]
    return {name: _unpack_weight(source, name) for name in names}


def _is_online(source: CheckpointSource) -> bool:
    return (source.settings.get("linear_class"), source.settings.get("quantization_mode")) == (MULTIPLYING, ONLINE)


def _plain_linears(source: CheckpointSource) -> list[str]:
    """Return the weights that are rounded at use: matrices but for tables, which have a row for each token."""
    kept = [str(name) for name in source.settings.get("modules_to_not_convert") or ()]
    text = source.config.get("text_config")
    tokens = source.config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    names = []
    for name, stored in source.stored.items():
        module = name.removesuffix(".weight")
        is_kept = any(module == each or module.startswith(f"{each}.") or module.endswith(each) for each in kept)
        is_matrix = name.endswith(".weight") and len(stored.shape) == 2 and stored.dtype in scaled.FLOATS
        if is_matrix and stored.shape[0] != tokens and not is_kept and not re.search(r"(^|\.)lm_head$", module):
            names.append(name)
    return names


def _unpack_weight(source: CheckpointSource, name: str) -> Decoded:
    stored = source.take(name, (torch.uint8,))
    scale = source.take(f"{name}_scale", scaled.FLOATS, (1,))
    if len(stored.shape) != 2:
        raise source.error(f"{name} has the shape {list(stored.shape)}, a quantized weight has two dimensions")
    shape, dtype = (FIELDS * stored.shape[0], stored.shape[1]), source.dtype
    divides = source.settings.get("linear_class", DIVIDING) == DIVIDING

    def decode(start: int, stop: int) -> Tensor:
        codes = _codes(stored, start, stop)
        if bool((codes == FIELDS - 1).any()):
            raise source.error(f"{name} holds a field of 3, which is none of three values; download it again")
        values, size = codes.float().sub_(1), scale.read().float()
        return (values.div_(size) if divides else values.mul_(size)).to(dtype)

    return Decoded(name, dtype, shape, (stored, scale), decode, step(shape))


def _codes(stored: StoredTensor, start: int, stop: int) -> Tensor:
    """Return the rows start .. stop - 1 of the codes, uint8 [stop - start, in]."""
    rows, parts = stored.shape[0], []
    for field in range(start // max(1, rows), -(-stop // max(1, rows))):
        first, last = max(start - field * rows, 0), min(stop - field * rows, rows)
        parts.append(stored.rows(first, last) >> FIELD_BITS * field & FIELDS - 1)
    return torch.cat(parts)


def _round_at_use(source: CheckpointSource, name: str) -> Decoded:
    stored = source.take(name)

    def decode(start: int, stop: int) -> Tensor:
        values = stored.read().float()
        scale = 1.0 / values.abs().mean().clamp_(min=LEAST_MEAN)
        return ((values * scale).round().clamp(-1, 1) / scale).to(stored.dtype)[start:stop]

    return Decoded(name, stored.dtype, stored.shape, (stored,), decode, stored.shape[0])
