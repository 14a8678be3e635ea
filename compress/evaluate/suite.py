"""Run a suite: what `compress eval MODEL --base BASE --suite quick|full` measures, in one call.

A suite is every task whose SUITES names it, the divergence from the original on each text, a search for what is broken
(diagnosis.py, tokenizers.py), and a few texts that both models write, to be read. Everything goes through the
original's tokenizer, so that both models read the same tokens; a tokenizer that differs is a finding. Where a cache is
named, texts and tasks are read through it, and the original without: its own cache is exact.

The noise floor is the KL of the original to itself in another number type, weights and arithmetic both: bfloat16 beside
float32 (float32 where the scores are in another type), on the first windows of the first text. A difference of that
size is rounding, and says nothing of the compression.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress import plugins
from compress.calib import prefix
from compress.calib.documents import documents, source_name
from compress.calib.prefix import Prefix
from compress.errors import CalibrationError, CheckpointError, RecipeError, UnsupportedModelError
from compress.evaluate import (
    answers,
    cache,
    diagnosis,
    findings,
    lost_tokens,
    side_by_side,
    task_scores,
    tokenizers,
)
from compress.evaluate.cache_candidates import check as check_cache
from compress.evaluate.cache_candidates import with_cache
from compress.evaluate.cache_reading import readings
from compress.evaluate.cache_scores import Candidate, policies
from compress.evaluate.items import Material, Task
from compress.evaluate.scores import (
    Comparison,
    Execution,
    TextWindows,
    positions,
    summary,
    text_windows,
    windows_at_a_time,
)
from compress.evaluate.task_scores import TaskScore
from compress.kv import generation
from compress.kv.settings import CacheSettings
from compress.model import load as lm
from compress.model.positions import max_positions
from compress.progress import Progress, silent

FLOOR_WINDOWS = 4  # of the first text
READING = 2048  # tokens that a task may ask of a model without a limit
DIAGNOSED = (4, 128)  # windows and tokens of each that parts are compared on


@dataclass(frozen=True)
class Size:
    """How much of each text a suite scores."""

    seq_len: int
    max_tokens: int  # of each text


SIZES = {"quick": Size(256, 4096), "full": Size(512, 65_536)}
SUITES = tuple(SIZES)


@dataclass(frozen=True)
class Asked:
    """What is to be measured."""

    suite: str | None = None  # "quick", "full", or None: `tasks` alone
    texts: tuple[str, ...] = ()  # to score; the first also lends text to tasks
    tasks: tuple[str, ...] = ()  # more tasks: NAME, or NAME=FILE for one that reads a file
    seq_len: int | None = None  # None: what the suite says
    max_tokens: int | None = None  # of each text; None: what the suite says
    kv: Mapping[str, CacheSettings] | None = None  # one cache by name; empty: the checkpoint's own; None: without one
    calib: str | None = None  # text for a cache that is calibrated


@dataclass(frozen=True)
class Result:
    """What a suite has found of a model beside its original; `plain()` is what scores.json keeps under "suites"."""

    suite: str  # "tasks" without one
    base: str  # name of the original
    texts: tuple[Comparison, ...]
    floor: Mapping[str, Any]  # "kl_mean" of the original to itself, "path": how, "tokens"; empty without texts
    tasks: tuple[TaskScore, ...]
    findings: tuple[str, ...]  # what looks broken, a sentence each; empty for a sound model
    remarks: tuple[str, ...]  # what several tasks say together, a sentence each
    seconds: float
    cache: str = ""  # name of the cache that the model was read through; "" for none
    cache_read: str = ""  # how it was read
    written: tuple[Mapping[str, str], ...] = ()  # "prompt", and what "base" and "model" write behind it
    lost: tuple[Mapping[str, Any], ...] = ()  # `lost_tokens.Lost.plain` of each text; none through a cache
    begins_with: str = ""  # what windows and questions begin with, by the tokenizer's name of it

    def plain(self) -> dict[str, Any]:
        """Return the result as JSON takes it."""
        values = dataclasses.asdict(self)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


@dataclass(frozen=True)
class Models:
    """Two loaded models with their tokenizers: the original and the compressed one."""

    directories: tuple[Path, Path]  # base, model
    base: Any
    model: Any
    tokenizers: tuple[Any, Any]
    cache: Candidate | None = None  # that the compressed one is read through

    @property
    def make_cache(self) -> answers.MakeCache | None:
        """What makes fresh caches for the compressed model."""
        return None if self.cache is None else partial(self.cache.as_generated, self.model.config)

    @property
    def names(self) -> list[str]:
        """The names of model and base, in this order, which is that of the scores."""
        return [directory.name for directory in self.directories[::-1]]


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


def check(asked: Asked) -> None:
    """Raise RecipeError for a suite or a task that there is not; quick, reads no model."""
    if asked.suite is not None:
        tasks_of(asked.suite)
    for each in asked.tasks:
        plugins.describe("task", each.partition("=")[0])
    if asked.suite is not None and not asked.texts:
        raise RecipeError("a suite scores text; give --text FILE, better twice")


def open_models(directory: Path, base: Path, execution: Execution, asked: Asked, say: Progress) -> Models:
    """Load a model and its original. CheckpointError where they cannot be compared: other numbers of token ids."""
    sizes = [lm.load_config(each).vocab_size for each in (base, directory)]
    if sizes[0] != sizes[1]:
        raise CheckpointError(
            f"{base.name} knows {sizes[0]:,} token ids, {directory.name} {sizes[1]:,}; predictions over other tokens "
            "cannot be compared"
        )
    if asked.kv is not None:
        check_cache(directory, asked.kv, asked.calib)
    both = (base, directory)
    words = lm.load_tokenizer(base), lm.load_tokenizer(directory)
    original = lm.load_model(base, execution.dtype, execution.device)
    if asked.kv is None:
        return Models(both, original, lm.load_model(directory, execution.dtype, execution.device), words)
    generation.detach(original)  # the exact cache, where the original stores another one
    model, found = with_cache(directory, execution, asked.kv, asked.calib, say)
    return Models(both, original, model, words, found)


def size_of(asked: Asked) -> Size:
    """Return how much of each text is scored; of the first one, how much tasks are made of."""
    size = SIZES[asked.suite or "full"]
    return Size(asked.seq_len or size.seq_len, asked.max_tokens or size.max_tokens)


def material(tokenizer: Any, configs: Sequence[Any], begun: Prefix, windows: Tensor | None) -> Material:
    """Return what tasks make items of; tokenizer: the original's; configs: of the text models, the original's first.

    windows: of the user's first text, each of which begins with `begun`; None without one.
    """
    limits = [max_positions(config) or READING for config in configs]

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    text = torch.zeros(0, 0, dtype=torch.long) if windows is None else windows[:, len(begun.tokens) :]
    return Material(
        tokenizers.encode_with(tokenizer),
        decode,
        begun.tokens,
        min(configs[0].vocab_size, len(tokenizer)),
        min(limits),
        text,
    )


def tasks_with_items(asked: Asked, stuff: Material) -> Iterator[Task]:
    """Give the tasks that are asked for, with the settings of the suite.

    Those of the suite that have no items for these models are left out. Raises CalibrationError for one that is named.
    """
    named = {each.partition("=")[0] for each in asked.tasks}
    of_suite = [] if asked.suite is None else tasks_of(asked.suite)
    for each in (*(name for name in of_suite if name not in named), *asked.tasks):
        name, _, file = each.partition("=")
        made = task(name, stuff, asked.suite, **({"file": file} if file else {}))
        if not made.items and each in asked.tasks:
            more = "give more text with --text, or a model that reads more"
            raise CalibrationError(f"task {name} has no items here: {more}")
        if made.items:
            yield made


def run(directory: Path, base: Path, asked: Asked, execution: Execution, progress: Progress | None = None) -> Result:
    """Measure a model beside its original. Raises CheckpointError, CalibrationError, RecipeError or NumericalError."""
    check(asked)
    say, start, size = progress or silent, time.perf_counter(), size_of(asked)
    windows = [text_windows([base], text, size.seq_len, size.max_tokens, execution.bos) for text in asked.texts]
    models = open_models(directory, base, execution, asked, say)
    scored = asked.suite is not None
    read = zip(asked.texts, windows, strict=True) if scored else ()
    texts, lost = zip(*(_compare(models, text, each, say) for text, each in read), strict=True) if scored else ((), ())
    floor = _floor(models, windows[0], execution, say) if scored else {}
    configs = [model.config.get_text_config() for model in (models.base, models.model)]
    begun = prefix.of_tokenizer(models.tokenizers[0], execution.bos)
    stuff = material(models.tokenizers[0], configs, begun, windows[0].tokens if windows else None)
    asked_tasks = list(tasks_with_items(asked, stuff))
    tasks = [_task(models, each, stuff, say) for each in asked_tasks]
    found = _findings(models, asked.texts, windows, say) if windows else []
    written = tuple(_written(models, [each.tokens for each in windows], stuff, say) if scored else ())
    return Result(
        asked.suite or "tasks",
        base.name,
        texts,
        floor,
        tuple(tasks),
        tuple(found),
        tuple(_remarks(models, asked_tasks, stuff, tasks)),
        time.perf_counter() - start,
        *(("", "") if models.cache is None else (models.cache.name, readings(models.model, models.cache).text)),
        written,
        tuple(each.plain() for each in lost if each is not None),
        begun.text,
    )


def _compare(models: Models, text: str, cut: TextWindows, say: Progress) -> tuple[Comparison, lost_tokens.Lost | None]:
    """Return the scores of a text, and where they were lost; None for that through a cache."""
    if models.cache is not None:
        return cache.compared(models.model, models.base, models.cache, cut, source_name(text), say), None
    windows, unscored = cut.tokens, cut.prefix.unscored
    pair = [models.model, models.base]
    batch, figures = windows_at_a_time(pair, windows.shape[1]), []
    for begin in range(0, len(windows), batch):
        figures.append(positions(pair, models.names, windows[begin : begin + batch]))
        say(f"scoring {source_name(text)}", min(begin + batch, len(windows)), len(windows))
    joined = torch.cat(figures, 1).view(4, len(windows), windows.shape[1] - 1)[..., unscored:]
    found = summary(joined, source_name(text), windows.shape[1], cut.prefix.text)
    assert isinstance(found, Comparison)
    return found, lost_tokens.find(
        pair, models.names, windows, joined[2], source_name(text), models.tokenizers[0].decode
    )


def _floor(models: Models, cut: TextWindows, execution: Execution, say: Progress) -> dict[str, Any]:
    """Return the KL of the original to itself in another number type."""
    say("measuring the noise floor", 0, 0)
    own = str(models.base.dtype).removeprefix("torch.")
    other_dtype = "bfloat16" if own == "float32" else "float32"
    other = lm.load_model(models.directories[0], other_dtype, execution.device)
    windows = cut.tokens[:FLOOR_WINDOWS]
    figures = [
        positions([other, models.base], [models.directories[0].name] * 2, part)
        for part in windows.split(windows_at_a_time([other, models.base], windows.shape[1]))
    ]
    joined = torch.cat(figures, 1).view(4, len(windows), windows.shape[1] - 1)[..., cut.prefix.unscored :]
    return {
        "kl_mean": float(joined[2].mean()),
        "same_top1": float(joined[3].mean()),
        "tokens": joined[0].numel(),
        "path": f"the original in {other_dtype} against itself in {own}",
    }


def _task(models: Models, made: Task, stuff: Material, say: Progress) -> TaskScore:
    """Return the figures of a task."""
    say(f"{made.name}, original", 0, 0)
    original = answers.score(models.base, made, stuff)
    say(f"{made.name}, model", 0, 0)
    own = answers.score(models.model, made, stuff, models.make_cache)
    return task_scores.of_task(made, own, original)


def _remarks(models: Models, tasks: Sequence[Task], stuff: Material, scores: Sequence[TaskScore]) -> Iterator[str]:
    """Yield what several tasks say together, a sentence each."""
    for remark in dict.fromkeys(task.remark for task in tasks if task.remark is not None):
        if sentence := remark(scores):
            yield sentence
    if sentence := _exact_contexts(models, tasks, stuff):
        yield sentence


def _exact_contexts(models: Models, tasks: Sequence[Task], stuff: Material) -> str:
    """Return in a sentence which tasks a cache cannot change, because it keeps their contexts exact; "" for none."""
    held = models.cache
    if held is None or held.settings.evict is not None or held.settings.read is not None:
        return ""
    codings = held.codings(models.model.config)
    exact = min(policy.sink + policy.residual_length + policy.flush for policy in policies(codings))
    longest = {task.name: answers.longest_context(task, stuff) for task in tasks if task.way != "written"}
    short = [name for name, tokens in longest.items() if tokens <= exact]
    said = f"contexts of at most {exact} tokens, which the cache {held.name} keeps exact"
    return f"{', '.join(short)}: {said}, so that they show no loss of it" if short else ""


def _written(models: Models, windows: Sequence[Tensor], stuff: Material, say: Progress) -> list[dict[str, str]]:
    """Return what both models write behind the beginnings of windows."""
    say("writing", 0, 0)
    return side_by_side.continued(models.base, models.model, windows, stuff.decode)


def _findings(models: Models, texts: Sequence[str], windows: Sequence[TextWindows], say: Progress) -> list[str]:
    """Return what looks broken, a sentence each."""
    say("comparing layers", 0, 0)
    sample = next(documents(texts[0]), "")
    found = [tokenizers.finding(models.tokenizers[0], models.tokenizers[1], models.model, sample)]
    count, length = DIAGNOSED
    parts = torch.cat([each.tokens[:count, :length] for each in windows])
    try:
        found += findings.sentences(diagnosis.compare(models.base, models.model, parts[:: len(windows)]))
    except UnsupportedModelError as error:
        found.append(f"layers could not be compared one by one: {error}")
    return [each for each in found if each]
