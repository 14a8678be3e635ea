"""Read HQQ's integers of 1, 2, 3, 4 and 8 bits as transformers stores them: w = (code - zero) * scale.

W_q holds the codes of a matrix [-1, group] (axis 1) or [group, -1] (axis 0), the weight in another shape. It is cut
along its rows in 8 / bits equal parts, which lie in the bits of one byte, the first part in the highest; of 3 bits in
ten parts of an int32, the last with rows that do not count. scale and zero are a number for each row or column of the
matrix. Both steps are made, and rounded, in the type that compute_dtype names. Other facts lie beside these as tensors:
numbers, and texts as bytes. Scales that are quantized themselves are refused.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compress.errors import shown
from compress.importers import options, scaled
from compress.importers.source import CheckpointSource, Decoded
from compress.storage.checkpoint import Readable

OPTIONS: options.Options = {"quant_config": (dict, None), "skip_modules": options.NAMES}
PACKINGS = {"8bit_u8": (8, 1), "4bit_u8": (4, 2), "3bit_32": (3, 10), "2bit_u8": (2, 4), "1bit_u8": (1, 8)}
DTYPES = {"torch.float16": torch.float16, "torch.bfloat16": torch.bfloat16, "torch.float32": torch.float32}
NESTED = ("meta_scale", "meta_zero", "scale_q", "zero_q", "zero_scale")  # parts of scales that are quantized
FACTS = (
    *("nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float", "quant_scale"),
    *("quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise"),
    *("optimize", "round_zero"),
)
LIMIT = 64  # bytes of a fact


def describe(source: CheckpointSource) -> str:
    """Return how the weights are stored."""
    return "hqq"


def tensors(source: CheckpointSource) -> dict[str, Readable]:
    """Return the weights by name; CheckpointError for one that lacks a part, or has one of another shape."""
    return {f"{module}.weight": _weight(source, module) for module in source.ending(".W_q")}


def _facts(source: CheckpointSource, module: str) -> dict[str, Tensor]:
    """Take the small tensors beside a weight that say how it is stored."""
    for part in NESTED:
        if any(name.startswith(f"{module}.{part}") for name in source.stored):
            raise source.error(f"{module}.{part}: scales that are quantized cannot be read; give the original model")
    stored = {key: source.stored.pop(f"{module}.{key}", None) for key in FACTS}
    facts = {key: part.read() for key, part in stored.items() if part is not None and part.nbytes <= LIMIT}
    if missing := [key for key in ("packing", "shape") if key not in facts]:
        raise source.error(f"{module}.{missing[0]} is missing, without which its weight cannot be decoded")
    return facts


def _text(facts: dict[str, Tensor], key: str) -> str:
    return bytes(facts[key].view(torch.uint8).tolist()).decode("latin-1") if key in facts else ""


def _weight(source: CheckpointSource, module: str) -> Decoded:
    facts, stored = _facts(source, module), source.take(f"{module}.W_q")
    packing, shape = _text(facts, "packing"), tuple(int(size) for size in facts["shape"].flatten().tolist())
    if packing not in PACKINGS or len(shape) != 2 or min(shape) < 1 or len(stored.shape) != 2:
        raise source.error(f"{stored.name} has the packing {shown(packing)} and shape {shown(shape)}, no weight's")
    bits, parts = PACKINGS[packing]
    kind = torch.int32 if parts == PACKINGS["3bit_32"][1] else torch.uint8
    width = stored.shape[1] * stored.dtype.itemsize // kind.itemsize  # a matrix may be stored as if it were of floats
    rows = math.prod(shape) // max(1, width)
    scale, zero = (source.take(f"{module}.{part}", scaled.FLOATS) for part in ("scale", "zero"))
    fits = rows * width == math.prod(shape) and rows <= parts * stored.shape[0]
    if not fits or any(part.shape not in ((rows, 1), (1, width)) for part in (scale, zero)):
        raise source.error(
            f"{stored.name} {list(stored.shape)}, its scales {list(scale.shape)} and zeros {list(zero.shape)} do not "
            f"belong to a weight {list(shape)} of {bits} bits"
        )
    dtype = DTYPES.get(_text(facts, "compute_dtype"), torch.float16)

    def decode(start: int, stop: int) -> Tensor:
        words = stored.read().view(kind)
        codes = torch.cat([words >> bits * place & (1 << bits) - 1 for place in reversed(range(parts))])[:rows]
        values = (codes.to(dtype) - zero.read().to(dtype)) * scale.read().to(dtype)
        return values.reshape(shape)[start:stop]

    return Decoded(f"{module}.weight", dtype, shape, (stored, scale, zero), decode, shape[0])
