"""List the cells of a study: recipes, with the values of each axis in all combinations.

A cell is named by its recipe and by a hash of everything that decides its figures: the resolved recipe, the model, the
calibration source, the texts that are scored, the seed and the type of the scores. The same request gives the same
names, so that a study is added to by asking for more.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from compress import recipe
from compress.calib.documents import source_name
from compress.errors import RecipeError
from compress.progress import note
from compress.recipe import Recipe
from compress.recipe.catalogue import COSTS, ListedRecipe
from compress.recipe.schema import Bos
from compress.storage.files import open_regular
from compress.storage.paths import SELF

# Version of what a cell is and holds; another version measures all cells anew.
VERSION = 1
ORIGINAL = "original"  # the cell of the model as it is
NAME_LENGTH = 60  # characters of a cell's folder before the hash


@dataclass(frozen=True)
class Settings:
    """What all cells of a study share. Paths are absolute."""

    model: str  # directory or hub id
    texts: tuple[str, ...]  # sources that are scored
    window: int = 512  # [tokens] of a scored window
    max_tokens: int = 32768  # [tokens] scored of each text
    dtype: str = "float32"  # of the scores
    device: str = "cpu"
    seed: int = 0
    max_memory: int | None = None  # [bytes] limit of each cell's process; decides no figure
    keep: bool = False  # whether checkpoints stay after scoring; decides no figure
    speed: bool = False  # whether each checkpoint is timed, too; decides no other figure
    suite: str | None = None  # whose tasks are asked: "quick" or "full"
    tasks: tuple[str, ...] = ()  # more tasks: NAME, or NAME=FILE for one that reads a file
    bos: Bos = "auto"  # what each scored window and each question begins with (calib/prefix.py)
    quantize_dtype: str | None = None  # that models are quantized in, and load in; None: the checkpoint's own


@dataclass(frozen=True)
class Axes:
    """The values that vary. An empty axis leaves what the recipe says."""

    recipes: tuple[str, ...]  # names of built-in recipes or files
    bits: tuple[str, ...] = ()  # of the weights, or of the cache in a recipe that quantizes no weights
    overrides: tuple[tuple[str, tuple[str, ...]], ...] = ()  # key of the recipe -> its values
    calib: tuple[str, ...] = (SELF,)  # sources of calibration text
    samples: tuple[int, ...] = ()  # [sequences] of calibration
    seq_len: tuple[int, ...] = ()  # [tokens] of each


@dataclass(frozen=True)
class Cell:
    """One recipe with one value of each axis. Without a recipe: the original."""

    recipe: Recipe | None
    overrides: tuple[str, ...] = ()  # beyond the recipe's own values
    calib: str | None = None  # source of calibration text; None: the model writes it, or none is needed
    needs_text: bool = False  # whether the recipe is calibrated
    cost: int = 0  # place in `catalogue.COSTS`: cheap cells are measured first

    @property
    def name(self) -> str:
        """The name of the recipe."""
        return self.recipe.name if self.recipe is not None else ORIGINAL

    @property
    def label(self) -> str:
        """The recipe and what differs from it, for people."""
        source = () if self.calib is None else (source_name(self.calib),)
        return ", ".join((self.name, *self.overrides, *source))

    def key(self, identity: dict[str, Any]) -> str:
        """Return the name of the cell's folder; identity: what all cells share."""
        content = {
            "shared": identity,
            "recipe": None if self.recipe is None else recipe.fingerprint(self.recipe),
            "calibration": identify_source(self.calib) if self.needs_text and self.calib is not None else None,
        }
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]
        words = re.sub(r"[^\w.=-]+", "-", "-".join((self.name, *self.overrides)))[:NAME_LENGTH].strip("-")
        return f"{words}-{digest}"


def match_recipes(patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the recipes that names, patterns (int*) and files stand for, all built-in ones for none.

    Raises RecipeError for a pattern that matches nothing.
    """
    known = recipe.names()
    matches = dict[str, None]()
    for pattern in patterns or ("*",):
        if pattern in known or not any(sign in pattern for sign in "*?["):
            matches[pattern] = None
            continue
        matching = [name for name in known if fnmatchcase(name, pattern)]
        if not matching:
            raise RecipeError(f"no built-in recipe matches {pattern}; `compress recipes` lists them")
        matches |= dict.fromkeys(matching)
    return tuple(matches)


def values(text: str) -> tuple[str, ...]:
    """Split values at commas that lie in no bracket and no quotes: "2,3" gives 2 and 3, "[1, 2]" one value."""
    split, depth, quote, begin = list[str](), 0, "", 0
    for at, sign in enumerate(text):
        if quote or sign in "\"'":
            quote = "" if sign == quote else quote or sign
            continue
        depth += (sign in "[{(") - (sign in "]})")
        if sign == "," and not depth:
            split.append(text[begin:at])
            begin = at + 1
    parts = tuple(part.strip() for part in (*split, text[begin:]))
    if not all(parts):
        raise RecipeError(f"{text!r} has an empty value; give values with commas between them, such as 2,3,4")
    return parts


def axis(override: str) -> tuple[str, tuple[str, ...]]:
    """Return key and values of KEY=V1,V2. Raises RecipeError."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"--set {override}: expected KEY=V1,V2")
    return key.strip(), values(text)


def cells(axes: Axes) -> list[Cell]:
    """Return the original and every cell of the grid, cheap ones first, without doubles.

    What a recipe does not take of an axis is left out, with a note; a recipe that takes nothing of it stays as it is.
    Raises RecipeError for a recipe that cannot be used, and for a value that no recipe takes.
    """
    unique, taken = dict[tuple[Any, ...], Cell](), set[str]()
    refused = dict[str, RecipeError]()
    for name in axes.recipes:
        kept: list[list[str]] = []
        for key, options in _axes_of(recipe.load(name), axes):
            overrides, errors = _try_overrides(name, key, options)
            refused |= errors
            if overrides:
                kept.append(overrides)
                taken.update(overrides)
                for override in errors:
                    note(f"{name} is not studied with {override}: {errors[override]}")
        for chosen_ones in itertools.product(*kept):
            for cell in _vary_calibration(recipe.load(name, chosen_ones), chosen_ones, axes):
                unique.setdefault((cell.name, recipe.fingerprint(cell.recipe), cell.calib), cell)  # type: ignore[arg-type]
    known = {_value(override) for override in taken}
    if wrong := [error for override, error in refused.items() if _value(override) not in known]:
        raise wrong[0]
    return [Cell(None), *sorted(unique.values(), key=lambda cell: cell.cost)]


def identify_source(source: str) -> str:
    """Return what tells a source of text apart: the sha256 of a file, the name of anything else."""
    path = Path(source)
    if not path.is_file():
        return source
    digest = hashlib.sha256()
    with open_regular(path) as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _axes_of(plain: Recipe, axes: Axes) -> Iterator[tuple[str, Sequence[str]]]:
    """Give the axes of a recipe's own values: key of the recipe -> values."""
    if axes.bits:
        yield "quantize.bits" if plain.packs else "kv_cache.bits", axes.bits
    yield from axes.overrides
    if _needs_text(plain):
        if axes.samples:
            yield "calibration.num_samples", [str(count) for count in axes.samples]
        if axes.seq_len:
            yield "calibration.seq_len", [str(length) for length in axes.seq_len]


def _try_overrides(name: str, key: str, options: Sequence[str]) -> tuple[list[str], dict[str, RecipeError]]:
    """Return the overrides of an axis that a recipe takes, and why it does not take the others."""
    accepted, refused = list[str](), dict[str, RecipeError]()
    for override in (f"{key}={option}" for option in options):
        try:
            recipe.load(name, [override])
        except RecipeError as error:
            refused[override] = error
        else:
            accepted.append(override)
    return accepted, refused


def _value(override: str) -> str:
    """Return an override as it was asked for: bits are those of the weights or of the cache."""
    return re.sub(r"^(quantize|kv_cache)\.bits=", "bits=", override)


def _vary_calibration(resolved: Recipe, overrides: Sequence[str], axes: Axes) -> Iterator[Cell]:
    """Give a recipe with each source of calibration text; once if it needs none."""
    cost, shown = _cost(resolved), tuple(overrides)
    if not _needs_text(resolved):
        yield Cell(resolved, shown, None, False, cost)
        return
    for source in axes.calib:
        yield Cell(resolved, shown, None if source == SELF else source, True, cost)


def _needs_text(resolved: Recipe) -> bool:
    return _cost(resolved) > 0


def _cost(resolved: Recipe) -> int:
    """Return the place of a recipe's most expensive part in COSTS; the first is free of data."""
    entry = ListedRecipe(resolved.name, yaml.safe_load(recipe.dump(resolved)))
    return list(COSTS).index(entry.cost)
