"""The commands about where the bits go: measure makes the table, allocate shows what the bytes buy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from compress.cli.options import (
    DEFAULT_ALLOCATION,
    AsJson,
    Calib,
    Context,
    Device,
    FormerOut,
    Goal,
    MaxKl,
    MaxMemory,
    Measurements,
    Model,
    Overrides,
    Processes,
    RecipeName,
    Seed,
    TextFile,
    aimed,
    app,
    errors,
    renamed,
)
from compress.cli.quantize import job_of


@app.command(epilog="Example: compress measure ./my-model --calib text.txt")
def measure(
    model: Model,
    recipe: RecipeName = DEFAULT_ALLOCATION,
    measurements: Measurements = None,
    calib: Calib = None,
    set_: Overrides = None,
    max_memory: MaxMemory = None,
    device: Device = "auto",
    seed: Seed = 0,
    processes: Processes = 1,
    as_json: AsJson = False,
    out: FormerOut = None,
) -> None:
    """Quantize every linear at every option of a recipe, once, and measure the damage; serves every later budget.

    Writes packed levels and sensitivity.json. An interrupted run goes on when started again.
    """
    import dataclasses

    from compress.allocate import session
    from compress.cli import tables

    with errors("; run the same command again to go on after the last finished block"):
        measurements = renamed(measurements, out, "--measurements")
        wanted = aimed(set_, None, None)
        job = job_of(model, recipe, None, calib, wanted, max_memory, device, seed, False, False)
        job = dataclasses.replace(job, processes=processes, measurements=measurements)
        with tables.progress_bar() as progress:
            folder, facts = session.measured(job, progress)
        if as_json:
            print(json.dumps(facts))
            return
        print(f"{folder}: {facts['units']} units, {facts['options']} options, {tables.size(facts['nbytes'])} of levels")
        print(f"{facts['nbytes per parameter']:.2f} bytes a parameter; damages: {', '.join(facts['damages'])}")


@app.command(epilog="Example: compress allocate ./my-model --target 3.25bpw --text held_out.txt")
def allocate(
    model: Model,
    recipe: RecipeName = DEFAULT_ALLOCATION,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report", metavar="DIR", help="For frontier.png and report.html. Default: that of --measurements."
        ),
    ] = None,
    calib: Calib = None,
    set_: Overrides = None,
    max_memory: MaxMemory = None,
    device: Device = "auto",
    seed: Seed = 0,
    target: Goal = None,
    context: Context = None,
    max_kl: MaxKl = None,
    measurements: Measurements = None,
    text: TextFile = None,
    points: Annotated[int, typer.Option(min=2, max=200, help="Budgets on the frontier.")] = 8,
    processes: Processes = 1,
    as_json: AsJson = False,
    out: FormerOut = None,
) -> None:
    """Show what the bytes buy: KL of the allocated model at several budgets, beside uniform options.

    With --target also which layers get what. Measures first what has not been measured. KL is on --text, or else on the
    calibration text, of the levels as they were measured, behind a full-precision prefix.
    """
    import dataclasses

    from compress.allocate import pareto
    from compress.cli import tables

    with errors("; run the same command again to go on"):
        report = renamed(report, out, "--report")
        wanted = aimed(set_, target, max_kl, context)
        job = job_of(model, recipe, None, calib, wanted, max_memory, device, seed, False, False)
        job = dataclasses.replace(job, processes=processes, measurements=measurements)
        with tables.progress_bar() as progress:
            found = pareto.measure(job, text, points, progress)
        files = pareto.write(found, report or Path(found["folder"]))
        if as_json:
            print(json.dumps(found))
            return
        tables.out.print(tables.frontier_table(found))
        for line in tables.allocation_lines(found):
            print(line)
        print("written: " + ", ".join(map(str, files)))
