"""Rows of a result file, each measured once: an interrupted benchmark goes on where it was."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import machine

Row = dict[str, Any]


def read(file: Path) -> list[Row]:
    return json.loads(file.read_text())["rows"] if file.exists() else []


def add(file: Path, identity: Row, again: bool, name: str, work: Callable[[], Row]) -> Row | None:
    """Measure the row of this identity, unless the file has it and not `again`; None if nothing was measured.

    What one row cannot do must not stop the others: SystemExit is said under `name`.
    """
    rows = read(file)
    others = [row for row in rows if not all(row.get(key) == value for key, value in identity.items())]
    if len(others) < len(rows) and not again:
        return None
    before = machine()
    try:
        found = work()
    except SystemExit as error:
        print(f"{name}: failed, {str(error).splitlines()[-1]}", file=sys.stderr)
        return None
    row = {**identity, **found, "machine": before, "load_average_after": machine()["load_average"]}
    _write(file, [*others, row])
    return row


def _write(file: Path, rows: list[Row]) -> None:
    """Beside, then in place: an interrupted run loses no row."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps({"rows": rows}, indent=2) + "\n")
    temporary.replace(file)
