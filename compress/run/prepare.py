"""Decide everything about a job before a weight is read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers

from compress import plugins, process_memory, recipe
from compress.calib import data as calib_data
from compress.errors import CheckpointError, NotMeasuredError, OutputError, first_line
from compress.model import load
from compress.model.skeleton import Skeleton
from compress.progress import Progress
from compress.recipe import Recipe, kv
from compress.run import expert_pruning, memory_plan
from compress.run import kv_cache as kv_checkpoint
from compress.run.job import Job, Prepared
from compress.run.plan import make
from compress.storage.checkpoint import Checkpoint, open_checkpoint
from compress.types import Plan
from compress.version import __version__

SAMPLED = 1 << 20  # bytes hashed at the start, middle and end of each shard to tell models apart


def prepare(job: Job) -> Prepared:
    """Open the model, apply the recipe, arrange the memory. Of the weights only headers are read."""
    return prepare_all(job, [job.recipe])[0]


def prepare_all(job: Job, recipes: Sequence[Recipe], every: bool = False) -> tuple[Prepared, list[Plan]]:
    """The same for several recipes at once, which differ in their schemes: for the first, and the plans of all.

    `every`: statistics of all inputs, and so calibration text, whether a method needs them or not.
    """
    checkpoint = open_checkpoint(resolve(job.model))
    if job.out.resolve() in (checkpoint.directory.resolve(), *checkpoint.directory.resolve().parents):
        raise OutputError(f"the output {job.out} holds the model itself; give another --out")
    if packed := checkpoint.config.get("quantization_config"):
        method = packed.get("quant_method") if isinstance(packed, dict) else packed
        raise CheckpointError(f"{job.model} is already quantized ({method}); give the original checkpoint")
    skeleton = Skeleton(checkpoint)
    skeleton.check_tensors()
    if job.recipe.kv_cache is not None:
        kv_checkpoint.check(skeleton.config, job.recipe.kv_cache)
    scopes = {step.method: plugins.load("transform", step.method).SCOPE for step in job.recipe.transform}
    for step in job.recipe.transform:
        if scopes[step.method] == "model":
            skeleton.edits = plugins.load("transform", step.method).apply(skeleton, step.config, job.seed)
    plans = [make(recipe, skeleton, job.pack) for recipe in recipes]
    plan, settings = plans[0], job.recipe.calibration
    if job.pack:
        expert_pruning.check(job.recipe, plan)
    seq_len = samples = 0
    layers = [layer for each in plans for layer in each.layers]
    static = any(layer.stored.has_in_scale for layer in layers)
    routed = job.pack and job.recipe.pruning is not None
    cached = job.recipe.kv_cache is not None and bool(kv.needs(job.recipe.kv_cache))
    needed = every or routed or cached or static or bool(memory_plan.statistics(layers)) or "block" in scopes.values()
    needed = needed or any(memory_plan.needs_text(layer) for layer in layers)
    tried = skeleton.edits.samples if skeleton.edits is not None else 0
    if needed or tried:
        longest = getattr(skeleton.config.get_text_config(), "max_position_embeddings", None)
        seq_len = min(settings.seq_len, longest or settings.seq_len)
        samples = (settings.num_samples if needed else min(tried, settings.num_samples)) * settings.rolled
    extras = memory_plan.Extras(
        samples > 0 and settings.asymmetric > 0 and job.pack,
        "block" in scopes.values(),
        settings.importance != "none",
        tuple(plans[1:]),
        every,
        kv_checkpoint.sampled(skeleton.config, samples * seq_len) if cached else 0,
    )
    arrangement = memory_plan.arrange(plan, skeleton, samples, seq_len, job.max_memory, extras)
    return Prepared(skeleton, plan, arrangement, samples, seq_len), plans


def resolve(model: str) -> Path:
    """A checkpoint directory: the given one, or the hub's snapshot of a model id."""
    path = Path(model)
    if path.exists():
        return path
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model) or model.startswith("."):
        raise CheckpointError(f"{model} is neither a directory nor a hub id of the form owner/name")
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{model} is no directory here and could not be fetched from the hub ({first_line(error)[:150]}); give the "
            "path of a downloaded checkpoint"
        ) from error


def calibration(
    job: Job, prepared: Prepared, progress: Progress, cache: Path | None = None
) -> calib_data.Calibration | None:
    """The calibration tokens, with the copies that the recipe asks for; None if the recipe needs none."""
    copies = job.recipe.calibration.rolled
    found = _calibration(job, dataclasses.replace(prepared, samples=prepared.samples // copies), progress, cache)
    return calib_data.expanded(found, copies) if found is not None and copies > 1 else found


def _calibration(
    job: Job, prepared: Prepared, progress: Progress, cache: Path | None = None
) -> calib_data.Calibration | None:
    """The calibration tokens; None if the recipe needs none.

    Text that the model writes itself is kept in the folder `cache`, and taken from there by the next run that asks for
    the same.
    """
    if not prepared.samples:
        return None
    checkpoint = prepared.skeleton.checkpoint
    if job.calib is not None:
        progress("reading calibration text", 0, 0)
        vocabulary = prepared.skeleton.config.get_text_config().vocab_size
        tokenizer = load.load_tokenizer(checkpoint.directory)
        return calib_data.calibration(job.calib, tokenizer, prepared.samples, prepared.seq_len, job.seed, vocabulary)
    request = {
        "source": calib_data.SELF_SOURCE,
        "model": fingerprint(checkpoint),
        "seed": job.seed,
        "num_samples": prepared.samples,
        "seq_len": prepared.seq_len,
        "software versions": versions(),
    }
    if cache is not None and (found := calib_data.restore(cache, request)) is not None:
        return found
    if not job.measures:
        raise NotMeasuredError("the calibration text is not written yet")
    progress("loading the model to write calibration text", 0, 0)
    written = calib_data.self_generated(
        checkpoint.directory,
        prepared.samples,
        prepared.seq_len,
        job.seed,
        max(0, job.max_memory - process_memory.resident())
        if job.max_memory is not None
        else int(0.8 * process_memory.available()),
        lambda done, total: progress("generating calibration text", done, total),
    )
    if cache is not None:
        calib_data.store(cache, request, written)
    return written


def identity(job: Job, checkpoint: Checkpoint, calibrated: calib_data.Calibration | None) -> dict[str, Any]:
    """What decides the bytes of the result; a run may be resumed only if all of it is the same."""
    return {
        "model": fingerprint(checkpoint),
        "recipe": recipe.fingerprint(job.recipe),
        "calibration text": calibrated.sha256 if calibrated is not None else None,
        "seed": job.seed,
        "command": "quantize" if job.pack else "transform",
        "device": torch.device(job.device).type,
        "software versions": versions(),
    }


def versions() -> dict[str, str]:
    return {
        "compress": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
    }


def fingerprint(checkpoint: Checkpoint) -> str:
    """sha256 over the configuration, all headers, and samples of each shard's bytes; not over whole terabytes."""
    digest = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode())
    for name, stored in sorted(checkpoint.tensors.items()):
        digest.update(f"{name} {stored.dtype} {stored.shape} {stored.offset}".encode())
    for file in sorted({stored.file for stored in checkpoint.tensors.values()}):
        size = file.stat().st_size
        with file.open("rb") as stream:
            for start in sorted({0, max(0, size // 2), max(0, size - SAMPLED)}):
                stream.seek(start)
                digest.update(stream.read(SAMPLED))
    return digest.hexdigest()
