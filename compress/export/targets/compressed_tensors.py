"""Write compressed-tensors, for vLLM, SGLang, transformers: packed integers of 2 to 8 bits, int8, FP4 and FP8 types.

A packed weight has weight_packed int32 [out, ceil(in * bits / 32)], weight_scale [out, groups] in the type of ours and
weight_shape; asymmetric weights have weight_zero_point, packed along the rows. W = (code - zero) * scale. Where inputs
are quantized to 8 bits a token at a time, weight is int8 [out, in] and weight_scale [out, 1]. An output head with a
table of its own is such a weight, too; embeddings are plain.

Data types of the grid format keep their codes: weight_packed uint8 [out, in / 2] of 4 bits, or weight float8_e4m3fn,
and weight_scale. The tensor scale of NVFP4 is written as a divisor, weight_global_scale = 1 / tensor_scale in float32:
a reader's scale of a block may differ from ours in the last bit of float32, unless it is a power of two. Static scales
of inputs are input_scale, or for NVFP4 the divisor input_global_scale.

2:4 weights of 16 bits, stored in the format `sparse`, are `sparse-24-bitmask`: compressed [out, in / 2], bitmask uint8
[out, ceil(in / 8)], shape [2, 1]. compressed-tensors up to 0.12 reads it; vLLM 0.32 refuses it.

transformers with compressed-tensors 0.18 to 0.20 opens asymmetric weights only if it is told to decode them all, and
can do that only if all are alike: "dequantize" says so, and asymmetric weights that differ are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.errors import ExportError
from compress.export import directory, grids, integers
from compress.export.convert import Export, dtype_name
from compress.export.weights import ExportWeight, IntWeight, StoredWeight
from compress.formats import sparse
from compress.numerics.packing import pack_stream
from compress.types import Activations

SUFFIX = ""
DRAFT_HEADS = "held"
CACHE = "vllm serve --kv-cache-dtype fp8"
BITS = tuple(range(2, 9))
SPARSE, SPARSE_BITMASK = "sparse", "sparse-24-bitmask"
PACKED, INT8, MIXED = "pack-quantized", "int-quantized", "mixed-precision"
FLOAT, NVFP4, MXFP4, MXFP8 = "float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
GRIDS: dict[str, tuple[str, dict[str, Any]]] = {  # data type -> format, and what shares a scale
    "nvfp4": (NVFP4, {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}),
    "mxfp4": (MXFP4, {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}),
    "mxfp8": (MXFP8, {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}),
    "fp8": (FLOAT, {"strategy": "tensor"}),
    "fp8-channel": (FLOAT, {"strategy": "channel"}),
    "fp8-block": (FLOAT, {"strategy": "block", "block_structure": [128, 128]}),
}
INPUT_SCALES: dict[str, dict[str, Any]] = {  # type of inputs with blocks -> what shares a scale
    "nvfp4": {**GRIDS["nvfp4"][1], "dynamic": "local"},
    "mxfp4": GRIDS["mxfp4"][1],
    "mxfp8": GRIDS["mxfp8"][1],
    "fp8-block": {"strategy": "group", "group_size": 128},
}
NUMBER = re.compile(r"(?<=\.)\d+(?=\\)")  # an escaped name has several
INPUTS = Activations(bits=8, scale="token", clip=1.0, dtype="int")  # the only ones that readers compute likewise


def refuses(weight: ExportWeight) -> str | None:
    """Return why a weight is no plain integers or data type of engines, or has quantized inputs they do not know."""
    if weight.stored.format == grids.FORMAT:
        return grids.refusal(weight, tuple(GRIDS))
    if weight.stored.format == SPARSE:
        return _sparse_refusal(weight)
    if reason := integers.refusal(weight, BITS, heads=True):
        return reason
    if weight.is_expert and not weight.stored.params.symmetric:
        return "transformers cannot open asymmetric experts in this format; set symmetric: true"
    activations, params = weight.stored.activations, weight.stored.params
    if activations is None:
        return None
    if activations != INPUTS:
        return (
            "its inputs are quantized otherwise than readers do it; set activations: {bits: 8, scale: token}, or null"
        )
    if params.bits != 8 or params.group(weight.shape[1]) != weight.shape[1] or not params.symmetric:
        return "readers multiply quantized inputs with int8 rows; set bits: 8, group_size: -1 and symmetric: true"
    return None


def _sparse_refusal(weight: ExportWeight) -> str | None:
    """Return why a weight of the format `sparse` is no 2:4 weight of 16 bits as an `nn.Linear` of its own."""
    params, columns = weight.stored.params, weight.shape[1]
    if weight.roles or weight.is_expert:
        return "only linears are sparse there; keep it, or quantize it without sparsity"
    if not params.has_patterns or params.inner != "dense" or columns % 4:
        return "of sparse weights readers have 2:4 in 16 bits alone; set keep: 2, of: 4 and bits: 16"
    if weight.stored.activations is not None:
        return "its inputs are quantized, which readers do not beside 16 bits; set activations: null"
    if weight.is_turned:
        return "the class of the model holds it as [inputs, outputs], which is no linear there; keep it"
    return weight.not_alone()


def check(export: Export) -> None:
    """Raise ExportError for what no reader opens: asymmetric weights that are not all alike, unequal fused linears."""
    export.check_packed()
    if any(weight.stored.format == SPARSE for weight in export.held):
        _check_sparse(export)
        return
    grids.check_fused(export)
    _settle_head(export)
    groups = _groups(export)
    if len(groups) > 1 and any(not scheme["weights"]["symmetric"] for scheme, _ in groups):
        raise ExportError(
            "transformers opens asymmetric compressed-tensors only if all weights are alike; set symmetric: true, or "
            "the same bits and group_size for all"
        )
    if any(weight.is_expert and grids.type_of(weight) not in (None, "fp8", "fp8-channel") for weight in export.held):
        export.notes.append("transformers 5.23 does not open experts of these types (it does fp8 and fp8-channel)")
    whole = [weight.stored.params for weight in export.held if weight.stored.format != grids.FORMAT]
    integers.settle_type(export, (params.scale_dtype for params in whole))


def _check_sparse(export: Export) -> None:
    """Raise ExportError for sparse weights beside quantized ones, of which old readers decompress one sort alone."""
    export.tables = (*export.tables, *(weight for weight in export.held if weight.roles))
    export.held = tuple(weight for weight in export.held if not weight.roles)
    other = next((weight for weight in export.held if weight.stored.format != SPARSE), None)
    if other is not None:
        raise ExportError(
            f"{other.name} is quantized beside sparse weights, and readers of these take no others; give all linears "
            "one method, or keep them"
        )
    export.notes.append(
        "compressed-tensors up to 0.12 reads 2:4 weights, as transformers does with it; vLLM 0.32 refuses them: export "
        "to dense for an engine"
    )


def _settle_head(export: Export) -> None:
    """Let a packed output head become plain numbers beside asymmetric weights, or data types, of which it is none."""
    heads = tuple(weight for weight in export.held if weight.roles or _is_odd_draft(weight))
    linears = tuple(weight for weight in export.held if weight not in heads)
    schemes = [scheme for scheme, _ in _groups(export)]
    reason = ""
    if len(schemes) > 1 and any(not scheme["weights"]["symmetric"] for scheme in schemes):
        reason = "transformers opens asymmetric weights only if all are alike"
    if any(weight.stored.format == grids.FORMAT for weight in linears):
        reason = "engines have a plain head beside FP4 and FP8"
    if heads and reason:
        export.held, export.tables = linears, (*export.tables, *heads)
        named = (weight.name for weight in heads if weight.roles)
        export.notes += [f"{name} is written as plain {dtype_name(export.dtype)}: {reason}" for name in named]


def _is_odd_draft(weight: StoredWeight) -> bool:
    """Return whether it is a linear of a draft head in integers, which may be beside linears of other types."""
    return weight.is_draft and weight.stored.format != grids.FORMAT


def write(export: Export, out: Path) -> None:
    """Write the directory, with the settings in config.json."""
    if export.held[0].stored.format == SPARSE:
        _write_sparse(export, out)
        return
    groups = _groups(export)
    formats = sorted({scheme["format"] for scheme, _ in groups})
    is_one = len(groups) == 1
    heads = [weight.name for weight in export.held if weight.roles]  # no engine's head is a Linear
    settings = {
        "quant_method": "compressed-tensors",
        "format": formats[0] if len(formats) == 1 else MIXED,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": export.plain_linears(),
        "config_groups": {
            f"group_{number}": {"targets": ["Linear", *_exact(heads)] if is_one else _targets(names, export), **scheme}
            for number, (scheme, names) in enumerate(groups)
        },
        **({} if groups[0][0]["weights"]["symmetric"] else {"dequantize": True}),
    }
    in_scales = grids.in_scales(export)
    tensors = directory.held_tensors(export, lambda weight: _stored_tensors(weight, in_scales.get(weight.name)))
    directory.write(export, out, tensors, {"quantization_config": settings})


def _write_sparse(export: Export, out: Path) -> None:
    """Write 2:4 weights; more settings than these would say that weights are quantized."""
    sparsity = {"format": SPARSE_BITMASK, "global_sparsity": 0.5, "sparsity_structure": "2:4"}
    settings = {
        "quant_method": "compressed-tensors",
        "sparsity_config": {**sparsity, "targets": ["Linear"], "ignore": export.plain_linears()},
    }
    directory.write(export, out, directory.held_tensors(export, _sparse_tensors), {"quantization_config": settings})


def _sparse_tensors(weight: StoredWeight) -> dict[str, Tensor]:
    packed = weight.read()
    mask = sparse.decode_mask(packed.tensors, packed.params, packed.shape, slice(None))
    return {
        "compressed": packed.tensors["values"],
        "bitmask": pack_stream(torch.nn.functional.pad(mask.byte(), (0, -mask.shape[1] % 8)), 1),
        "shape": torch.tensor(packed.shape)[:, None],
    }


def _groups(export: Export) -> list[tuple[dict[str, Any], list[str]]]:
    """Return each way in which weights are stored, and the names of those."""
    groups: list[tuple[dict[str, Any], list[str]]] = []
    for weight in export.held:
        scheme = _scheme(weight)
        names = next((names for known, names in groups if known == scheme), None)
        if names is None:
            groups.append((scheme, names := []))
        names.append(weight.name)
    return groups


def _scheme(weight: StoredWeight) -> dict[str, Any]:
    kind, params = grids.type_of(weight), weight.stored.params
    if kind is not None:
        packed, shared = GRIDS[kind]
        weights = {"num_bits": params.bits, "type": "float", "symmetric": True, "dynamic": False, **shared}
        inputs = None if weight.stored.activations is None else _grid_inputs(weight.stored.activations)
        return {"weights": weights, "input_activations": inputs, "output_activations": None, "format": packed}
    is_row = params.group(weight.shape[1]) == weight.shape[1]
    shared = {"type": "int", "symmetric": params.symmetric, "dynamic": False, "actorder": None}
    inputs = None
    if weight.stored.activations is not None:
        inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "weights": {
            "num_bits": params.bits,
            **shared,
            "strategy": "channel" if is_row else "group",
            "group_size": None if is_row else params.group_size,
        },
        "input_activations": inputs,
        "output_activations": None,
        "format": PACKED if inputs is None else INT8,
    }


def _grid_inputs(activations: Activations) -> dict[str, Any]:
    """Return how inputs are quantized in a type of engines."""
    is_static = activations.scale == "tensor"
    shared = INPUT_SCALES.get(activations.dtype, {"strategy": "tensor" if is_static else "token"})
    return {"num_bits": activations.bits, "type": "float", "symmetric": True, "dynamic": not is_static, **shared}


def _exact(names: Iterable[str]) -> list[str]:
    return [f"re:^{re.escape(name)}$" for name in names]


def _targets(names: list[str], export: Export) -> list[str]:
    """Return patterns for these modules and no other packed one: with any numbers, where all such modules are here."""
    own, patterns, rest = set(names), list[str](), list[str]()
    by_kind: dict[str, list[str]] = {}
    for weight in export.held:
        by_kind.setdefault(NUMBER.sub(r"\\d+", re.escape(weight.name)), []).append(weight.name)
    for kind, members in by_kind.items():
        if own.issuperset(members):
            patterns.append(f"re:^{kind}$")
        else:
            rest.extend(name for name in members if name in own)
    return [*patterns, *_exact(rest)]


def _stored_tensors(weight: StoredWeight, in_scale: Tensor | None) -> dict[str, Tensor]:
    """Return what is stored for a weight; in_scale: the static scale of its inputs, if it has one."""
    if weight.stored.format != grids.FORMAT:
        return _integer_tensors(weight.integers())
    stored, params = weight.read().tensors, weight.stored.params
    name = "weight_packed" if params.bits == 4 else "weight"
    is_whole = params.block_rows == -1
    tensors = {name: stored["codes"], "weight_scale": stored["scales"].flatten() if is_whole else stored["scales"]}
    if params.tensor_scale:
        tensors["weight_global_scale"] = 1 / stored["tensor_scale"]
    if in_scale is not None:
        is_divisor = params.tensor_scale
        tensors["input_global_scale" if is_divisor else "input_scale"] = 1 / in_scale if is_divisor else in_scale
    return tensors


def _integer_tensors(weight: IntWeight) -> dict[str, Tensor]:
    if weight.activations is not None:
        return {"weight": (weight.codes.to(torch.int16) - 128).to(torch.int8), "weight_scale": weight.scales}
    stored = {
        "weight_packed": integers.pack_words(weight.codes, weight.bits),
        "weight_scale": weight.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if weight.zeros is not None:
        stored["weight_zero_point"] = integers.pack_words(weight.zeros.T.contiguous(), weight.bits).T.contiguous()
    return stored
