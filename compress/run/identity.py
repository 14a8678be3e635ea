"""Identify a run by its source, its settings and the software; identify its result by the hash of every file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from compress import recipe
from compress.calib.data import Calibration
from compress.model.fingerprint import fingerprint, versions
from compress.run.job import Job
from compress.storage import manifest
from compress.storage.checkpoint import MANIFEST, Checkpoint, write_text


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
        "dtype": job.dtype,
        "software versions": versions(),
    }


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
