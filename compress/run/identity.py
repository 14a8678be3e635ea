"""Identify a run by its source, its settings and the software; identify its result by the hash of every file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers

from compress import recipe
from compress.calib.data import Calibration
from compress.run.job import Job
from compress.storage import manifest
from compress.storage.checkpoint import MANIFEST, Checkpoint, write_text
from compress.version import __version__

SAMPLED = 1 << 20  # bytes hashed at the start, middle and end of each shard to tell models apart


def identity(job: Job, checkpoint: Checkpoint, calibration: Calibration | None) -> dict[str, Any]:
    """Return what decides the bytes of the result; a run may be resumed only if all of it is the same."""
    return {
        "model": fingerprint(checkpoint),
        "adapter": checkpoint.base_settings.get("adapter"),
        "recipe": recipe.fingerprint(job.recipe),
        "calibration text": calibration.sha256 if calibration is not None else None,
        "seed": job.seed,
        "command": "quantize" if job.pack else "transform",
        "device": torch.device(job.device).type,
        "software versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions of this software and of the libraries that numbers depend on."""
    return {
        "compress": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
    }


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return a sha256 over the configuration, all headers, and samples of each shard's bytes; not whole terabytes."""
    digest = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode())
    if checkpoint.base_settings:
        digest.update(json.dumps(checkpoint.base_settings, sort_keys=True).encode())
    for name, tensor in sorted(checkpoint.tensors.items()):
        for stored in tensor.sources:
            digest.update(f"{name} {stored.dtype} {stored.shape} {stored.offset}".encode())
    for file in checkpoint.files:
        size = file.stat().st_size
        with file.open("rb") as stream:
            for start in sorted({0, max(0, size // 2), max(0, size - SAMPLED)}):
                stream.seek(start)
                digest.update(stream.read(SAMPLED))
    return digest.hexdigest()


def write_manifest(directory: Path, job: Job, source: Checkpoint) -> None:
    """Write the manifest of a finished checkpoint: hash and size of every file, and what it was made of."""
    values = {
        **manifest.entries(directory),
        "source": {"model": job.model_name, "fingerprint": fingerprint(source), "base": source.base or None},
        "recipe": recipe.fingerprint(job.recipe),
        "seed": job.seed,
        "versions": versions(),
    }
    write_text(directory / MANIFEST, json.dumps(values, indent=1) + "\n")
