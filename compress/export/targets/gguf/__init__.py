"""Write a GGUF file, which llama.cpp, ollama and others run: integers and K-quants, in every bit as they are.

Symmetric codes of up to 4, 5 and 8 bits are written as they are (Q4_0, Q5_0, Q8_0). Asymmetric ones are code - zero
point, one bit more: 3-bit ones go into Q4_0, 4-bit ones into Q5_0, 5- to 7-bit ones into Q8_0; of 8 bits they do not
fit. All else is stored in its own type, norms and routers in float32. The types Q2_K to Q6_K hold what the method
`kquant` has chosen on their grids, and nothing else: the scales of other methods are no products of two numbers. FP4 of
the grid format is MXFP4 or NVFP4, weights of three values are TQ1_0 or TQ2_0.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from compress.errors import ExportError
from compress.export import directory as directory_of_files
from compress.export import grids
from compress.export.convert import Export
from compress.export.place import MARK
from compress.export.targets.gguf import architecture, tensors, vocabulary
from compress.export.targets.gguf.settings import DATA, TOOL
from compress.export.targets.gguf.tensors import BLOCK
from compress.export.weights import ExportWeight
from compress.formats.kquant import SUPER_BLOCK

SUFFIX = ".gguf"
DRAFT_HEADS = "left out"
CACHE: str = DATA["cache"]
TAKES = ("split_size",)  # OUT is a directory then, with NAME-00001-of-00003.gguf and so on
TABLE = "token_embd.weight"
RECIPE = "gguf-mix"
ALIGNMENT, LONGEST_NAME = 32, 256  # bytes, of the place of each tensor, and of the name of a directory


def refuses(weight: ExportWeight) -> str | None:
    """Return why no block type holds the weight in every bit, and what would have to be chosen; None if one does."""
    checks = {tensors.K_QUANT: _refuses_k, tensors.TERNARY: _refuses_trits, grids.FORMAT: _refuses_fp4}
    if weight.stored.format in checks:
        return checks[weight.stored.format](weight)
    if (reason := weight.not_integers()) is not None:
        return reason
    if tensors.type_of(weight) is None:
        return "asymmetric codes of 8 bits have no GGUF type; set symmetric: true, or bits: 7"
    group_size, columns = weight.stored.params.group_size, weight.shape[1]
    if columns % BLOCK:
        return f"rows of {columns} are no whole blocks of {BLOCK}; leave it unquantized"
    if group_size != -1 and group_size % BLOCK:
        return f"groups of {group_size} are no whole blocks; set group_size to a multiple of {BLOCK}, or -1"
    return None


def decodes(weight: ExportWeight) -> bool:
    """Tell whether a weight that no block type holds is written as plain numbers: tables, and rows of odd widths."""
    return bool(weight.roles) or weight.shape[1] % BLOCK != 0


def _refuses_k(weight: ExportWeight) -> str | None:
    """The same of a weight on the grid of a K type."""
    if weight.shape[1] % SUPER_BLOCK:
        return (
            f"rows of {weight.shape[1]} are no whole super-blocks of {SUPER_BLOCK}, which K-quants need; quantize it "
            f"again, or give it a rule with another method (gptq, rtn) and group_size {BLOCK}"
        )
    if weight.stored.params.step_dtype != "float16":
        return (
            "its weights are too large or too small for the float16 steps of K-quants in GGUF files; give it a rule "
            f"with another method (gptq, rtn) and group_size {BLOCK}, or leave it unquantized"
        )
    return weight.not_alone()


def _refuses_fp4(weight: ExportWeight) -> str | None:
    """The same of a data type."""
    if tensors.type_of(weight) is None:
        return f"the type {grids.type_of(weight)} is none of GGUF files; set type: mxfp4, nvfp4 or iq4_nl"
    if weight.shape[1] % (size := tensors.block_of(weight)):
        return f"rows of {weight.shape[1]} are no whole blocks of {size}; leave it unquantized"
    return weight.not_alone()


def _refuses_trits(weight: ExportWeight) -> str | None:
    """The same of a weight of three values."""
    columns, group = weight.shape[1], weight.stored.params.group(weight.shape[1])
    if columns % (size := tensors.block_of(weight)):
        return f"rows of {columns} are no whole blocks of {size}; leave it unquantized"
    if group % size:
        return f"groups of {group} are no whole blocks; set group_size to a multiple of {size}, or -1"
    return weight.not_alone()


def check(export: Export) -> None:
    """Raise ExportError for models, settings, tokenizers and mixtures of experts that llama.cpp does not have."""
    try:
        import gguf  # noqa: F401 (all that follows needs it)
    except ImportError as error:
        raise ExportError("to write GGUF files install the package gguf: pip install 'compress-llm[gguf]'") from error
    config = export.source.skeleton.model.config
    model = architecture.describe(config)
    held = model.edit({f"{weight.name}.weight": weight for weight in export.held})
    tensors.check_experts([w for w in held.values() if isinstance(w, ExportWeight) and w.is_expert], model)
    vocabulary.metadata(export.source.directory, config.get_text_config().vocab_size)


def file_nbytes(export: Export) -> int:
    """Return the bytes of the file of what may be planned only, and those of the longest name of its directory."""
    with tempfile.TemporaryDirectory() as folder:
        writer, entries = _begin(export, Path(folder) / f"header{SUFFIX}")
        writer.close()
        header = os.path.getsize(Path(folder) / f"header{SUFFIX}")
    aligned = [-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in (header, *(e.nbytes for e in entries.values()))]
    return sum(aligned) + LONGEST_NAME


def write(export: Export, out: Path) -> None:
    """Write the file; ExportError for tensors that llama.cpp does not have."""
    writer, entries = _begin(export, out)
    for number, (name, entry) in enumerate(entries.items()):
        export.progress(f"writing {name}", number, len(entries))
        writer.write_tensor_data(entry.read().numpy())
    writer.close()


def _begin(export: Export, out: Path) -> tuple[Any, dict[str, tensors.GgufEntry]]:
    """Write all that comes before the numbers; return the writer, and the tensors to be written."""
    import gguf

    directory = export.source.directory
    model = architecture.describe(export.source.skeleton.model.config)
    export.notes.extend(model.notes)
    if any(weight.stored.activations is not None for weight in export.held):
        export.notes.append(f"inputs of linears are quantized as {TOOL} does it: 8 bits, in blocks")
    entries = tensors.entries(export, model)
    keys = {**MARK, **model.metadata, **vocabulary.metadata(directory, entries[TABLE].shape[0])}
    if export.wishes.split_size:
        out.mkdir()
        directory_of_files.write_record(export, out)
        out = out / f"{directory.resolve().name}{SUFFIX}"
    writer = gguf.GGUFWriter(out, model.architecture, split_max_size=export.wishes.split_size)
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
    return writer, entries


def _add(writer: Any, key: str, value: Any) -> None:
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    getattr(writer, f"add_{kinds[type(value)]}")(key, value)
