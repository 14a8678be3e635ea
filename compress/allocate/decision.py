"""Let an allocator choose from an opened table for a target, and describe what it chose."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from pathlib import Path
from typing import Any

from compress import plugins
from compress.allocate import cache_share, cache_store, metrics, times
from compress.allocate.problem import JOINT, KL_ONE_AT_A_TIME, Allocated, Problem
from compress.allocate.sensitivity import Measurements
from compress.allocate.table import SensitivityTable
from compress.errors import BudgetError, CheckpointError
from compress.recipe import fingerprint
from compress.recipe.schema import Allocation, Target
from compress.storage import json_text
from compress.storage.checkpoint import read_json, write_text
from compress.storage.json_text import INTEGER, OBJECT, TEXT

BUDGET_BISECTIONS = 12


def decide_target(store: Measurements, allocation: Allocation, target: Target) -> dict[str, Any]:
    """Return what is allocated, as JSON values; kept in the folder, so that a resumed run does not search again."""
    decided = dataclasses.replace(store.opened.job.recipe, allocate=dataclasses.replace(allocation, target=target))
    name = hashlib.sha256(json.dumps([fingerprint(decided), store.opened.job.seed]).encode()).hexdigest()[:16]
    path = store.database.folder / f"choice-{name}.json"
    if path.is_file():
        return _read(path, allocation)
    started = time.monotonic()
    cache, room = None, None
    if allocation.context is not None:
        opened, tokens, folder = store.opened, store.calibration.tokens, store.database.folder
        offer = cache_store.offer(opened.job, allocation, opened.prepared, tokens, folder, store.progress)
        weights = metrics.table(store, frozenset({KL_ONE_AT_A_TIME}))
        cache, room = cache_share.divide(offer, weights, target, allocation.cache_estimator)
    table, problem, result = solve(store, allocation, target, room)
    facts = describe(store, allocation, target, table, result)
    if cache is not None:
        facts |= {"cache": cache, "nbytes": facts["nbytes"] + cache["nbytes"]}
    facts["budget"] = problem.budget
    facts["seconds"] = round(time.monotonic() - started, 2)
    write_text(path, json.dumps(facts, indent=1) + "\n")
    return facts


def _read(path: Path, allocation: Allocation) -> dict[str, Any]:
    """Return what was allocated before; CheckpointError for a file that does not say it."""
    facts = read_json(path)
    layout = {"choices": {str: INTEGER}, "units": {str: TEXT}, "notes": [TEXT]}
    wrong = json_text.mismatch(facts, {**layout, **({} if allocation.context is None else {"cache": OBJECT})})
    count = len(allocation.options) + len(allocation.tables)
    if wrong or not all(0 <= option < count for option in facts["choices"].values()):
        raise CheckpointError(f"{path} is damaged, or of another version ({wrong or 'choices'}); remove it")
    return facts


def solve(
    store: Measurements, allocation: Allocation, target: Target, room: int | None = None
) -> tuple[SensitivityTable, Problem, Allocated]:
    """Let the allocator choose; room: bytes of all units, where a cache takes a part of the target. Raises BudgetError.

    Where the target is a divergence, the bytes are the fewest within it.
    """
    module = plugins.load("allocate", allocation.method)
    needs = module.needs(allocation.config)
    table = metrics.table(store, needs)
    bound = target.value if target.unit == "kl" else None
    if bound is not None:
        room = _smallest_room_within_kl(store, allocation, bound)
    if target.is_share:
        table, problem, original = times.problem(store, table, target)
    else:
        problem = table.problem(target) if room is None else table.problem_within(room)
    evaluator = metrics.evaluator(store, table) if JOINT in needs else None
    with store.database.writing():
        result: Allocated = module.allocate(problem, allocation.config, evaluator)
    if target.is_share:
        share = problem.nbytes(result.choice) / max(1, original)
        result = dataclasses.replace(result, facts={**result.facts, "share": share})
    if problem.nbytes(result.choice) > problem.budget:
        raise AssertionError(f"{allocation.method} went over its budget")
    if bound is not None:
        evaluator = metrics.evaluator(store, table)
        if (kl := evaluator.divergence([result.choice], range(evaluator.samples))[0]) > bound:
            raise BudgetError(
                f"{allocation.method} leaves a divergence of {kl:.4g} nats a token where the knapsack stays within "
                f"{bound:g}; use the knapsack, or give a target in bytes"
            )
    return table, problem, result


def _smallest_room_within_kl(store: Measurements, allocation: Allocation, bound: float) -> int:
    """Return the fewest bytes of all units whose choice stays within a divergence.

    They are found to 1 / 2^BUDGET_BISECTIONS of the range.
    """
    module, config = plugins.load("allocate", allocation.method), allocation.config
    if JOINT in module.needs(config):  # a search from the knapsack's answer ends no worse than that
        plain = without_search(allocation)
        module, config = plugins.load("allocate", plain.method), plain.config
    table = metrics.table(store, module.needs(config))
    evaluator = metrics.evaluator(store, table)
    empty = Problem(table.units, 0)
    everything = list(range(evaluator.samples))

    def kl(budget: int) -> float:
        try:
            choice = module.allocate(Problem(table.units, budget), config, None).choice
        except BudgetError:  # a method may need more than the least
            return math.inf
        return evaluator.divergence([choice], everything)[0]

    low, high = empty.least, empty.most
    if (best := kl(high)) > bound:
        raise BudgetError(
            f"the largest options leave a divergence of {best:.4g} nats a token, above the bound of {bound:g}; raise "
            "it, or offer larger options"
        )
    if kl(low) <= bound:
        high = low
    for _ in range(BUDGET_BISECTIONS):
        middle = (low + high) // 2
        low, high = (low, middle) if kl(middle) <= bound else (middle, high)
    return high


def without_search(allocation: Allocation) -> Allocation:
    """Return the allocation by a knapsack alone, which measures no choices."""
    if allocation.method == "knapsack":
        config = dataclasses.replace(allocation.config, rounds=0)
    else:
        config = plugins.load("allocate", "knapsack").Config(estimator=allocation.config.estimator)
    return dataclasses.replace(allocation, method="knapsack", config=config)


def describe(
    store: Measurements, allocation: Allocation, target: Target, table: SensitivityTable, result: Allocated
) -> dict[str, Any]:
    """Return the facts of an allocation, and the choices, as JSON values."""
    entries = [unit.entries[i] for unit, i in zip(table.units, result.choice, strict=True)]
    shares = {option: 0 for option in table.options}
    for unit, entry in zip(table.units, entries, strict=True):
        shares[entry.option] += unit.numel
    return {
        "method": allocation.method,
        "target": target.text,
        **({"with tables": True} if store.opened.tables else {}),  # in what the target counts
        "bpw": table.bpw(result.choice),
        "nbytes": table.nbytes(result.choice),
        "weights by option": {option: numel / sum(shares.values()) for option, numel in shares.items()},
        "units": {unit.name: entry.option for unit, entry in zip(table.units, entries, strict=True)},
        "measured on": {"tokens": table.tokens, **table.facts},
        "database_nbytes": store.database.nbytes,
        "notes": [*store.opened.notes, *result.notes],
        "trace": [dict(row) for row in result.trace],
        **result.facts,
        "choices": table.option_numbers(result.choice),
    }
