"""Open checkpoints that other tools have quantized: weights are decoded while they are read, a tensor at a time.

`quantization_config` in config.json names the tool (`quant_method`), and the file of that name in this package reads
it. Such a file defines

    OPTIONS                     the values that options of `quantization_config` may have, see options.py
    describe(source) -> str     how the weights are stored, in words; CheckpointError for options it cannot read
    tensors(source) -> dict     name -> tensor, for every weight that is stored in another way than as itself

It takes from the `CheckpointSource` what it reads, and what serves the other tool only. What it leaves is read as it
is. Nothing is read but headers, until a tensor's values are needed. The values are those that the tool's own reader
gives: the same products, in the same order and type.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from compress import plugins
from compress.errors import CheckpointError, shown
from compress.importers import companions, gguf, lora, options
from compress.importers.source import CheckpointSource
from compress.storage import checkpoint as storage
from compress.storage import paths
from compress.storage.checkpoint import CONFIG, Checkpoint, Readable

KEYS = ("quantization_config", "compression_config", "quantization")  # the second and third are of one tool each
NAMELESS = {"mlx": {"group_size", "bits"}, "bitsandbytes": {"load_in_4bit"}}  # tool -> keys of a section without a name
PARTS = re.compile(
    r"weight_scale|weight_packed|qweight|absmax|\.scales?$|_quantized$"
)  # in the names of packed weights
ALIASES = {"mxfp8": {"weight_block_size": [1, 32], "quant_method": "fp8"}}  # quant_method -> whose it is, its defaults
DROPPED = "plain weights; a section on quantization that names no tool is left out"
LEADING_WRAPPERS = re.compile(r"(?:(?:module|_orig_mod|_fsdp_wrapped_module|_forward_module|base_model\.model)\.)+")
INNER_WRAPPERS = re.compile(
    r"(?<=\.)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)  # around parts of a model
ADAPTER = re.compile(r"\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|base_layer|modules_to_save)\.")


def open_checkpoint(directory: Path) -> Checkpoint:
    """List the tensors of a checkpoint directory, decoded and merged with an adapter when they are read.

    They are those of a GGUF file where the directory has its map (compress/importers/gguf.py). The adapter is in the
    folder `lora.ADAPTER_FOLDER`, if that is there. Raises CheckpointError.
    """
    checkpoint = gguf.open_checkpoint(directory) if (directory / gguf.MAP).is_file() else _open_decoded(directory)
    adapter = directory / lora.ADAPTER_FOLDER
    return lora.merge_adapter(checkpoint, adapter) if adapter.is_dir() else checkpoint


def _open_decoded(directory: Path) -> Checkpoint:
    """List the tensors of a checkpoint directory; those that another tool has quantized are decoded when they are read.

    The configuration of the result does not speak of quantization, unless the checkpoint is one that compress packed.
    Raises CheckpointError as storage.checkpoint does, and for a tool or an option of it that cannot be read, and for
    tensors that are missing or have other shapes than they should.
    """
    companions.check(directory)
    checkpoint = storage.open_checkpoint(directory)
    companions.check_plain(checkpoint)
    settings = _settings(directory, checkpoint)
    if settings is not None and settings.get("quant_method") == paths.METHOD:
        return checkpoint
    checkpoint = strip_wrappers(checkpoint)
    if settings is None:
        return checkpoint
    if "quant_method" not in settings:
        base = ", ".join(filter(None, [DROPPED, checkpoint.base]))
        return dataclasses.replace(checkpoint, config=_plain(checkpoint.config), base=base)
    importer = plugins.load("importers", _importer(directory, settings["quant_method"]))
    stored = {source.name: source for tensor in checkpoint.tensors.values() for source in tensor.sources}
    source = CheckpointSource(directory, checkpoint.config, settings, stored)
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


def _settings(directory: Path, checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return the settings of the tool that quantized a checkpoint, None if none has.

    They stand in config.json, in older checkpoints in a file beside it. Those without a quant_method are of a tool that
    writes none, or of plain weights.
    """
    text = checkpoint.config.get("text_config")
    sections = [checkpoint.config, *([text] if isinstance(text, dict) else [])]
    given = (section[key] for section in sections for key in KEYS if key in section and _is_section(key, section[key]))
    settings = next(filter(None, given), None)
    settings = companions.settings(directory) if settings is None else settings
    if settings is None or (isinstance(settings, dict) and isinstance(settings.get("quant_method"), str)):
        alias = ALIASES.get(settings["quant_method"]) if settings else None
        return settings if alias is None else {**alias, **settings, "quant_method": alias["quant_method"]}
    if isinstance(settings, dict) and "quant_method" not in settings:
        tool = next((tool for tool, keys in NAMELESS.items() if keys <= settings.keys()), None)
        if _is_plain(checkpoint.tensors):
            return settings
        if tool is not None:
            return {**settings, "quant_method": tool}
    raise CheckpointError(
        f"{directory / CONFIG}: quantization_config {shown(settings)} names no quant_method; download it again"
    )


def _is_section(key: str, value: object) -> bool:
    """Return whether a value of config.json speaks of quantization; under the last key a model may have its own."""
    return key in KEYS[:-1] or (key == KEYS[-1] and isinstance(value, dict) and NAMELESS["mlx"] <= value.keys())


def _is_plain(tensors: Mapping[str, Readable]) -> bool:
    """Return whether no name and no type of a tensor is that of a packed weight."""
    plain = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool)
    return all(tensor.dtype in plain and not PARTS.search(name) for name, tensor in tensors.items())


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
        if not _is_section(key, value)
    }


def strip_wrappers(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the names that its tensors have in the model itself.

    Raises CheckpointError for one that holds an adapter which is not merged.
    """
    if adapted := sorted(filter(ADAPTER.search, checkpoint.tensors)):
        raise CheckpointError(
            f"{checkpoint.directory} holds {len(adapted)} tensors of an adapter that is not merged, first "
            f"{shown(adapted[0])}; merge it with PEFT (merge_and_unload) and save the result, or give the base model, "
            "and the adapter as --adapter"
        )
    names = plain_names(checkpoint.tensors)
    if all(name == plain for name, plain in names.items()):
        return checkpoint
    tensors: Mapping[str, Readable] = {
        plain: checkpoint.tensors[name].renamed(plain) for name, plain in sorted(names.items())
    }
    front = _leading_wrappers(names)
    words = f"names without {front.rstrip('.')} in front" if front else "names without those of wrappers"
    return dataclasses.replace(checkpoint, tensors=tensors, base=words)


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Return name -> the name without wrappers; all names stay as they are where two would be the same."""
    names = list(names)
    front = _leading_wrappers(names)
    plain = {name: INNER_WRAPPERS.sub("", name[len(front) :]) for name in names}
    return plain if len(set(plain.values())) == len(plain) else dict(zip(names, names, strict=True))


def _leading_wrappers(names: Iterable[str]) -> str:
    """Return the wrappers that stand in front of all names, "" if there are none."""
    prefixes = {match[0] if (match := LEADING_WRAPPERS.match(name)) else "" for name in names}
    return prefixes.pop() if len(prefixes) == 1 else ""
