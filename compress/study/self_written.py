"""Let the model write its calibration text once for all cells of a study that ask for as much of it."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path

from compress.progress import silent
from compress.run import calibration_text, prepare
from compress.run.job import Job
from compress.storage.files import open_lock
from compress.storage.workdir import Output
from compress.study.folder import StudyFolder

FOLDER = "self-written"  # in the directory of a study; a folder for each number and length of samples


def put(study: StudyFolder, job: Job) -> None:
    """Put the text that a job would let the model write where the job finds it; write it first if nobody has.

    A job that reads a text, or whose bits are still to be allocated, is left to itself. Whether the text is the right
    one is checked by the job.
    """
    output = Output(job.out)
    if job.calib is not None or job.recipe.allocate is not None or output.is_begun or output.calibration.is_dir():
        return
    prepared = prepare.prepare(job)
    if not prepared.samples:
        return
    written = study.folder / FOLDER / f"{prepared.samples}x{prepared.seq_len}"
    written.mkdir(parents=True, exist_ok=True)
    with open_lock(written.parent / f"{written.name}.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
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
