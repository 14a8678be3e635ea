"""From a recipe that leaves bits open to one that says what every linear gets.

What is measured (compress/allocate/quantize_options.py, compress/allocate/sensitivity.py) lies in a folder beside the
output and serves every budget; an allocator of compress/allocate chooses; the choice becomes rules of the recipe, so
that the rest of the program, and whoever runs the written recipe again, needs to know nothing of allocation.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compress import plugins, process_memory
from compress.allocate import joint_kl, kv_session, prepare_options, quantize_options, sensitivity
from compress.allocate import kv_budget as budget
from compress.allocate.problem import Allocated, Choice, Problem
from compress.allocate.table import Table
from compress.allocate.variants import FIXED, Database
from compress.errors import BudgetError, NotMeasuredError, RecipeError
from compress.progress import Progress
from compress.recipe import fingerprint
from compress.recipe.schema import KEEP, Allocation, Recipe, Target
from compress.run import calibration_text, memory_plan, prepare
from compress.run.job import Job
from compress.storage.checkpoint import read_json, write_text
from compress.storage.workdir import writing

JOINT = "joint"  # among what an allocator needs: it measures choices
BISECTIONS = 12  # of the budget, for a bound on the divergence


class Session:
    """An opened folder of measurements: the table, and a bench to measure choices on."""

    def __init__(self, opened: prepare_options.Options, database: Database, measured: sensitivity.Measured) -> None:
        self.opened, self.database, self.measured = opened, database, measured
        self.recipe = opened.asked.recipe

    def table(self, needs: frozenset[str]) -> Table:
        """The table with these damages; what is missing is measured first."""
        return self.measured.table(needs - {JOINT})

    def bench(self, found: Table, text: str | None = None, tokens: int = 0) -> Bench:
        """To measure choices with, on the calibration text or on the first `tokens` of another."""
        if not self.opened.asked.measures:
            raise NotMeasuredError(f"{self.database.folder} does not hold this choice")
        if text is None:
            return Bench(self, found, self.measured.judge())
        return Bench(self, found, self.measured.other_text(text, tokens))


class Bench:
    """The joint effect of choices on the predictions (`allocate.problem.Bench`)."""

    def __init__(self, session: Session, found: Table, judge: joint_kl.Candidates) -> None:
        self.table, self.candidates = found, judge
        self.samples, self.seq_len = judge.samples, judge.seq_len
        self.seed, self.folder = session.opened.asked.seed, session.database.folder
        self.fixed = {name: FIXED for name, levels in session.opened.levels.items() if FIXED in levels}
        self.say: Callable[[str], None] = session.measured.say
        self.max_memory = session.opened.asked.max_memory

    @property
    def tokens(self) -> int:
        """Scored at most."""
        return self.samples * self.seq_len

    @property
    def forwards(self) -> float:
        return self.candidates.forwards

    def divergence(self, choices: Sequence[Choice], samples: Sequence[int]) -> list[float]:
        """Nats a token; `samples`: numbers of calibration sequences."""
        found = self.candidates.divergence([self.assignment(choice) for choice in choices], samples)
        process_memory.check(self.max_memory)
        return found

    def assignment(self, choice: Choice) -> dict[str, Any]:
        """Linear -> level; what is kept is left out."""
        open_ = {name: str(number) for name, number in self.table.levels(choice).items()}
        return {**self.fixed, **{n: level for n, level in open_.items() if not self._is_kept(level)}}

    def _is_kept(self, level: str) -> bool:
        return self.table.options[int(level)] == KEEP


@contextmanager
def session(asked: Job, progress: Progress) -> Iterator[Session]:
    """Open, or make, the measurements of a recipe. Levels are complete when it is entered."""
    opened = prepare_options.options(asked)
    database = Database(asked.measurements or prepare_options.folder_of(asked))
    if not asked.measures and not database.is_begun:
        raise NotMeasuredError(f"{database.folder} does not exist")
    with writing(database.folder, "--measurements"):
        calibration = calibration_text.calibration(
            opened.asked, opened.prepared, progress, database.folder / "calibration"
        )
    assert calibration is not None, "measuring always has a text"
    prepared = dataclasses.replace(opened.prepared, samples=calibration.tokens.shape[0])
    opened = dataclasses.replace(opened, prepared=prepared)
    arrangement = memory_plan.first_arrangement(prepared.arrangement)
    with database.opened(prepare_options.measurement_identity(opened, calibration), arrangement):
        quantize_options.quantize_all(opened, database, calibration.tokens, progress)
        measured = sensitivity.Measured(opened, database, calibration, progress)
        try:
            yield Session(opened, database, measured)
        finally:
            measured.close()


def measured(asked: Job, progress: Progress) -> tuple[Path, dict[str, Any]]:
    """Make the levels, and the damages that the recipe's allocator needs; the folder, and facts as JSON values."""
    with session(asked, progress) as opened:
        settings = opened.opened.allocation
        found = opened.table(plugins.load("allocate", settings.method).needs(settings.config))
        parameters = sum(unit.numel for unit in found.units) + found.fixed_numel
        facts = {
            "units": len(found.units),
            "options": len(found.options),
            "nbytes": opened.database.nbytes,
            "nbytes per parameter": opened.database.nbytes / parameters,
            "damages": sorted(found.units[0].entries[0].damage),
            "scores": sorted(found.units[0].scores),
            **found.facts,
        }
        return opened.database.folder, facts


def is_open(asked: Job) -> bool:
    """Whether there is something to allocate; a run that only transforms has nothing."""
    return asked.recipe.allocate is not None and (asked.pack or not asked.recipe.packs)


def decided(asked: Job, progress: Progress) -> Job:
    """The job with its allocation made: its recipe says what every linear gets, its `allocation` how that came about.

    A job without an allocation is returned as it is. Raises RecipeError without a target, BudgetError for one that
    cannot be met.
    """
    allocation = asked.recipe.allocate
    if allocation is None or not is_open(asked):
        return asked
    if allocation.target is None:
        raise RecipeError(f"recipe {asked.recipe.name!r} has no target; give --target 3.25bpw, 2.1GiB or --max-kl 0.05")
    if not asked.recipe.packs:
        return _cache_only(asked, allocation, progress)
    with session(asked, progress) as opened:
        facts = decision(opened, allocation, allocation.target)
    recipe = prepare_options.chosen(asked.recipe, facts.pop("choices"))
    if "cache" in facts:
        recipe = _with_cache(recipe, allocation, facts["cache"])
    return dataclasses.replace(asked, recipe=recipe, allocation=facts)


def _cache_only(asked: Job, allocation: Allocation, progress: Progress) -> Job:
    """The same for a recipe that leaves the weights as they are: all that is left of the target is the cache's."""
    assert allocation.target is not None, "the caller has checked"
    prepared = prepare.prepare_all(asked, [asked.recipe], every=True)[0]
    folder = asked.measurements or prepare_options.folder_of(asked)
    with writing(folder, "--measurements"):
        calibration = calibration_text.calibration(asked, prepared, progress, folder / "calibration")
        assert calibration is not None, "measuring always has a text"
        offer = kv_session.offer(asked, allocation, calibration.tokens, folder, progress)
    room = process_memory.parse_size(allocation.target.text) - prepared.plan.nbytes
    nbytes, choice = kv_session.divided(offer, (), room, allocation.cache_estimator)
    cache = kv_session.described(offer, choice)
    facts = {
        "method": allocation.method,
        "target": allocation.target.text,
        "nbytes": prepared.plan.nbytes + nbytes,
        "cache": cache,
        "notes": [],
    }
    recipe = dataclasses.replace(asked.recipe, allocate=None)
    return dataclasses.replace(asked, recipe=_with_cache(recipe, allocation, cache), allocation=facts)


def _with_cache(recipe: Recipe, allocation: Allocation, facts: dict[str, Any]) -> Recipe:
    """The recipe with the bits of its cache as rules."""
    assert recipe.kv_cache is not None, "the recipe was checked"
    offered = kv_session.options(recipe.kv_cache, allocation.cache_bits)
    return dataclasses.replace(recipe, kv_cache=kv_session.applied(recipe.kv_cache, facts, offered))


def decision(opened: Session, allocation: Allocation, target: Target) -> dict[str, Any]:
    """What is allocated, as JSON values; kept in the folder, so that a run that goes on need not search again."""
    wanted = dataclasses.replace(opened.recipe, allocate=dataclasses.replace(allocation, target=target))
    name = hashlib.sha256(json.dumps([fingerprint(wanted), opened.opened.asked.seed]).encode()).hexdigest()[:16]
    path = opened.database.folder / f"choice-{name}.json"
    if path.is_file():
        return read_json(path)
    started = time.monotonic()
    cache = None
    weights = target
    if allocation.context is not None:
        cache, weights = beside_cache(opened, allocation, target)
    found, problem, result = solve(opened, allocation, weights)
    facts = described(opened, allocation, target, found, result)
    if cache is not None:
        facts |= {"cache": cache, "nbytes": facts["nbytes"] + cache["nbytes"]}
    facts["budget"] = problem.budget
    facts["seconds"] = round(time.monotonic() - started, 2)
    write_text(path, json.dumps(facts, indent=1) + "\n")
    return facts


def beside_cache(opened: Session, allocation: Allocation, target: Target) -> tuple[dict[str, Any], Target]:
    """What the cache gets of a target for both, and what is left for the weights. Raises BudgetError."""
    asked = dataclasses.replace(opened.opened.asked, recipe=opened.recipe)
    calibration, progress = opened.measured.calibration, opened.measured.progress
    offer = kv_session.offer(asked, allocation, calibration.tokens, opened.database.folder, progress)
    found = opened.table(frozenset({budget.SWAP}))
    size = process_memory.parse_size(target.text)
    room = size - found.other_nbytes - found.fixed_nbytes
    nbytes, choice = kv_session.divided(offer, found.units, room, allocation.cache_estimator)
    most = Problem(found.units, 0).most + found.other_nbytes + found.fixed_nbytes  # there may be more than enough
    return kv_session.described(offer, choice), Target(f"{min(size - nbytes, most)}B")


def solve(opened: Session, allocation: Allocation, target: Target) -> tuple[Table, Problem, Allocated]:
    """Let the allocator choose. Raises BudgetError."""
    module = plugins.load("allocate", allocation.method)
    needs = module.needs(allocation.config)
    found = opened.table(needs)
    bound = target.value if target.unit == "kl" else None
    if bound is not None:
        target = _within(opened, allocation, bound)
    problem = found.problem(target)
    bench = opened.bench(found) if JOINT in needs else None
    with writing(opened.database.folder, "--measurements"):
        result: Allocated = module.allocate(problem, allocation.config, bench)
    if problem.nbytes(result.choice) > problem.budget:
        raise AssertionError(f"{allocation.method} went over its budget")
    if bound is not None:
        judge = opened.bench(found)
        if (kl := judge.divergence([result.choice], range(judge.samples))[0]) > bound:
            raise BudgetError(
                f"{allocation.method} leaves a divergence of {kl:.4g} nats a token where the knapsack stays within "
                f"{bound:g}; use the knapsack, or give a target in bytes"
            )
    return found, problem, result


def _within(opened: Session, allocation: Allocation, bound: float) -> Target:
    """The smallest budget, to 1 / 2^BISECTIONS of the range, whose choice stays within a divergence."""
    module, config = plugins.load("allocate", allocation.method), allocation.config
    if JOINT in module.needs(config):  # a search from the knapsack's answer ends no worse than that
        module = plugins.load("allocate", "knapsack")
        config = module.Config(estimator=config.estimator)
    found = opened.table(module.needs(config))
    bench = opened.bench(found)
    empty = Problem(found.units, 0)
    everything = list(range(bench.samples))

    def kl(budget: int) -> float:
        try:
            choice = module.allocate(Problem(found.units, budget), config, None).choice
        except BudgetError:  # a method may need more than the least
            return math.inf
        return bench.divergence([choice], everything)[0]

    low, high = empty.least, empty.most
    if (best := kl(high)) > bound:
        raise BudgetError(
            f"the largest options leave a divergence of {best:.4g} nats a token, above the bound of {bound:g}; raise "
            "it, or offer larger options"
        )
    if kl(low) <= bound:
        high = low
    for _ in range(BISECTIONS):
        middle = (low + high) // 2
        low, high = (low, middle) if kl(middle) <= bound else (middle, high)
    return Target(f"{high + found.fixed_nbytes + found.other_nbytes}B")


def described(
    opened: Session, allocation: Allocation, target: Target, found: Table, result: Allocated
) -> dict[str, Any]:
    """The facts of an allocation, and the choices."""
    entries = [unit.entries[i] for unit, i in zip(found.units, result.choice, strict=True)]
    shares = {option: 0 for option in found.options}
    for unit, entry in zip(found.units, entries, strict=True):
        shares[entry.option] += unit.numel
    return {
        "method": allocation.method,
        "target": target.text,
        "bpw": found.bpw(result.choice),
        "nbytes": found.nbytes(result.choice),
        "weights by option": {option: numel / sum(shares.values()) for option, numel in shares.items()},
        "units": {unit.name: entry.option for unit, entry in zip(found.units, entries, strict=True)},
        "measured on": {"tokens": found.tokens, **found.facts},
        "database_nbytes": opened.database.nbytes,
        "notes": list(result.notes),
        "trace": [dict(row) for row in result.trace],
        **{key: value for key, value in result.facts.items()},
        "choices": found.levels(result.choice),
    }
