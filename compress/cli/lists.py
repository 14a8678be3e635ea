"""Explain recipes, methods and their settings: `compress recipes` and `compress methods`."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.cli.options import AsJson, errors

if TYPE_CHECKING:
    from compress.recipe.catalogue import ListedRecipe

All = Annotated[bool, typer.Option("--all", help="List those of papers that are not on the frontier, too.")]


def recipes(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Print this recipe's YAML.")] = None,
    papers: All = False,
    as_json: AsJson = False,
) -> None:
    """List the built-in recipes by purpose, with their size and their cost, or print one to start from."""
    with errors():
        from compress import recipe
        from compress.recipe import catalogue

        if name is not None:
            print(recipe.text(name), end="")
            return
        groups = catalogue.by_purpose()
        if as_json:
            print(json.dumps({e.name: _facts(purpose, e) for purpose, group in groups.items() for e in group}))
            return
        rows = [
            (e.name, catalogue.PURPOSES[purpose], e.bits or "-", e.cost, e.description)
            for purpose, group in groups.items()
            for e in group
            if papers or not e.is_paper
        ]
        _print_lines(("recipe", "purpose", "bits", "cost", "what it is"), rows)
        print("Where to start: " + ", ".join(f"{n} {use}" for n, use in catalogue.WHERE_TO_START.items()) + ".")
        print("bits: for a weight, or for a coded number of a cache; as measured, or as planned (docs/recipes.md)")
        print("cost: all but data-free read calibration text; without --calib the model writes its own")
        if count := 0 if papers else sum(e.is_paper for group in groups.values() for e in group):
            print(f"{count} more, of papers and to compare with: compress recipes --all")


def _print_lines(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with a line for each row; on a terminal the last column is cut at its width."""
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for row in (names, *rows):
        line = "  ".join([*(f"{cell:<{width}}" for cell, width in zip(row[:-1], widths[:-1], strict=True)), row[-1]])
        print(line if limit is None or len(line) <= limit else f"{line[: limit - 1]}…")


def _facts(purpose: str, entry: ListedRecipe) -> dict[str, Any]:
    """Return what the list says of one recipe, as data."""
    return {
        "purpose": purpose,
        "is_paper": entry.is_paper,
        "bits": float(entry.bits) if entry.bits else None,
        "measured": bool(entry.measured),
        "calibration": entry.cost != "data-free",
        "cost": entry.cost,
        "description": entry.description,
    }


def methods(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Print the settings of this one: KIND/NAME, or NAME alone.")
    ] = None,
    papers: All = False,
    as_json: AsJson = False,
) -> None:
    """List methods, transforms, allocators, formats, cache codecs and the sections of recipes, or explain one."""
    with errors():
        from compress.cli import tables
        from compress.recipe import keys

        if name is None:
            described = {each: keys.describe(each) for each in keys.all_names()}
            if as_json:
                print(json.dumps(described))
                return
            lines = [(each, text) for each, text in described.items() if papers or not keys.is_paper(each)]
            _print_lines(("name", "what it is"), lines)
            if count := len(described) - len(lines):
                print(f"{count} more, of papers: compress methods --all")
            return
        full = keys.full_name(name)
        settings = keys.settings(full)
        if as_json:
            plain = [setting._asdict() for setting in settings]
            facts = {"name": full, "is_paper": keys.is_paper(full), "description": keys.describe(full)}
            print(json.dumps({**facts, "settings": plain}))
            return
        print(f"{full}: {keys.describe(full)}")
        rows = [(s.name, s.type, "-" if s.default is None else s.default, s.unit, s.text) for s in settings]
        if rows:
            tables.out.print(tables.columns(("setting", "type", "default", "unit", "what it is"), rows))
