"""Save and load the cache of a prompt: `compress kv save`, `compress kv load` and `compress kv show`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from compress.cli.options import AsJson, Device, Model, Seed, app, check_model, device_named, errors
from compress.errors import CalibrationError, first_line
from compress.storage import paths

kv = typer.Typer(
    name="kv",
    help="Save the cache of a prompt, and go on from it later.",
    epilog="Example: compress kv save ./my-model --prompt-file manual.txt --out manual.kv",
    no_args_is_help=True,
    add_completion=False,
)
app.add_typer(kv)

Quality = Literal["high", "standard", "small", "lossless"]
File = Annotated[Path, typer.Argument(metavar="FILE", help="A cache that compress kv save wrote.")]


@kv.command(epilog="Example: compress kv save ./my-model --prompt-file manual.txt --out manual.kv")
def save(
    model: Model,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="File to write, replaced when complete.")],
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Text to read.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(metavar="FILE", help="File with the text to read.")] = None,
    quality: Annotated[
        Quality, typer.Option(help="Of keys and values; a checkpoint with a cache of its own keeps every bit.")
    ] = "standard",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that kv save did not write.")] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Let a model read a prompt, and save the cache that it computes.

    A file of an earlier kv save is replaced, any other only with --overwrite.
    """
    with errors():
        text = _text(prompt, prompt_file)
        check_model(model)
        paths.check_writable(out.parent, "--out")
        if out.is_dir():
            raise typer.BadParameter(f"{out} is a directory; give a file", param_hint="--out")
        read = [path for path in (paths.local_model(model), prompt_file) if path is not None]
        paths.check_saved_cache_out(out, overwrite, read)
        from compress.evaluate import saved_cache
        from compress.run.source import resolve

        found = saved_cache.save(resolve(model), text, out, quality, device_named(device))
        _print(found, out, as_json)


@kv.command(epilog='Example: compress kv load ./my-model manual.kv --prompt "How is it reset?"')
def load(
    model: Model,
    file: File,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="Text that follows the saved prompt; may be none.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0: the likeliest token each time.")] = 0.0,
    seed: Seed = 0,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Load the cache of a prompt, and let the model go on from there."""
    with errors():
        check_model(model)
        _check_file(file)
        from compress.evaluate import saved_cache
        from compress.run.source import resolve

        draw = (temperature, seed)
        written = saved_cache.write_on(resolve(model), file, prompt, max_new_tokens, draw, device_named(device))
        print(json.dumps({"prompt": prompt, "text": written}) if as_json else written)


@kv.command(epilog="Example: compress kv show manual.kv")
def show(file: File, as_json: AsJson = False) -> None:
    """Show what a saved cache holds: tokens, bytes, quality. Hashes of what is small are checked."""
    with errors():
        _check_file(file)
        from compress.evaluate import saved_cache

        _print(saved_cache.described(file), file, as_json)


def _print(found: object, path: Path, as_json: bool) -> None:
    """Print what a file holds, a `Saved`."""
    facts = {"file": str(path), **dataclasses.asdict(found)}  # type: ignore[call-overload]
    if as_json:
        print(json.dumps(facts))
        return
    share = facts["nbytes"] / max(1, facts["raw_nbytes"])
    print(
        f"{path}: {facts['tokens']:,} tokens, {facts['nbytes'] / 2**20:.2f} MiB, {share:.1%} of keys and values as the "
        f"model computes them, quality {facts['quality']}"
    )


def _text(prompt: str | None, prompt_file: Path | None) -> str:
    """Return the text of one of the two options."""
    if (prompt is None) == (prompt_file is None):
        raise typer.BadParameter("give --prompt or --prompt-file, one of them", param_hint="--prompt")
    if prompt_file is None:
        assert prompt is not None
        return prompt
    paths.check_text(str(prompt_file))
    try:
        return prompt_file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CalibrationError(f"cannot read {prompt_file} ({first_line(error)}); give a text in UTF-8") from error


def _check_file(file: Path) -> None:
    paths.check_saved_cache(file)
