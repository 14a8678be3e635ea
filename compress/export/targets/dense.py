"""Write plain weights that any tool reads: every weight decoded, with all that lies around and beside it multiplied in.

Weights are computed in float32 and rounded once. Fused experts are written as published checkpoints have them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from compress.export import directory
from compress.export.convert import Export, dense_tensor
from compress.export.directory import Named
from compress.export.source import fused_experts
from compress.export.weights import ExportWeight, StoredWeight

SUFFIX = ""


def refuses(weight: ExportWeight) -> str | None:
    """Refuse tables, which become plain numbers as everything else does, without a word."""
    return "" if weight.roles else None


def check(export: Export) -> None:
    """Say so where weights of the checkpoint have inputs that are quantized, which plain weights do not."""
    if any(weight.stored.activations is not None for weight in export.source.packed):
        export.notes.append("inputs of linears are not quantized: plain weights cannot say so")


def nbytes(export: Export, weight: StoredWeight) -> int:
    """Return the bytes of a weight as it is written."""
    return weight.shape[0] * weight.shape[1] * export.dtype.itemsize


def write(export: Export, out: Path) -> None:
    """Write a directory that transformers loads without any package for quantized weights."""
    together = [weight for weight in export.held if _experts(weight) in export.source.fused]
    biases = {f"{weight.name}.bias" for weight in together}
    directory.write(export, out, _tensors(export), {}, left_out=biases)


def _experts(weight: StoredWeight) -> str:
    """Return the path of the module of experts that a weight is in, if it is in one."""
    return weight.module.rsplit(".", 2)[0]


def _tensors(export: Export) -> Iterator[Named]:
    """Yield the weights: each by itself, or all experts of a block in the tensors that hold them together."""
    written = set()
    for number, weight in enumerate(export.held):
        export.progress(f"writing {weight.name}", number, len(export.held))
        path = _experts(weight)
        if path not in export.source.fused:
            name = f"{weight.name}.weight"
            yield name, dense_tensor(weight, name, export.dtype)
        elif path not in written:
            written.add(path)
            yield from fused_experts(export.source, path, export.dtype)
