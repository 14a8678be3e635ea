"""Make the tasks that are asked for, and let a model and its original answer them.

Everything goes through the original's tokenizer, so that both models read the same tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from compress import plugins
from compress.calib.prefix import Prefix
from compress.errors import CalibrationError, RecipeError
from compress.evaluate import answers, task_scores
from compress.evaluate.cache_scores import policies
from compress.evaluate.items import Material, Task, encode_with
from compress.evaluate.pair import Pair
from compress.evaluate.task_scores import TaskScore
from compress.model.architectures import max_positions
from compress.progress import Progress

SUITES = ("quick", "full")
UNLIMITED_TOKENS = 2048  # what a task may ask of a model without a limit


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
    known = [each.name for each in dataclasses.fields(module.Config)]
    if unknown := [key for key in given if key not in known]:
        raise RecipeError(plugins.unknown(f"setting of task {name}", unknown[0], known))
    try:
        config = module.Config(**given)
    except ValueError as error:
        raise RecipeError(f"task {name}: {error}") from error
    judges = {each: getattr(module, each, None) for each in ("correct", "figures", "remark")}
    return Task(name, module.WAY, module.items(config, material), **judges, by=getattr(module, "BY", ""))


def check_tasks(suite: str | None, names: Sequence[str]) -> None:
    """Raise RecipeError for a suite or a task that there is not; names: NAME or NAME=FILE."""
    if suite is not None:
        tasks_of(suite)
    for each in names:
        plugins.describe("task", each.partition("=")[0])


def material(tokenizer: Any, configs: Sequence[Any], begun: Prefix, windows: Tensor | None) -> Material:
    """Return what tasks make items of; tokenizer: the original's; configs: of the text models, the original's first.

    windows: of the user's first text, each of which begins with `begun`; None without one.
    """
    limits = [max_positions(config) or UNLIMITED_TOKENS for config in configs]

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    text = torch.zeros(0, 0, dtype=torch.long) if windows is None else windows[:, len(begun.tokens) :]
    return Material(
        encode_with(tokenizer),
        decode,
        begun.tokens,
        min(configs[0].vocab_size, len(tokenizer)),
        min(limits),
        text,
    )


def tasks_with_items(suite: str | None, names: Sequence[str], stuff: Material) -> Iterator[Task]:
    """Yield the tasks of a suite, with its settings, and those that are named: NAME or NAME=FILE.

    Those of the suite that have no items for these models are left out. Raises CalibrationError for one that is named.
    """
    named = {each.partition("=")[0] for each in names}
    of_suite = [] if suite is None else tasks_of(suite)
    for each in (*(name for name in of_suite if name not in named), *names):
        name, _, file = each.partition("=")
        made = task(name, stuff, suite, **({"file": file} if file else {}))
        if not made.items and each in names:
            more = "give more text with --text, or a model that reads more"
            raise CalibrationError(f"task {name} has no items here: {more}")
        if made.items:
            yield made


def ask(pair: Pair, task: Task, stuff: Material, progress: Progress) -> TaskScore:
    """Return the figures of a task that both models answer."""
    progress(f"{task.name}, original", 0, 0)
    original = answers.score(pair.base, task, stuff)
    progress(f"{task.name}, model", 0, 0)
    return task_scores.of_task(task, answers.score(pair.model, task, stuff), original)


def remarks(pair: Pair, tasks: Sequence[Task], stuff: Material, scores: Sequence[TaskScore]) -> Iterator[str]:
    """Yield what several tasks say together, a sentence each."""
    for remark in dict.fromkeys(task.remark for task in tasks if task.remark is not None):
        if sentence := remark(scores):
            yield sentence
    if sentence := _exact_contexts(pair, tasks, stuff):
        yield sentence


def _exact_contexts(pair: Pair, tasks: Sequence[Task], stuff: Material) -> str:
    """Return in a sentence which tasks a cache cannot change, because it keeps their contexts exact; "" for none."""
    held = pair.model.cache
    if held is None or held.settings.evict is not None or held.settings.read is not None:
        return ""
    codings = held.codings(pair.model.model.config)
    exact = min(policy.sink + policy.residual_length + policy.flush for policy in policies(codings))
    longest = {task.name: answers.longest_context(task, stuff) for task in tasks if task.way != "written"}
    short = [name for name, tokens in longest.items() if tokens <= exact]
    clause = f"contexts of at most {exact} tokens, which the cache {held.name} keeps exact"
    return f"{', '.join(short)}: {clause}, so that they show no loss of it" if short else ""
