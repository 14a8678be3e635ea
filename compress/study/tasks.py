"""Ask the cells of a study the tasks of a suite, as `compress eval` does, beside the original's answers.

The original answers once for the whole study: the first process that needs its answers holds a lock while it makes
them, and the others wait for the file. Tasks are made of the first text that is scored, in windows of the suite's
length, or of the study's if that is shorter.

Cells with a cache answer through it, as they are scored: contexts in one pass, as in `generate`, and the last token of
a context with the answer behind what the cache has stored. The original's cache is exact.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compress.errors import RecipeError
from compress.evaluate import answers, intervals, suite, task_runs, task_scores
from compress.evaluate.cache_candidates import open_reader
from compress.evaluate.items import Material, Outcome, Task
from compress.evaluate.reader import Execution, Reader
from compress.evaluate.scores import text_windows
from compress.model import load as lm
from compress.run.source import resolve
from compress.study.folder import StudyFolder
from compress.study.grid import Settings


def check(settings: Settings) -> None:
    """Raise CompressError for tasks that there are not, or that cannot be asked of this model; loads no weights."""
    if settings.suite is None and not settings.tasks:
        return
    suite.check(suite.SuiteRequest(settings.suite, settings.texts, settings.tasks))
    names = [each.partition("=")[0] for each in settings.tasks]
    if doubled := sorted(name for name in set(names) if names.count(name) > 1):
        raise RecipeError(f"--task {doubled[0]} is given twice; make it one file, so that figures can be told apart")
    if not _tasks_with_material(settings)[0]:
        raise RecipeError("no task has questions for this model: it reads too few tokens, or knows too few")


def measure(
    study: StudyFolder, settings: Settings, model: Path | None, has_cache: bool = False
) -> tuple[dict[str, list[dict[str, Any]]], float | None]:
    """Return the figures of each task under the name of the suite, and the seconds that they took.

    model: the checkpoint that is asked beside the original; None: the original alone. has_cache: through the cache that
    it stores. Nothing, and None, where no tasks were asked for.
    """
    if settings.suite is None and not settings.tasks:
        return {}, None
    made, stuff = _tasks_with_material(settings)
    original = _of_original(study, settings, made, stuff)
    begun = time.monotonic()
    if model is None:
        rows = [row(task, original[task.name]) for task in made]
    else:
        execution = Execution(settings.dtype, settings.device, bos=settings.bos)
        if has_cache:
            reader = open_reader(model, execution, {}, None)
        else:
            reader = Reader(lm.load_model(model, execution.dtype, execution.device))
        rows = [row(task, answers.score(reader, task, stuff), original[task.name]) for task in made]
    return {settings.suite or "tasks": rows}, round(time.monotonic() - begun, 2)


def _suite_request(settings: Settings) -> suite.SuiteRequest:
    size = suite.size_of(suite.SuiteRequest(settings.suite))
    return suite.SuiteRequest(settings.suite, settings.texts, settings.tasks, min(size.seq_len, settings.window))


def _tasks_with_material(settings: Settings) -> tuple[list[Task], Material]:
    """Return the tasks with their items, and what these are made of."""
    base, asked = resolve(settings.model), _suite_request(settings)
    size = suite.size_of(asked)
    cut = text_windows([base], asked.texts[0], size.seq_len, size.max_tokens, settings.bos)
    stuff = task_runs.material(lm.load_tokenizer(base), [lm.load_config(base)], cut.prefix, cut.tokens)
    return list(task_runs.tasks_with_items(asked.suite, asked.tasks, stuff)), stuff


def _of_original(
    study: StudyFolder, settings: Settings, made: Sequence[Task], stuff: Material
) -> Mapping[str, list[Outcome]]:
    """Return the original's answers by task; those that the study does not have yet are made and kept."""
    with study.hold_lock("answers/lock"):
        if missing := [task for task in made if study.answers(task) is None]:
            reader = Reader(lm.load_model(resolve(settings.model), settings.dtype, settings.device))
            for task in missing:
                study.keep_answers(task, answers.score(reader, task, stuff))
    return {task.name: study.answers(task) or [] for task in made}


def row(task: Task, outcomes: Sequence[Outcome], original: Sequence[Outcome] | None = None) -> dict[str, Any]:
    """Return the figures of a task; "paired" is what scores.json of `compress eval` has under this name."""
    scores = task_scores.of_task(task, outcomes, original)
    return {
        "task": task.name,
        "score": scores.accuracy,
        "se": intervals.share_error(sum(outcome.right for outcome in outcomes), len(outcomes)),
        "base": None if scores.paired is None else scores.paired.base_accuracy,
        "n": scores.items,
        "nll": scores.nll,
        "nll_se": scores.nll_se,
        "figures": dict(scores.figures),
        "paired": None if scores.paired is None else asdict(scores.paired),
        "by": scores.by,
        "groups": [asdict(group) for group in scores.groups],
    }
