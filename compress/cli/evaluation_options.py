"""Declare the options that commands which compare a model with its original share, each once."""

from __future__ import annotations

from typing import Annotated

from typer import Option

Base = Annotated[str | None, Option(metavar="MODEL", help="Uncompressed model to compare with.")]
