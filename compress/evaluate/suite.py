"""Run a suite: what `compress eval MODEL --base BASE --suite quick|full` measures, in one call.

A suite is every task whose SUITES names it, the divergence from the original on each text with the noise floor, a
search for what is broken (findings.py), and a few texts that both models write, to be read. Everything goes through the
original's tokenizer, so that both models read the same tokens; a tokenizer that differs is a finding. Where a cache is
named, texts and tasks are read through it, and the original without.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.calib import prefix
from compress.calib.documents import source_name
from compress.errors import RecipeError
from compress.evaluate import findings, task_runs
from compress.evaluate.generation import continue_side_by_side
from compress.evaluate.pair import compare_text, noise_floor, open_pair
from compress.evaluate.reader import Execution, readings
from compress.evaluate.scores import Comparison, text_windows
from compress.evaluate.task_scores import TaskScore
from compress.kv.settings import CacheSettings
from compress.progress import Progress, silent


@dataclass(frozen=True)
class Size:
    """How much of each text a suite scores."""

    seq_len: int
    max_tokens: int  # of each text


SIZES = {"quick": Size(256, 4096), "full": Size(512, 65_536)}


@dataclass(frozen=True)
class SuiteRequest:
    """What a suite is to measure."""

    suite: str | None = None  # "quick", "full", or None: `tasks` alone
    texts: tuple[str, ...] = ()  # to score; the first also lends text to tasks
    tasks: tuple[str, ...] = ()  # more tasks: NAME, or NAME=FILE for one that reads a file
    seq_len: int | None = None  # None: what the suite says
    max_tokens: int | None = None  # of each text; None: what the suite says
    kv: Mapping[str, CacheSettings] | None = None  # one cache by name; empty: the checkpoint's own; None: without one
    calib: str | None = None  # text for a cache that is calibrated
    are_texts_scored: bool = False  # without a suite, too


@dataclass(frozen=True)
class SuiteResult:
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
    lost: tuple[Mapping[str, Any], ...] = ()  # `pair.LostTokens.plain` of each text; none through a cache
    begins_with: str = ""  # what windows and questions begin with, by the tokenizer's name of it

    def plain(self) -> dict[str, Any]:
        """Return the result as JSON takes it."""
        values = dataclasses.asdict(self)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def check(asked: SuiteRequest) -> None:
    """Raise RecipeError for a suite or a task that there is not; quick, reads no model."""
    task_runs.check_tasks(asked.suite, asked.tasks)
    if asked.suite is not None and not asked.texts:
        raise RecipeError("a suite scores text; give --text FILE, better twice")


def size_of(asked: SuiteRequest) -> Size:
    """Return how much of each text is scored; of the first one, how much tasks are made of."""
    size = SIZES[asked.suite or "full"]
    return Size(asked.seq_len or size.seq_len, asked.max_tokens or size.max_tokens)


def run(
    directory: Path, base: Path, asked: SuiteRequest, execution: Execution, progress: Progress = silent
) -> SuiteResult:
    """Measure a model beside its original. Raises CheckpointError, CalibrationError, RecipeError or NumericalError."""
    check(asked)
    start, size = time.perf_counter(), size_of(asked)
    windows = [text_windows([base], text, size.seq_len, size.max_tokens, execution.bos) for text in asked.texts]
    pair = open_pair(directory, base, execution, asked.kv, asked.calib, progress)
    texts, lost, floor = [], [], {}
    if asked.suite is not None or asked.are_texts_scored:
        for source, cut in zip(asked.texts, windows, strict=True):
            comparison, lost_tokens = compare_text(pair, source_name(source), cut, progress)
            texts.append(comparison)
            lost += [] if lost_tokens is None else [lost_tokens.plain()]
    if asked.suite is not None:
        floor = noise_floor(pair, windows[0], execution, progress)
    begun = prefix.of_tokenizer(pair.tokenizers[0], execution.bos)
    stuff = task_runs.material(pair.tokenizers[0], pair.configs, begun, windows[0].tokens if windows else None)
    tasks = list(task_runs.tasks_with_items(asked.suite, asked.tasks, stuff))
    scores = [task_runs.ask(pair, task, stuff, progress) for task in tasks]
    defects = findings.find(pair, asked.texts, windows, progress) if windows else []
    written = []
    if asked.suite is not None:
        progress("writing", 0, 0)
        beginnings = [each.tokens for each in windows]
        written = continue_side_by_side(pair.base.model, pair.model.model, beginnings, stuff.decode)
    cache = pair.model.cache
    return SuiteResult(
        suite=asked.suite or "tasks",
        base=base.name,
        texts=tuple(texts),
        floor=floor,
        tasks=tuple(scores),
        findings=tuple(defects),
        remarks=tuple(task_runs.remarks(pair, tasks, stuff, scores)),
        seconds=time.perf_counter() - start,
        cache="" if cache is None else cache.name,
        cache_read="" if cache is None else readings(pair.model.model, cache).text,
        written=tuple(written),
        lost=tuple(lost),
        begins_with=begun.text,
    )
