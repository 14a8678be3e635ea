"""Make the checkpoints of a study's cells, and describe the model that they are made of.

The model writes its calibration text once for all cells that ask for as much of it.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from compress import api
from compress.importers import open_checkpoint
from compress.model import fingerprint
from compress.model.architectures import max_positions
from compress.model.load import load_config
from compress.progress import silent
from compress.run import calibration_text, prepare
from compress.run.job import Job
from compress.storage.checkpoint import Checkpoint, read_json
from compress.storage.files import open_lock
from compress.storage.workdir import Output
from compress.study import jobs
from compress.study.folder import CellFolder, StudyFolder

# In the directory of a study; a folder for each number and length of samples.
SELF_WRITTEN_FOLDER = "self-written"


def count_parameters(checkpoint: Checkpoint) -> int:
    """Return how many numbers all tensors of a model have."""
    return sum(tensor.nbytes // tensor.dtype.itemsize for tensor in checkpoint.tensors.values())


def identify(directory: Path) -> tuple[str, int]:
    """Return the fingerprint of a model, and how many parameters it has."""
    checkpoint = open_checkpoint(directory)
    return fingerprint.fingerprint(checkpoint), count_parameters(checkpoint)


def describe_original(directory: Path) -> dict[str, Any]:
    """Return the size of a model: bytes, parameters, and the positions that it is made for."""
    checkpoint = open_checkpoint(directory)
    return {
        "nbytes": checkpoint.nbytes,
        "parameters": count_parameters(checkpoint),
        "positions": max_positions(load_config(directory)),
    }


def quantize(own: CellFolder, job: Job) -> tuple[dict[str, Any], bool]:
    """Return the report of the cell's checkpoint, which is made unless an earlier process has.

    Also whether its time is without measuring the options of its allocation, or some of them, because they were there.
    """
    if own.checkpoint.is_dir():
        return read_json(own.checkpoint / "report.json"), False
    if (name := jobs.measured_name(own.path)) is None:
        put_self_written_text(own.study, job)
        return api.quantize(job), False
    with own.study.hold_lock(f"{name}.lock"):
        folder = own.study.folder / name
        was_measured = folder.is_dir()
        return api.quantize(dataclasses.replace(job, measurements=folder)), was_measured


def put_self_written_text(study: StudyFolder, job: Job) -> None:
    """Put the text that a job would let the model write where the job finds it; write it first if nobody has.

    A job that reads a text is left to itself. Whether the text is the right one is checked by the job.
    """
    output = Output(job.out)
    if job.calib is not None or output.is_begun or output.calibration.is_dir():
        return
    prepared = prepare.prepare(job)
    if not prepared.samples:
        return
    written = study.folder / SELF_WRITTEN_FOLDER / f"{prepared.samples}x{prepared.seq_len}"
    with study.hold_lock(f"{SELF_WRITTEN_FOLDER}/{written.name}.lock"):
        written.mkdir(exist_ok=True)
        calibration_text.calibration(job, prepared, silent, written)
    _copy(written, output)


def _copy(written: Path, output: Output) -> None:
    """Copy the text into a folder of unfinished work, which is known by its lock."""
    output.work.mkdir(parents=True, exist_ok=True)
    open_lock(output.work / "lock").close()
    part = output.out.with_name("calibration.copy")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(written, part)
    part.rename(output.calibration)
