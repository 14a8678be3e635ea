"""Run a suite: what `compress eval MODEL --base BASE --suite quick|full` measures, in one call.

A suite is every task whose SUITES names it, with the texts and the checks that go with the suite's size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compress import plugins
from compress.errors import RecipeError
from compress.evaluate.items import Material, Task
from compress.evaluate.scores import Comparison, Execution
from compress.evaluate.task_scores import TaskScore
from compress.progress import Progress

SUITES = ("quick", "full")


def tasks_of(suite: str) -> list[str]:
    """Return the names of the tasks of a suite, sorted; RecipeError for an unknown suite."""
    if suite not in SUITES:
        raise RecipeError(plugins.unknown("suite", suite, SUITES))
    return [name for name in plugins.names("task") if suite in plugins.constant("task", name, "SUITES")]


def task(name: str, material: Material, suite: str | None = None, **settings: object) -> Task:
    """Return a task with its items, with the settings of a suite and those given here.

    RecipeError for an unknown task or impossible settings.
    """
    module = plugins.load("task", name)
    given = {**(module.SUITES.get(suite, {}) if suite else {}), **settings}
    known = [each for each in module.Config.__dataclass_fields__]
    for key in given:
        if key not in known:
            raise RecipeError(plugins.unknown(f"setting of task {name}", key, known))
    try:
        config = module.Config(**given)
    except ValueError as error:
        raise RecipeError(f"task {name}: {error}") from error
    return Task(name, module.WAY, module.items(config, material), getattr(module, "correct", None))


@dataclass(frozen=True)
class Asked:
    """What is to be measured."""

    suite: str | None = None  # "quick", "full", or None: `tasks` alone
    texts: tuple[str, ...] = ()  # to score; the first also lends text to tasks
    tasks: tuple[str, ...] = ()  # more tasks: NAME, or NAME=FILE for one that reads a file
    seq_len: int = 512
    max_tokens: int | None = None  # of each text; None: what the suite says


@dataclass(frozen=True)
class Result:
    """What a suite has found of a model beside its original; `plain()` is what scores.json keeps under "suites"."""

    suite: str
    base: str  # name of the original
    texts: tuple[Comparison, ...]
    floor: Mapping[str, Any]  # KL of the original to itself through another numerical path, and which path that is
    tasks: tuple[TaskScore, ...]
    findings: tuple[str, ...]  # what looks broken, a sentence each; empty for a sound model
    seconds: float
    extra: Mapping[str, Any] = field(default_factory=dict)  # what other parts add, by their names

    def plain(self) -> dict[str, Any]:
        """Return the result as JSON takes it."""
        raise NotImplementedError


def run(directory: Path, base: Path, asked: Asked, execution: Execution, progress: Progress | None = None) -> Result:
    """Measure a model beside its original. Raises CheckpointError, CalibrationError, RecipeError or NumericalError."""
    raise NotImplementedError
