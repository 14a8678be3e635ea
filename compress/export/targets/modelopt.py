"""Write modelopt directories, for vLLM, SGLang, TensorRT-LLM: NVFP4, FP8 by tensors, rows or blocks, MXFP8, mixtures.

Codes and scales are stored as they are: weight uint8 [out, in / 2] (NVFP4) or float8_e4m3fn [out, in], weight_scale,
the tensor scale of NVFP4 weight_scale_2 and static scales of inputs input_scale, single numbers. hf_quant_config.json
says how, and config.json says the same in the newer layout. Engines read both only where modelopt is named as the
producer, so it is.

The format has no words for unquantized inputs beside FP8 and MXFP8 weights: engines round them all the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.export import directory, grids
from compress.export.convert import Export
from compress.export.weights import ExportWeight, StoredWeight
from compress.storage.checkpoint import write_text
from compress.storage.paths import MODELOPT_SETTINGS
from compress.types import Activations

SUFFIX = ""
DRAFT_HEADS = "held"
CACHE = "vllm serve --kv-cache-dtype fp8"
PRODUCER = {"name": "modelopt", "version": "0.47.0", "written_by": "compress"}
MIXED = "MIXED_PRECISION"
BLOCK = 128
ALGORITHMS: dict[tuple[str, Activations | None], str] = {  # type, type of inputs -> what it is called
    ("nvfp4", None): "W4A16_NVFP4",
    ("nvfp4", Activations(4, "tensor", dtype="nvfp4")): "NVFP4",
    ("fp8", Activations(scale="tensor", dtype="fp8")): "FP8",
    ("fp8-channel", Activations(dtype="fp8")): "FP8_PER_CHANNEL_PER_TOKEN",
    ("fp8-block", Activations(dtype="fp8-block")): "FP8_PB_WO",
    ("mxfp8", Activations(dtype="mxfp8")): "MXFP8",
}
ROUNDED_INPUTS = {"fp8-channel": "FP8_PER_CHANNEL_PER_TOKEN", "fp8-block": "FP8_PB_WO", "mxfp8": "MXFP8"}
GROUP_SIZES = {"NVFP4": 16, "W4A16_NVFP4": 16, "MXFP8": 32}


def refuses(weight: ExportWeight) -> str | None:
    """Return why a weight is of no type that engines read in this format."""
    if weight.stored.format != grids.FORMAT:
        return (
            f"it is stored in the format {weight.stored.format!r}; choose a method that writes data types (grid_gptq)"
        )
    kind = grids.type_of(weight)
    if reason := grids.refusal(weight, tuple(dict.fromkeys(kind for kind, _ in ALGORITHMS))):
        return reason
    if _algorithm(weight) is None:
        inputs = next(inputs for known, inputs in ALGORITHMS if known == kind and inputs is not None)
        words = f"{{bits: {inputs.bits}, scale: {inputs.scale}, dtype: {inputs.dtype}}}"
        return f"the format has {kind} with other inputs; set activations: {words}, or export to compressed-tensors"
    if kind == "fp8-block" and weight.shape[1] % BLOCK:
        return f"its {weight.shape[1]} inputs are no whole blocks of {BLOCK}; give it the type fp8-channel, or keep it"
    return None


def check(export: Export) -> None:
    """Raise ExportError for unequal fused linears; say so where engines round inputs that ours do not."""
    export.check_packed()
    grids.check_fused(export)
    if any(weight.stored.activations is None and grids.type_of(weight) in ROUNDED_INPUTS for weight in export.held):
        export.notes.append(
            "engines round the inputs of FP8 and MXFP8 linears to 8 bits: the format cannot say otherwise"
        )


def write(export: Export, out: Path) -> None:
    """Write the directory, with the settings in config.json and in a file beside it."""
    quantization, section = _settings(export)
    in_scales = grids.in_scales(export)
    tensors = directory.held_tensors(export, lambda weight: _tensors(weight, in_scales.get(weight.name)))
    directory.write(export, out, tensors, {"quantization_config": section})
    described = {"producer": PRODUCER, "quantization": quantization}
    write_text(out / MODELOPT_SETTINGS, json.dumps(described, indent=2) + "\n")


def _algorithm(weight: ExportWeight) -> str | None:
    """Return what the format calls a weight with its inputs, None if it has no name for that."""
    kind, inputs = grids.type_of(weight) or "", weight.stored.activations
    return ALGORITHMS.get((kind, inputs)) or (ROUNDED_INPUTS.get(kind) if inputs is None else None)


def _settings(export: Export) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of the file of their own, and the section of config.json."""
    by_algorithm: dict[str, list[str]] = {}
    for weight in export.held:
        by_algorithm.setdefault(str(_algorithm(weight)), []).append(weight.name)
    ignored = export.plain_linears()
    layers = {name: _layer(algorithm) for algorithm, names in by_algorithm.items() for name in names}
    is_mixed = len(by_algorithm) > 1
    whole: dict[str, Any] = (
        {"quant_algo": MIXED, "quantized_layers": layers} if is_mixed else next(iter(layers.values()))
    )
    quantization = {**whole, "kv_cache_quant_algo": None, "exclude_modules": ignored}
    groups = {
        f"group_{number}": {**_group(algorithm), "targets": sorted(names) if is_mixed else ["Linear"]}
        for number, (algorithm, names) in enumerate(by_algorithm.items())
    }
    section = {"quant_method": "modelopt", **whole, "config_groups": groups, "ignore": ignored, "kv_cache_scheme": None}
    return quantization, {**section, "producer": PRODUCER}


def _layer(algorithm: str) -> dict[str, Any]:
    size = GROUP_SIZES.get(algorithm)
    return {"quant_algo": algorithm, **({"group_size": size} if size else {})}


def _group(algorithm: str) -> dict[str, Any]:
    """Return a group of the section, whose readers take its group_size, and no more, from it."""
    size = GROUP_SIZES.get(algorithm)
    numbers = {"dynamic": False, "num_bits": 4 if "NVFP4" in algorithm else 8, "type": "float"}
    numbers |= {"group_size": size} if size else {}
    shared = {"FP8_PER_CHANNEL_PER_TOKEN": {"strategy": "channel"}, "FP8_PB_WO": {"strategy": "block"}}
    inputs = {} if algorithm == "W4A16_NVFP4" else {"input_activations": numbers}
    return {**inputs, "weights": {**numbers, **shared.get(algorithm, {})}}


def _tensors(weight: StoredWeight, in_scale: Tensor | None) -> dict[str, Tensor]:
    """Return what is stored for a weight; in_scale: the static scale of its inputs, if it has one."""
    stored, kind = weight.read().tensors, grids.type_of(weight)
    scales = stored["scales"]
    shapes: dict[str | None, tuple[int, ...]] = {
        "fp8": (),
        "fp8-channel": scales.shape[:1],
        "fp8-block": (scales.shape[0], 1, scales.shape[1], 1),
    }
    tensors = {"weight": stored["codes"], "weight_scale": scales.reshape(shapes.get(kind, scales.shape))}
    if "tensor_scale" in stored:
        tensors["weight_scale_2"] = stored["tensor_scale"].reshape(())
    if in_scale is not None:
        tensors["input_scale"] = in_scale.reshape(())
    return tensors
