"""Options that commands share, and how their values and errors are handled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from compress.errors import CompressError

app = typer.Typer(
    name="compress",
    help="Compress language models: quantize a Hugging Face checkpoint by a recipe, check it, score it, use it.",
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
)

DEFAULT_RECIPE = "vq2bit"
DEFAULT_ALLOCATION = "mixed3bit"  # of the commands that need something to allocate

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint directory, or a hub id (owner/name).")]
Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint that compress wrote.")]
RecipeName = Annotated[str, typer.Option("--recipe", "-r", help="Built-in recipe (`compress recipes`) or a YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe value: bits=3. Repeatable.")
]
MaxMemory = Annotated[
    str | None,
    typer.Option("--max-memory", metavar="SIZE", help="Limit for this process: 8GiB. Default: what is free."),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Seed = Annotated[int, typer.Option(min=0, max=(1 << 63) - 1, help="Of the calibration sample and everything random.")]
Calib = Annotated[
    str | None,
    typer.Option(
        "--calib",
        metavar="SRC",
        help="Text: a .txt, .jsonl or .parquet file, or a data set name. Default: the model writes its own.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", metavar="DIR", help="The checkpoint to be written. Default: models_out/<model>-<recipe>."
    ),
]
FormerOut = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="DIR", hidden=True, help="The former name of another option.")
]
TextFile = Annotated[
    str | None, typer.Option("--text", metavar="FILE", help="Text to score; never the calibration text.")
]

Goal = Annotated[
    str | None,
    typer.Option("--target", metavar="SIZE", help="Allocate bits for 3.25bpw (linears) or 2.1GiB (whole model)."),
]
Context = Annotated[
    int | None,
    typer.Option("--context", min=1, metavar="TOKENS", help="Count the cache of so many tokens in --target, too."),
]
MaxKl = Annotated[
    float | None,
    typer.Option("--max-kl", metavar="NATS", help="The smallest model within this KL, on the calibration text."),
]
Measurements = Annotated[
    Path | None,
    typer.Option(
        "--measurements", metavar="DIR", help="Made or reused. Default: beside the output, by model and recipe."
    ),
]
Processes = Annotated[int, typer.Option(min=1, help="Processes that measure choices side by side.")]


@contextmanager
def errors(resume: str = "") -> Iterator[None]:
    """The user's errors as one line, interruption as a hint; anything else is a bug and shows its traceback."""
    try:
        yield
    except CompressError as error:
        typer.echo(f"compress: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo(f"compress: interrupted{resume}", err=True)
        raise typer.Exit(130) from None


def device_named(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise typer.BadParameter(f"{name!r} is not auto, cpu or cuda", param_hint="--device")
    if name == "cuda" and not torch.cuda.is_available():
        raise CompressError("--device cuda: this machine has no usable CUDA device; use --device cpu")
    return name


def aimed(
    overrides: list[str] | None, target: str | None, max_kl: float | None, context: int | None = None
) -> list[str]:
    """The overrides, with those that --target, --max-kl and --context stand for."""
    if target is not None and max_kl is not None:
        raise typer.BadParameter("give --target or --max-kl, not both", param_hint="--max-kl")
    if context is not None and max_kl is not None:
        raise typer.BadParameter("give --target, a size that the cache is counted in", param_hint="--context")
    goal = target if max_kl is None else f"{max_kl:.12f}".rstrip("0").rstrip(".") + "kl"
    said = {"allocate.target": goal, "allocate.context": context}
    return [*(overrides or []), *(f"{key}={wanted}" for key, wanted in said.items() if wanted is not None)]


def note(text: str | None) -> None:
    """Print one line on stderr, if there is something to say."""
    if text is not None:
        typer.echo(f"compress: {text}", err=True)


def renamed(given: Path | None, former: Path | None, option: str) -> Path | None:
    """The value of an option that was called --out before, which still works and is told its new name."""
    if former is None:
        return given
    if given is not None:
        raise typer.BadParameter(f"it is the former name of {option}; give that alone", param_hint="--out")
    note(f"--out is for checkpoints; here it is called {option}")
    return former


def missing(option: str, advice: str) -> str:
    raise typer.BadParameter(advice, param_hint=option)
