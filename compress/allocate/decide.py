"""Turn a recipe that leaves bits open into one that says what every linear gets.

An allocator chooses among the measured options (compress/allocate/decision.py); the choice becomes rules of the recipe,
so that the rest of the program, and whoever runs the written recipe again, needs to know nothing of allocation.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from compress import ranks
from compress.allocate import kv_share, prepare_options
from compress.allocate.decision import decision
from compress.allocate.sensitivity import Measurements
from compress.allocate.session import led
from compress.errors import RecipeError, shown
from compress.progress import Progress
from compress.recipe import Recipe
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
        return ranks.by_main(lambda: kv_share.alone(asked, allocation, progress))
    target = allocation.target

    def made(store: Measurements) -> tuple[Recipe, dict[str, Any]]:
        facts = decision(store, store.opened.allocation, target)
        facts["predicted_peak"] = store.evaluators.predicted_peak
        return prepare_options.chosen(asked.recipe, facts.pop("choices"), store.opened.tables), facts

    recipe, facts = led(asked, progress, made)
    if "cache" in facts:
        recipe = kv_share.applied(recipe, allocation, facts["cache"])
    return dataclasses.replace(asked, recipe=recipe, allocation=facts)
