"""Write an export as a directory of safetensors files in the layout of transformers.

Tensors are gathered up to `SHARD` bytes, and written as one file: memory is bounded by that, not by the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.export.convert import Export, cast
from compress.export.place import RECORD
from compress.export.weights import StoredWeight
from compress.importers.source import Decoded
from compress.run import companion_files
from compress.storage.checkpoint import CONFIG, SINGLE, Readable, write_shard, write_text
from compress.version import __version__

SHARD = 512 << 20  # bytes of a file, unless one tensor is larger

Named = tuple[str, Tensor | Readable]  # with its full name


def write(
    export: Export,
    out: Path,
    tensors: Iterable[Named],
    config: Mapping[str, Any],
    left_out: Collection[str] = (),
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the directory `out`: weights, configuration, tokenizer and the other files of the checkpoint.

    tensors: what is stored for the held weights, by full name; taken one after the other. config: what is laid over
    config.json. left_out: plain tensors that are not written. metadata: what every file of weights says of them.
    """
    out.mkdir(parents=True)
    plain = {name: stored for name, stored in export.plain().items() if name not in left_out}
    in_float32 = export.source.kept_in_float32(plain, export.dtype)
    if export.is_chosen:
        plain = {n: stored if n in in_float32 else as_dtype(stored, export.dtype) for n, stored in plain.items()}
    elif export.dtype != export.source.dtype:  # readers turn into that type what is stored in others
        plain = {
            n: stored if n in in_float32 else as_dtype(stored, export.dtype, is_kept=True)
            for n, stored in plain.items()
        }
    write_shards(out, chain(plain.items(), tensors), metadata or {})
    finish(export, out, config)


def finish(export: Export, out: Path, config: Mapping[str, Any]) -> None:
    """Write all files of a directory that hold no weights; config: what is laid over config.json."""
    companion_files.copy_files(export.source.directory, out)
    write_text(out / CONFIG, json.dumps({**export.config(), **config}, indent=2) + "\n")
    write_record(export, out)


def write_record(export: Export, out: Path) -> None:
    """Write the file by which a directory is known to be an export of ours, which may be replaced."""
    record = {"version": __version__, "source": export.source.directory.name, "notes": export.notes}
    write_text(out / RECORD, json.dumps(record, indent=1) + "\n")


def held_tensors(export: Export, tensors: Callable[[StoredWeight], Mapping[str, Tensor]]) -> Iterator[Named]:
    """Yield what a target stores for the held weights: `tensors(weight)` gives it by last names, such as qweight."""
    for number, weight in enumerate(export.held):
        export.progress(f"writing {weight.name}", number, len(export.held))
        for key, tensor in tensors(weight).items():
            yield f"{weight.name}.{key}", tensor


def as_dtype(stored: Readable, dtype: torch.dtype, is_kept: bool = False) -> Readable:
    """Return a floating tensor in another type, any other as it is.

    is_kept: the tensor keeps its type, and is only checked. Reading raises ExportError where a finite value would
    become infinite in `dtype`.
    """
    if not stored.dtype.is_floating_point or stored.dtype == dtype:
        return stored

    def rows(start: int, stop: int) -> Tensor:
        values = stored.rows(start, stop) if stored.shape else stored.read()
        made = cast(stored.name, values, dtype)
        return values if is_kept else made

    step = stored.shape[0] if stored.shape else 1
    return Decoded(stored.name, stored.dtype if is_kept else dtype, stored.shape, stored.sources, rows, step)


def write_shards(out: Path, tensors: Iterable[Named], metadata: Mapping[str, str]) -> None:
    """Write tensors into files of at most SHARD bytes, each with the metadata, and an index where there are several."""
    gathered: dict[str, Tensor | Readable] = {}
    nbytes = count = 0
    for name, tensor in tensors:
        if gathered and nbytes + tensor.nbytes > SHARD:
            count += 1
            write_shard(out / f"model-{count:05}.safetensors", gathered, metadata=metadata)
            gathered, nbytes = {}, 0
        gathered[name] = tensor
        nbytes += tensor.nbytes
    count += 1
    write_shard(out / (SINGLE if count == 1 else f"model-{count:05}.safetensors"), gathered, metadata=metadata)
    if count > 1:
        companion_files.write_index(out)
