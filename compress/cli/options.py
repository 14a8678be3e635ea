"""Declare the options that commands share, each once, and check their values."""

from __future__ import annotations

import dataclasses
import errno
import functools
import inspect
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer
from typer import Argument, Option

from compress.cli import interruption, streams
from compress.cli.signatures import ComputeDtype, parameter, with_help
from compress.errors import CompressError, RecipeError, out_of_memory
from compress.storage import paths

if TYPE_CHECKING:
    from compress.run.job import Job

app = typer.Typer(
    name="compress",
    help="Compress language models: quantize a Hugging Face checkpoint by a recipe, check it, score it, use it.",
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
)

DEFAULT_RECIPE = "trellis4bit"
DEFAULT_ALLOCATION = "mixed3bit"  # of the commands that need something to allocate

Model = Annotated[str, Argument(metavar="MODEL", help="Checkpoint directory, GGUF file, or a hub id (owner/name).")]
Adapter = Annotated[Path | None, Option(metavar="DIR", help="LoRA adapter as PEFT saves it, merged in first.")]
Directory = Annotated[Path, Argument(metavar="DIR", help="A checkpoint that compress wrote.")]
Device = Annotated[str, Option(help="auto, cpu or cuda.")]
Dtype = Annotated[Literal["float32", "bfloat16", "float16", "auto"], Option(help="Of the scores; auto: as stored.")]
Seed = Annotated[int, Option(min=0, max=(1 << 63) - 1, help="Of the calibration sample and everything random.")]
TextFile = Annotated[str | None, Option("--text", metavar="FILE", help="Text to score; never the calibration text.")]
AsJson = Annotated[bool, Option("--json", help="Print the result as JSON.")]
FormerOut = Annotated[
    Path | None, Option("--out", "-o", metavar="DIR", hidden=True, help="The former name of another option.")
]

GOAL = ("target", "context", "max_kl")
OUTPUT = ("out", "overwrite", "restart", "base_model", "work")
REQUIRED = inspect.Parameter.empty
UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}  # wherever it is
LEAST_MEMORY = 1 << 20  # bytes; what is less was meant in another unit

Writes = Literal["checkpoint", "measurements"] | None


@dataclass(frozen=True)
class RunOptions:
    """The options shared by the commands that plan, measure or write a checkpoint. One field is one option."""

    model: Model
    recipe: Annotated[str, Option("--recipe", "-r", help="Built-in recipe (`compress recipes`) or a YAML file.")] = (
        DEFAULT_RECIPE
    )
    out: Annotated[
        Path | None,
        Option(
            "--out", "-o", metavar="DIR", help="The checkpoint to be written. Default: models_out/<model>-<recipe>."
        ),
    ] = None
    calib: Annotated[
        str | None,
        Option(
            metavar="SRC",
            help="Text or chats: a .txt, .jsonl or .parquet file, or a data set. Default: the model writes its own.",
        ),
    ] = None
    adapter: Adapter = None
    base_model: Annotated[
        str | None, Option(metavar="ID", help="Hub id of the original (owner/name), for the model card.")
    ] = None
    overrides: Annotated[
        list[str] | None, Option("--set", metavar="KEY=VALUE", help="Override a recipe value: bits=3. Repeatable.")
    ] = None
    max_memory: Annotated[
        str | None, Option(metavar="SIZE", help="Limit for this process: 8GiB. Default: what is free.")
    ] = None
    device: Device = "auto"
    dtype: ComputeDtype = None
    seed: Seed = 0
    target: Annotated[
        str | None, Option(metavar="SIZE", help="Allocate bits for 3.25bpw (linears) or 2.1GiB (whole model).")
    ] = None
    context: Annotated[
        int | None, Option(min=1, metavar="TOKENS", help="Count the cache of so many tokens in --target, too.")
    ] = None
    max_kl: Annotated[
        float | None, Option(metavar="NATS", help="Allocate the smallest model within this KL on the calibration text.")
    ] = None
    measurements: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="Measured by `compress measure`; made or reused. Default: beside the output, by model and recipe.",
        ),
    ] = None
    budget: Annotated[
        str | None, Option(metavar="TIME", help="To measure damages and quantize: 90s, 20min, 2h. Picks the estimator.")
    ] = None
    processes: Annotated[int, Option(min=1, help="Processes that measure choices side by side.")] = 1
    overwrite: Annotated[
        bool, Option("--overwrite", help="Replace an existing output once the new one is complete.")
    ] = False
    restart: Annotated[bool, Option("--restart", help="Forget an unfinished run and start over.")] = False
    allow_partial: Annotated[
        bool, Option("--allow-partial", help="Go on with less than half of the weights packed, or packed ones lost.")
    ] = False
    work: Annotated[
        Path | None,
        Option(metavar="DIR", help="For unfinished work; then --out may be an object store. Default: beside --out."),
    ] = None

    @property
    def recipe_overrides(self) -> list[str]:
        """The values of --set, and those that --target, --max-kl and --context stand for."""
        goal = {"allocate.target": self._goal(), "allocate.context": self.context}
        return [*(self.overrides or []), *(f"{key}={value}" for key, value in goal.items() if value is not None)]

    def _goal(self) -> str | None:
        """The target of an allocation that --target or --max-kl stands for."""
        from compress.recipe import Target

        if self.max_kl is None:
            try:
                return None if self.target is None else Target(self.target.strip()).text
            except ValueError as error:
                raise typer.BadParameter(str(error), param_hint="--target") from error
        if self.target is not None:
            raise typer.BadParameter("give --target or --max-kl, not both", param_hint="--max-kl")
        if self.context is not None:
            raise typer.BadParameter("give --target, a size that the cache is counted in", param_hint="--context")
        bound = f"{self.max_kl:.12f}".rstrip("0").rstrip(".")
        if not math.isfinite(self.max_kl) or self.max_kl <= 0 or not bound.strip("0."):
            raise typer.BadParameter("give a positive number of nats a token, such as 0.05", param_hint="--max-kl")
        return f"{bound}kl"

    def _limit(self) -> int | None:
        """The bytes of --max-memory."""
        return size_given(self.max_memory)

    def _seconds(self) -> float | None:
        """The seconds of --budget."""
        from compress.progress import parse_duration

        try:
            return None if self.budget is None else parse_duration(self.budget)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--budget") from error

    def _check_folders(self, writes: Writes, out: Path | None) -> None:
        """Raise the error for a folder that the run could not write; `out`: that of the checkpoint, None: unknown."""
        read = [each for each in (Path(self.model), self.adapter) if each is not None and each.exists()]
        if writes is not None and self.measurements is not None:
            paths.check_outside(self.measurements, "--measurements", *read)
            paths.check_writable(self.measurements, "--measurements")
        elif writes == "measurements" and out is not None:
            paths.check_writable(out.parent, "--measurements")
        if writes == "checkpoint" and out is not None:
            paths.check_name(out)
            paths.check_apart(out, *read)
            if self.work is not None:
                paths.check_outside(self.work, "--work", *read)
                paths.check_writable(self.work, "--work")
            paths.check_out(out, self.overwrite)
            paths.check_writable(out.parent, "--out")

    def job(self, pack: bool = True, writes: Writes = "checkpoint") -> Job:
        """Return the job of a run; wrong usage, paths and recipes stop here, before anything heavy is imported.

        `pack` False: the job applies only the transforms of the recipe. `writes`: None for a plan.
        """
        from compress import recipe as recipes

        overrides, limit = self.recipe_overrides, self._limit()
        check_device(self.device)
        check_paths(self.model, self.calib)
        check_adapter(self.adapter)
        if self.base_model is not None and not paths.HUB_ID.fullmatch(self.base_model):
            raise typer.BadParameter("give the id of a model on the hub, owner/name", param_hint="--base-model")
        self._check_folders(writes, self.out)
        note(recipes.ambiguous(self.recipe))
        recipe = recipes.load(self.recipe, overrides)
        if not pack and not recipe.transform:
            raise RecipeError(f"recipe {recipe.name!r} has no transform to apply; give one that has, or use quantize")
        if self.budget is not None and not hasattr(getattr(recipe.allocate, "config", None), "estimator"):
            said = f"recipe {recipe.name!r} has no estimator of damages to choose; leave it out"
            raise typer.BadParameter(said, param_hint="--budget")
        from compress.run.job import Job

        model = Path(self.model.rstrip("/")).name.removesuffix(paths.GGUF)
        name = re.sub(r"[^\w.-]+", "-", f"{model or 'model'}-{recipe.name}")
        out = self.out or Path("models_out") / (name if pack else f"{name}-transformed")
        self._check_folders(writes, out)
        return Job(
            model=self.model,
            recipe=recipe,
            out=out,
            adapter=self.adapter,
            base_model=self.base_model,
            calib=self.calib,
            max_memory=limit,
            device=device_named(self.device),
            dtype=self.dtype,
            seed=self.seed,
            overwrite=self.overwrite,
            restart=self.restart,
            work=self.work,
            allow_partial=self.allow_partial,
            pack=pack and recipe.packs,
            measurements=self.measurements,
            budget=self._seconds(),
            processes=self.processes,
        )


def command(
    name: str | None = None,
    *,
    epilog: str,
    without: tuple[str, ...] = (),
    helps: Mapping[str, str] | None = None,
    **defaults: Any,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command whose first parameter is a `RunOptions`: on the command line its fields are options.

    typer reads the options of a command from the parameters of its function. The registered function therefore gets a
    signature in which the fields of the dataclass, with their types and defaults, stand in place of the first
    parameter; when it is called, it puts them together again. A field that is added to the dataclass is an option of
    every command. `without`: fields that this command does not offer. `helps`: of fields that mean another thing
    here. `defaults`: values that differ here, or REQUIRED.
    """
    hints = get_type_hints(RunOptions, include_extras=True)
    hints |= {name: with_help(hints[name], text) for name, text in (helps or {}).items()}
    shared = [
        parameter(field.name, hints[field.name], defaults.get(field.name, field.default))
        for field in dataclasses.fields(RunOptions)
        if field.name not in without
    ]

    def register(function: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        parameters = [*shared, *(parameter(each.name, each.annotation, each.default) for each in own)]

        @functools.wraps(function)
        def called(**values: Any) -> None:
            options = RunOptions(**{each.name: values.pop(each.name) for each in shared})
            function(options, **values)

        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {each.name: each.annotation for each in parameters}
        app.command(name, epilog=epilog)(called)
        return function

    return register


def _is_interruption(error: BaseException | None) -> bool:
    """Return whether this is an interruption, or came up while one was answered."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


@contextmanager
def errors(resume: str = "") -> Iterator[None]:
    """Print the user's errors as one line and an interruption as a hint; anything else shows its traceback: a bug.

    What goes wrong while an interruption is answered is part of that.
    """
    try:
        yield
    except BaseException as error:
        if _is_interruption(error):
            interruption.said()
            note(f"interrupted{resume}")
            raise typer.Exit(interruption.exit_code() or 130) from None
        if (line := out_of_memory(error)) or isinstance(error, CompressError):
            note(line or str(error))
            raise typer.Exit(1) from None
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(streams.UNREAD) from None
        if isinstance(error, OSError) and (error.errno in UNWRITABLE or (error.errno and error.filename)):
            note(f"{error.filename or 'cannot write the output'}: {error.strerror}")
            raise typer.Exit(1) from None
        raise


def size_given(text: str | None) -> int | None:
    """Return the bytes of --max-memory; wrong usage for what no run could keep to."""
    from compress.process_memory import parse_size

    try:
        limit = None if text is None else parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--max-memory") from error
    if limit is not None and limit < LEAST_MEMORY:
        said = f"{text} is {limit} bytes, less than any run takes; give a size such as 8GiB"
        raise typer.BadParameter(said, param_hint="--max-memory")
    return limit


def check_model(model: str) -> None:
    """Raise the error for a model that is not there, before torch is imported."""
    path = paths.local_model(model)
    if path is not None and paths.gguf_file(path) is None:
        paths.check_checkpoint(path)


def check_base(model: str, base: str | None) -> None:
    """Raise the error for a base that is not there; print a note where it seems to be exchanged with the model."""
    if base is not None:
        check_model(base)
        note(paths.exchange_note(model, base))


def check_adapter(adapter: Path | None) -> None:
    """Raise the error for an adapter that is not there, before torch is imported."""
    if adapter is not None:
        paths.check_adapter(adapter)


def check_paths(model: str, *texts: str | None) -> None:
    """Raise the error for a model or a text that is not there, before torch is imported."""
    check_model(model)
    for text in texts:
        if text is not None:
            paths.check_corpus(text)


def check_device(name: str) -> None:
    """Raise wrong usage for a device that has no meaning, before torch is imported."""
    if name not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter(f"{name!r} is not auto, cpu or cuda", param_hint="--device")


def device_named(name: str) -> str:
    """Return cpu or cuda for the value of --device."""
    check_device(name)
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise CompressError("--device cuda: this machine has no usable CUDA device; use --device cpu")
    return name


def note(text: str | None) -> None:
    """Print one line on stderr, if there is something to say and anybody to read it."""
    if text is not None:
        with suppress(OSError):
            typer.echo(f"compress: {text}", err=True)


class NotePrinter(logging.Handler):
    """Print the notes of a run, each once."""

    def __init__(self) -> None:
        super().__init__()
        self.said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a note unless it has been printed."""
        text = record.getMessage()
        if text not in self.said:
            self.said.add(text)
            note(text)


def renamed(given: Path | None, former: Path | None, option: str) -> Path | None:
    """Return the value of an option that was called --out before; that name still works, with a note."""
    if former is None:
        return given
    if given is not None:
        raise typer.BadParameter(f"it is the former name of {option}; give that alone", param_hint="--out")
    note(f"--out is for checkpoints; here it is called {option}")
    return former


def text_given(text: str | None) -> str:
    """Return the value of --text; wrong usage without one."""
    if text is None:
        raise typer.BadParameter("give the text to score: a .txt, .jsonl or .parquet file", param_hint="--text")
    return text
