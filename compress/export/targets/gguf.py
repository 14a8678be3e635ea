"""Write a GGUF file, which llama.cpp, ollama and others run: integers as Q4_0, Q5_0 or Q8_0, in every bit as they are.

Symmetric codes of up to 4, 5 and 8 bits are written as they are. Asymmetric ones are code - zero point, one bit more:
3-bit ones go into Q4_0, 4-bit ones into Q5_0, 5- to 7-bit ones into Q8_0; of 8 bits they do not fit. All else is stored
in its own type, norms and routers in float32. K-quants are not written: their scales are products of two numbers, so
that codes which were chosen for other scales would not be the same weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from compress.errors import ExportError
from compress.export import gguf_model, gguf_tensors, gguf_vocabulary
from compress.export.convert import Export
from compress.export.gguf_data import TOOL
from compress.export.gguf_tensors import BLOCK
from compress.export.place import MARK
from compress.export.weights import Weight

SUFFIX = ".gguf"
TABLE = "token_embd.weight"


def refuses(weight: Weight) -> str | None:
    """Return why no block type holds the weight in every bit, and what would have to be chosen; None if one does."""
    if (reason := weight.not_integers()) is not None:
        return reason
    if gguf_tensors.type_of(weight) is None:
        return "asymmetric codes of 8 bits have no GGUF type; set symmetric: true, or bits: 7"
    group_size, columns = weight.stored.params.group_size, weight.shape[1]
    if columns % BLOCK:
        return f"rows of {columns} are no whole blocks of {BLOCK}; leave it unquantized"
    if group_size != -1 and group_size % BLOCK:
        return f"groups of {group_size} are no whole blocks; set group_size to a multiple of {BLOCK}, or -1"
    return None


def check(export: Export) -> None:
    """Raise ExportError for models, settings and tokenizers that llama.cpp does not have."""
    try:
        import gguf  # noqa: F401 (all that follows needs it)
    except ImportError as error:
        raise ExportError("to write GGUF files install the package gguf: pip install 'compress-llm[gguf]'") from error
    config = export.source.skeleton.model.config
    gguf_model.describe(config)
    gguf_vocabulary.metadata(export.source.directory, config.get_text_config().vocab_size)


def write(export: Export, out: Path) -> None:
    """Write the file; ExportError for tensors that llama.cpp does not have."""
    import gguf

    directory = export.source.directory
    model = gguf_model.describe(export.source.skeleton.model.config)
    export.notes.extend(model.notes)
    if any(weight.stored.activations is not None for weight in export.held):
        export.notes.append(f"inputs of linears are quantized as {TOOL} does it: 8 bits, blocks of {BLOCK}")
    entries = gguf_tensors.entries(export, model)
    keys = {**MARK, **model.metadata, **gguf_vocabulary.metadata(directory, entries[TABLE].shape[0])}
    writer = gguf.GGUFWriter(out, model.architecture)
    writer.add_name(directory.resolve().name)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, entry in entries.items():
        kind = gguf.GGMLQuantizationType(entry.type)
        # with another element type than uint8 the shape is taken as it is
        writer.add_tensor_info(name, entry.shape, np.dtype(np.float32), entry.nbytes, raw_dtype=kind)
    for key, value in keys.items():
        _add(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for number, (name, entry) in enumerate(entries.items()):
        export.progress(f"writing {name}", number, len(entries))
        writer.write_tensor_data(entry.read().numpy())
    writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    getattr(writer, f"add_{kinds[type(value)]}")(key, value)
