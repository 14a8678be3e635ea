"""Read bitsandbytes' weights: 4 bits by a table (nf4 or fp4) and the largest number of each block, or int8 by rows.

Of 4 bits, `weight` holds two codes in a byte, the first in the high half, in the order of the weight's numbers. Beside
it lie weight.quant_map (the table), weight.absmax (a number for each block), and JSON with the shape and the block
size. With double quantization absmax is coded too: nested_quant_map[absmax] * nested_absmax[block] + nested_offset. Of
8 bits, W = weight * SCB * (1 / 127), SCB a number for each row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from compress.errors import shown
from compress.importers import options
from compress.importers.source import CheckpointSource, Decoded, step
from compress.storage import json_text
from compress.storage.checkpoint import CONFIG, Readable, StoredTensor

STATE = ".quant_state.bitsandbytes__"
KINDS = ("nf4", "fp4")
OPTIONS: options.Options = {
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "bnb_4bit_use_double_quant"), options.FLAG),
    **dict.fromkeys(("llm_int8_has_fp16_weight", "llm_int8_enable_fp32_cpu_offload"), options.FLAG),
    **dict.fromkeys(("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage"), options.TEXT),
    **{"bnb_4bit_quant_type": KINDS, "llm_int8_threshold": options.NUMBER, "llm_int8_skip_modules": options.NAMES},
}
LIMIT = 1 << 16  # bytes of a state
LARGEST = 1 << 16  # block that there is, by far
BY_127 = 7.874015718698502e-3
FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def describe(source: CheckpointSource) -> str:
    """Return how the weights are stored."""
    if not source.settings.get("load_in_4bit"):
        return "bitsandbytes of 8 bits"
    kind = source.settings.get("bnb_4bit_quant_type", "fp4")
    if kind not in KINDS:
        raise source.error(f"{CONFIG}: bnb_4bit_quant_type {shown(kind)} is none of {', '.join(KINDS)}")
    twice = ", scales quantized" if source.settings.get("bnb_4bit_use_double_quant") else ""
    return f"bitsandbytes {kind}{twice}"


def tensors(source: CheckpointSource) -> dict[str, Readable]:
    """Return the weights by name; CheckpointError for one that lacks a part, or has one of another shape."""
    weights: dict[str, Readable] = {}
    for kind in KINDS:
        weights.update({name: _four(source, name, kind) for name in source.ending(STATE + kind)})
    for module in source.ending(".SCB"):
        weights[f"{module}.weight"] = _eight(source, module)
    return weights


def _state(source: CheckpointSource, name: str, kind: str) -> dict[str, Any]:
    """Return the JSON of a weight; CheckpointError for what does not describe one."""
    stored = source.take(f"{name}{STATE}{kind}", (torch.uint8,))
    if stored.nbytes > LIMIT:
        raise source.error(f"{stored.name} has {stored.nbytes} bytes, too many for a description")
    try:
        state = json_text.loads(bytes(stored.read().tolist()))
        shape, block = state["shape"], state["blocksize"]
        is_good = all(type(size) is int and size > 0 for size in (*shape, block)) and state["dtype"] in FLOATS
        is_good = is_good and block <= LARGEST
    except (ValueError, KeyError, TypeError) as error:
        raise source.error(f"{stored.name} does not describe a weight; download it again") from error
    if not is_good or len(shape) < 2:
        raise source.error(f"{stored.name} describes no weight that can be read: {shown(state)}")
    return dict(state)


def _four(source: CheckpointSource, name: str, kind: str) -> Decoded:
    """Return a weight of 4 bits."""
    state = _state(source, name, kind)
    shape, block, dtype = tuple(state["shape"]), state["blocksize"], FLOATS[state["dtype"]]
    count, inner = math.prod(shape), math.prod(shape[1:])
    stored, table = source.take(name), source.take(f"{name}.quant_map", (torch.float32,), (16,))
    if stored.nbytes < -(-count // 2):
        raise source.error(f"{name} has {stored.nbytes} bytes, too few for the shape {list(shape)}")
    codes = stored._replace(dtype=torch.uint8, shape=(stored.nbytes,))
    largest = source.take(f"{name}.absmax", (torch.float32, torch.uint8), (-(-count // block),))
    nested = _nested_scales(source, name, state, largest) if largest.dtype == torch.uint8 else ()

    def factors(first: int, last: int) -> Tensor:
        if not nested:
            return largest.rows(first, last)
        levels, outer = (part.read() for part in nested)
        group = torch.arange(first, last) // state["nested_blocksize"]
        return levels[largest.rows(first, last).int()] * outer[group] + torch.tensor(float(state["nested_offset"]))

    def decode(start: int, stop: int) -> Tensor:
        begin, end = start * inner, stop * inner  # begin is even, as `start` is
        octets = codes.rows(begin // 2, -(-end // 2))
        halves = torch.stack([octets >> 4, octets & 15], -1).flatten()[: end - begin]
        first = begin // block
        scales = factors(first, -(-end // block)).repeat_interleave(block)
        values = table.read()[halves.int()].mul_(scales[begin - first * block : end - first * block])
        return values.to(dtype).view(stop - start, *shape[1:])

    return Decoded(name, dtype, shape, (stored, table, largest, *nested), decode, step(shape, 2))


def _nested_scales(
    source: CheckpointSource, name: str, state: dict[str, Any], largest: StoredTensor
) -> tuple[StoredTensor, ...]:
    """Return the table and the scales of scales that are quantized themselves."""
    size, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if type(size) is not int or size < 1 or not isinstance(offset, int | float):
        raise source.error(f"{name} has scales in bytes, and {shown(state)} does not say how; download it again")
    groups = -(-largest.shape[0] // size)
    return (
        source.take(f"{name}.nested_quant_map", (torch.float32,), (256,)),
        source.take(f"{name}.nested_absmax", (torch.float32,), (groups,)),
    )


def _eight(source: CheckpointSource, module: str) -> Decoded:
    """Return a weight of 8 bits."""
    stored = source.take(f"{module}.weight", (torch.int8,))
    if len(stored.shape) != 2:
        raise source.error(f"{stored.name} has the shape {list(stored.shape)}, a quantized weight has two dimensions")
    rows = stored.shape[:1]
    scales = source.take(f"{module}.SCB", (torch.float32,), rows)
    layout = source.stored.pop(f"{module}.weight_format", None)
    if layout is not None and (layout.nbytes != 1 or int(layout.read().item()) != 0):
        raise source.error(
            f"{module}.weight is stored in tiles of one kind of GPU, not by rows; save it again on a CPU"
        )
    dtype = source.dtype

    def decode(start: int, stop: int) -> Tensor:
        return (stored.rows(start, stop) * scales.rows(start, stop).view(-1, 1) * BY_127).to(dtype)

    return Decoded(f"{module}.weight", dtype, stored.shape, (stored, scales), decode, step(stored.shape))
