"""Write a graph for ONNX Runtime: packed linears are MatMulNBits nodes of 2, 4 or 8 bits, exact.

The directory holds model.onnx with keys and values as inputs and outputs, its tensors in model.onnx.data, and
genai_config.json, with which onnxruntime-genai runs it. Packed embeddings are a GatherBlockQuantized node; a table that
is tied to the output head is stored once. The graph computes in float32, or in float16 with --dtype. With --int8-inputs
ONNX Runtime rounds the inputs of products to 8 bits on a CPU.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from compress.errors import ExportError
from compress.export import directory
from compress.export.convert import Export
from compress.export.targets.onnx import graph, nodes
from compress.export.weights import ExportWeight, StoredWeight

SUFFIX = ""
DRAFT_HEADS = "left out"
PACKAGES = ("onnx_ir", "onnxscript")
TAKES = ("int8_inputs",)
DTYPES = (torch.float32, torch.float16)


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
    if export.wishes.int8_inputs or any(weight.stored.activations is not None for weight in export.held):
        export.notes.append("inputs of linears are quantized as ONNX Runtime does it on a CPU: 8 bits, in blocks")
    elif export.held:
        export.notes.append("products are exact, which is slow on a CPU; --int8-inputs rounds their inputs to 8 bits")
    heads = graph.cached_heads(export)
    out.mkdir(parents=True)
    graph.write(export, out, heads)
    graph.write_genai_config(export, out, heads)
    directory.finish(export, out, {})
