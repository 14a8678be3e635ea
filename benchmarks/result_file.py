"""Keep rows of a result file, each measured once, and show them: an interrupted benchmark goes on where it was."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure import ROOT, device_name, machine

if TYPE_CHECKING:  # machines that only time kernels need not have it
    from rich.table import Table

Row = dict[str, Any]


def read(file: Path) -> list[Row]:
    """Return the rows of a file; none if it is not there."""
    return json.loads(file.read_text())["rows"] if file.exists() else []


def add(file: Path, identity: Row, again: bool, name: str, work: Callable[[], Row]) -> Row | None:
    """Measure the row of this identity, unless the file has it and not `again`; return None if nothing was measured.

    A row that fails does not stop the others: its SystemExit is printed under `name`.
    """
    rows = read(file)
    others = [row for row in rows if not all(row.get(key) == value for key, value in identity.items())]
    if len(others) < len(rows) and not again:
        return None
    before = machine()
    try:
        figures = work()
    except SystemExit as error:
        print(f"{name}: failed, {str(error).splitlines()[-1]}", file=sys.stderr)
        return None
    row = {**identity, **figures, "machine": before, "load_average_after": machine()["load_average"]}
    _write(file, [*others, row])
    return row


def _write(file: Path, rows: list[Row]) -> None:
    """Write a line for each row beside the file, then put it in place: an interrupted run loses no row."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    lines = ",\n".join(json.dumps(row) for row in rows)
    temporary.write_text(f'{{"rows": [\n{lines}\n]}}\n')
    temporary.replace(file)


def show(table: Table) -> None:
    """Print a table, 200 columns wide where no terminal says its width."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 200).print(table)


def present(title: str, names: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str]) -> None:
    """Print cells as a table, the columns `left` aligned left, and again as markdown."""
    from rich.table import Table

    table = Table(title=title)
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for cells in rows:
        table.add_row(*cells)
    show(table)
    print("\n".join(f"| {' | '.join(cells)} |" for cells in (names, ["---"] * len(names), *rows)))


def duration(seconds: float) -> str:
    """Return a time in hours, minutes or seconds, with one digit behind the point."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def write_for_device(script: str, device: str, file: Path | None, facts: Row, rows: list[Row]) -> None:
    """Write the rows measured on a device to `file`, by default results/SCRIPT_DEVICE.json."""
    name = device_name(device)
    slug = "cpu" if device == "cpu" else re.sub(r"\W+", "_", name).lower()
    file = file or ROOT / f"benchmarks/results/{script}_{slug}.json"
    file.write_text(json.dumps({"device": name, **facts, "rows": rows}, indent=1) + "\n")
    print(f"written to {file}")


def show_for_device(script: str, file: Path | None, header: str, line: Callable[[Row], str]) -> None:
    """Print the rows of a file of `write_for_device` as markdown."""
    stored = json.loads((file or ROOT / f"benchmarks/results/{script}_cpu.json").read_text())
    copied = f", copies {stored['copy_gb_per_s']:.0f} GB/s" if "copy_gb_per_s" in stored else ""
    print(f"{stored['device']}, {stored['threads']} threads, torch {stored['torch']}{copied}\n\n{header}")
    print("|" + "---|" * header.count(" | ") + "---|")
    for row in stored["rows"]:
        print(line(row))
