"""Make checkpoints: `compress quantize`, `plan`, `transform`, `merge` and `allocate`."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.cli.options import (
    DEFAULT_RESERVE,
    AsJson,
    FormerOut,
    Reserve,
    TextFile,
    device_named,
    errors,
    former_out,
    note,
    parse_serve,
)
from compress.cli.run_options import (
    ALLOCATING_RECIPE,
    CALIBRATION_RECIPE,
    GOAL,
    OUTPUT,
    REQUIRED,
    RunOptions,
    takes_run_options,
)
from compress.storage import paths

if TYPE_CHECKING:
    from compress.allocate.forecast import Unmeasured
    from compress.run.job import Job

FALLS_SHORT = 3  # exit code of a run whose checkpoint does not reach what `accept` says
RESUME = "; run the same command again to go on after the last finished block"


@takes_run_options()
def quantize(
    options: RunOptions,
    model_free: Annotated[
        str | None,
        typer.Option(
            "--model-free",
            metavar="SCHEME",
            help="Round each weight by itself, of a model that transformers need not know, for engines: int8, int4, "
            "fp8, fp8-block, nvfp4, mxfp4, or a recipe that only rounds. --export modelopt: in its layout.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    as_json: AsJson = False,
) -> None:
    """Quantize a checkpoint by a recipe into a packed checkpoint. An interrupted run goes on when started again."""
    if model_free is not None:
        return _quantize_model_free(options, model_free, dry_run, as_json)
    with errors(RESUME):
        job = options.job(writes=None if dry_run else "checkpoint")
        if dry_run:
            _plan(job, as_json, _measuring_words(job, options))
            return
        from compress import api
        from compress.cli import tables

        with tables.progress_bar() as progress:
            report = api.quantize(job, progress, tables.print_plan, options.export_path(job.out))
        _print_report(report, job, as_json)


def _quantize_model_free(options: RunOptions, scheme: str, dry_run: bool, as_json: bool) -> None:
    """Round a checkpoint without the class of its model, and print what has come of it."""
    with errors():
        job = options.data_free(scheme).job(writes=None if dry_run else "checkpoint")
        from compress import api
        from compress.cli import tables

        with tables.progress_bar() as progress:
            rounded = api.quantize_model_free(job, dry_run, progress)
        if as_json:
            print(json.dumps({"out": str(job.out), **dataclasses.asdict(rounded)}))
            return
        for line in (*rounded.notes, *rounded.lines(job.out)):
            print(line)


@takes_run_options(without=("overwrite", "restart", "base_model", "work", "accept"))
def plan(
    options: RunOptions,
    serve: Annotated[
        str | None,
        typer.Option(
            "--serve",
            metavar="SIZE",
            help="Say what 24GiB, or 8x141GiB, serve: contexts, sequences at a time. No more.",
        ),
    ] = None,
    reserve: Reserve = DEFAULT_RESERVE,
    as_json: AsJson = False,
) -> None:
    """Show what a run would do: exact bytes of every layer, predicted memory, and time.

    Time is counted, with speeds of this machine that are measured once. A recipe that searches or tunes times a block.

    Nothing is measured: for a recipe that allocates bits and has not been measured (`compress allocate --measure`) only
    sizes. With --serve a packed checkpoint is planned as it is stored, and config.json alone is enough.
    """
    with errors():
        job = options.job(writes=None)
        if serve is not None:
            from compress.cli import capacity

            return capacity.plan_serving(job, parse_serve(serve, reserve, options.device), as_json)
        _plan(job, as_json, _measuring_words(job, options))


@takes_run_options(
    without=(*GOAL, "measurements", "processes", "budget", "allow_partial", "export", "imatrix"),
    recipe=REQUIRED,
)
def transform(options: RunOptions, as_json: AsJson = False) -> None:
    """Apply only the transforms of a recipe: a full-precision checkpoint, for use elsewhere.

    The model computes the same function, unless a transform clips weights (the report says so).

    Operations that a transform leaves to run time (`online`) are left out: plain checkpoints have no place for them.
    """
    with errors(RESUME):
        job = options.job(pack=False)
        from compress import api
        from compress.cli import tables

        with tables.progress_bar() as progress:
            report = api.quantize(job, progress, tables.print_plan)
        _print_report(report, job, as_json)


@takes_run_options(
    without=(*GOAL, "measurements", "processes", "budget", "export"),
    helps={
        "model": "A packed checkpoint.",
        "recipe": "Built-in recipe or a YAML file. Default: the checkpoint's own.",
        "out": "The checkpoint to be written.",
        "adapter": "LoRA adapter as PEFT saves it.",
    },
    recipe="",
    adapter=REQUIRED,
    out=REQUIRED,
)
def merge(options: RunOptions, as_json: AsJson = False) -> None:
    """Merge a LoRA adapter into a packed checkpoint, and quantize the sum, by the checkpoint's own recipe or another.

    Weights are rounded twice, first in the checkpoint that is given. `compress quantize ORIGINAL --adapter DIR` rounds
    once.
    """
    with errors(RESUME):
        directory = Path(options.model)
        paths.check_checkpoint(directory)
        from compress.storage import manifest

        recipe = options.recipe or str(directory / manifest.RECIPE)
        job = dataclasses.replace(options, recipe=recipe).job()
        from compress import api
        from compress.cli import tables

        with tables.progress_bar() as progress:
            report = api.merge(directory, job, progress, tables.print_plan)
        _print_report(report, job, as_json)


@takes_run_options(
    without=(
        *GOAL,
        *OUTPUT[1:],
        "measurements",
        "processes",
        "budget",
        "allow_partial",
        "imatrix",
        "export",
        "accept",
    ),
    helps={"out": "The file to be written.", "recipe": "Whose calibration settings count."},
    recipe=CALIBRATION_RECIPE,
    out=REQUIRED,
)
def imatrix(options: RunOptions, as_json: AsJson = False) -> None:
    """Write the importance matrix of a model on calibration text, in the GGUF format of llama.cpp.

    Its quantizer takes the file (--imatrix), and so does `compress quantize --imatrix`.
    """
    with errors():
        job = options.job(writes=None)
        paths.check_writable(job.out.parent, "--out")
        from compress.cli import tables
        from compress.run import collect_importance

        with tables.progress_bar() as progress:
            matrix = collect_importance.write(job, progress)
        facts = {"out": str(job.out), "tensors": len(matrix.inputs), "tokens": matrix.samples * matrix.seq_len}
        if as_json:
            print(json.dumps({**facts, "unnamed": matrix.unnamed}))
            return
        print(f"{job.out}: inputs of {facts['tensors']} tensors, {facts['tokens']:,} tokens")
        for name in matrix.unnamed:
            note(f"{name} has no name in GGUF files, and is left out")


@takes_run_options(without=(*OUTPUT, "accept", "imatrix"), recipe=ALLOCATING_RECIPE)
def allocate(
    options: RunOptions,
    text: TextFile = None,
    points: Annotated[int, typer.Option(min=2, max=200, help="Budgets at which bits are allocated.")] = 8,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report", metavar="DIR", help="For frontier.png and report.html. Default: that of --measurements."
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Only quantize every linear at every option; that serves every later budget."),
    ] = False,
    as_json: AsJson = False,
    out: FormerOut = None,
) -> None:
    """Show KL against size: models with allocated bits at several budgets, beside every option used uniformly.

    With --target also the option of each layer. Measures first what has not been measured. KL is on --text, or else on
    the calibration text, of the weights as they were measured: each quantized behind full-precision blocks.

    With --measure it stops behind the measurement: the packed weights of all options and sensitivity.json are written.
    """
    if measure:
        if text is not None or report is not None:
            raise typer.BadParameter("ends before a text or a report is of use; leave them out", param_hint="--measure")
        return _measure(options, out, as_json)
    with errors("; run the same command again to go on"):
        report = former_out(report, out, "--report")
        if text is not None:
            paths.check_corpus(text)
        if report is not None:
            paths.check_writable(report, "--report")
        job = options.job(writes="measurements")
        from compress.allocate import pareto
        from compress.cli import tables

        with tables.progress_bar() as progress:
            frontier = pareto.measure(job, text, points, progress)
        files = pareto.write(frontier, report or Path(frontier["folder"]))
        if as_json:
            print(json.dumps(frontier))
            return
        tables.out.print(tables.frontier_table(frontier))
        for line in tables.allocation_lines(frontier):
            print(line)
        print("written: " + ", ".join(map(str, files)))


def _measure(options: RunOptions, out: Path | None, as_json: bool) -> None:
    """Quantize every linear at every option of a recipe, and print what the loss of each took to measure."""
    with errors(RESUME):
        measurements = former_out(options.measurements, out, "--measurements")
        job = dataclasses.replace(options, measurements=measurements).job(writes="measurements")
        from compress.allocate import decide
        from compress.cli import tables

        with tables.progress_bar() as progress:
            folder, facts = decide.measure(job, progress)
        if as_json:
            print(json.dumps(facts))
            return
        size = tables.size(facts["nbytes"])
        print(f"{folder}: {facts['units']} units, {facts['options']} options, {size} of packed weights")
        print(f"{facts['nbytes per parameter']:.2f} bytes a parameter; measured: {', '.join(facts['damages'])}")


def _print_report(report: dict[str, Any], job: Job, as_json: bool) -> None:
    """Print what came of a job, as lines or as JSON, and its verdict; typer.Exit where it falls short of `accept`."""
    from compress.cli import tables

    for line in [json.dumps(report)] if as_json else tables.result_lines(report, str(job.out)):
        print(line)
    if (verdict := report.get("acceptance")) is not None:
        if not as_json:
            print(verdict["text"])
        if not verdict["accepted"]:
            raise typer.Exit(FALLS_SHORT)


def _measuring_words(job: Job, options: RunOptions) -> list[str]:
    """Return the options of a command line that measures for this job, into the folder where it is looked for."""
    from compress.allocate import variants

    words = [job.model, "--recipe", options.named_recipe]
    words += [word for override in options.recipe_overrides for word in ("--set", override)]
    options_given = {
        "--adapter": job.adapter,
        "--calib": options.calib,
        "--seed": job.seed or None,
        "--budget": options.budget,
        "--dtype": job.dtype,
        "--max-memory": None if job.max_memory is None else f"{job.max_memory}B",
        "--device": None if job.device == device_named("auto") else job.device,
    }
    words += [word for name, value in options_given.items() if value is not None for word in (name, str(value))]
    words += ["--allow-partial"] if job.allow_partial else []
    if job.recipe.allocate is not None:
        words += ["--measurements", str(job.measurements or variants.folder_of(job))]
    return words


def _plan(job: Job, as_json: bool, words: list[str]) -> None:
    """Print what a run would do; `words`: the options of a command that measures for it."""
    from compress import api
    from compress.cli import capacity, tables
    from compress.run.report import plan_facts

    with tables.progress_bar() as progress:
        planned = api.plan(job, progress)
    if not isinstance(planned, tuple):
        out = ["--out", str(job.out)] if planned.command == "quantize" else []
        _print_unmeasured(planned, as_json, [*words, *out])
        return
    job, prepared, predicted = planned
    layers, sizes = prepared.plan, prepared.skeleton.other_nbytes(prepared.plan.kept_nbytes)
    source, base = prepared.skeleton.checkpoint.nbytes, prepared.skeleton.checkpoint.base
    result: dict[str, Any] = {
        **plan_facts(layers, prepared.skeleton),
        "predicted_peak": prepared.arrangement.peak_nbytes,
        "predicted_seconds": round(predicted, 1),
        "kept": layers.kept_reasons,
        "base": base or None,
    }
    cache = (job.allocation or {}).get("cache")
    if cache is not None:
        result["cache"] = cache
    if (nbytes := capacity.cache_bytes(job, prepared)) is not None:
        result["cache_bytes"] = nbytes
    if as_json:
        print(json.dumps(result))
        return
    tables.out.print(tables.plan_table(result["plan"], sizes, layers.nbytes, source, layers.bpw))
    print(tables.bits(layers.bpw, result["whole"]))
    peak = tables.size(prepared.arrangement.peak_nbytes)
    print(f"predicted peak memory {peak}, time {tables.time_text(predicted)}")
    if base:
        print(f"base: {base}")
    for line in prepared.messages:
        print(line)
    if nbytes is not None:
        print(tables.cache_bytes_line(nbytes))
    if cache is not None:
        print(tables.cache_line(cache))
    for name, reason in list(layers.kept_reasons.items())[:10]:
        print(f"kept as it is: {name} ({reason})")


def _print_unmeasured(forecast: Unmeasured, as_json: bool, words: list[str]) -> None:
    from compress.cli import tables

    measuring = ["allocate", "--measure"] if forecast.command == "measure" else [forecast.command]
    command = shlex.join(["compress", *measuring, *words])
    if as_json:
        print(json.dumps({"measured": False, **dataclasses.asdict(forecast), "command": command}))
        return
    for line in tables.unmeasured_lines(forecast, command):
        print(line)
