"""Open checkpoints that other tools have quantized: weights are decoded while they are read, a tensor at a time.

`quantization_config` in config.json names the tool (`quant_method`), and the file of that name in this package reads
it. Such a file defines

    OPTIONS                     the values that options of `quantization_config` may have, see options.py
    describe(source) -> str     how the weights are stored, in words; CheckpointError for options it cannot read
    tensors(source) -> dict     name -> tensor, for every weight that is stored in another way than as itself

It takes from the `Source` what it reads, and what serves the other tool only. What it leaves is read as it is. Nothing
is read but headers, until somebody asks a tensor for its values. The values are those that the tool's own reader gives:
the same products, in the same order and type.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress import plugins
from compress.errors import CheckpointError, shown
from compress.importers import companions, gguf, lora, options, wrapped
from compress.importers.source import Source
from compress.storage import checkpoint as storage
from compress.storage import paths
from compress.storage.checkpoint import CONFIG, Checkpoint, Readable

KEYS = ("quantization_config", "compression_config")  # the second is of older versions of one tool


def open_checkpoint(directory: Path) -> Checkpoint:
    """List the tensors of a checkpoint directory, decoded and merged with an adapter when they are read.

    They are those of a GGUF file where the directory has its map (compress/importers/gguf.py). The adapter is in the
    folder `lora.FOLDER`, if that is there. Raises CheckpointError.
    """
    checkpoint = gguf.open_checkpoint(directory) if (directory / gguf.MAP).is_file() else _decoded(directory)
    adapter = directory / lora.FOLDER
    return lora.merged(checkpoint, adapter) if adapter.is_dir() else checkpoint


def _decoded(directory: Path) -> Checkpoint:
    """List the tensors of a checkpoint directory; those that another tool has quantized are decoded when they are read.

    The configuration of the result does not speak of quantization, unless the checkpoint is one that compress packed.
    Raises CheckpointError as storage.checkpoint does, and for a tool or an option of it that cannot be read, and for
    tensors that are missing or have other shapes than they should.
    """
    companions.check(directory)
    checkpoint = storage.open_checkpoint(directory)
    companions.check_plain(checkpoint)
    settings = _settings(directory, checkpoint.config)
    if settings is not None and settings["quant_method"] == paths.METHOD:
        return checkpoint
    checkpoint = wrapped.unwrapped(checkpoint)
    if settings is None:
        return checkpoint
    importer = plugins.load("importers", _importer(directory, settings["quant_method"]))
    stored = {source.name: source for tensor in checkpoint.tensors.values() for source in tensor.sources}
    source = Source(directory, checkpoint.config, settings, stored)
    base = importer.describe(source)
    options.check(source, importer.OPTIONS, settings)
    decoded: dict[str, Readable] = importer.tensors(source)
    if not decoded:
        raise source.error(
            f"{CONFIG}, or a file of settings beside it, says that it is quantized ({base}), but no weight is stored "
            "so; remove that section or file if the weights are as they were, or download it again"
        )
    if twice := sorted(decoded.keys() & source.stored):
        raise source.error(f"{twice[0]} is stored twice, quantized and as it is")
    base = ", ".join(filter(None, [base, checkpoint.base]))
    return Checkpoint(directory, _plain(checkpoint.config), {**source.stored, **decoded}, base, settings)


def _settings(directory: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings of the tool that quantized a checkpoint, None if none has.

    They stand in config.json, in older checkpoints in a file beside it.
    """
    sections = [config, *(part for part in (config.get("text_config"),) if isinstance(part, dict))]
    found = next((section[key] for section in sections for key in KEYS if section.get(key)), None)
    found = companions.settings(directory) if found is None else found
    if found is None:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("quant_method"), str):
        raise CheckpointError(
            f"{directory / CONFIG}: quantization_config {shown(found)} names no quant_method; download it again"
        )
    return found


def _importer(directory: Path, method: str) -> str:
    """Return the name of the importer for a quant_method."""
    names = plugins.names("importers")
    name = method.lower().replace("-", "_")
    if name not in names:
        raise CheckpointError(
            f"{directory} is already quantized ({shown(method)}), in a way that cannot be read; what can be: "
            f"{', '.join(name.replace('_', '-') for name in names)}; give the original checkpoint"
        )
    return name


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without its sections on quantization."""
    return {
        key: _plain(value) if key == "text_config" and isinstance(value, dict) else value
        for key, value in config.items()
        if key not in KEYS
    }
