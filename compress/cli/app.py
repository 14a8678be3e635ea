"""The command line: parse, call one function, print. Heavy imports stay inside the commands, so that --help is instant.

Exit codes: 0 done, 1 the user's input cannot be used, 2 wrong usage, 128 + n ended by signal n (130 by SIGINT, 143 by
SIGTERM), 141 nobody reads the output.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from compress import ranks
from compress.cli import (  # noqa: F401  (they add their commands)
    allocate,
    evaluate,
    export,
    interruption,
    kv,
    kv_saved,
    lists,
    push,
    quantize,
    recommend,
    report,
    sampling,
    streams,
    study,
)
from compress.cli.options import AsJson, Directory, app, errors, note
from compress.storage import paths
from compress.version import __version__


def _print_version(asked: bool) -> None:
    if asked:
        print(f"compress {__version__}")
        raise typer.Exit


SHARED = {"quantize", "transform", "measure", "allocate", "eval", "study"}  # commands that several processes share


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Compress language models: quantize a Hugging Face checkpoint by a recipe, check it, score it, use it."""
    if ranks.given()[1] > 1 and context.invoked_subcommand not in SHARED:
        note(f"{context.invoked_subcommand} runs in one process; start it without torchrun")
        raise typer.Exit(2)


@app.command(epilog="Example: compress inspect models_out/my-model-int4")
def inspect(
    directory: Directory,
    all_layers: Annotated[bool, typer.Option("--all", help="Every layer, not only the worst.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint stores: bits per weight by group of layers and in all, the largest errors, fallbacks.

    Of one that was saved again by other software, which writes no report: the bits.
    """
    with errors():
        paths.check_checkpoint(directory)
        from compress.cli import tables
        from compress.run.report import PACKED, load, worst

        report = load(directory)
        if as_json:
            print(json.dumps(report))
            return
        sizes = dict(report["nbytes"])
        total = sizes.pop("total")
        kept = {name: nbytes for name, nbytes in sizes.items() if name not in PACKED}
        tables.out.print(tables.plan_table(report["plan"], kept, total, report["source_nbytes"], report["bpw"]))
        print(tables.bits(report["bpw"], report.get("whole")))
        if "incomplete" in report:
            print(f"{directory}: {report['incomplete']}")
            return
        rows = report["layers"] if all_layers else worst(report["layers"])
        tables.out.print(tables.layers_table(rows, "all layers" if all_layers else "largest errors"))


@app.command(epilog="Example: compress verify models_out/my-model-int4")
def verify(directory: Directory, as_json: AsJson = False) -> None:
    """Check a checkpoint: file hashes, names, shapes and types, and that every block loads and gives finite outputs.

    One that was saved again by other software has no hashes; the rest is checked.
    """
    with errors():
        paths.check_checkpoint(directory)
        from compress.cli import tables
        from compress.run import verify as checks

        with tables.progress_bar() as progress:
            counts = checks.verify(directory, progress)
        print(json.dumps(counts) if as_json else tables.verify_line(counts, str(directory)))
