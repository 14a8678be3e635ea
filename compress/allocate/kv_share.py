"""Divide a target between the weights and the cache of a context.

Each layer's keys and each layer's values are units beside the units of weights, with damages in nats a token
(compress/allocate/kv_budget.py, `kl_one_at_a_time`), so that one knapsack divides the budget. The cache's share is
taken off the budget, and the recipe's own allocator spends the rest on weights. A recipe without `quantize` leaves the
weights as they are and has all the rest for the cache.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.allocate import kv_budget, kv_session, kv_tokens, metrics, prepare_options, table
from compress.allocate.prepare_options import Options
from compress.allocate.sensitivity import Measurements
from compress.errors import BudgetError
from compress.process_memory import parse_size, show
from compress.progress import Progress
from compress.recipe.schema import Allocation, Recipe, Target
from compress.run import calibration_text, prepare
from compress.run.job import Job
from compress.storage.workdir import writing


def beside(store: Measurements, allocation: Allocation, target: Target) -> tuple[dict[str, Any], Target]:
    """Return the facts of the cache's share of a target for both, and what is left for the weights.

    Raises BudgetError where the smallest options do not fit.
    """
    tokens, folder = store.calibration.tokens, store.database.folder
    offer = kv_session.offer(store.opened.asked, allocation, tokens, folder, store.progress)
    weights = metrics.table(store, frozenset({kv_budget.DIVERGENCE}))
    size, exact = parse_size(target.text), weights.other_nbytes + weights.fixed_nbytes
    nbytes, choice = kv_budget.divided(offer, weights.units, size - exact, allocation.cache_estimator)
    left = min(size - nbytes, weights.most_nbytes)  # there may be more than enough
    return kv_budget.described(offer, choice), Target(f"{left}B")


def check_room(opened: Options, target: Target, tokens: Tensor, folder: Path, progress: Progress) -> None:
    """Measure the cache, and raise BudgetError where its smallest options do not fit beside those of the weights."""
    offer = kv_session.offer(opened.asked, opened.allocation, tokens, folder, progress)
    sizes = table.assemble(opened, {}, {}, 0, {})
    kv_budget.joined(offer, sizes.units, parse_size(target.text) - sizes.other_nbytes - sizes.fixed_nbytes)


def alone(asked: Job, allocation: Allocation, progress: Progress) -> Job:
    """Decide a recipe that leaves the weights as they are: all that is left of the target is for the cache."""
    assert allocation.target is not None, "the caller has checked"
    prepared = prepare.prepare_all(asked, [asked.recipe], every=True)[0]
    room = parse_size(allocation.target.text) - prepared.plan.nbytes
    if room <= 0:
        raise BudgetError(
            f"the target {allocation.target.text} leaves nothing for the cache: the weights take "
            f"{show(prepared.plan.nbytes)}; raise it, or use a recipe that quantizes them"
        )
    folder = asked.measurements or prepare_options.folder_of(asked)
    with writing(folder, "--measurements"):
        calibration = calibration_text.calibration(asked, prepared, progress, folder / "calibration")
        assert calibration is not None, "measuring always has a text"
        offer = kv_session.offer(asked, allocation, calibration.tokens, folder, progress)
    nbytes, choice = kv_budget.divided(offer, (), room, allocation.cache_estimator)
    cache = kv_budget.described(offer, choice)
    facts = {
        "method": allocation.method,
        "target": allocation.target.text,
        "nbytes": prepared.plan.nbytes + nbytes,
        "cache": cache,
        "notes": [],
    }
    recipe = dataclasses.replace(asked.recipe, allocate=None)
    return dataclasses.replace(asked, recipe=applied(recipe, allocation, cache), allocation=facts)


def applied(recipe: Recipe, allocation: Allocation, facts: dict[str, Any]) -> Recipe:
    """Return the recipe with what the facts of a cache state: rules of its layers, and their shares of tokens."""
    assert recipe.kv_cache is not None, "the recipe was checked"
    options = kv_budget.options(recipe.kv_cache, allocation.cache_bits, allocation.cache_options)
    by_layer = {int(layer): by_kind for layer, by_kind in facts["layers"].items()}
    layers, named = facts["layers of the model"], {option.name: option.keep for option in options}
    cache = kv_budget.laid_out(recipe.kv_cache, by_layer, layers, options)
    shares = {layer: named[by_kind["keys"]] for layer, by_kind in by_layer.items()}
    cache = dataclasses.replace(cache, evict=kv_tokens.chosen(recipe.kv_cache, shares, layers))
    return dataclasses.replace(recipe, kv_cache=cache)
