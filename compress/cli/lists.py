"""Explain recipes, methods and their settings: `compress recipes` and `compress methods`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.cli.options import AsJson, app, errors

if TYPE_CHECKING:
    from compress.recipe.catalogue import Entry


@app.command(epilog="Example: compress recipes int4 > mine.yaml")
def recipes(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Print this recipe's YAML.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the built-in recipes by purpose, with their size and their cost, or print one to start from."""
    with errors():
        from compress import recipe
        from compress.cli import tables
        from compress.recipe import catalogue

        if name is not None:
            print(recipe.text(name), end="")
            return
        groups = catalogue.by_purpose()
        if as_json:
            print(json.dumps({e.name: _facts(purpose, e) for purpose, group in groups.items() for e in group}))
            return
        print("Where to start: " + ", ".join(f"{n} {use}" for n, use in catalogue.WHERE_TO_START.items()) + ".")
        for purpose, group in groups.items():
            print(f"\n{purpose}")
            rows = [
                (e.name, e.bits or "-", "no" if e.cost == "data-free" else "yes", e.cost, e.description) for e in group
            ]
            tables.out.print(tables.columns(("recipe", "bits", "text", "cost", "what it is"), rows))
        print("\nbits: stored bits per weight as measured, or per coded number of a cache (losses: docs/recipes.md)")
        print("text: whether the recipe needs calibration text; without --calib the model writes its own")
        print("cost: " + "; ".join(f"{cost} {meaning}" for cost, meaning in catalogue.COSTS.items()))


def _facts(purpose: str, entry: Entry) -> dict[str, Any]:
    """What the list says of one recipe, as data."""
    return {
        "purpose": purpose,
        "bits": float(entry.bits) if entry.bits else None,
        "measured": bool(entry.measured),
        "calibration": entry.cost != "data-free",
        "cost": entry.cost,
        "description": entry.description,
    }


@app.command(epilog="Example: compress methods recipe/calibration")
def methods(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Print the settings of this one: KIND/NAME, or NAME alone.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List methods, transforms, allocators, formats, cache codecs and the sections of recipes, or explain one."""
    with errors():
        from compress.cli import settings, tables

        if name is None:
            described = {full: settings.describe(full) for full in settings.all_names()}
            if as_json:
                print(json.dumps(described))
                return
            width = max(map(len, described))
            for full, text in described.items():
                print(f"{full:<{width}}  {text}")
            return
        full = settings.full_name(name)
        listed = settings.settings(full)
        if as_json:
            keys = [setting._asdict() for setting in listed]
            print(json.dumps({"name": full, "description": settings.describe(full), "settings": keys}))
            return
        print(f"{full}: {settings.describe(full)}")
        rows = [(s.name, s.type, "-" if s.default is None else s.default, s.unit, s.text) for s in listed]
        if rows:
            tables.out.print(tables.columns(("setting", "type", "default", "unit", "what it is"), rows))
