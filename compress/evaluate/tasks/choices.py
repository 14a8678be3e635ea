"""Multiple choice: questions of a JSON-lines file of yours, answered by likelihood.

One question a line:

    {"question": "The capital of France is", "choices": ["Rome", "Paris", "Oslo"], "answer": 1}

`question` may be called `context`, and is read as it stands: write "Question: ... Answer:" where that is meant. A space
is put before a choice that has none. `answer` is the place of the right choice from 0, its letter (A, B, ...), or its
text. An `id` names the question; else the line's number does. The model chooses by summed log-likelihood, and by that
per byte, as "acc" and "acc_norm" of lm-evaluation-harness.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.errors import CalibrationError, first_line, shown
from compress.evaluate.items import Item, Material
from compress.storage import json_text

WAY = "likelihood"
SUITES: Mapping[str, Mapping[str, Any]] = {}


@dataclass(frozen=True)
class Config:
    """Settings of the task."""

    file: str = ""  # JSON lines
    count: int = 0  # questions from the start of the file; 0: all

    def __post_init__(self) -> None:
        if not self.file:
            raise ValueError("file: name one with questions, choices=FILE")
        if self.count < 0:
            raise ValueError("count is negative")


def items(config: Config, material: Material) -> list[Item]:
    """Return the questions; CalibrationError, with the line, for one that cannot be used."""
    path = Path(config.file)
    found: dict[str, Item] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise CalibrationError(f"cannot read the questions of {path} ({first_line(error)})") from error
    for number, line in enumerate(lines, 1):
        if not line.strip() or (config.count and len(found) == config.count):
            continue
        try:
            item = _item(json_text.loads(line), str(number))
        except ValueError as error:
            raise CalibrationError(f"{path}, line {number}: {first_line(error)}") from error
        if item.name in found:
            raise CalibrationError(f"{path}, line {number}: the id {shown(item.name)} stands on an earlier line, too")
        found[item.name] = item
    if not found:
        raise CalibrationError(
            f'{path} has no questions; write {{"question": ..., "choices": [...], "answer": 0}} lines'
        )
    return list(found.values())


def _item(row: Any, number: str) -> Item:
    """Return the item of a line; ValueError for what is not one."""
    if not isinstance(row, dict):
        raise ValueError('no object; write {"question": ..., "choices": [...], "answer": 0}')
    context = row.get("question", row.get("context"))
    choices = row.get("choices")
    if not isinstance(context, str) or not context.strip():
        raise ValueError('no text under "question" (or "context")')
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c.strip() for c in choices):
        raise ValueError('"choices" is no list of at least two texts')
    if "answer" not in row:
        raise ValueError('no "answer": the place of the right choice from 0, its letter, or its text')
    spaced = tuple(c if c[0].isspace() or context[-1].isspace() else f" {c}" for c in choices)
    return Item(str(row.get("id", number)), context, spaced, _place(row["answer"], choices))


def _place(answer: Any, choices: Sequence[str]) -> int:
    """Return the place of the right choice."""
    if type(answer) is int and 0 <= answer < len(choices):
        return answer
    if isinstance(answer, str):
        if answer in choices:
            return choices.index(answer)
        letter = string.ascii_uppercase.find(answer.strip().upper()) if len(answer.strip()) == 1 else -1
        if 0 <= letter < len(choices):
            return letter
    raise ValueError(f'"answer" {shown(answer)} is none of the {len(choices)} choices')
