"""Compare compressed key-value caches: `compress kv-bench`, and the options --kv and --calib of other commands."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compress.cli.evaluation_options import Bos, note_prefix
from compress.cli.options import (
    AsJson,
    Device,
    Dtype,
    Model,
    TextFile,
    app,
    check_paths,
    device_named,
    errors,
    note,
    text_given,
)
from compress.errors import RecipeError, cut, shown

if TYPE_CHECKING:
    from compress.kv.settings import CacheSettings

OWN = "own"
SECTION = "kv_cache."  # in front of the keys of overrides

Cache = Annotated[
    str | None,
    typer.Option(
        "--kv", metavar="RECIPE", help="Cache to use: a recipe with kv_cache, or own: that of the checkpoint."
    ),
]
CacheCalib = Annotated[
    str | None, typer.Option("--calib", metavar="SRC", help="Text for cache recipes that need calibration.")
]

CacheSet = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a value of --kv's kv_cache: bits=3. Repeatable."),
]


def cache_recipes(names: list[str], overrides: Sequence[str] | None = None) -> dict[str, CacheSettings]:
    """Return cache recipes by name, with overrides of their kv_cache; none: the cache that the checkpoint stores."""
    from compress import recipe

    overrides = [_of_section(override) for override in overrides or ()]
    if overrides and names in ([], [OWN]):
        raise RecipeError("--set changes a recipe of --kv; the cache of a checkpoint is as it was written: name one")
    if names == [OWN]:
        return {}
    found = {}
    for name in names:
        note(recipe.ambiguous(name))
        loaded = recipe.load(name)
        if loaded.kv_cache is not None and overrides:
            loaded = recipe.load(name, overrides)
        if loaded.kv_cache is None:
            raise RecipeError(
                f"recipe {shown(loaded.name)} has no kv_cache; those that have are {', '.join(with_cache())}"
            )
        found[", ".join((loaded.name, *(override.removeprefix(SECTION) for override in overrides)))] = loaded.kv_cache
    return found


def _of_section(override: str) -> str:
    """Return an override `key=value` of kv_cache with the section in front; RecipeError for other sections."""
    from compress.recipe.schema import TOP_KEYS

    first = override.partition("=")[0].strip().partition(".")[0]
    if first in TOP_KEYS and first != SECTION.rstrip("."):
        raise RecipeError(f"--set {cut(override)}: of a recipe of --kv only kv_cache is used; set a key of it, bits=3")
    return override if first in TOP_KEYS else f"{SECTION}{override.strip()}"


def with_cache(only: bool = False) -> list[str]:
    """Return the names of the built-in recipes with kv_cache; `only`: with nothing else."""
    from compress import recipe

    loaded = [recipe.load(name) for name in recipe.names()]
    return [each.name for each in loaded if each.kv_cache is not None and not (only and each.packs)]


def _has_cache(directory: Path) -> bool:
    """Tell whether a checkpoint stores settings of a cache."""
    from compress.runtime import kv_config
    from compress.storage.checkpoint import read_config

    return kv_config.stored_section(read_config(directory)) is not None


@app.command("kv-bench", epilog="Example: compress kv-bench ./my-model --kv kv4 --kv kv2 --text held_out.txt")
def kv_bench(
    model: Model,
    kv: Annotated[
        list[str] | None,
        typer.Option("--kv", metavar="RECIPE", help="Recipe with kv_cache; repeatable. Default: own, or all that fit."),
    ] = None,
    overrides: CacheSet = None,
    text: TextFile = None,
    context: Annotated[
        list[int] | None,
        typer.Option("--context", min=64, help="Tokens of a context; repeatable. Default: three that fit."),
    ] = None,
    calib: CacheCalib = None,
    max_tokens: Annotated[int, typer.Option(min=128, help="Tokens of the text to score at each context.")] = 16384,
    needles: Annotated[
        int, typer.Option(min=0, help="Long texts with five sentences to find again, for each context; 0: none.")
    ] = 4,
    equal_bytes: Annotated[bool, typer.Option(help="Also compare at equal bytes.")] = True,
    speed: Annotated[bool, typer.Option(help="Also time them.")] = True,
    bos: Bos = "auto",
    dtype: Dtype = "float32",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Compare compressed caches with the uncompressed one: loss, recall, needles, errors of attention, bytes, speed."""
    with errors():
        text = text_given(text)
        check_paths(model, text, calib)
        recipes = cache_recipes(kv or [], overrides) if kv or overrides else None
        import dataclasses

        from compress.cli import cache_tables, tables
        from compress.evaluate import Execution, cache
        from compress.run.source import resolve

        directory = resolve(model)
        if recipes is None:
            recipes = cache_recipes([OWN] if _has_cache(directory) else with_cache(only=True))
        left_out = None if kv else note  # what was not asked for by name
        asked = cache.Request(
            recipes, text, calib, tuple(context or ()), max_tokens, equal_bytes, speed, needles, left_out
        )
        note_prefix(directory, bos)
        with tables.progress_bar() as progress:
            found = cache.bench(directory, asked, Execution(dtype, device_named(device), bos=bos), progress)
        if as_json:
            print(json.dumps(dataclasses.asdict(found)))
            return
        for line in cache_tables.lines(found):
            print(line)
        for table in cache_tables.tables(found):
            tables.out.print(table)
