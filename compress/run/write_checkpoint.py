"""Complete a checkpoint whose blocks are written: configuration, index, cache, self-check, report, page, manifest."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from compress import process_memory, recipe
from compress.errors import first_line
from compress.importers import companions
from compress.pages import checkpoint as pages
from compress.progress import Progress, note
from compress.run import beside, identity, kv_cache, model_card, remote_code, report, trained_tensors, verify
from compress.run.job import RunState
from compress.run.source import beside_model
from compress.runtime import hf
from compress.storage import files, known_files, notice
from compress.storage.checkpoint import CONFIG, INDEX, read_header, read_json, write_text
from compress.storage.files import read_text
from compress.storage.manifest import PAGE, RECIPE
from compress.storage.workdir import Output

TIED = "tie_word_embeddings"
COPIED_LIMIT = 64 << 20  # bytes; larger files beside a model are not its configuration


def finish(output: Output, run: RunState, started: float, progress: Progress) -> dict[str, Any]:
    """Complete the checkpoint in output.model, check it, put it in place; return the report.

    started: time.monotonic() when the job began.
    """
    skeleton, job, directory, device = run.prepared.skeleton, run.job, output.model, torch.device(run.job.device)
    beside.write(output, run, progress)
    progress("writing the configuration", len(skeleton.blocks), len(skeleton.blocks))
    write_index(directory)
    copy_files(skeleton.checkpoint.directory, directory)
    # a stated dtype: transformers would else take that of the first floating tensor, perhaps a scale
    dtype = skeleton.checkpoint.config.get("dtype") or str(skeleton.dtype).removeprefix("torch.")
    config = _reshaped(remote_code.without(skeleton.checkpoint.config), skeleton.reshaped)
    is_untied = skeleton.is_untied and not run.prepared.plan.is_rejoined
    config = {**(_untied(config) if is_untied else config), "dtype": dtype}
    quantization = hf.build_config({row.name: row.stored for row in run.layers}, run.prunings).to_dict()
    if run.layers:
        config = notice.added({**config, "quantization_config": quantization})
    write_text(directory / CONFIG, json.dumps(config, indent=2) + "\n")
    write_text(directory / RECIPE, recipe.dump(job.recipe))
    probes = trained_tensors.train(output, run, progress)
    cache, cache_facts = kv_cache.build(output, run, progress)
    if cache is not None:
        config["quantization_config"] = {**quantization, "kv_cache": cache}
        write_text(directory / CONFIG, json.dumps(config, indent=2) + "\n")
    outcome = verify.self_check(directory, run.hashes, probes, device, progress, run.start)
    process_memory.check(job.max_memory)
    result = {**report.build(run, time.monotonic() - started, outcome), "kv_cache": cache_facts}
    write_text(directory / known_files.CARD, model_card.text(run, result))
    write_text(directory / known_files.REPORT, json.dumps(result, indent=1) + "\n")
    _write_page(directory, result, job.out)
    identity.write_manifest(directory, job, skeleton.checkpoint)
    output.publish()
    return result


def _write_page(directory: Path, result: dict[str, Any], out: Path) -> None:
    """Write the page of a checkpoint; one that cannot be written is a note, since the checkpoint does without."""
    page = directory / PAGE
    try:
        write_text(page, pages.page(result, read_text(directory / RECIPE)))
    except Exception as error:  # noqa: BLE001  (whatever is wrong with a page, the checkpoint is finished)
        page.with_name(page.name + ".part").unlink(missing_ok=True)
        note(f"no {PAGE} was written ({first_line(error)}); compress inspect {out} --page tries it again")


def _reshaped(config: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json with other values for its text model."""
    if isinstance(inner := config.get("text_config"), dict):
        return {**config, "text_config": {**inner, **values}}
    return {**config, **values}


def _untied(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json without tied embeddings."""
    sections = {
        key: {**value, TIED: False} for key, value in config.items() if isinstance(value, dict) and TIED in value
    }
    return {**config, **sections, TIED: False}


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
    for path in sorted(beside_model(source)):
        name = path.name
        if known_files.is_of_source(name) or companions.reason(name) is not None:
            continue
        if (words := _left_out(path)) is not None:
            left_out.setdefault(words, []).append(name)
        elif name.endswith("_config.json") and any(remote_code.references(values := read_json(path))):
            write_text(directory / name, json.dumps(remote_code.without(values), indent=2, ensure_ascii=False) + "\n")
        else:
            files.copy(path, directory / name)
    for line in companions.lines(source, left_out):
        note(line)


def _left_out(path: Path) -> str | None:
    """Return why a file beside a model is not copied, None for one that is."""
    if not known_files.is_copied(path.name):
        return "no part of a model"
    if not known_files.is_inside(path):
        return "links out of the folder; put the files there to have them copied"
    if path.stat().st_size > COPIED_LIMIT:
        return f"larger than {process_memory.show(COPIED_LIMIT)}"
    return None
