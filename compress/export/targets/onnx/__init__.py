"""Write a graph for ONNX Runtime: packed linears are MatMulNBits nodes of 2, 4 or 8 bits, exact.

The directory holds model.onnx with keys and values as inputs and outputs, its tensors in model.onnx.data, and
genai_config.json, with which onnxruntime-genai runs it. Packed embeddings are a GatherBlockQuantized node; a table that
is tied to the output head is stored once. The graph computes in float32, or in float16 with --dtype. With --int8-inputs
ONNX Runtime rounds the inputs of products to 8 bits on a CPU.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch

from compress.errors import ExportError
from compress.export import directory
from compress.export.convert import Export
from compress.export.targets.onnx import graph, nodes
from compress.export.targets.onnx.graph import FILE, has_positions
from compress.export.weights import ExportWeight, StoredWeight
from compress.model.cache_pass import CachedHeads
from compress.storage.checkpoint import read_json, write_text

SUFFIX = ""
PACKAGES = ("onnx_ir", "onnxscript")
INT8_INPUTS = True
DTYPES = (torch.float32, torch.float16)
CONFIG = "genai_config.json"
GENERATION = "generation_config.json"
KIND = "decoder"  # any model that reads tokens and caches keys and values: the names of models are a closed list


def refuses(weight: ExportWeight) -> str | None:
    """Return why MatMulNBits does not hold the weight in every bit, and what would have to be chosen."""
    if (reason := weight.not_integers()) is not None:
        return reason
    if nodes.form_of(weight) is None:
        group, least = weight.stored.params.group_size, nodes.BLOCKS[-1]
        return f"groups of {group} are no whole blocks of {least}; set group_size to a multiple of {least}, or -1"
    return None


def check(export: Export) -> None:
    """Raise ExportError for models whose graph would not be the same function, and where packages are missing."""
    if any(importlib.util.find_spec(name) is None for name in PACKAGES):
        raise ExportError("to write ONNX graphs install the package onnxscript: pip install 'compress-llm[onnx]'")
    if not export.is_chosen:
        export.dtype, export.is_chosen = DTYPES[0], True
        if export.source.dtype != export.dtype:
            export.notes.append(
                "the graph computes in float32, the type of its plain numbers; --dtype float16 halves them"
            )
    if export.dtype not in DTYPES:
        raise ExportError("the graph computes in float32 or float16; set --dtype to one of these")
    graph.check(export)


def nbytes(export: Export, weight: StoredWeight) -> int:
    """Return the bytes of a weight as it is written."""
    form = nodes.form_of(weight)
    assert form is not None
    stored = nodes.specs(form, weight, export.dtype).values()
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in stored)


def write(export: Export, out: Path) -> None:
    """Write the directory; ExportError for scales or numbers that the type of the graph does not hold."""
    if export.int8_inputs or any(weight.stored.activations is not None for weight in export.held):
        export.notes.append("inputs of linears are quantized as ONNX Runtime does it on a CPU: 8 bits, in blocks")
    elif export.held:
        export.notes.append("products are exact, which is slow on a CPU; --int8-inputs rounds their inputs to 8 bits")
    heads = graph.cached_heads(export)
    out.mkdir(parents=True)
    graph.write(export, out, heads)
    _write_genai_config(export, out, heads)
    directory.finish(export, out, {})


def _write_genai_config(export: Export, out: Path, heads: list[CachedHeads]) -> None:
    """Write genai_config.json; leave it out where heads differ in size, of which genai knows one for all."""
    sizes = {size for each in heads for size in (each.keys, each.values)}
    if len(sizes) != 1:
        export.notes.append(f"{CONFIG} is not written: onnxruntime-genai knows no models whose heads differ in size")
        return
    ((count, width),) = sizes
    config = export.source.skeleton.config.get_text_config()
    stated = _generation(export)
    end = stated.get("eos_token_id", config.eos_token_id)
    first = end[0] if isinstance(end, list) else end
    begin, padding = (stated.get(name, getattr(config, name)) for name in ("bos_token_id", "pad_token_id"))
    length = getattr(config, "max_position_embeddings", None) or 4096
    inputs = {name: name for name in ("input_ids", "attention_mask")}
    if has_positions(export.source.skeleton.model):
        inputs["position_ids"] = "position_ids"
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": FILE,
        "head_size": width,
        "hidden_size": config.hidden_size,
        "inputs": {
            **inputs,
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": len(heads),
        "num_key_value_heads": count,
    }
    tokens = {
        "bos_token_id": first if begin is None else begin,
        "eos_token_id": end,
        "pad_token_id": first if padding is None else padding,
    }
    model = {"type": KIND, "context_length": length, "vocab_size": config.vocab_size, "decoder": decoder, **tokens}
    search: dict[str, Any] = {
        "max_length": length,
        "past_present_share_buffer": False,
        **{name: stated[name] for name in ("do_sample", "temperature", "top_k", "top_p") if name in stated},
    }
    write_text(out / CONFIG, json.dumps({"model": model, "search": search}, indent=2) + "\n")


def _generation(export: Export) -> dict[str, Any]:
    """Return what the checkpoint says of writing text, without what it leaves open."""
    file = export.source.directory / GENERATION
    if not file.is_file():
        return {}
    stated: dict[str, Any] = read_json(file)
    return {name: value for name, value in stated.items() if value is not None}
