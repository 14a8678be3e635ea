"""The commands about where the bits go: measure makes the table, allocate shows what the bytes buy."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from compress.cli.options import (
    DEFAULT_ALLOCATION,
    GOAL,
    OUTPUT,
    AsJson,
    FormerOut,
    RunOptions,
    TextFile,
    command,
    errors,
    renamed,
)
from compress.cli.quantize import RESUME


@command(
    epilog="Example: compress measure ./my-model --calib text.txt", without=(*GOAL, *OUTPUT), recipe=DEFAULT_ALLOCATION
)
def measure(options: RunOptions, as_json: AsJson = False, out: FormerOut = None) -> None:
    """Quantize every linear at every option of a recipe, once, and measure the damage; serves every later budget.

    Writes packed levels and sensitivity.json. An interrupted run goes on when started again.
    """
    from compress.allocate import session
    from compress.cli import tables

    with errors(RESUME):
        measurements = renamed(options.measurements, out, "--measurements")
        job = dataclasses.replace(options, measurements=measurements).job()
        with tables.progress_bar() as progress:
            folder, facts = session.measured(job, progress)
        if as_json:
            print(json.dumps(facts))
            return
        print(f"{folder}: {facts['units']} units, {facts['options']} options, {tables.size(facts['nbytes'])} of levels")
        print(f"{facts['nbytes per parameter']:.2f} bytes a parameter; damages: {', '.join(facts['damages'])}")


@command(
    epilog="Example: compress allocate ./my-model --target 3.25bpw --text held_out.txt",
    without=OUTPUT,
    recipe=DEFAULT_ALLOCATION,
)
def allocate(
    options: RunOptions,
    text: TextFile = None,
    points: Annotated[int, typer.Option(min=2, max=200, help="Budgets on the frontier.")] = 8,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report", metavar="DIR", help="For frontier.png and report.html. Default: that of --measurements."
        ),
    ] = None,
    as_json: AsJson = False,
    out: FormerOut = None,
) -> None:
    """Show what the bytes buy: KL of the allocated model at several budgets, beside uniform options.

    With --target also which layers get what. Measures first what has not been measured. KL is on --text, or else on the
    calibration text, of the levels as they were measured, behind a full-precision prefix.
    """
    from compress.allocate import pareto
    from compress.cli import tables

    with errors("; run the same command again to go on"):
        report = renamed(report, out, "--report")
        job = options.job()
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
