"""Turn a recipe that leaves bits open into one that says what every linear gets.

An allocator chooses among the measured options (compress/allocate/decision.py); the choice becomes rules of the recipe,
so that the rest of the program, and whoever runs the written recipe again, needs to know nothing of allocation.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from compress import ranks
from compress.allocate import cache_options, cache_share, metrics, prepare_options
from compress.allocate.decision import decide_target
from compress.allocate.sensitivity import Measurements
from compress.allocate.session import run_on_measurements
from compress.errors import RecipeError, shown
from compress.progress import Progress
from compress.recipe import Recipe
from compress.run.job import Job


def is_open(job: Job) -> bool:
    """Tell whether there is something to allocate; a run that only transforms has nothing."""
    return job.recipe.allocate is not None and (job.pack or not job.recipe.packs)


def decide(job: Job, progress: Progress) -> Job:
    """Return the job with its allocation made: a recipe without open bits, and the facts of it as `allocation`.

    A job without an allocation is returned as it is. Raises RecipeError without a target, BudgetError for one that
    cannot be met.
    """
    allocation = job.recipe.allocate
    if allocation is None or not is_open(job):
        return job
    target = allocation.target
    if target is None:
        raise RecipeError(
            f"recipe {shown(job.recipe.name)} has no target; give --target 3.25bpw, 2.1GiB or --max-kl 0.05"
        )
    if not job.recipe.packs:
        return ranks.by_main(lambda: cache_share.decide_cache(job, allocation, target, progress))

    def choose(store: Measurements) -> tuple[Recipe, dict[str, Any]]:
        facts = decide_target(store, store.opened.allocation, target)
        facts["predicted_peak"] = store.evaluators.predicted_peak
        return prepare_options.apply_choice(job.recipe, facts.pop("choices"), store.opened.tables), facts

    recipe, facts = run_on_measurements(job, progress, choose)
    if "cache" in facts:
        recipe = cache_options.apply_choice(recipe, allocation, facts["cache"])
    return dataclasses.replace(job, recipe=recipe, allocation=facts)


def measure(job: Job, progress: Progress) -> tuple[Path, dict[str, Any]]:
    """Measure every option, and the damages that the recipe's allocator needs; return the folder, and facts as JSON."""
    if job.recipe.allocate is not None:  # what is measured serves every target
        allocation = dataclasses.replace(job.recipe.allocate, target=None, context=None)
        job = dataclasses.replace(job, recipe=dataclasses.replace(job.recipe, allocate=allocation))

    def describe(store: Measurements) -> tuple[Path, dict[str, Any]]:
        table = metrics.table(store, store.opened.needs)
        return store.database.folder, {
            "units": len(table.units),
            "options": len(table.options),
            "nbytes": store.database.nbytes,
            "nbytes per parameter": store.database.nbytes / table.numel,
            "damages": sorted(table.units[0].entries[0].damage),
            "scores": sorted(table.units[0].scores),
            **table.facts,
        }

    return run_on_measurements(job, progress, describe)
