"""Read GGUF files, the format of llama.cpp, as checkpoints: weights are decoded while they are read.

Such a checkpoint is a directory with a configuration and a tokenizer in the layout of transformers, the file (or a link
to it), and `MAP`, which says which of its tensors make which weight. transformers' own rules turn them: names, the
order of rows of queries and keys, norms that are stored as 1 + w. Values that are stored as numbers keep their type;
those of blocks are decoded to float32 and rounded once, to the type of the configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.errors import CheckpointError, first_line, shown
from compress.importers import gguf_blocks, gguf_header
from compress.importers.gguf_header import BLOCKS, HEADS, KV_HEADS, WIDTHS, GgufHeader, GgufTensor
from compress.importers.source import Decoded, step
from compress.storage import json_text
from compress.storage.checkpoint import CONFIG, Checkpoint, StoredTensor, read_config, read_json

MAP = ".compress_gguf.json"  # hidden: no part of what is made of the model
ODD = (ValueError, IndexError, KeyError, TypeError, AttributeError, ArithmeticError)  # what odd settings raise
WEIGHT = {"shape": [json_text.INTEGER], "from": [json_text.TEXT]}
LAYOUT = {
    **{"file": json_text.TEXT, "settings": json_text.OBJECT},
    **{"weights": {str: WEIGHT}, "unused": [json_text.TEXT]},
}


def open_checkpoint(directory: Path) -> Checkpoint:
    """List the weights of a directory with a GGUF file and its `MAP`.

    Tensors that no weight is made of are listed under their own names. Raises CheckpointError for damaged files and for
    types that cannot be read.
    """
    config, facts = read_config(directory), read_json(directory / MAP)
    wrong = json_text.mismatch(facts, LAYOUT)
    for name, made in facts["weights"].items() if wrong is None else ():
        if not made["from"] or not made["shape"] or min(made["shape"]) < 1:
            wrong = f"{shown(name)} is of no size, or of no tensor"
    if wrong:
        raise CheckpointError(f"{directory / MAP} is damaged ({wrong}); remove it, and give the .gguf file itself")
    if Path(facts["file"]).name != facts["file"]:
        raise CheckpointError(f"{directory / MAP} names {shown(facts['file'])}, outside the directory; refused")
    header = gguf_header.read_all(directory / facts["file"])
    named = getattr(torch, str(config.get("dtype")), None)
    build = _Builder(header, named if isinstance(named, torch.dtype) else torch.float32, facts["settings"])
    weights = {name: build.weight(name, tuple(made["shape"]), made["from"]) for name, made in facts["weights"].items()}
    used = {*facts["unused"], *(name for made in facts["weights"].values() for name in made["from"])}
    rest = {name: build.plain(name, entry.shape, entry) for name, entry in header.tensors.items() if name not in used}
    check_sizes(header, config, directory / CONFIG)
    return Checkpoint(directory, config, {**rest, **weights}, _types(header), {"format": "gguf", **facts})


def check_sizes(header: GgufHeader, config: Mapping[str, Any], where: Path) -> None:
    """Raise CheckpointError, which names the file `where`, for a size of a configuration that no tensor bears out."""
    largest = max((math.prod(entry.shape) for entry in header.tensors.values()), default=0)
    json_text.check_sizes(config, str(where), len(header.tensors), largest)


def check_metadata(header: GgufHeader, file: Path) -> None:
    """Raise CheckpointError for a size in the metadata that no tensor has, and for heads that do not divide.

    Models are built by these sizes, so they are compared before that.
    """
    blocks = len({name.split(".")[1] for name in header.tensors if name.startswith("blk.")})
    widest = max((size for entry in header.tensors.values() for size in entry.shape), default=0)
    limits = {**dict.fromkeys(WIDTHS, (widest, "the widest of its tensors has")), BLOCKS: (blocks, "it stores")}
    stated = {key: header.metadata.get(f"{header.architecture}.{key}") for key in limits}
    for key, values in stated.items():
        limit, words = limits[key]
        for value in values if isinstance(values, list) else [values] if values is not None else []:
            if type(value) is not int or not 0 <= value <= limit:
                raise CheckpointError(
                    f"{file} says {header.architecture}.{key} {shown(value)}, but {words} {limit}; metadata and "
                    "tensors do not belong together, download it again"
                )
    heads = stated[HEADS]
    shared = heads if stated[KV_HEADS] is None else stated[KV_HEADS]
    for name, entry in header.tensors.items():
        rows, count = entry.shape[0], {"attn_q": heads, "attn_k": shared}.get(name.split(".")[-2:][0])
        if isinstance(count, int) and (not count or rows % count):
            raise CheckpointError(
                f"{file} says that tensor {shown(name)} has {rows} rows of {count} heads, which do not divide them; "
                "download it again"
            )
    if isinstance(heads, int) and isinstance(shared, int) and shared and heads % shared:  # 0: blocks without attention
        raise CheckpointError(
            f"{file} says that {heads} heads share {shared} heads of keys and values, which do not divide them; "
            "download it again"
        )


def _types(header: GgufHeader) -> str:
    """Return how the weights are stored, in words: GGUF and the types, those of most bytes first."""
    sizes: dict[str, int] = {}
    for entry in header.tensors.values():
        name = gguf_blocks.type_name(entry.type)
        sizes[name] = sizes.get(name, 0) + entry.nbytes
    return f"GGUF ({', '.join(sorted(sizes, key=lambda name: -sizes[name]))})"


class _Builder:
    """What makes weights of the tensors of a file; settings: the model's configuration with all defaults."""

    def __init__(self, header: GgufHeader, dtype: torch.dtype, settings: Mapping[str, Any]) -> None:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        self.entries, self.dtype = header.tensors, dtype
        kind = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)
        self.is_plain = kind is TensorProcessor
        try:
            self.processor = kind(config=dict(settings))
        except ODD as error:
            raise CheckpointError(
                f"{MAP} has settings that are not those of {shown(header.architecture)} ({first_line(error)}); remove "
                "it, and give the .gguf file itself"
            ) from error

    def weight(self, name: str, shape: tuple[int, ...], names: list[str]) -> Decoded:
        """Return the weight that these tensors make."""
        if missing := [each for each in names if each not in self.entries]:
            raise CheckpointError(f"tensor {shown(missing[0])} of weight {name} is missing; download the file again")
        entries = [self.entries[each] for each in names]
        is_table = not names[0].startswith("blk.")  # embeddings, head, last norm: with rows in their order
        if len(entries) == 1 and (self.is_plain or (is_table and len(shape) == 2)) and entries[0].shape == shape:
            return self.plain(name, shape, entries[0])
        return self._decoded_tensor(
            name, shape, entries, lambda start, stop: self._turned_rows(name, shape, entries)[start:stop]
        )

    def plain(self, name: str, shape: tuple[int, ...], entry: GgufTensor) -> Decoded:
        """Return a weight that is one tensor as it is."""
        if len(shape) < 2:
            return self._decoded_tensor(name, shape, [entry], lambda start, stop: values(entry)[start:stop])
        return self._decoded_tensor(name, shape, [entry], lambda start, stop: values(entry, start, stop), step(shape))

    def _decoded_tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        entries: list[GgufTensor],
        read: Callable[[int, int], Tensor],
        rows: int | None = None,
    ) -> Decoded:
        dtypes = {gguf_blocks.PLAIN.get(entry.type, self.dtype) for entry in entries}
        dtype = dtypes.pop() if len(dtypes) == 1 else self.dtype
        sources = tuple(map(_stored_bytes, entries))
        return Decoded(name, dtype, shape, sources, lambda a, b: read(a, b).to(dtype), rows or shape[0])

    def _turned_rows(self, name: str, shape: tuple[int, ...], entries: list[GgufTensor]) -> Tensor:
        """Return a whole weight in float32, as transformers makes it of these tensors."""
        made: dict[str, Tensor] = {}
        mapping = {key: name for entry in entries for key in (entry.name, entry.name.removesuffix(".weight"))}
        for entry in entries:
            try:
                weights, given, _ = self.processor.process(
                    weights=values(entry).numpy(),
                    name=entry.name,
                    tensor_key_mapping=mapping,
                    parsed_parameters={"tensors": made},
                )
            except ODD:  # for a shape that it cannot turn
                break
            if given is not None:
                made[name] = torch.from_numpy(weights.copy())
        if set(made) != {name} or made[name].shape != shape:
            raise CheckpointError(
                f"{entries[0].file}: tensor {shown(entries[0].name)} of shape {list(entries[0].shape)} does not make "
                f"{name} of shape {list(shape)}; its metadata and weights do not belong together"
            )
        return made[name]


def _stored_bytes(entry: GgufTensor) -> StoredTensor:
    """Return the bytes of a tensor, uint8 [bytes]."""
    return StoredTensor(entry.name, entry.file, torch.uint8, (entry.nbytes,), entry.offset, entry.nbytes)


def values(entry: GgufTensor, start: int = 0, stop: int | None = None) -> Tensor:
    """Return the entries start .. stop - 1 of the first dimension of a tensor (None: to the last), in float32."""
    stop = entry.shape[0] if stop is None else stop
    row = entry.nbytes // entry.shape[0]
    raw = (
        _stored_bytes(entry).rows(start * row, stop * row)
        if row * entry.shape[0] == entry.nbytes
        else _stored_bytes(entry).read()
    )
    plain = gguf_blocks.PLAIN.get(entry.type)
    decoded = gguf_blocks.decode(raw, entry.type) if plain is None else raw.view(plain).to(torch.float32)
    decoded = decoded.reshape(stop - start, *entry.shape[1:])
    if entry.factor is not None:
        factors = values(entry.factor)
        factors = factors if len(factors) == 1 else factors[start:stop].view(-1, *[1] * (decoded.dim() - 1))
        decoded = decoded * factors
    return decoded
