"""Measure options and allocate bits: `compress measure` and `compress allocate`."""

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
from compress.storage import paths


@command(
    epilog="Example: compress measure ./my-model --calib text.txt", without=(*GOAL, *OUTPUT), recipe=DEFAULT_ALLOCATION
)
def measure(options: RunOptions, as_json: AsJson = False, out: FormerOut = None) -> None:
    """Quantize every linear at every option of a recipe and measure the loss of each; serves every later budget.

    Writes the packed weights of all options and sensitivity.json. An interrupted run goes on when started again.
    """
    with errors(RESUME):
        measurements = renamed(options.measurements, out, "--measurements")
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


@command(
    epilog="Example: compress allocate ./my-model --target 3.25bpw --text held_out.txt",
    without=OUTPUT,
    recipe=DEFAULT_ALLOCATION,
)
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
    as_json: AsJson = False,
    out: FormerOut = None,
) -> None:
    """Show KL against size: models with allocated bits at several budgets, beside every option used uniformly.

    With --target also the option of each layer. Measures first what has not been measured. KL is on --text, or else on
    the calibration text, of the weights as they were measured: each quantized behind full-precision blocks.
    """
    with errors("; run the same command again to go on"):
        report = renamed(report, out, "--report")
        if text is not None:
            paths.check_corpus(text)
        if report is not None:
            paths.check_writable(report, "--report")
        job = options.job(writes="measurements")
        from compress.allocate import pareto
        from compress.cli import tables

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
