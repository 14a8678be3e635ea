"""Write checkpoints in the formats of other tools, or a level of their weights: `compress export`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Option

from compress import plugins
from compress.cli.options import AsJson, Level, at_level, errors, note
from compress.storage import paths


def export(
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="A checkpoint that compress wrote.", show_default=False)
    ] = None,
    to: Annotated[str | None, Option("--to", metavar="NAME", help="Of the format; --list names them.")] = None,
    out: Annotated[Path | None, Option("--out", "-o", metavar="OUT", help="Directory, or file, to write.")] = None,
    list_formats: Annotated[bool, Option("--list", help="List the formats that are written, and stop.")] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        Option(help="Of everything that is not packed; without it as stored."),
    ] = None,
    int8_inputs: Annotated[
        bool, Option("--int8-inputs", help="Round inputs of products to 8 bits: faster on a CPU (onnx only).")
    ] = False,
    split_size: Annotated[
        str | None, Option(metavar="SIZE", help="OUT is a directory with files of at most that size (gguf only): 2GiB.")
    ] = None,
    level: Level = None,
    link: Annotated[
        bool, Option("--link", help="With --level alone: link to the files of DIR, for a draft model that shares them.")
    ] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an existing export.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint in the format of another tool, without loss, or say why that cannot be.

    With --level only a level of its weights; without --to as a checkpoint of ours.
    """
    if list_formats:
        return _list_formats(as_json)
    _check_given({"DIR": directory, "--to": to or level, "--out": out})
    assert directory is not None and out is not None
    if link and (level is None or to is not None):
        raise typer.BadParameter("it goes with --level, and without --to", param_hint="--link")
    with errors():
        paths.check_checkpoint(directory)
        if to is None and level is not None:
            return _export_level(directory, level, out, link, overwrite, as_json)
        assert to is not None
        directory = Path(at_level(str(directory), level))
        from compress.cli import tables
        from compress.export import convert
        from compress.process_memory import parse_size

        convert.target_named(to)
        import torch

        chosen = None if dtype is None else getattr(torch, dtype)
        with tables.progress_bar() as progress:
            wishes = convert.Wishes(int8_inputs, parse_size(split_size) if split_size else 0)
            result = convert.export(directory, to, out, chosen, overwrite, progress, wishes)
        for line in result.notes:
            note(line)
        if as_json:
            facts = {"out": str(out), "to": to, "nbytes": result.nbytes, "source_nbytes": result.source_nbytes}
            print(json.dumps({**facts, "notes": result.notes}))
            return
        source = "packed by compress" if result.is_packed else "not packed, as it was"
        print(f"{out}: {to}, {tables.size(result.nbytes)} ({source}: {tables.size(result.source_nbytes)})")


def _check_given(arguments: Mapping[str, object]) -> None:
    """Raise BadParameter for the first of some arguments, by name, that is missing."""
    for name, value in arguments.items():
        if value is None:
            raise typer.BadParameter("it is missing; give DIR, --to and --out, or --list", param_hint=name)


def _export_level(directory: Path, level: int, out: Path, link: bool, overwrite: bool, as_json: bool) -> None:
    """Write a level as a checkpoint of ours, or as links to one, and print what it takes."""
    from compress.cli import tables
    from compress.export import level as levels
    from compress.export import linked_level

    if link:
        nbytes = linked_level.link(directory, level, out, overwrite)
    else:
        with tables.progress_bar() as progress:
            nbytes = levels.export(directory, level, out, overwrite, progress)
    facts = {"out": str(out), "level": level, "nbytes": nbytes}
    print(json.dumps(facts) if as_json else f"{out}: level {level} of {directory}, {tables.size(nbytes)}")


def _list_formats(as_json: bool) -> None:
    """Print the formats of other tools that a checkpoint can be written in."""
    with errors():
        by_name = {name.replace("_", "-"): plugins.describe("export", name) for name in plugins.names("export")}
        if as_json:
            print(json.dumps(by_name))
            return
        width = max(map(len, by_name), default=0)
        for name, text in by_name.items():
            print(f"{name:<{width}}  {text}")
