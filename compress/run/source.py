"""Make a checkpoint directory of what a user names: a directory, a hub id, a GGUF file; with or without an adapter.

Everything that opens a model opens a directory. A GGUF file gets a temporary one with its configuration, its tokenizer,
a link to the file, and what says how to read it. With an adapter the directory has links to the files of the checkpoint
and to the adapter. No weight is read or copied. The process removes it when it ends.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from compress import process_memory
from compress.errors import CheckpointError, first_line
from compress.importers import gguf, gguf_header, lora
from compress.progress import note
from compress.run.job import Job
from compress.storage import known_files, paths
from compress.storage.checkpoint import read_json, write_text


def of(job: Job) -> Path:
    """Return the directory of a job's model, with its adapter; CheckpointError as `resolve`."""
    return resolve(job.model, job.adapter, job.dtype)


def given(job: Job) -> list[str]:
    """Return where a job's model and adapter lie, which is the same in every process."""
    path = paths.local_model(job.model) or _fetched(job.model)
    return [str(each.resolve()) for each in (path, job.adapter) if each is not None]


def resolve(model: str, adapter: Path | None = None, dtype: str | None = None) -> Path:
    """Return the directory of a model: the given one, the hub's snapshot of an id, or a temporary one.

    `adapter`: of a LoRA that is merged into it. `dtype`: that its configuration is to name. Raises CheckpointError.
    """
    path = paths.local_model(model) or _fetched(model)
    file = paths.gguf_file(path)
    if file is None and adapter is None and dtype is None:
        return path
    # links are not followed: a file of a cache has its name on the link only
    files = gguf_header.split_files(file) if file is not None else sorted(path.iterdir())
    return _directory(path.absolute(), file and file.absolute(), adapter and adapter.absolute(), dtype, _states(files))


def _states(files: Iterable[Path]) -> tuple[tuple[str, int, int], ...]:
    """Return name, bytes and time of files: those of another model in the same place differ."""
    found = ((file.name, file.stat()) for file in files if file.is_file())
    return tuple((name, state.st_size, state.st_mtime_ns) for name, state in found)


_made = set[Path]()  # directories of this process, whose links lead to the files that a user has named


@functools.cache
def _directory(
    path: Path, file: Path | None, adapter: Path | None, dtype: str | None, states: tuple[tuple[str, int, int], ...]
) -> Path:
    """Make the directory of a model that is no checkpoint directory by itself; anew where its files have changed."""
    folder = Path(tempfile.mkdtemp(prefix="compress-"))
    atexit.register(_remove, folder, os.getpid())
    directory = folder / path.name.removesuffix(paths.GGUF)
    directory.mkdir()
    _made.add(directory)
    if file is None:
        for each in path.iterdir():
            if each.is_file() and each.name != paths.MANIFEST:  # whose files are not all that is loaded
                (directory / each.name).symlink_to(each)
    else:
        from compress.model import gguf_names

        for beside in sorted(file.parent.glob("*.gguf")):
            if beside.name.lower().startswith(paths.PROJECTOR):
                note(f"left out: {beside}, a tower for images beside the language model")
        for part in gguf_header.split_files(file):
            (directory / part.name).symlink_to(part)
        write_text(directory / gguf.MAP, json.dumps(gguf_names.write_directory(file, directory)))
        process_memory.trim()  # a vocabulary takes several hundred bytes a token while it is read
    if dtype is not None:
        config = _with_dtype(read_json(directory / paths.CONFIG), dtype)
        (directory / paths.CONFIG).unlink()  # a link to the file of the checkpoint
        write_text(directory / paths.CONFIG, json.dumps(config, indent=2))
    if adapter is not None:
        lora.check(adapter)
        (directory / lora.ADAPTER_FOLDER).symlink_to(adapter)
    return directory


def beside_model(directory: Path) -> Iterator[Path]:
    """Yield the files in the directory of a model, each where its user has it if `resolve` has made the directory."""
    for path in directory.iterdir():
        if os.path.isfile(path):
            yield Path(os.readlink(path)) if directory in _made and path.is_symlink() else path


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return a configuration, and those of its parts, with another type of numbers."""
    changed = {key: _with_dtype(value, dtype) if _is_part(value) else value for key, value in config.items()}
    changed.pop("torch_dtype", None)  # the former name
    return {**changed, "dtype": dtype}


def _is_part(value: Any) -> bool:
    """Return whether a value of a configuration is that of a part of the model, such as its text model."""
    return isinstance(value, dict) and bool({"dtype", "torch_dtype"} & value.keys())


def _remove(folder: Path, process: int) -> None:
    """Remove a folder, unless this is a copy of the process that made it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _fetched(model: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", known_files.CARD, *known_files.COPIED]
    patterns += [pattern.upper() for pattern in known_files.LEGAL]
    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{model} is no directory here and could not be fetched from the hub ({first_line(error)[:150]}); give the "
            "path of a downloaded checkpoint"
        ) from error
