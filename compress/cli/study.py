"""Measure many recipes on one model: `compress study`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.cli.options import (
    AsJson,
    Bos,
    ComputeDtype,
    Device,
    Dtype,
    Model,
    Seed,
    check_device,
    check_paths,
    device_named,
    errors,
    note,
    note_prefix,
    parse_memory,
    parse_time,
)
from compress.errors import RecipeError
from compress.storage import paths

if TYPE_CHECKING:
    from compress.study.folder import CellFolder, StudyFolder
    from compress.study.grid import Axes, Settings

RESUME = "; run the same command again to go on"

Out = Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Of the study; new, or to go on with.")]
Texts = Annotated[list[str], typer.Option("--text", metavar="SRC", help="Text to score; repeatable.")]
Recipes = Annotated[
    list[str] | None,
    typer.Option("--recipes", "-r", metavar="A,B", help="Recipes, patterns (int*) or files. Default: all built-in."),
]
Bits = Annotated[str | None, typer.Option(metavar="2,3", help="Bits, of recipes that have them.")]
Values = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=V1,V2", help="Values of a recipe's key, each a cell. Repeatable."),
]
Calib = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SRC", help="Calibration text; repeatable. self: the model writes it. Default: compress's own."
    ),
]
Samples = Annotated[str | None, typer.Option(metavar="16,64", help="Samples of calibration.")]
SeqLen = Annotated[str | None, typer.Option(metavar="256,512", help="Tokens of a sample of calibration.")]
Window = Annotated[int, typer.Option(min=2, help="Tokens of a scored window.")]
MaxTokens = Annotated[int, typer.Option(min=2, help="Tokens of each text to score, from its start.")]
Jobs = Annotated[int, typer.Option(min=1, help="Cells at a time.")]
CellTime = Annotated[
    str | None, typer.Option(metavar="TIME", help="Longest time of a cell: 30min. What takes longer has failed.")
]
MaxMemory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Limit for quantizing in each process. Default: what is free.")
]
Retry = Annotated[bool, typer.Option("--retry", help="Measure what has failed before once more.")]
Keep = Annotated[bool, typer.Option("--keep", help="Keep the checkpoints.")]
Timed = Annotated[bool, typer.Option("--speed", help="Also time each checkpoint.")]
Suite = Annotated[
    str | None, typer.Option(metavar="NAME", help="quick or full: ask each cell the tasks of this suite, too.")
]
Tasks = Annotated[
    list[str] | None,
    typer.Option("--task", metavar="NAME", help="Ask a task; NAME=FILE for one that reads a file. Repeatable."),
]


def study(
    model: Model,
    out: Out,
    text: Texts,
    recipes: Recipes = None,
    bits: Bits = None,
    overrides: Values = None,
    calib: Calib = None,
    samples: Samples = None,
    seq_len: SeqLen = None,
    window: Window = 512,
    max_tokens: MaxTokens = 32768,
    jobs: Jobs = 1,
    cell_time: CellTime = None,
    max_memory: MaxMemory = None,
    retry: Retry = False,
    keep: Keep = False,
    speed: Timed = False,
    suite: Suite = None,
    task: Tasks = None,
    bos: Bos = "auto",
    dtype: Dtype = "float32",
    quantize_dtype: ComputeDtype = None,
    device: Device = "auto",
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Quantize a model with many recipes, score each result once, and show all on one page.

    A study that was interrupted goes on when it is started again. With other recipes, values or calibration texts the
    same command adds to it.
    """
    with errors(RESUME):
        check_device(device)
        sources = [source for source in calib or () if source != paths.SELF]
        check_paths(model, *text, *sources)
        paths.check_apart(out, paths.local_model(model))
        paths.check_writable(out, "--out")
        limits = parse_time(cell_time, "--cell-time"), parse_memory(max_memory)
        from compress.study import grid
        from compress.study.grid import Axes, Settings

        axes = Axes(
            grid.match_recipes([name for names in recipes or () for name in grid.values(names)]),
            grid.values(bits) if bits else (),
            tuple(grid.axis(each) for each in overrides or ()),
            _sources(calib or [str(paths.default_text())]),
            _numbers(samples, "--samples"),
            _numbers(seq_len, "--seq-len"),
        )
        asked_tasks = tuple(_with_absolute_file(each) for each in task or ())
        rest = device_named(device), seed, limits[1], keep, speed, suite, asked_tasks, bos, quantize_dtype
        shared = Settings(_absolute(model), _sources(text), window, max_tokens, dtype, *rest)
        summary = _run(axes, shared, out, (jobs, limits[0], retry))
        if as_json:
            print(json.dumps(summary))
            return
        _print_end(summary, out)
        if summary["failed"] and not summary["cells"]:
            raise typer.Exit(1)


def _run(axes: Axes, shared: Settings, out: Path, how: tuple[int, float | None, bool]) -> dict[str, Any]:
    """Measure all cells; how: cells at a time, seconds of a cell, whether failed ones are measured again."""
    import torch

    from compress.calib import prefix
    from compress.evaluate.scores import text_windows
    from compress.importers import open_checkpoint
    from compress.model.fingerprint import fingerprint
    from compress.run.source import resolve
    from compress.study import folder as folders
    from compress.study import grid, runner, summary, tasks

    cells = grid.cells(axes)
    names = {Path(source).name for source in shared.texts}
    if len(names) < len(shared.texts):
        raise RecipeError("two texts to score have the same name; rename one, so that figures can be told apart")
    directory = resolve(shared.model)
    note_prefix(directory, shared.bos)
    begun = prefix.of_directory(directory, shared.bos)
    for source in shared.texts:  # what cannot be scored is known before anything is quantized
        text_windows([directory], source, shared.window, shared.max_tokens, shared.bos)
    tasks.check(shared)
    study_folder = folders.StudyFolder(out)
    begins_with = begun.text or begun.sentence  # without either, the study is that of a version that put nothing there
    identity = folders.identity(shared, fingerprint(open_checkpoint(directory)), begins_with)
    study_folder.open(identity)
    asked = [study_folder.ask(cell, shared, identity) for cell in cells]
    if how[2]:
        for each in asked:
            each.forget_failure()
    left = sum(each.result is None for each in asked)
    note(f"{len(asked)} cells, {left} of them to be measured; results in {out}")
    devices = torch.cuda.device_count() if shared.device == "cuda" else 0
    effort = runner.RunLimits(how[0], devices, how[1])
    try:
        runner.run(asked, effort, lambda cell: _note_result(cell, asked, study_folder))
    finally:
        result = summary.write(study_folder)
    return result


def _note_result(cell: CellFolder, asked: list[CellFolder], study_folder: StudyFolder) -> None:
    """Print what came of a cell, and bring the page up to date."""
    from compress.study import summary

    result = cell.result
    assert result is not None
    done = sum(each.result is not None for each in asked)
    note(f"{done} of {len(asked)}: {line(result)}")
    summary.write(study_folder)


def line(result: dict[str, Any]) -> str:
    """Return in a line what came of a cell."""
    from compress.cli.tables import size, time_text

    if result["status"] == "failed":
        return f"{result['label']} failed: {result['reason']}"
    parts = [size(result["nbytes"])]
    for row in result["texts"]:
        error = f" ± {row['kl_se']:.2g}" if row.get("kl_se") else ""
        loss = f"KL {row['kl_mean']:.5f}{error}, " if "kl_mean" in row else ""
        parts.append(f"{row['text']}: {loss}perplexity {row['perplexity']:.2f} ({row['tokens']:,} tokens)")
    seconds = result["cost"].get("seconds", 0.0) + result["cost"]["scoring_seconds"]
    return f"{result['label']}: {'; '.join(parts)}; {time_text(seconds)}"


def _print_end(summary: dict[str, Any], out: Path) -> None:
    """Print where the results are, and what is missing."""
    counts = f"{len(summary['cells'])} cells measured, {len(summary['failed'])} failed"
    waiting = f", {len(summary['pending'])} asked for earlier and not measured" if summary["pending"] else ""
    print(f"{out / 'study.html'}: {counts}{waiting}; study.json and study.csv beside it")
    for each in summary["failed"]:
        print(line(each))


def _absolute(source: str) -> str:
    """Return the absolute path of a file or directory; anything else as it is."""
    return os.path.abspath(source) if os.path.exists(source) else source


def _with_absolute_file(task: str) -> str:
    """Return NAME=FILE with the absolute path of the file; NAME as it is."""
    name, sign, file = task.partition("=")
    return f"{name}{sign}{_absolute(file)}"


def _sources(given: list[str]) -> tuple[str, ...]:
    """Return sources of text by absolute path, each once."""
    return tuple(dict.fromkeys(_absolute(source) for source in given))


def _numbers(text: str | None, option: str) -> tuple[int, ...]:
    from compress.study import grid

    if text is None:
        return ()
    values = grid.values(text)
    if not all(value.isdecimal() and int(value) > 0 for value in values):
        raise typer.BadParameter(f"{text!r} are no positive whole numbers such as 16,64", param_hint=option)
    return tuple(map(int, values))
