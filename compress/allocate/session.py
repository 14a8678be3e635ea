"""Open the measurements of a recipe: options on disk, the table of them, and evaluators of choices.

What is measured (compress/allocate/quantize_options.py, compress/allocate/metrics.py) lies in a folder beside the
output and serves every budget.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from compress import plugins, process_memory, ranks
from compress.allocate import (
    estimator_cost,
    kv_share,
    metrics,
    prepare_options,
    quantize_options,
    quantizing_time,
    table,
)
from compress.allocate.evaluators import Evaluators, check_memory
from compress.allocate.sensitivity import WITH_OPTIONS, Measurements
from compress.allocate.variants import Database
from compress.errors import NotMeasuredError
from compress.progress import Progress
from compress.run import calibration_text
from compress.run.job import Job
from compress.storage.workdir import writing

T = TypeVar("T")


def led(asked: Job, progress: Progress, work: Callable[[Measurements], T]) -> T:
    """Open the measurements of a recipe, and return what `work` makes of them.

    Every linear is quantized at every option before. Where a run has several processes, they share that out; then the
    main one does the work, and the others take part in its comparisons of variants.
    """
    with ranks.joined(asked.device), session(asked, progress) as store:
        return store.evaluators.led(lambda: work(store))


@contextmanager
def session(asked: Job, progress: Progress) -> Iterator[Measurements]:
    started = time.monotonic()
    process_memory.return_freed_memory()
    opened = prepare_options.options(asked)
    target, context = opened.allocation.target, opened.allocation.context
    if target is not None:
        table.check_target(opened, target)
    if _compares(opened):
        check_memory(opened)
    database = Database(asked.measurements or prepare_options.folder_of(asked))
    is_main = ranks.current().is_main
    if asked.measures and is_main:
        estimator_cost.check(opened, database.folder)
        quantizing_time.check(opened, database.folder)
    if not asked.measures and not database.is_begun:
        raise NotMeasuredError(f"{database.folder} does not exist")
    cache = database.folder / "calibration"
    with writing(database.folder, "--measurements"):
        calibration = ranks.by_main(
            lambda: calibration_text.calibration(opened.asked, opened.prepared, progress, cache)
        )
    assert calibration is not None, "measuring always has a text"
    process_memory.trim()
    prepared = dataclasses.replace(opened.prepared, samples=calibration.tokens.shape[0])
    opened = dataclasses.replace(opened, prepared=prepared)
    arrangement = prepared.arrangement.as_stored()
    with _held(database, prepare_options.measurement_identity(opened, calibration), arrangement):
        if target is not None and context is not None and is_main:
            kv_share.check_room(opened, target, calibration.tokens, database.folder, progress)
        is_new = quantize_options.quantize_all(opened, database, calibration.tokens, progress)
        if is_main:
            left = estimator_cost.left(opened, time.monotonic() - started if is_new else 0.0)
            opened = dataclasses.replace(opened, allocation=estimator_cost.resolved(opened, database.folder, left))
        evaluators = Evaluators(opened, database.folder, calibration, progress)
        evaluators.predicted_peak = prepared.arrangement.peak_nbytes if is_new else 0
        try:
            yield Measurements(opened, database, evaluators)
        finally:
            evaluators.close()


@contextmanager
def _held(database: Database, identity: dict[str, Any], arrangement: dict[str, Any]) -> Iterator[None]:
    """Open the database, which the main process holds for all."""
    if not ranks.current().is_main:
        database.arrangement = ranks.current().share(arrangement)
        yield
        return
    with database.opened(identity, arrangement):
        ranks.current().share(database.arrangement)
        yield


def _compares(opened: prepare_options.Options) -> bool:
    """Return whether variants of the whole model are compared, for which each block alone is not enough."""
    settings = opened.allocation
    needs = plugins.load("allocate", settings.method).needs(settings.config)
    return bool(opened.tables) or not needs <= {*WITH_OPTIONS}


def measured(asked: Job, progress: Progress) -> tuple[Path, dict[str, Any]]:
    """Measure every option, and the damages that the recipe's allocator needs; return the folder, and facts as JSON."""
    if asked.recipe.allocate is not None:  # what is measured serves every target
        allocation = dataclasses.replace(asked.recipe.allocate, target=None, context=None)
        asked = dataclasses.replace(asked, recipe=dataclasses.replace(asked.recipe, allocate=allocation))

    def facts(store: Measurements) -> tuple[Path, dict[str, Any]]:
        settings = store.opened.allocation
        measures = metrics.table(store, plugins.load("allocate", settings.method).needs(settings.config))
        return store.database.folder, {
            "units": len(measures.units),
            "options": len(measures.options),
            "nbytes": store.database.nbytes,
            "nbytes per parameter": store.database.nbytes / measures.numel,
            "damages": sorted(measures.units[0].entries[0].damage),
            "scores": sorted(measures.units[0].scores),
            **measures.facts,
        }

    return led(asked, progress, facts)
