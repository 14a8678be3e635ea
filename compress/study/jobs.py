"""Turn what a cell asks for into a job, and tell which cells may allocate their bits from one folder.

Every linear at every option of an allocation, and what each of them costs, do not depend on the target. Cells that
differ in it alone allocate from one folder, DIR/measured/KEY. The first of them measures, one works with it at a time
(DIR/measured/KEY.lock), and the last that has a result removes it. Cells of another allocator have a folder of their
own: an estimator that is chosen by itself depends on what is there already (compress/allocate/cost.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path

from compress import recipe
from compress.errors import CompressError
from compress.model import fingerprint
from compress.run.job import Job
from compress.study import grid
from compress.study.folder import RECIPE, CellFolder, StudyFolder

# In the directory of a study; a folder for each set of options.
MEASURED_FOLDER = "measured"


def job_of(own: CellFolder) -> Job:
    """Return what a cell with a recipe asks for. Raises RecipeError, CheckpointError."""
    asked, settings = own.request, own.settings
    resolved = dataclasses.replace(recipe.load(str(own.path / RECIPE)), name=asked["name"])
    return Job(
        settings.model,
        resolved,
        own.checkpoint,
        calib=asked["calib"],
        max_memory=settings.max_memory,
        device=settings.device,
        dtype=settings.quantize_dtype,
        seed=settings.seed,
        pack=resolved.packs,
    )


def is_held_up(own: CellFolder) -> bool:
    """Return whether another cell works with what this one would allocate from."""
    with suppress(CompressError, OSError):  # a damaged cell, or an unreadable text, fails later
        name = measured_name(own.path)
        return name is not None and own.study.is_locked(f"{name}.lock")
    return False


def forget_measurements(study: StudyFolder) -> None:
    """Remove what cells of a study have allocated from, where no cell without a result needs it.

    Raises CompressError or OSError where what another needs cannot be told; all of it then stays.
    """
    for folder in filter(Path.is_dir, (study.folder / MEASURED_FOLDER).glob("*")):
        name = f"{MEASURED_FOLDER}/{folder.name}"
        with suppress(BlockingIOError), study.hold_lock(f"{name}.lock", wait=False):
            if name not in {measured_name(cell.path) for cell in study.cells() if cell.result is None}:
                shutil.rmtree(folder, ignore_errors=True)


@cache  # a runner asks again and again
def measured_name(path: Path) -> str | None:
    """Return what the cell in a folder allocates from: a folder, seen from the study's. None: it does not allocate.

    Cells with the same one measure the same, and may read what each has written.
    """
    own = CellFolder(path)
    if not own.request["has_recipe"] or (allocation := (job := job_of(own)).recipe.allocate) is None:
        return None
    at_any_target = dataclasses.replace(job.recipe, allocate=dataclasses.replace(allocation, target=None))
    known = [
        recipe.fingerprint(at_any_target),
        grid.identify_source(job.calib) if job.calib is not None else None,
        *(job.max_memory, job.seed, fingerprint.versions()),
    ]
    return f"{MEASURED_FOLDER}/{hashlib.sha256(json.dumps(known).encode()).hexdigest()[:10]}"
