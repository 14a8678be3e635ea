"""Declare the options that commands share, each once, check their values, and print notes and errors."""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from compress.cli import interruption, streams
from compress.errors import CompressError, RecipeError, cut, first_line, out_of_memory, shown
from compress.storage import paths

if TYPE_CHECKING:
    from compress.kv.settings import CacheSettings
    from compress.run.capacity import ServingMemory

Model = Annotated[str, Argument(metavar="MODEL", help="Checkpoint directory, GGUF file, or a hub id (owner/name).")]
Adapter = Annotated[Path | None, Option(metavar="DIR", help="LoRA adapter as PEFT saves it, merged in first.")]
Directory = Annotated[Path, Argument(metavar="DIR", help="A checkpoint that compress wrote.")]
Level = Annotated[
    int | None,
    Option(metavar="BITS", help="Of a checkpoint with several in one: which of its levels. Default: all of it."),
]
Device = Annotated[str, Option(help="auto, cpu or cuda.")]
Dtype = Annotated[Literal["float32", "bfloat16", "float16", "auto"], Option(help="Of the scores; auto: as stored.")]
ComputeDtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    Option(
        help="Compute in this type, not in the checkpoint's. config.json names it: the result loads in it, too. "
        "What is not packed stays as it is stored."
    ),
]
Seed = Annotated[int, Option(min=0, max=(1 << 63) - 1, help="Of the calibration sample and everything random.")]
TextFile = Annotated[str | None, Option("--text", metavar="FILE", help="Text to score; never the calibration text.")]
Base = Annotated[str | None, Option(metavar="MODEL", help="Uncompressed model to compare with.")]
Bos = Annotated[
    Literal["auto", "never", "always"],
    Option(help="Begin-of-text token before each window and question; auto: what the tokenizer puts before a text."),
]
Cache = Annotated[
    str | None,
    Option("--kv", metavar="RECIPE", help="Cache to use: a recipe with kv_cache, or own: that of the checkpoint."),
]
CacheCalib = Annotated[
    str | None, Option("--calib", metavar="SRC", help="Text for cache recipes that need calibration.")
]
CacheSet = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="Override a value of --kv's kv_cache: bits=3. Repeatable."),
]
Reserve = Annotated[
    str,
    Option(
        "--reserve",
        metavar="SIZE",
        help="Of each device for activations and graphs, where contexts are counted: 2GiB or 10%.",
    ),
]
AsJson = Annotated[bool, Option("--json", help="Print the result as JSON.")]
FormerOut = Annotated[
    Path | None, Option("--out", "-o", metavar="DIR", hidden=True, help="The former name of another option.")
]

DEFAULT_RESERVE = "10%"  # share of a device: vLLM leaves 8%, and takes activations and graphs from the rest
OWN_CACHE = "own"  # the value of --kv for the cache that a checkpoint stores
CACHE_SECTION = "kv_cache."
UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}  # errors of the disk, whatever the file
MIN_MEMORY_NBYTES = 1 << 20  # a smaller limit was meant in another unit


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
            interruption.mark_reported()
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


def at_level(model: str, level: int | None) -> str:
    """Return a model of which a level is all there is, None: of which all is; CheckpointError for one without it."""
    if level is None:
        return model
    check_model(model)
    from compress.run.source import resolve

    return str(resolve(model, level=level))


def parse_nbytes(text: str, option: str) -> int:
    """Return the bytes of an option such as 8GiB; wrong usage for anything else."""
    from compress.process_memory import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def parse_serve(text: str, reserve: str, device: str) -> ServingMemory:
    """Return what --serve and --reserve stand for; wrong usage for anything else. device: cpu counts in its blocks."""
    from compress.run.capacity import TOKENS_PER_BLOCK, ServingMemory

    count, times, each = text.rpartition("x")
    if times and not (count.strip().isdecimal() and int(count)):
        raise typer.BadParameter(f"{text!r} is not a size such as 24GiB or 8x141GiB", param_hint="--serve")
    nbytes = parse_nbytes(each, "--serve")
    if each.strip().isdecimal() and nbytes < MIN_MEMORY_NBYTES:
        raise typer.BadParameter(f"{text!r} has no unit; {text}GiB?", param_hint="--serve")
    share, percent, _ = reserve.partition("%")
    if percent and not re.fullmatch(r"\d{1,2}(\.\d+)?", share.strip()):
        raise typer.BadParameter(
            f"{reserve!r} is not a share such as 10% or a size such as 2GiB", param_hint="--reserve"
        )
    kept = int(nbytes * float(share) / 100) if percent else parse_nbytes(reserve, "--reserve")
    block = TOKENS_PER_BLOCK["cpu" if device == "cpu" else "cuda"]
    return ServingMemory(nbytes, int(count or 1), kept, block)


def parse_memory(text: str | None) -> int | None:
    """Return the bytes of --max-memory; wrong usage for what no run could keep to."""
    limit = None if text is None else parse_nbytes(text, "--max-memory")
    if limit is not None and limit < MIN_MEMORY_NBYTES:
        reason = f"{text} is {limit} bytes, less than any run takes; give a size such as 8GiB"
        raise typer.BadParameter(reason, param_hint="--max-memory")
    return limit


def parse_time(text: str | None, option: str) -> float | None:
    """Return the seconds of an option such as 90s, 20min or 2h; wrong usage for anything else."""
    from compress.progress import parse_duration

    try:
        return None if text is None else parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


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
        self.printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a note unless it has been printed."""
        text = record.getMessage()
        if text not in self.printed:
            self.printed.add(text)
            note(text)


def former_out(given: Path | None, former: Path | None, option: str) -> Path | None:
    """Return the value of an option that was called --out before; that name still works, with a note."""
    if former is None:
        return given
    if given is not None:
        raise typer.BadParameter(f"it is the former name of {option}; give that alone", param_hint="--out")
    note(f"--out is for checkpoints; here it is called {option}")
    return former


def required_text(text: str | None) -> str:
    """Return the value of --text; wrong usage without one."""
    if text is None:
        raise typer.BadParameter("give the text to score: a .txt, .jsonl or .parquet file", param_hint="--text")
    return text


def note_prefix(directory: Path, bos: Bos) -> None:
    """Print what each window begins with, where the tokenizer of a model puts something before a text."""
    from compress.calib import prefix

    note(prefix.of_directory(directory, bos).sentence or None)


def keep(directory: Path, add: Callable[[Any], object]) -> None:
    """Add a result to scores.json of a checkpoint that compress wrote, and bring its page up to date.

    add: is called with the module `compress.evaluate.record`.

    A checkpoint that may only be read, or whose scores.json is damaged, is measured all the same: a note says that the
    result is not kept.
    """
    from compress.evaluate import page, record

    if not record.is_kept(directory):
        return
    try:
        add(record)
        page.refresh(directory)
    except (CompressError, OSError) as error:
        note(f"what was measured is not kept beside {directory}: {first_line(error)}")


def cache_recipes(names: list[str], overrides: Sequence[str] | None = None) -> dict[str, CacheSettings]:
    """Return cache recipes by name, with overrides of their kv_cache; none: the cache that the checkpoint stores."""
    from compress import recipe

    overrides = [_in_cache_section(override) for override in overrides or ()]
    if overrides and names in ([], [OWN_CACHE]):
        raise RecipeError("--set changes a recipe of --kv; the cache of a checkpoint is as it was written: name one")
    if names == [OWN_CACHE]:
        return {}
    caches = {}
    for name in names:
        note(recipe.ambiguous(name))
        loaded = recipe.load(name)
        if loaded.kv_cache is not None and overrides:
            loaded = recipe.load(name, overrides)
        if loaded.kv_cache is None:
            raise RecipeError(
                f"recipe {shown(loaded.name)} has no kv_cache; those that have are {', '.join(recipes_with_cache())}"
            )
        caches[", ".join((loaded.name, *(override.removeprefix(CACHE_SECTION) for override in overrides)))] = (
            loaded.kv_cache
        )
    return caches


def _in_cache_section(override: str) -> str:
    """Return an override `key=value` of kv_cache with the section in front; RecipeError for other sections."""
    from compress.recipe.schema import TOP_KEYS

    first = override.partition("=")[0].strip().partition(".")[0]
    if first in TOP_KEYS and first != CACHE_SECTION.rstrip("."):
        raise RecipeError(f"--set {cut(override)}: of a recipe of --kv only kv_cache is used; set a key of it, bits=3")
    return override if first in TOP_KEYS else f"{CACHE_SECTION}{override.strip()}"


def recipes_with_cache(only: bool = False) -> list[str]:
    """Return the names of the built-in recipes with kv_cache; `only`: with nothing else."""
    from compress import recipe

    loaded = [recipe.load(name) for name in recipe.names()]
    return [each.name for each in loaded if each.kv_cache is not None and not (only and each.packs)]
