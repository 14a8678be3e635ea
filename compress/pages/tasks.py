"""Show what the cells of a study answer in tasks: right answers by size, and each task beside the original."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from compress.pages import html, suite, svg
from compress.pages.scatter import Mark, scatter

MIB = 2**20
Cell = Mapping[str, Any]
Row = Mapping[str, Any]
NAMES = (
    *("recipe", "suite", "task", "items", "right", "s.e.", "original", "difference, 95%", "lost", "gained"),
    *("McNemar p", "NLL", "s.e.", "original", "difference, 95%"),
)


def section(cells: Sequence[Cell]) -> str:
    """Return the section of cells, the original among them; "" where none was asked."""
    asked = [cell for cell in cells if rows(cell)]
    if not asked:
        return ""
    tasks = list(dict.fromkeys(row["task"] for cell in asked for row in rows(cell)))
    said = html.paragraph(
        "Right: share of items. Lost and gained: items that only the original, or only the recipe has right. NLL: nats "
        "a token of the right answer. An interval that holds 0 shows no difference. Recipes of the cache alone are not "
        "asked."
    )
    each = [_chart(f"task {task}", asked, [task]) for task in tasks]
    several = len(tasks) > 1 and any(each)
    return html.section(
        "Tasks",
        _chart("mean over tasks", asked, tasks) if several else each[0],
        html.folded("Each task by size", "\n".join(each)) if several else "",
        said,
        html.table("Tasks beside the original", NAMES, [line for cell in asked for line in _lines(cell)]),
    )


def rows(cell: Cell) -> list[Row]:
    """Return the figures of all tasks of a cell; none for one that was not asked or has failed."""
    return [row for found in (cell.get("suites") or {}).values() for row in found]


def _chart(name: str, cells: Sequence[Cell], tasks: Sequence[str]) -> str:
    """Return the mean share of right answers over bytes; "" where all are of one size, or some were asked other tasks.

    The standard error takes tasks for independent of each other.
    """
    points: list[tuple[Cell, float, float]] = []
    for cell in cells:
        found = [row for row in rows(cell) if row["task"] in tasks]
        if len(found) < len(tasks):
            return ""
        error = math.sqrt(sum((row["se"] or 0.0) ** 2 for row in found)) / len(found)
        points.append((cell, sum(row["score"] for row in found) / len(found), error))
    if len({cell["nbytes"] for cell in cells}) < 2:
        return ""
    best, highest = set[str](), -1.0
    for cell, value, _ in sorted(points, key=lambda point: (point[0]["nbytes"], -point[1])):
        if value > highest:
            best.add(cell["key"])
            highest = value
    marks = [
        Mark(cell["nbytes"] / MIB, value, cell["label"], cell["purpose"], cell["key"] in best, error)
        for cell, value, error in points
    ]
    axes = svg.Axis("whole file, MiB", is_log=True), svg.Axis("share of items right")
    caption = f"Share of items right, {name}, by size of all stored tensors; lines are one standard error up and down."
    return html.figure(scatter(f"Right answers by size, {name}", marks, axes), caption)


def _lines(cell: Cell) -> list[list[html.Cell]]:
    """Return a row of the table for each task."""
    return [
        [cell["label"], name, row["task"], row["n"], row["score"], row["se"], *_beside(row)]
        for name, found in cell["suites"].items()
        for row in found
    ]


def _beside(row: Row) -> list[html.Cell]:
    """Return what the columns from the original's share on show; of the original itself only the likelihood."""
    paired = row["paired"]
    if paired is None:
        return [None, None, None, None, None, row["nll"], row["nll_se"], None, None]
    return [
        *(paired["base_accuracy"], suite.difference(paired), paired["lost"], paired["gained"], paired["p_value"]),
        *(row["nll"], row["nll_se"], paired["base_nll"], suite.nll_difference(paired)),
    ]
