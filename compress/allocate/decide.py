"""Turn a recipe that leaves bits open into one that says what every linear gets.

An allocator chooses among the measured options (compress/allocate/decision.py); the choice becomes rules of the recipe,
so that the rest of the program, and whoever runs the written recipe again, needs to know nothing of allocation.
"""

from __future__ import annotations

import dataclasses

from compress.allocate import kv_share, prepare_options
from compress.allocate.decision import decision
from compress.allocate.session import session
from compress.errors import RecipeError, shown
from compress.progress import Progress
from compress.run.job import Job


def is_open(asked: Job) -> bool:
    """Tell whether there is something to allocate; a run that only transforms has nothing."""
    return asked.recipe.allocate is not None and (asked.pack or not asked.recipe.packs)


def decided(asked: Job, progress: Progress) -> Job:
    """Return the job with its allocation made: a recipe without open bits, and the facts of it as `allocation`.

    A job without an allocation is returned as it is. Raises RecipeError without a target, BudgetError for one that
    cannot be met.
    """
    allocation = asked.recipe.allocate
    if allocation is None or not is_open(asked):
        return asked
    if allocation.target is None:
        raise RecipeError(
            f"recipe {shown(asked.recipe.name)} has no target; give --target 3.25bpw, 2.1GiB or --max-kl 0.05"
        )
    if not asked.recipe.packs:
        return kv_share.alone(asked, allocation, progress)
    with session(asked, progress) as store:
        facts = decision(store, store.opened.allocation, allocation.target)
        facts["predicted_peak"] = store.evaluators.predicted_peak
        recipe = prepare_options.chosen(asked.recipe, facts.pop("choices"), store.opened.tables)
    if "cache" in facts:
        recipe = kv_share.applied(recipe, allocation, facts["cache"])
    return dataclasses.replace(asked, recipe=recipe, allocation=facts)
