"""Write torchao's Int8Tensor, for transformers with torchao: a byte for each code of 2 to 8 bits.

_weight_qdata int8 [out, in], _weight_scale [out, groups] in the type of ours, and _weight_zero_point int8 [out, groups]
of asymmetric weights: w = (qdata - zero_point) * scale. Each file says in its metadata, for all weights, what they are
put together to. Fewer than 8 bits save nothing here: torchao's own types of 4 bits hold layouts of single devices.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from compress.export import directory, integers
from compress.export.convert import Export, dtype_name
from compress.export.weights import ExportWeight, IntWeight, StoredWeight

SUFFIX = ""
BITS = tuple(range(2, 9))
PARTS = ("qdata", "scale", "zero_point")


def refuses(weight: ExportWeight) -> str | None:
    """Return why a weight is no plain integers that torchao multiplies with as ours does."""
    if reason := integers.refusal(weight, BITS) or integers.without_activations(weight):
        return reason
    if weight.is_expert:
        return "transformers does not put experts together of torchao's tensors; keep experts"
    params = weight.stored.params
    if not params.symmetric and params.group(weight.shape[1]) == weight.shape[1]:
        return "torchao leaves the zero points of whole rows out of its products; set symmetric: true, or a group_size"
    return None


def check(export: Export) -> None:
    """Raise ExportError for a checkpoint without packed linears."""
    export.check_packed()
    integers.settle_type(export, (weight.stored.params.scale_dtype for weight in export.held))
    if any(weight.stored.params.bits < 8 for weight in export.held):
        export.notes.append("torchao stores a byte for each code: bits below 8 save nothing there")


def nbytes(export: Export, weight: StoredWeight) -> int:
    """Return the bytes of a weight as it is written."""
    params, (rows, columns) = weight.stored.params, weight.shape
    groups = columns // params.group(columns)
    return rows * (columns + groups * (2 if params.symmetric else 3))


def write(export: Export, out: Path) -> None:
    """Write the directory, with the settings in config.json and what the tensors are in each file."""
    settings = {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}},
        "modules_to_not_convert": export.plain_linears() or None,
    }
    metadata = {f"{weight.name}.weight": json.dumps(_description(export, weight)) for weight in export.held}
    metadata["tensor_names"] = json.dumps(list(metadata))
    tensors = directory.held_tensors(export, lambda weight: _tensors(weight.integers()))
    directory.write(export, out, tensors, {"quantization_config": settings}, metadata=metadata)


def _description(export: Export, weight: StoredWeight) -> dict[str, object]:
    """Return what torchao makes of the tensors of a weight."""
    params = weight.stored.params
    return {
        "_type": "Int8Tensor",
        "_data": {
            "block_size": [1, params.group(weight.shape[1])],
            "dtype": {"_type": "torch.dtype", "_data": dtype_name(export.dtype)},
        },
        "_tensor_data_names": PARTS[:2] if params.symmetric else PARTS,
    }


def _tensors(weight: IntWeight) -> dict[str, Tensor]:
    middle = 1 << (weight.bits - 1)
    parts = [(weight.codes - middle).view(torch.int8), weight.scales]  # wraps around as two's complement does
    if weight.zeros is not None:
        parts.append((weight.zeros - middle).view(torch.int8))
    return {f"_weight_{name}": part for name, part in zip(PARTS, parts, strict=False)}
