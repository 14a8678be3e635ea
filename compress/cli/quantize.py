"""Write checkpoints, or plan them: `compress quantize`, `compress transform`, `compress merge` and `compress plan`."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.cli.options import GOAL, REQUIRED, AsJson, RunOptions, command, device_named, errors
from compress.storage import paths

if TYPE_CHECKING:
    from compress.allocate.forecast import Unmeasured
    from compress.run.job import Job, Prepared

RESUME = "; run the same command again to go on after the last finished block"


@command(epilog="Example: compress quantize ./my-model --recipe int4 --calib text.txt --max-memory 8GiB")
def quantize(
    options: RunOptions,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    as_json: AsJson = False,
) -> None:
    """Quantize a checkpoint by a recipe into a packed checkpoint. An interrupted run goes on when started again."""
    with errors(RESUME):
        job = options.job(writes=None if dry_run else "checkpoint")
        if dry_run:
            _plan(job, as_json, _words(job, options))
            return
        from compress import api
        from compress.cli import tables

        with tables.progress_bar() as progress:
            report = api.quantize(job, progress, tables.print_plan)
        _print_report(report, job, as_json)


@command(
    epilog="Example: compress plan ./my-model --recipe int4 --max-memory 8GiB",
    without=("overwrite", "restart", "base_model", "work"),
)
def plan(options: RunOptions, as_json: AsJson = False) -> None:
    """Show what a run would do: exact bytes of every layer, predicted memory, and time, from timing one block.

    Nothing is measured: for a recipe that allocates bits and has not been measured (`compress measure`) only sizes.
    """
    with errors():
        job = options.job(writes=None)
        _plan(job, as_json, _words(job, options))


@command(
    epilog="Example: compress transform ./my-model --recipe rotated.yaml --out rotated",
    without=(*GOAL, "measurements", "processes", "budget", "allow_partial"),
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


@command(
    epilog="Example: compress merge models_out/my-model-int4 --adapter ./lora --out models_out/merged --calib text.txt",
    without=(*GOAL, "measurements", "processes", "budget"),
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


def _print_report(report: dict[str, Any], job: Job, as_json: bool) -> None:
    """Print what came of a job, as lines or as JSON."""
    from compress.cli import tables

    for line in [json.dumps(report)] if as_json else tables.result_lines(report, str(job.out)):
        print(line)


def _words(job: Job, options: RunOptions) -> list[str]:
    """The options of a command line that measures for this job, into the folder where it is looked for."""

    from compress.allocate import variants

    words = [job.model, "--recipe", options.recipe]
    words += [word for override in options.recipe_overrides for word in ("--set", override)]
    said = {
        "--adapter": job.adapter,
        "--calib": job.calib,
        "--seed": job.seed or None,
        "--budget": options.budget,
        "--dtype": job.dtype,
        "--max-memory": None if job.max_memory is None else f"{job.max_memory}B",
        "--device": None if job.device == device_named("auto") else job.device,
    }
    words += [word for name, given in said.items() if given is not None for word in (name, str(given))]
    words += ["--allow-partial"] if job.allow_partial else []
    if job.recipe.allocate is not None:
        words += ["--measurements", str(job.measurements or variants.folder_of(job))]
    return words


def _plan(job: Job, as_json: bool, words: list[str]) -> None:
    """Print what a run would do; `words`: how the same is said to a command that measures."""
    from compress import api
    from compress.cli import tables
    from compress.progress import duration
    from compress.run.plan_summary import groups
    from compress.run.report import packed_nbytes, whole

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
        "plan": [dataclasses.asdict(group) for group in groups(layers)],
        "nbytes": {**packed_nbytes(layers), **sizes, "total": layers.nbytes},
        "bpw": layers.bpw,
        "whole": whole(layers),
        "predicted_peak": prepared.arrangement.peak_nbytes,
        "predicted_seconds": round(predicted, 1),
        "kept": layers.kept_reasons,
        "base": base or None,
    }
    cache = (job.allocation or {}).get("cache")
    if cache is not None:
        result["cache"] = cache
    if (nbytes := _cache_bytes(job, prepared)) is not None:
        result["cache_bytes"] = nbytes
    if as_json:
        print(json.dumps(result))
        return
    tables.out.print(tables.plan_table(result["plan"], sizes, layers.nbytes, source, layers.bpw))
    print(tables.bits(layers.bpw, result["whole"]))
    peak = tables.size(prepared.arrangement.peak_nbytes)
    print(f"predicted peak memory {peak}, time {duration(predicted)}")
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


def _cache_bytes(job: Job, prepared: Prepared) -> dict[str, Any] | None:
    """Return what the recipe's cache takes; None without one, and for one that is still to be calibrated."""
    from compress.run import kv_cache

    settings = job.recipe.kv_cache
    if settings is None or settings.needs() or (job.recipe.packs and not job.pack):
        return None
    skeleton = prepared.skeleton
    return kv_cache.bytes_at_context(skeleton.config, settings, {}, skeleton.dtype).plain()


def _print_unmeasured(found: Unmeasured, as_json: bool, words: list[str]) -> None:
    from compress.cli import tables

    command = shlex.join(["compress", found.command, *words])
    if as_json:
        print(json.dumps({"measured": False, **dataclasses.asdict(found), "command": command}))
        return
    for line in tables.unmeasured_lines(found, command):
        print(line)
