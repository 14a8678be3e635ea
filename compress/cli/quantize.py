"""The commands that write checkpoints: quantize, transform, and plan, which shows what quantize would do."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.cli.options import (
    DEFAULT_RECIPE,
    AsJson,
    Calib,
    Context,
    Device,
    Goal,
    MaxKl,
    MaxMemory,
    Measurements,
    Model,
    Out,
    Overrides,
    Processes,
    RecipeName,
    Seed,
    aimed,
    app,
    device_named,
    errors,
    note,
)
from compress.errors import RecipeError

if TYPE_CHECKING:
    from compress.allocate.forecast import Unmeasured
    from compress.run.job import Job


@app.command(epilog="Example: compress quantize ./my-model --recipe int4 --calib text.txt --max-memory 8GiB")
def quantize(
    model: Model,
    recipe: RecipeName = DEFAULT_RECIPE,
    out: Out = None,
    calib: Calib = None,
    set_: Overrides = None,
    max_memory: MaxMemory = None,
    device: Device = "auto",
    seed: Seed = 0,
    target: Goal = None,
    context: Context = None,
    max_kl: MaxKl = None,
    measurements: Measurements = None,
    processes: Processes = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output, at the end.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Forget an unfinished run and start over.")] = False,
    as_json: AsJson = False,
) -> None:
    """Quantize a checkpoint by a recipe into a packed checkpoint. An interrupted run goes on when started again."""
    with errors("; run the same command again to go on after the last finished block"):
        asked = aimed(set_, target, max_kl, context)
        job = job_of(model, recipe, out, calib, asked, max_memory, device, seed, overwrite, restart)
        job = dataclasses.replace(job, measurements=measurements, processes=processes)
        if dry_run:
            _plan(job, as_json, _words(job, recipe, asked))
            return
        _run(job, as_json)


@app.command(epilog="Example: compress plan ./my-model --recipe int4 --max-memory 8GiB")
def plan(
    model: Model,
    recipe: RecipeName = DEFAULT_RECIPE,
    out: Out = None,
    calib: Calib = None,
    set_: Overrides = None,
    max_memory: MaxMemory = None,
    device: Device = "auto",
    seed: Seed = 0,
    target: Goal = None,
    context: Context = None,
    max_kl: MaxKl = None,
    measurements: Measurements = None,
    processes: Processes = 1,
    as_json: AsJson = False,
) -> None:
    """Show what a run would do: bytes of every layer, exact; predicted memory; time, from timing one real block.

    Nothing is measured: a recipe that allocates bits and has not been measured (`compress measure`) gives only sizes.
    """
    with errors():
        asked = aimed(set_, target, max_kl, context)
        job = job_of(model, recipe, out, calib, asked, max_memory, device, seed, False, False)
        job = dataclasses.replace(job, measurements=measurements, processes=processes)
        _plan(job, as_json, _words(job, recipe, asked))


@app.command(epilog="Example: compress transform ./my-model --recipe rotated.yaml --out rotated")
def transform(
    model: Model,
    recipe: RecipeName,
    out: Out = None,
    calib: Calib = None,
    set_: Overrides = None,
    max_memory: MaxMemory = None,
    device: Device = "auto",
    seed: Seed = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output, at the end.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Forget an unfinished run and start over.")] = False,
    as_json: AsJson = False,
) -> None:
    """Apply only the transforms of a recipe: a full-precision checkpoint, for use elsewhere.

    Of the same function, unless a transform clips weights (the report says so).

    Operations that a transform leaves to run time (`online`) are left out: plain checkpoints have no place for them.
    """
    with errors("; run the same command again to go on after the last finished block"):
        _run(job_of(model, recipe, out, calib, set_, max_memory, device, seed, overwrite, restart, False), as_json)


def _run(job: Job, as_json: bool) -> None:
    from rich.text import Text

    from compress import api
    from compress.cli import tables

    with tables.progress_bar() as progress:
        report = api.quantize(
            job, progress, lambda prepared: tables.err.print(Text(tables.plan_line(prepared)), soft_wrap=True)
        )
    if as_json:
        print(json.dumps(report))
        return
    for line in tables.result_lines(report, str(job.out)):
        print(line)


def job_of(
    model: str,
    recipe: str,
    out: Path | None,
    calib: str | None,
    overrides: list[str] | None,
    max_memory: str | None,
    device: str,
    seed: int,
    overwrite: bool,
    restart: bool,
    pack: bool = True,
) -> Job:
    """The parsed options as a job; typos in the recipe stop here, before anything heavy is imported."""
    from compress import recipe as recipes_module

    note(recipes_module.ambiguous(recipe))
    loaded = recipes_module.load(recipe, overrides or [])
    if not pack and not loaded.transform:
        raise RecipeError(f"recipe {loaded.name!r} has no transform to apply; give one that has, or use quantize")
    from compress.process_memory import parse_size
    from compress.run.job import Job

    try:
        limit = None if max_memory is None else parse_size(max_memory)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--max-memory") from error
    name = re.sub(r"[^\w.-]+", "-", f"{Path(model.rstrip('/')).name or 'model'}-{loaded.name}")
    return Job(
        model=model,
        recipe=loaded,
        out=out or Path("models_out") / (name if pack else f"{name}-transformed"),
        calib=calib,
        max_memory=limit,
        device=device_named(device),
        seed=seed,
        overwrite=overwrite,
        restart=restart,
        pack=pack and loaded.packs,
    )


def _words(job: Job, recipe: str, overrides: list[str]) -> list[str]:
    """The options of a command line that measures for this job, into the folder where it is looked for."""
    from compress.allocate import prepare_options

    words = [job.model, "--recipe", recipe, *(word for text in overrides for word in ("--set", text))]
    said = {
        "--calib": job.calib,
        "--seed": job.seed or None,
        "--max-memory": None if job.max_memory is None else f"{job.max_memory}B",
        "--device": None if job.device == device_named("auto") else job.device,
    }
    words += [word for name, given in said.items() if given is not None for word in (name, str(given))]
    if job.recipe.allocate is not None:
        words += ["--measurements", str(job.measurements or prepare_options.folder_of(job))]
    return words


def _plan(job: Job, as_json: bool, words: list[str]) -> None:
    """Print what a run would do; `words`: how the same is said to a command that measures."""
    from compress import api
    from compress.cli import tables
    from compress.run.plan import groups

    with tables.progress_bar() as progress:
        planned = api.plan(job, progress)
    if not isinstance(planned, tuple):
        out = ["--out", str(job.out)] if planned.command == "quantize" else []
        _print_unmeasured(planned, as_json, [*words, *out])
        return
    job, prepared, predicted = planned
    layers, sizes = prepared.plan, prepared.skeleton.other_nbytes(prepared.plan.kept_nbytes)
    source = prepared.skeleton.checkpoint.nbytes
    result: dict[str, Any] = {
        "plan": [dataclasses.asdict(group) for group in groups(layers)],
        "nbytes": {"quantized linears": layers.quantized_nbytes, **sizes, "total": layers.nbytes},
        "bpw": layers.bpw,
        "predicted_peak": prepared.arrangement.peak_nbytes,
        "predicted_seconds": round(predicted, 1),
        "kept": layers.kept,
    }
    cache = (job.allocation or {}).get("cache")
    if cache is not None:
        result["cache"] = cache
    if as_json:
        print(json.dumps(result))
        return
    tables.out.print(tables.plan_table(result["plan"], sizes, layers.nbytes, source, layers.bpw))
    peak = tables.size(prepared.arrangement.peak_nbytes)
    print(f"predicted peak memory {peak}, time {tables.seconds(predicted)}")
    if cache is not None:
        print(tables.cache_line(cache))
    for name, reason in list(layers.kept.items())[:10]:
        print(f"kept as it is: {name} ({reason})")


def _print_unmeasured(found: Unmeasured, as_json: bool, words: list[str]) -> None:
    from compress.cli import tables

    command = shlex.join(["compress", found.command, *words])
    if as_json:
        print(json.dumps({"measured": False, **dataclasses.asdict(found), "command": command}))
        return
    for line in tables.unmeasured_lines(found, command):
        print(line)
