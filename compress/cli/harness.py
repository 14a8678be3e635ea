"""Run tasks of lm-evaluation-harness for `compress eval --tasks`, and show what they found."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import TYPE_CHECKING, Annotated

from typer import BadParameter, Option

from compress.cli.evaluation_options import note_prefix
from compress.cli.kept import keep
from compress.cli.options import check_base, check_model
from compress.cli.suites import BESIDE, beside

if TYPE_CHECKING:
    from compress.evaluate.task_scores import TaskScore
    from compress.recipe.schema import Bos

HEADS = ("task", "items", "right", "95%", "original", *BESIDE)

HarnessTasks = Annotated[
    str | None,
    Option(
        "--tasks",
        metavar="NAMES",
        help="Tasks of lm-evaluation-harness (package lm_eval), separated by commas: hellaswag,arc_easy or a .yaml.",
    ),
]
HarnessLimit = Annotated[int | None, Option("--limit", min=1, help="Documents of each of --tasks. Default: all.")]


def run(
    model: str, base: str | None, tasks: str, limit: int | None, execution: tuple[str, str, Bos], as_json: bool
) -> None:
    """Measure, keep the result beside the checkpoint, and print it. execution: dtype, device and --bos."""
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise BadParameter("name at least one task", param_hint="--tasks")
    check_model(model)
    check_base(model, base)
    from compress.calib import prefix
    from compress.cli import tables
    from compress.evaluate import harness, record
    from compress.evaluate.scores import Execution
    from compress.evaluate.suite import Result
    from compress.run.source import resolve

    dtype, device, bos = execution
    directories = [resolve(each) for each in (model, base) if each is not None]
    note_prefix(directories[0], bos)
    start = time.perf_counter()
    with tables.progress_bar() as progress:
        found = harness.evaluate(directories, names, Execution(dtype, device, bos=bos), limit, progress)
    if base is not None:
        seconds = time.perf_counter() - start
        result = Result(harness.WAY, directories[1].name, (), {}, tuple(found), (), (), seconds)
        result = dataclasses.replace(result, begins_with=prefix.of_directory(directories[1], bos).text)
        keep(directories[0], lambda: record.add(directories[0], suites=[result.plain()]))
    if as_json:
        print(json.dumps({"tasks": [dataclasses.asdict(each) for each in found]}))
        return
    tables.out.print(tables.columns(HEADS, [_row(each) for each in found]))


def _row(found: TaskScore) -> tuple[str, ...]:
    bounds = f"{found.accuracy_low:.1%} to {found.accuracy_high:.1%}"
    own = (found.task, str(found.items), f"{found.accuracy:.1%}", bounds)
    return (*own, *(beside(dataclasses.asdict(found.paired)) if found.paired is not None else [""] * 5))
