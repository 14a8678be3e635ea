"""Declare the options that commands which compare a model with its original share, each once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from compress.cli.options import note

Bos = Annotated[
    Literal["auto", "never", "always"],
    Option(help="Begin-of-text token before each window and question; auto: what the tokenizer puts before a text."),
]
Base = Annotated[str | None, Option(metavar="MODEL", help="Uncompressed model to compare with.")]


def note_prefix(directory: Path, bos: Bos) -> None:
    """Say what each window begins with, where the tokenizer of a model puts something before a text."""
    from compress.calib import prefix

    note(prefix.of_directory(directory, bos).sentence or None)
