"""Add the cells of one study.json to another of the same model and settings, whose folder need not exist any more.

    python benchmarks/merge_studies.py compress/study/shipped/SmolLM2-135M-Instruct.json studies/more/study.json \
        --out merged.json --page merged.html

Fingerprint of the model, texts, window, tokens, type, device, seed and version must be the same: then each cell is what
the first study would have measured. A cell that both have is the first's; one that had failed in the first and is
measured in the second is the second's. What no other beats is found anew. With --replace a cell of the second, measured
or failed, takes the place of those that the first has of the same recipe, overrides and calibration text: the recipe
has changed since.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from compress.pages import html
from compress.pages import study as page
from compress.study import summary

SHARED = ("version", "fingerprint", "settings")


def merge(first: dict[str, Any], second: dict[str, Any], replace: bool = False) -> dict[str, Any]:
    """Return the first study with the cells of the second; ValueError, which names what differs, for another one.

    replace: drop the cells of the first that ask for the same as one of the second by an earlier recipe.
    """
    if differs := [name for name in SHARED if first[name] != second[name]]:
        raise ValueError(f"the studies have another {', '.join(differs)}; measure the second with those of the first")
    anew = [_asked(cell) for cell in (*second["cells"], *second["failed"])] if replace else []
    kept = [cell for cell in first["cells"] if _asked(cell) not in anew]
    cells = {cell["key"]: cell for cell in (*second["cells"], *kept)}
    former = [cell for cell in first["failed"] if _asked(cell) not in anew]
    failed = {cell["key"]: cell for cell in (*second["failed"], *former) if cell["key"] not in cells}
    named = summary.labels([*cells.values(), *failed.values()])
    in_order = sorted(cells.values(), key=lambda cell: (cell["nbytes"], cell["key"]))
    measured = [{**cell, "label": named[cell["key"]]} for cell in in_order]
    return {
        **first,
        "original": first["original"] or second["original"],
        "cells": measured,
        "failed": sorted(failed.values(), key=lambda cell: (cell["label"], cell["key"])),
        "pending": [],
        "frontier": summary.frontiers(measured),
    }


def _asked(cell: dict[str, Any]) -> tuple[Any, ...]:
    return cell["name"], cell["overrides"], cell["calib"]


def main() -> None:
    """Read both, and write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs=2, type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--replace", action="store_true", help="drop cells of recipes that have changed since")
    asked = parser.parse_args()
    merged = merge(*(json.loads(path.read_text()) for path in asked.studies), asked.replace)
    asked.out.write_text(json.dumps(html.finite(merged), indent=1, allow_nan=False) + "\n")
    if asked.page is not None:
        asked.page.write_text(page.page(merged))
    print(f"{asked.out}: {len(merged['cells'])} cells, {len(merged['failed'])} failed")


if __name__ == "__main__":
    main()
