"""Open the measurements of a recipe: options on disk, the table of them, and evaluators of choices.

What is measured (compress/allocate/quantize_options.py, compress/allocate/metrics.py) lies in a folder beside the
output and serves every budget.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from compress import process_memory, ranks
from compress.allocate import cache_share, cost, prepare_options, quantize_options, times, variants
from compress.allocate.evaluators import Evaluators, check_memory
from compress.allocate.sensitivity import WITH_OPTIONS, Measurements
from compress.allocate.variants import Database
from compress.errors import NotMeasuredError
from compress.progress import Progress
from compress.run import calibration_text
from compress.run.job import Job

T = TypeVar("T")


def run_on_measurements(job: Job, progress: Progress, work: Callable[[Measurements], T]) -> T:
    """Open the measurements of a recipe, and return what `work` makes of them.

    Every linear is quantized at every option before. Where a run has several processes, they share that out; then the
    main one does the work, and the others take part in its comparisons of variants.
    """
    with ranks.joined(job.device), open_measurements(job, progress) as store:
        return store.evaluators.run_with_peers(lambda: work(store))


@contextmanager
def open_measurements(job: Job, progress: Progress) -> Iterator[Measurements]:
    """Open the measurements of a recipe, measuring what comes before every allocation and is not in the folder."""
    started = time.monotonic()
    process_memory.return_freed_memory()
    opened = prepare_options.options(job)
    target, context = opened.allocation.target, opened.allocation.context
    cost.check_target(opened)
    times.check(opened)
    if opened.tables or not opened.needs <= {*WITH_OPTIONS}:  # variants of the whole model are compared
        check_memory(opened)
    database = Database(job.measurements or variants.folder_of(job))
    is_main = ranks.current().is_main
    if job.measures and is_main:
        cost.check_time(opened, database.folder)
    if not job.measures and not database.is_begun:
        raise NotMeasuredError(f"{database.folder} does not exist")
    cache = database.folder / "calibration"
    with database.writing():
        calibration = ranks.by_main(lambda: calibration_text.calibration(opened.job, opened.prepared, progress, cache))
    assert calibration is not None, "measuring always has a text"
    process_memory.trim()
    prepared = dataclasses.replace(opened.prepared, samples=calibration.tokens.shape[0])
    opened = dataclasses.replace(opened, prepared=prepared)
    identity = prepare_options.measurement_identity(opened, calibration)
    with _open_database(database, identity, prepared.arrangement.as_stored()):
        if target is not None and context is not None and is_main:
            cache_share.check_room(opened, target, calibration.tokens, database.folder, progress)
        is_new = quantize_options.quantize_all(opened, database, calibration.tokens, progress)
        if is_main:
            left = cost.seconds_left(opened, time.monotonic() - started if is_new else 0.0)
            opened = dataclasses.replace(opened, allocation=cost.resolve_estimator(opened, database.folder, left))
        evaluators = Evaluators(opened, database.folder, calibration, progress)
        evaluators.predicted_peak = prepared.arrangement.peak_nbytes if is_new else 0
        try:
            yield Measurements(opened, database, evaluators)
        finally:
            evaluators.close()


@contextmanager
def _open_database(database: Database, identity: dict[str, Any], arrangement: dict[str, Any]) -> Iterator[None]:
    """Open the database, which the main process holds for all."""
    if not ranks.current().is_main:
        database.arrangement = ranks.current().share(arrangement)
        yield
        return
    with database.hold(identity, arrangement):
        ranks.current().share(database.arrangement)
        yield
