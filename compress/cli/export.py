"""Write checkpoints in the formats of other tools: `compress export`, and `compress exports`, which lists them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from compress import plugins
from compress.cli.options import AsJson, Directory, app, errors, note
from compress.storage import paths


@app.command(epilog="Example: compress export models_out/my-model-int4 --to gguf --out my-model.gguf")
def export(
    directory: Directory,
    to: Annotated[str, typer.Option("--to", metavar="NAME", help="Of the format; `compress exports` lists them.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="OUT", help="Directory, or file, to write.")],
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Of everything that is not packed; without it as stored."),
    ] = None,
    int8_inputs: Annotated[
        bool, typer.Option("--int8-inputs", help="Round inputs of products to 8 bits: faster on a CPU (onnx only).")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing export.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint in the format of another tool, without loss, or say why that cannot be."""
    with errors():
        paths.check_checkpoint(directory)
        from compress.cli import tables
        from compress.export import convert

        convert.target_named(to)
        import torch

        chosen = None if dtype is None else getattr(torch, dtype)
        with tables.progress_bar() as progress:
            result = convert.export(directory, to, out, chosen, overwrite, progress, int8_inputs)
        for line in result.notes:
            note(line)
        if as_json:
            facts = {"out": str(out), "to": to, "nbytes": result.nbytes, "source_nbytes": result.source_nbytes}
            print(json.dumps({**facts, "notes": result.notes}))
            return
        source = "packed by compress" if result.is_packed else "not packed, as it was"
        print(f"{out}: {to}, {tables.size(result.nbytes)} ({source}: {tables.size(result.source_nbytes)})")


@app.command(epilog="Example: compress exports")
def exports(as_json: AsJson = False) -> None:
    """List the formats of other tools that `compress export` writes."""
    with errors():
        described = {name.replace("_", "-"): plugins.describe("export", name) for name in plugins.names("export")}
        if as_json:
            print(json.dumps(described))
            return
        width = max(map(len, described), default=0)
        for name, text in described.items():
            print(f"{name:<{width}}  {text}")
