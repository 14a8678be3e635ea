"""Write a GGUF file, which llama.cpp, ollama and others run: integers as Q4_0, Q5_0 or Q8_0, in every bit as they are.

A block of these types is a float16 scale and 32 signed codes: w = scale * code. Symmetric codes of up to 4, 5 and 8
bits are written as they are. Asymmetric ones are code - zero point, one bit more: 3-bit ones go into Q4_0, 4-bit ones
into Q5_0, 5- to 7-bit ones into Q8_0; of 8 bits they do not fit. Scales of larger groups are repeated. Experts of a
layer are one tensor, of the widest type that one of them needs.

All else is stored in its own type, norms and routers in float32. K-quants are not written: their scales are products of
two numbers, so that codes which were chosen for other scales would not be the same weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.errors import ExportError
from compress.export import gguf_model, gguf_vocabulary
from compress.export.convert import Export
from compress.export.gguf_model import Model
from compress.export.signed import scales_of, signed, width
from compress.export.weights import Packed, Weight
from compress.importers import gguf_blocks
from compress.importers.gguf_settings import FREQUENCIES
from compress.model.load import plain_config
from compress.storage.checkpoint import Readable

SUFFIX = ".gguf"
BLOCK = 32  # weights of a block
CHUNK = 1 << 24  # codes that are packed at a time
PLAIN = {dtype: number for number, dtype in gguf_blocks.PLAIN.items()}
IN_FULL = ("_norm.weight", ".ffn_gate_inp.weight", ".ffn_gate_inp_shexp.weight", ".bias")  # in float32
TABLE = "token_embd.weight"


def refuses(weight: Weight) -> str | None:
    """Return why no block type holds the weight in every bit, and what would have to be chosen; None if one does."""
    if (reason := weight.not_integers()) is not None:
        return reason
    params, columns = weight.stored.params, weight.shape[1]
    if _type(weight) is None:
        return "asymmetric codes of 8 bits have no GGUF type; set symmetric: true, or bits: 7"
    if columns % BLOCK:
        return f"rows of {columns} are no whole blocks of {BLOCK}; leave it unquantized"
    if params.group_size != -1 and params.group_size % BLOCK:
        return f"groups of {params.group_size} are no whole blocks; set group_size to a multiple of {BLOCK}, or -1"
    return None


def write(export: Export, out: Path) -> None:
    """Write the file; ExportError for models, settings and tokenizers that llama.cpp does not have."""
    try:
        import gguf
    except ImportError as error:
        raise ExportError("to write GGUF files install the package gguf: pip install 'compress-llm[gguf]'") from error
    directory = export.source.directory
    model = gguf_model.describe(plain_config(directory))
    export.notes.extend(model.notes)
    if any(weight.stored.activations is not None for weight in export.held):
        export.notes.append("inputs of linears are quantized in llama.cpp's own way (8 bits, blocks of 32)")
    entries = _entries(export, model)
    keys = {**model.metadata, **gguf_vocabulary.metadata(directory, entries[TABLE].shape[0])}
    sizes = Counter[str]()
    writer = gguf.GGUFWriter(out, model.architecture)
    writer.add_name(directory.resolve().name)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, entry in entries.items():
        kind = gguf.GGMLQuantizationType(entry.type)
        sizes[kind.name] += entry.nbytes
        # with another element type than uint8 the shape is taken as it is
        writer.add_tensor_info(name, entry.shape, np.dtype(np.float32), entry.nbytes, raw_dtype=kind)
    most = sizes.most_common(1)[0][0]
    writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if most == 'F32' else 'MOSTLY'}_{most}"])
    for key, value in keys.items():
        _add(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for number, (name, entry) in enumerate(entries.items()):
        export.progress(f"writing {name}", number, len(entries))
        data = torch.cat([part() for part in entry.parts]) if len(entry.parts) > 1 else entry.parts[0]()
        writer.write_tensor_data(data.contiguous().reshape(-1).view(torch.uint8).numpy())
    writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    getattr(writer, f"add_{kinds[type(value)]}")(key, value)


@dataclass
class _Entry:
    """A tensor of the file."""

    type: int  # its number in GGUF
    shape: tuple[int, ...]
    parts: list[Callable[[], Tensor]]  # what it is made of, read when called; experts in order

    @property
    def nbytes(self) -> int:
        numel = torch.Size(self.shape).numel()
        if self.type in gguf_blocks.PLAIN:
            return numel * gguf_blocks.PLAIN[self.type].itemsize
        block = gguf_blocks.BLOCKS[self.type]
        return numel // block.elements * block.nbytes


def _entries(export: Export, model: Model) -> dict[str, _Entry]:
    """Return the tensors of the file by name."""
    entries: dict[str, _Entry] = {}
    for stored in export.plain().values():
        name, expert = model.place(stored.name)
        if expert is not None:
            raise ExportError(f"{stored.name} is not quantized; llama.cpp has the experts of a layer in one tensor")
        entries[name] = _plain(export, model, name, stored)
    held: dict[str, list[tuple[int | None, Packed]]] = {}
    for weight in export.held:
        name, expert = model.place(f"{weight.name}.weight")
        held.setdefault(name, []).append((expert, weight))
    for name, parts in held.items():
        entries[name] = _packed(model, name, sorted(parts, key=lambda part: part[0] or 0))
    if model.divisors:
        entries[FREQUENCIES] = _Entry(0, (len(model.divisors),), [partial(torch.tensor, model.divisors)])
    return entries


def _packed(model: Model, name: str, parts: list[tuple[int | None, Packed]]) -> _Entry:
    """Return the entry of a weight, or of the weights of all experts."""
    weights = [weight for _, weight in parts]
    shape, is_stacked = weights[0].shape, parts[0][0] is not None
    kind = max(filter(None, map(_type, weights)))
    order = model.rows(name, shape[0])
    return _Entry(
        kind, (len(weights), *shape) if is_stacked else shape, [partial(_blocks, each, kind, order) for each in weights]
    )


def _plain(export: Export, model: Model, name: str, stored: Readable) -> _Entry:
    """Return the entry of a tensor of plain numbers."""
    shape = stored.shape if len(stored.shape) == 1 or stored.shape[0] > 1 else stored.shape[1:]
    dtype = export.dtype if export.is_chosen else stored.dtype
    if len(shape) == 1 or name.endswith(IN_FULL):
        dtype = torch.float32
    if dtype not in PLAIN:
        raise ExportError(f"{stored.name} is stored as {dtype}, which GGUF files do not have")
    offset = model.norm_offset if name.endswith("_norm.weight") else 0.0
    order = model.rows(name, stored.shape[0])

    def read() -> Tensor:
        values = stored.read().to(dtype)
        values = values if order is None else values[order]
        return values + offset if offset else values

    return _Entry(PLAIN[dtype], shape, [read])


def _type(weight: Weight) -> int | None:
    """Return the narrowest type for the signed integers of a weight, None if there is none."""
    return next((number for number, bits in gguf_blocks.SIGNED.items() if bits >= width(weight)), None)


def _blocks(weight: Packed, kind: int, order: Tensor | None) -> Tensor:
    """Return a weight as blocks, uint8 [rows, bytes of a row], rows in the given order."""
    integers = weight.integers()
    scales = scales_of(integers, BLOCK, torch.float16, "GGUF")
    rows = torch.arange(integers.shape[0]) if order is None else order
    parts = rows.split(max(1, CHUNK // integers.shape[1]))
    return torch.cat([gguf_blocks.pack(signed(integers, part), scales[part], kind) for part in parts])
