"""Divide a target between the weights and the cache of a context.

Each layer's keys and each layer's values are units beside the units of weights, with damages in nats a token
(compress/allocate/cache_units.py, `kl_one_at_a_time`), so that one knapsack divides the budget. The cache's share is
taken off the budget, and the recipe's own allocator spends the rest on weights. A recipe without `quantize` leaves the
weights as they are and has all the rest for the cache.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.allocate import cache_options, cache_store, cache_units, table, variants
from compress.allocate.prepare_options import Options
from compress.allocate.table import SensitivityTable
from compress.errors import BudgetError
from compress.process_memory import show
from compress.progress import Progress
from compress.recipe.schema import Allocation, CacheEstimator, Target
from compress.run import calibration_text, prepare
from compress.run.job import Job
from compress.storage.workdir import check_owner, writing


def divide(
    offer: cache_units.CacheOffer, weights: SensitivityTable, target: Target, estimator: CacheEstimator
) -> tuple[dict[str, Any], int]:
    """Return the facts of the cache's share of a target for both, and the bytes that are left for the weights' units.

    weights: with damages in nats a token. Raises BudgetError where the smallest options do not fit.
    """
    room = weights.room(target)
    nbytes, choice = cache_units.divide(offer, weights.units, room, estimator)
    return cache_units.describe(offer, choice), room - nbytes


def check_room(opened: Options, target: Target, tokens: Tensor, folder: Path, progress: Progress) -> None:
    """Measure the cache, and raise BudgetError where its smallest options do not fit beside those of the weights."""
    offer = cache_store.offer(opened.job, opened.allocation, opened.prepared, tokens, folder, progress)
    sizes = table.assemble(opened, {}, {}, 0, {})
    cache_units.join(offer, sizes.units, sizes.room(target))


def decide_cache(job: Job, allocation: Allocation, target: Target, progress: Progress) -> Job:
    """Decide a recipe that leaves the weights as they are: all that is left of the target is for the cache."""
    prepared = prepare.prepare_all(job, [job.recipe], every=True)[0]
    room = target.nbytes - prepared.plan.nbytes
    if room <= 0:
        raise BudgetError(
            f"the target {target.text} leaves nothing for the cache: the weights take "
            f"{show(prepared.plan.nbytes)}; raise it, or use a recipe that quantizes them"
        )
    folder = job.measurements or variants.folder_of(job)
    with writing(folder, "--measurements"):
        calibration = calibration_text.calibration(job, prepared, progress, folder / "calibration")
        assert calibration is not None, "measuring always has a text"
        if folder.exists():
            check_owner(folder, "--measurements")
        offer = cache_store.offer(job, allocation, prepared, calibration.tokens, folder, progress)
    nbytes, choice = cache_units.divide(offer, (), room, allocation.cache_estimator)
    cache = cache_units.describe(offer, choice)
    facts = {
        "method": allocation.method,
        "target": target.text,
        "nbytes": prepared.plan.nbytes + nbytes,
        "cache": cache,
        "notes": [],
    }
    recipe = cache_options.apply_choice(dataclasses.replace(job.recipe, allocate=None), allocation, cache)
    return dataclasses.replace(job, recipe=recipe, allocation=facts)
