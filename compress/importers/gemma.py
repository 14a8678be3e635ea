"""Read weights of 2, 4 or 8 bits with a scale for each row, or for blocks of a row, as transformers stores them.

`weight` is int8 [out, in], or uint8 with 2 or 4 codes in a byte, the lowest bits first, less 2^(bits - 1). weight_scale
is float32 [out, 1]. Tables of embeddings have embedding_quantized and embedding_scale [rows, blocks] in their place. A
product is made in the model's type, of scales that are rounded to it. Scales of inputs and outputs are left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.errors import shown
from compress.importers import options, scaled
from compress.importers.source import CheckpointSource, Decoded
from compress.storage.checkpoint import CONFIG, Readable

WIDTHS = (2, 4, 8)
OPTIONS: options.Options = {
    **{"modules_to_not_convert": options.NAMES, "quantize_embeddings": options.FLAG},
    **{"num_bits": (*WIDTHS, None), "module_quant_configs": (dict, None)},
}
PARTS = {".weight_scale": ".weight", ".embedding_scale": ".embedding_quantized"}  # ending of scales -> of codes


def describe(source: CheckpointSource) -> str:
    """Return how the weights are stored."""
    return "integers of 2, 4 or 8 bits by rows"


def tensors(source: CheckpointSource) -> dict[str, Readable]:
    """Return the weights by name; CheckpointError for one that lacks a part, or has one of another shape."""
    weights: dict[str, Readable] = {}
    for ending, codes in PARTS.items():
        for module in source.ending(ending):
            weights[f"{module}.weight"] = _weight(source, module, codes, ending)
    source.drop("_activation_scale")
    return weights


def _weight(source: CheckpointSource, module: str, codes: str, ending: str) -> Decoded:
    stored = source.take(module + codes, (torch.int8, torch.uint8))
    scale = source.take(module + ending, scaled.FLOATS)
    if len(stored.shape) != 2 or len(scale.shape) != 2 or not all((*stored.shape, *scale.shape)):
        raise source.error(f"{stored.name} and {scale.name} have two dimensions each, but not here")
    bits = 8 if stored.dtype == torch.int8 else _bits(source, module)
    shape, dtype = (stored.shape[0], stored.shape[1] * 8 // bits), source.dtype

    def rows(start: int, stop: int) -> Tensor:
        if bits == 8:
            return stored.rows(start, stop).float()
        return scaled.unpack_codes(stored.rows(start, stop), bits, shape[1]).float().sub_(1 << (bits - 1))

    grid = scaled.ScaleGrid(scale, (1, max(1, shape[1] // scale.shape[1])), values=lambda part: part.to(dtype).float())
    return scaled.weight(source, f"{module}.weight", scaled.Codes(stored, shape, rows), grid, dtype)


def _bits(source: CheckpointSource, module: str) -> int:
    """Return the bits of a module whose codes lie in bytes: those of the first pattern in its name, or of all."""
    own, patterns = source.settings, source.settings.get("module_quant_configs")
    for pattern, form in patterns.items() if isinstance(patterns, dict) else ():
        try:
            if options.has_match(pattern, module):
                own = {**own, **form} if isinstance(form, dict) else {}
                break
        except ValueError as error:
            raise source.error(f"{CONFIG}: {shown(pattern)} of module_quant_configs {error}") from error
    bits = own.get("num_bits", 4)
    if bits not in WIDTHS[:2]:
        raise source.error(f"{CONFIG}: {module} has codes in bytes, and num_bits {shown(bits)}, not 2 or 4")
    return int(bits)
