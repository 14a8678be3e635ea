"""Read torchao's tensors as transformers saves them: their parts, and JSON in the files' metadata on how to join them.

`module.weight` is stored as `module._weight_qdata`, `module._weight_scale` and perhaps `module._weight_zero_point`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from compress.errors import shown
from compress.importers import options, scaled
from compress.importers.source import CheckpointSource, Decoded
from compress.storage import json_text
from compress.storage.checkpoint import Readable, StoredTensor, read_metadata

KINDS = {"Int8Tensor": "int8", "IntxUnpackedToInt8Tensor": "integers", "Float8Tensor": "float8"}
OPTIONS: options.Options = {
    **options.PLAIN_MODULES,
    **{"quant_type": (dict, str, None), "quant_type_kwargs": (dict, None)},
    **dict.fromkeys(("include_input_output_embeddings", "untie_embedding_weights"), options.FLAG),
}
CODES = (torch.int8, *scaled.FLOAT8)
PARTS = {"qdata", "scale", "zero_point"}


def describe(source: CheckpointSource) -> str:
    """Return how the weights are stored."""
    kinds = sorted({KINDS[facts["_type"]] for facts in _facts(source).values() if facts["_type"] in KINDS})
    return f"torchao {' and '.join(kinds) or 'without a quantized weight'}"


def tensors(source: CheckpointSource) -> dict[str, Readable]:
    """Return the weights by name; CheckpointError for one of a kind that cannot be read, or that lacks a part."""
    return {name: _weight(source, name, facts) for name, facts in _facts(source).items() if facts["_type"] != "Tensor"}


def _facts(source: CheckpointSource) -> dict[str, dict[str, Any]]:
    """Return name -> what the metadata says of the tensor."""
    facts_by_module = {}
    for file in sorted({stored.file for stored in source.stored.values()}):
        for name, text in read_metadata(file).items():
            try:
                facts = json_text.loads(str(text).encode()) if name not in ("format", "tensor_names") else None
            except ValueError:
                continue  # of somebody else
            if isinstance(facts, dict) and isinstance(facts.get("_type"), str):
                facts_by_module[name] = facts
    if not facts_by_module:
        raise source.error(
            "its files say nothing of how the weights are stored; save it again with a later transformers"
        )
    return facts_by_module


def _weight(source: CheckpointSource, name: str, facts: dict[str, Any]) -> Decoded:
    module, _, key = name.rpartition(".")
    data, parts = facts.get("_data"), facts.get("_tensor_data_names")
    if facts["_type"] not in KINDS or not isinstance(data, dict) or not isinstance(parts, list):
        raise source.error(
            f"{name} is a {shown(facts['_type'])}, which cannot be read; what can be: {', '.join(KINDS)}; give the "
            "original checkpoint"
        )
    if extra := {str(part) for part in parts} - PARTS:
        raise source.error(f"{name} has {shown(sorted(extra)[0])}, which cannot be read; give the original checkpoint")
    stored = source.take(f"{module}._{key}_qdata", CODES)
    scale = source.take(f"{module}._{key}_scale", scaled.FLOATS)
    block = _block(source, name, stored.shape, scale.shape)
    zeros: scaled.Rows | None = None
    others: tuple[StoredTensor, ...] = ()
    if "zero_point" in parts:
        point = source.take(f"{module}._{key}_zero_point", (torch.int8, torch.uint8, torch.int32, *scaled.FLOATS))
        if math.prod(point.shape) != math.prod(scale.shape) or block[0] != 1:
            raise source.error(f"{point.name} has the shape {list(point.shape)}, its scales {list(scale.shape)}")
        table = point._replace(shape=_grid(stored.shape, block))
        zeros, others = (lambda start, stop: table.rows(start, stop).float()), (point,)
    scales = scaled.ScaleGrid(scale._replace(shape=_grid(stored.shape, block)), block, zeros, others=others)
    return scaled.weight(source, name, scaled.plain(stored), scales, _dtype(source, data))


def _grid(shape: tuple[int, ...], block: scaled.Block) -> tuple[int, ...]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def _block(source: CheckpointSource, name: str, shape: tuple[int, ...], scales: tuple[int, ...]) -> scaled.Block:
    """Return the rows and columns that share a scale; there is one scale, one for each row, or a grid of them."""
    if len(shape) == 2:
        rows, columns = shape
        grid = {0: (1, 1), 1: (*scales, 1)}.get(len(scales), scales)
        if len(grid) == 2 and all((*shape, *grid)) and not rows % grid[0] and not columns % grid[1]:
            return rows // grid[0], columns // grid[1]
    raise source.error(f"{name} has the shape {list(shape)}, and scales of {list(scales)}, which do not fit")


def _dtype(source: CheckpointSource, data: dict[str, Any]) -> torch.dtype:
    """Return the type that a tensor says it decodes to."""
    named = data.get("dtype")
    dtype = getattr(torch, str(named.get("_data")), None) if isinstance(named, dict) else None
    return dtype if dtype in scaled.FLOATS else source.dtype
