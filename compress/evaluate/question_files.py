"""Read the questions of a task from a file of the user's: JSON lines, an object each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from compress.errors import CalibrationError, first_line, shown
from compress.evaluate.items import Item
from compress.storage import json_text
from compress.storage.files import read_text


def check(file: str, task: str, count: int, **positive: int) -> None:
    """Raise ValueError for a task's settings without a file, a negative count, or a number that is not positive."""
    if not file:
        raise ValueError(f"file: name one with questions, {task}=FILE")
    if count < 0:
        raise ValueError(f"count {count} is negative")
    for name, value in positive.items():
        if value < 1:
            raise ValueError(f"{name} {value} is not positive")


def read_lines(file: str, count: int, make: Callable[[Mapping[str, Any], str], Item], form: str) -> list[Item]:
    """Return an item for each of the first `count` lines of a JSON-lines file, 0: all.

    make(row, name) raises ValueError for a row that is none; the name is the row's "id", or the number of its line.
    form: what a line looks like, or where that is said. Raises CalibrationError, with the line.
    """
    path = Path(file)
    try:
        lines = read_text(path, "utf-8-sig").splitlines()
    except (OSError, UnicodeError) as error:
        raise CalibrationError(f"cannot read the questions of {path} ({first_line(error)})") from error
    found: dict[str, Item] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if count and len(found) == count:
            break
        try:
            row = json_text.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"no JSON object; {form}")
            item = make(row, str(row.get("id", number)))
        except ValueError as error:
            raise CalibrationError(f"{path}, line {number}: {first_line(error)}") from error
        if item.name in found:
            raise CalibrationError(f"{path}, line {number}: the id {shown(item.name)} stands on an earlier line, too")
        found[item.name] = item
    if not found:
        raise CalibrationError(f"{path} has no questions; {form}")
    return list(found.values())


def text(row: Mapping[str, Any], key: str) -> str:
    """Return a text that a row must have; ValueError without."""
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f'no text under "{key}"')
    return value


def texts(row: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return texts that a row must have, given as one or as a list; ValueError without."""
    value = row.get(key)
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not listed or not all(isinstance(x, str) and x.strip() for x in listed):
        raise ValueError(f'"{key}" is no text and no list of texts')
    return tuple(listed)


def answers(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what counts as right, under "answers" or "answer"; ValueError without."""
    return texts(row, "answers" if "answers" in row else "answer")
