"""Show what the cells of a study answer in tasks: right answers by size, and each task beside the original."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from compress.pages import html, suite, svg
from compress.pages.scatter import Mark, scatter, unbeaten

MIB = 2**20
SIGNIFICANT = 0.05
Cell = Mapping[str, Any]
Row = Mapping[str, Any]
SHARES = "recipe", "task", "items", "right", "s.e.", "difference, 95%", "lost", "gained", "McNemar p"
PAIRED = "lost", "gained", "p_value"
LOSSES = "recipe", "task", "NLL", "s.e.", "difference, 95%"


def section(cells: Sequence[Cell]) -> str:
    """Return the section of cells, the original among them; "" where none was asked."""
    asked = [cell for cell in cells if rows(cell)]
    if not asked:
        return ""
    tasks = list(dict.fromkeys(row["task"] for cell in asked for row in rows(cell)))
    said = html.paragraph(
        "Right: share of items. Lost and gained: items that only the original, or only the recipe has right. Where the "
        "interval holds 0 no difference was found: the true one may lie anywhere in it. Recipes with a cache answer "
        "through it: where contexts are no longer than what it keeps exact, as the original does."
    )
    lines = [(cell, row) for cell in asked for row in rows(cell)]
    drawn = [cell for cell in asked if not cell["is_cache_only"]]  # those of the cache alone have the original's size
    each = [_chart(f"task {task}", drawn, [task]) for task in tasks]
    several = len(tasks) > 1 and any(each)
    return html.section(
        "Tasks",
        _chart("mean over tasks", drawn, tasks) if several else each[0],
        html.fold("Each task by size", "\n".join(each)) if several else "",
        said,
        _grid(asked, tasks),
        html.fold(suite.RIGHT, html.table(suite.RIGHT, SHARES, [_shares(*line) for line in lines])),
        html.fold(suite.LIKELIHOOD, html.table(suite.LIKELIHOOD, LOSSES, [_losses(*line) for line in lines])),
    )


def rows(cell: Cell) -> list[Row]:
    """Return the figures of all tasks of a cell; none for one that was not asked or has failed."""
    return [row for suite in (cell.get("suites") or {}).values() for row in suite]


def _chart(name: str, cells: Sequence[Cell], tasks: Sequence[str]) -> str:
    """Return the mean share of right answers over bytes; "" where all are of one size, or some were asked other tasks.

    The standard error takes tasks for independent of each other.
    """
    points: list[tuple[Cell, float, float]] = []
    for cell in cells:
        scores = [row for row in rows(cell) if row["task"] in tasks]
        if len(scores) < len(tasks):
            return ""
        error = math.sqrt(sum((row["se"] or 0.0) ** 2 for row in scores)) / len(scores)
        points.append((cell, sum(row["score"] for row in scores) / len(scores), error))
    if len({cell["nbytes"] for cell in cells}) < 2:
        return ""
    front = unbeaten(points, lambda point: point[0]["nbytes"], lambda point: -point[1])
    best = {cell["key"] for cell, _, _ in front}
    marks = [
        Mark(cell["nbytes"] / MIB, value, cell["label"], cell["purpose"], cell["key"] in best, error)
        for cell, value, error in points
    ]
    axes = svg.Axis("whole file, MiB", is_log=True), svg.Axis("share of items right")
    caption = f"Share of items right, {name}, by size of all stored tensors; lines are one standard error up and down."
    return html.figure(scatter(f"Right answers by size, {name}", marks, axes), caption)


def _grid(cells: Sequence[Cell], tasks: Sequence[str]) -> str:
    """Return the share of right answers by cell and task, with a star where the paired test finds a difference."""
    shown: list[list[html.Cell]] = []
    for cell in cells:
        by_task = {row["task"]: row for row in rows(cell)}
        scores = [_score(by_task.get(task)) for task in tasks]
        mean = sum(row["score"] for row in by_task.values()) / len(by_task)
        shown.append([cell["label"], cell["nbytes"] / MIB, *scores, f"{mean:.1%}"])
    caption = f"Right answers by recipe and task; * differs from the original (McNemar, p < {SIGNIFICANT})"
    return html.table(caption, ("recipe", "MiB", *tasks, "mean"), shown)


def _score(row: Row | None) -> str | None:
    if row is None:
        return None
    is_other = row["paired"] is not None and row["paired"]["p_value"] < SIGNIFICANT
    return f"{row['score']:.1%}{'*' if is_other else ''}"


def _shares(cell: Cell, row: Row) -> list[html.Cell]:
    """Return how many answers of a task are right, beside the original's; its own row has nothing beside it."""
    paired = row["paired"]
    beside = [None] * 4 if paired is None else [suite.difference(paired), *(paired[key] for key in PAIRED)]
    return [cell["label"], row["task"], row["n"], f"{row['score']:.1%}", row["se"], *beside]


def _losses(cell: Cell, row: Row) -> list[html.Cell]:
    """Return the likelihood of the right answers of a task, beside the original's."""
    beside = None if row["paired"] is None else suite.nll_difference(row["paired"])
    return [cell["label"], row["task"], row["nll"], row["nll_se"], beside]
