"""Make a checkpoint directory of what a user names: a directory, a hub id, a GGUF file; with or without an adapter.

Everything that opens a model opens a directory. A GGUF file gets a temporary one with its configuration, its tokenizer,
a link to the file, and what says how to read it. With an adapter the directory has links to the files of the checkpoint
and to the adapter. No weight is read or copied. The process removes it when it ends.

Code that came with a checkpoint is never run. `auto_map` names classes in .py files beside a model. Where those are
missing, transformers fails on the reference although it has the class itself. So the model and the tokenizer must be of
classes that transformers has, and references are left out of what is written (`without_code`).
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

import torch
from transformers import PreTrainedModel

from compress.errors import CheckpointError, first_line
from compress.importers import companions, gguf_header, lora, open_checkpoint
from compress.model import architectures, load
from compress.model.skeleton import Skeleton
from compress.progress import note
from compress.run.job import Job
from compress.runtime import hf
from compress.storage import manifest, paths
from compress.storage.checkpoint import INDEX, Checkpoint, StoredTensor, read_json, write_text

WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")  # ends of files that hold some


def of(job: Job) -> Path:
    """Return the directory of a job's model, with its adapter; CheckpointError as `resolve`."""
    return resolve(job.model, job.adapter, job.dtype)


def locate(job: Job) -> list[str]:
    """Return where a job's model and adapter lie, which is the same in every process."""
    path = paths.local_model(job.model) or _fetch(job.model)
    return [str(each.resolve()) for each in (path, job.adapter) if each is not None]


def load_model(name: str, dtype: torch.dtype | str, device_map: Any, verify: bool) -> PreTrainedModel:
    """Load the model that a user names, by the class it is of; the rest as `load_model` of compress/model/load.py."""
    return load.load_model(resolve(name), dtype, device_map=device_map, verify=verify, tasks=None)


def open_original(job: Job) -> Checkpoint:
    """Open the checkpoint that a job names; CheckpointError for one of ours, OutputError for an output in its place."""
    checkpoint = open_checkpoint(of(job))
    paths.check_apart(job.out, *map(Path, locate(job)))
    if packed := checkpoint.config.get("quantization_config"):
        method = packed.get("quant_method") if isinstance(packed, dict) else packed
        raise CheckpointError(f"{job.model} is already quantized ({method}); give the original checkpoint")
    return checkpoint


def has_weights(job: Job) -> bool:
    """Return whether there is more of a job's model than its configuration."""
    return any(file.suffix in WEIGHTS or file.name == INDEX for file in of(job).iterdir())


def open_or_imagine(job: Job) -> Checkpoint:
    """Open the checkpoint that a job names, packed or not; of a directory without weights, imagine them in bfloat16."""
    directory = of(job)
    if has_weights(job):
        return open_checkpoint(directory)
    tensors: dict[str, Any] = {}
    try:
        config = load.plain_config(directory)
        with torch.device("meta"):
            model = load.empty_model(config, torch.bfloat16)
    except load.FAILURES as error:
        raise CheckpointError(
            f"{directory} has no weights, and transformers cannot make a model of its {paths.CONFIG} "
            f"({first_line(error)}); correct that, or download the checkpoint"
        ) from error
    model.tie_weights()
    names = {id(each): name for name, each in reversed(model.state_dict(keep_vars=True).items())}  # tied ones once
    for name, each in model.state_dict(keep_vars=True).items():
        if names[id(each)] == name:
            file = directory / paths.CONFIG
            tensors[name] = StoredTensor(name, file, each.dtype, tuple(each.shape), 0, each.nbytes)
    return Checkpoint(directory, read_json(directory / paths.CONFIG), tensors)


def open_model(job: Job) -> Skeleton:
    """Open the original that a job names, of which only headers are read. Raises CheckpointError for one not usable.

    Notes tell which of the files beside the weights are left out, and what a class without a head is taken for.
    """
    checkpoint = open_original(job)
    skeleton = Skeleton(checkpoint)
    skeleton.check_tensors()
    check_tokenizer(checkpoint.directory)
    for remark in (*companions.notes(checkpoint), *architectures.remarks(skeleton.config)):
        note(remark)
    return skeleton


def resolve(model: str, adapter: Path | None = None, dtype: str | None = None, level: int | None = None) -> Path:
    """Return the directory of a model: the given one, the hub's snapshot of an id, or a temporary one.

    `adapter`: of a LoRA that is merged into it. `dtype`: that its configuration is to name. `level`: of the weights of
    a packed checkpoint that is all there is of them. Raises CheckpointError.
    """
    path = paths.local_model(model) or _fetch(model)
    file = paths.gguf_file(path)
    if file is None and adapter is None and dtype is None and level is None:
        return path
    # links are not followed: a file of a cache has its name on the link only
    files = gguf_header.split_files(file) if file is not None else sorted(path.iterdir())
    return _make_directory(
        path.absolute(), file and file.absolute(), adapter and adapter.absolute(), dtype, level, _file_states(files)
    )


def _file_states(files: Iterable[Path]) -> tuple[tuple[str, int, int], ...]:
    """Return name, bytes and time of files: those of another model in the same place differ."""
    states = ((file.name, file.stat()) for file in files if file.is_file())
    return tuple((name, state.st_size, state.st_mtime_ns) for name, state in states)


_made_directories = set[Path]()  # of this process, whose links lead to the files that a user has named


@functools.cache
def _make_directory(
    path: Path,
    file: Path | None,
    adapter: Path | None,
    dtype: str | None,
    level: int | None,
    states: tuple[tuple[str, int, int], ...],
) -> Path:
    """Make the directory of a model that is no checkpoint directory by itself; anew where its files have changed."""
    folder = Path(tempfile.mkdtemp(prefix="compress-"))
    atexit.register(_remove, folder, os.getpid())
    directory = folder / path.name.removesuffix(paths.GGUF)
    directory.mkdir()
    _made_directories.add(directory)
    if file is None:
        for each in path.iterdir():
            if each.is_file() and each.name != paths.MANIFEST:  # whose files are not all that is loaded
                (directory / each.name).symlink_to(each)
        for name in manifest.inner_files(path):
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).symlink_to(path / name)
    else:
        from compress.model import gguf_names

        for neighbour in sorted(file.parent.glob("*.gguf")):
            if neighbour.name.lower().startswith(paths.PROJECTOR):
                note(f"left out: {neighbour}, a tower for images beside the language model")
        for part in gguf_header.split_files(file):
            (directory / part.name).symlink_to(part)
        gguf_names.write_directory(file, directory)
    if dtype is not None or level is not None:
        config = read_json(directory / paths.CONFIG)
        config = config if dtype is None else _with_dtype(config, dtype)
        config = config if level is None else hf.with_level(config, level)
        (directory / paths.CONFIG).unlink()  # a link to the file of the checkpoint
        write_text(directory / paths.CONFIG, json.dumps(config, indent=2))
    if adapter is not None:
        lora.check(adapter)
        (directory / lora.ADAPTER_FOLDER).symlink_to(adapter)
    return directory


def model_files(directory: Path) -> Iterator[Path]:
    """Yield the files in the directory of a model, each where its user has it if `resolve` has made the directory."""
    for path in [*directory.iterdir(), *(directory / name for name in manifest.inner_files(directory))]:
        if os.path.isfile(path):
            yield Path(os.readlink(path)) if directory in _made_directories and path.is_symlink() else path


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return a configuration, and those of its parts, with another type of numbers."""
    changed = {key: _with_dtype(value, dtype) if _is_section(value) else value for key, value in config.items()}
    changed.pop("torch_dtype", None)  # the former name
    return {**changed, "dtype": dtype}


def _is_section(value: Any) -> bool:
    """Return whether a value of a configuration is that of a part of the model, such as its text model."""
    return isinstance(value, dict) and bool({"dtype", "torch_dtype"} & value.keys())


def _remove(folder: Path, process: int) -> None:
    """Remove a folder, unless this is a copy of the process that made it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _fetch(model: str) -> Path:
    """Return the hub's snapshot of a model; CheckpointError where it cannot be fetched."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", manifest.CARD, *manifest.COPIED]
    patterns += [pattern.upper() for pattern in manifest.LEGAL_PATTERNS]
    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{model} is no directory here and could not be fetched from the hub ({first_line(error)[:150]}); give the "
            "path of a downloaded checkpoint"
        ) from error


CODE_KEYS = ("auto_map", "custom_pipelines")
TOKENIZER = "tokenizer_config.json"


def without_code(value: Any) -> Any:
    """Return a JSON value without these references, in inner objects too."""
    if isinstance(value, dict):
        return {key: without_code(inner) for key, inner in value.items() if key not in CODE_KEYS}
    return [without_code(inner) for inner in value] if isinstance(value, list) else value


def code_references(value: Any) -> Iterator[str]:
    """Yield the keys of references to code in a JSON value."""
    if isinstance(value, dict):
        yield from (key for key in CODE_KEYS if key in value)
        for inner in value.values():
            yield from code_references(inner)


def check_tokenizer(directory: Path) -> None:
    """Raise CheckpointError for a tokenizer that only code beside it can make."""
    path = directory / TOKENIZER
    if not path.is_file() or not any(code_references(read_json(path))):
        return
    try:
        load.load_tokenizer(directory)
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} names code of its own (auto_map), which is not run, and transformers cannot make the tokenizer "
            f"without: {error}"
        ) from error
