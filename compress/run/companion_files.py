"""Write what goes along with the weights of a checkpoint: config.json, recipe, index, and copied files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from compress import process_memory, recipe
from compress.importers import companions
from compress.progress import note
from compress.run import draft_heads
from compress.run.job import RunState
from compress.run.source import code_references, model_files, without_code
from compress.runtime import hf
from compress.storage import files, json_text, manifest
from compress.storage.checkpoint import CONFIG, INDEX, read_header, read_json, write_text
from compress.storage.manifest import RECIPE

TIED_KEY = "tie_word_embeddings"
MAX_COPIED_NBYTES = 64 << 20  # larger files beside a model are not its configuration


def write_config(directory: Path, run: RunState, cache: dict[str, Any] | None = None) -> None:
    """Write the recipe and config.json of a checkpoint; cache: the section of its calibrated cache, if it has one."""
    skeleton = run.prepared.skeleton
    config = _with_text_settings(without_code(skeleton.checkpoint.config), skeleton.reshaped)
    if skeleton.is_untied and not run.prepared.plan.tables_are_shared:
        config = _without_tied_embeddings(config)
    # a stated dtype: transformers would else take that of the first floating tensor, perhaps a scale
    dtype = skeleton.checkpoint.config.get("dtype") or str(skeleton.dtype).removeprefix("torch.")
    config = {**config, "dtype": dtype}
    shapes = draft_heads.shapes(run.prepared.plan, run.layers)
    quantization = hf.build_config({row.name: row.stored for row in run.layers}, run.prunings, shapes).to_dict()
    if run.layers:
        config = json_text.add_notice({**config, "quantization_config": quantization})
    if cache is not None:
        config["quantization_config"] = {**quantization, "kv_cache": cache}
    write_text(directory / CONFIG, json.dumps(config, indent=2) + "\n")
    write_text(directory / RECIPE, recipe.dump(run.job.recipe))


def _with_text_settings(config: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json with other values for its text model."""
    if isinstance(inner := config.get("text_config"), dict):
        return {**config, "text_config": {**inner, **values}}
    return {**config, **values}


def _without_tied_embeddings(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json whose embeddings and output head are not tied, in its sections either."""
    sections = {
        key: {**value, TIED_KEY: False}
        for key, value in config.items()
        if isinstance(value, dict) and TIED_KEY in value
    }
    return {**config, **sections, TIED_KEY: False}


def write_index(directory: Path) -> None:
    """Write the index over all shards of a directory."""
    weight_map: dict[str, str] = {}
    size = 0
    for path in sorted(directory.glob("model-*.safetensors")):
        tensors = read_header(path)
        weight_map.update(dict.fromkeys(tensors, path.name))
        size += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    write_text(directory / INDEX, json.dumps(index, indent=1) + "\n")


def copy_files(source: Path, directory: Path) -> None:
    """Copy what belongs to a model and holds no weights and no code, nor names any; notes say what else is left out.

    Weights and code that are left out are named where a model is opened (`companions.notes`).
    """
    left_out: dict[str, list[str]] = {}
    inner_files = manifest.inner_files(source)
    for path in sorted(model_files(source)):
        inner = f"{path.parent.name}/{path.name}"
        name = inner if inner in inner_files else path.name
        (directory / name).parent.mkdir(exist_ok=True)
        if name != inner and (manifest.is_of_source(name) or companions.reason(name) is not None):
            continue
        if (why := _why_left_out(path, name)) is not None:
            left_out.setdefault(why, []).append(name)
        elif name.endswith("_config.json") and any(code_references(values := read_json(path))):
            write_text(directory / name, json.dumps(without_code(values), indent=2, ensure_ascii=False) + "\n")
        else:
            files.copy(path, directory / name)
    for line in companions.lines(source, left_out):
        note(line)


def _why_left_out(path: Path, name: str) -> str | None:
    """Return why a file beside a model is not copied, None for one that is."""
    if not manifest.is_copied(name):
        return "no part of a model"
    if not manifest.is_inside(path):
        return "links out of the folder; put the files there to have them copied"
    if path.stat().st_size > MAX_COPIED_NBYTES:
        return f"larger than {process_memory.show(MAX_COPIED_NBYTES)}"
    return None
