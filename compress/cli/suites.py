"""Run suites and tasks for `compress eval`, and show what they found."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from compress.cli.evaluation_options import note_prefix
from compress.cli.kept import keep
from compress.cli.options import check_base, check_paths, note
from compress.errors import CalibrationError

if TYPE_CHECKING:
    from compress.evaluate.scores import Execution
    from compress.kv.settings import CacheSettings
    from compress.recipe.schema import Bos

GROUPS = ("items", "right", "original", "NLL", "original's")
SCORES = ("text", "tokens", "KL, nats a token", "perplexity", "original", "other top-1")
BESIDE = ("difference, 95%", "lost, gained", "p", "changed")
TASKS = ("task", "items", "right", "original", *BESIDE, "NLL", "less the original's, 95%")

Texts = Annotated[
    list[str] | None,
    Option("--text", metavar="FILE", help="Text to score; never the calibration text. With --suite repeatable."),
]
Suite = Annotated[
    str | None, Option(metavar="NAME", help="quick or full: texts, tasks, noise floor, defects; with --base.")
]
Tasks = Annotated[
    list[str] | None,
    Option("--task", metavar="NAME", help="Run a task; NAME=FILE for one that reads a file. Repeatable, with --base."),
]
Choices = Annotated[
    Path | None, Option(metavar="FILE", help="Multiple-choice questions, JSON lines: question, choices, answer.")
]


@dataclass(frozen=True)
class Asked:
    """The options of a suite as they were given."""

    suite: str | None
    tasks: Sequence[str]
    choices: Path | None
    texts: Sequence[str]
    seq_len: int | None
    max_tokens: int | None
    kv: Mapping[str, CacheSettings] | None = None  # one cache by name; empty: the checkpoint's own; None: without one
    calib: str | None = None  # text for it

    @property
    def is_any(self) -> bool:
        """Whether a suite or a task is asked for."""
        return bool(self.suite or self.tasks or self.choices)


def one_text(texts: Sequence[str]) -> str | None:
    """Return the only text, None for none; wrong usage for several without a suite."""
    if len(texts) > 1:
        raise typer.BadParameter("give one text, or --suite quick, which scores several", param_hint="--text")
    return texts[0] if texts else None


def run(model: str, base: str | None, asked: Asked, execution: tuple[str, str, Bos], as_json: bool) -> None:
    """Measure, keep the result beside the checkpoint, and print it. execution: dtype, device and --bos."""
    if base is None and asked.kv is not None:
        base = model
    if base is None:
        raise typer.BadParameter("name the uncompressed model that the tasks compare with", param_hint="--base")
    check_paths(model, *asked.texts, asked.calib)
    check_base(model, base)
    if asked.choices is not None and not asked.choices.is_file():
        raise CalibrationError(f"{asked.choices} is not a file; give questions as JSON lines")
    from compress.cli import tables
    from compress.evaluate import Execution, record
    from compress.evaluate import suite as suites
    from compress.run.source import resolve

    tasks = [*asked.tasks, *([f"choices={asked.choices}"] if asked.choices else [])]
    how_much = asked.seq_len, asked.max_tokens
    what = suites.Asked(asked.suite, tuple(asked.texts), tuple(tasks), *how_much, asked.kv, asked.calib)
    suites.check(what)
    directory, original = resolve(model), resolve(base)
    note_prefix(original, execution[2])
    how: Execution = Execution(dtype=execution[0], device=execution[1], bos=execution[2])
    with tables.progress_bar() as progress:
        found = suites.run(directory, original, what, how, progress).plain()
    keep(directory, lambda: record.add(directory, suites=[found]))
    if as_json:
        print(json.dumps(found))
        return
    _show(found)


def _show(found: dict[str, Any]) -> None:
    """Print a result for people."""
    from compress.cli import tables
    from compress.pages.suite import half_of_loss

    if found["texts"]:
        tables.out.print(tables.columns(SCORES, [_score(row) for row in found["texts"]]))
    for each in found["lost"]:
        print(half_of_loss(each))
    if found["cache"]:
        print(f"read through the cache {found['cache']}, {found['cache_read']}")
    if found["floor"]:
        print(f"KL of {found['floor']['kl_mean']:.2g} is rounding: {found['floor']['path']}")
    _show_tasks(found["tasks"], found["remarks"])
    for each in found["findings"]:
        note(f"looks broken: {each}")
    if not found["findings"] and found["texts"]:
        print("no layer and no tokenizer looks broken")


def _show_tasks(tasks: Sequence[dict[str, Any]], remarks: Sequence[str]) -> None:
    """Print tasks beside the original, and what some of them have for each depth or the like."""
    from compress.cli import tables

    if tasks:
        print()
        tables.out.print(tables.columns(TASKS, [_row(row) for row in tasks]))
        print("lost, gained: items that only the original, only the model has right; p: of McNemar's exact test")
    for each in remarks:
        print(each)
    for row in tasks:
        if row["groups"]:
            print(f"\n{row['task']} by {row['by']}")
            tables.out.print(tables.columns((row["by"], *GROUPS), [_group(each) for each in row["groups"]]))


def _score(row: dict[str, Any]) -> tuple[str, ...]:
    error = f" ± {row['kl_se']:.5f}" if row["kl_se"] is not None else ""
    perplexities = (f"{row[key]:.3f}" for key in ("perplexity", "base_perplexity"))
    own = row["text"], f"{row['tokens']:,}", f"{row['kl_mean']:.5f}{error}"
    return (*own, *perplexities, f"{1 - row['same_top1']:.1%}")


def _group(row: dict[str, Any]) -> tuple[str, ...]:
    shares = (f"{row['accuracy']:.1%}", f"{row['base_accuracy']:.1%}")
    losses = ("" if each is None else f"{each:.3f}" for each in (row["nll"], row["base_nll"]))
    return (str(row["value"]), str(row["items"]), *shares, *losses)


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    from compress.pages.suite import nll_difference

    paired = row["paired"]
    loss = "" if row["nll"] is None else f"{row['nll']:.3f}"
    own = row["task"], str(row["items"]), f"{row['accuracy']:.1%}"
    return (*own, *beside(paired), loss, nll_difference(paired) or "")


def beside(paired: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the original's share of right items, and what the columns of BESIDE say of the difference."""
    from compress.pages.suite import difference

    counts = f"{paired['lost']}, {paired['gained']}", f"{paired['p_value']:.2g}"
    return (f"{paired['base_accuracy']:.1%}", difference(paired), *counts, f"{paired['all_flips']:.1%}")
