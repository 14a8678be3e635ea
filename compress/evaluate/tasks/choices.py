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
from typing import Any

from compress.errors import shown
from compress.evaluate.items import Item, Material, check_file, read_lines

WAY = "likelihood"
SUITES: Mapping[str, Mapping[str, Any]] = {}
FORM = 'write {"question": ..., "choices": [...], "answer": 0} lines'


@dataclass(frozen=True)
class Config:
    """Settings of the task."""

    file: str = ""  # JSON lines
    count: int = 0  # questions from the start of the file; 0: all

    def __post_init__(self) -> None:
        check_file(self.file, "choices", self.count)


def items(config: Config, material: Material) -> list[Item]:
    """Return the questions; CalibrationError, with the line, for one that cannot be used."""
    return read_lines(config.file, config.count, _item, FORM)


def _item(row: Mapping[str, Any], name: str) -> Item:
    """Return the item of a line; ValueError for what is not one."""
    context, choices = row.get("question", row.get("context")), row.get("choices")
    if not isinstance(context, str) or not context.strip():
        raise ValueError('no text under "question" (or "context")')
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c.strip() for c in choices):
        raise ValueError('"choices" is no list of at least two texts')
    if "answer" not in row:
        raise ValueError('no "answer": the place of the right choice from 0, its letter, or its text')
    spaced = tuple(c if c[0].isspace() or context[-1].isspace() else f" {c}" for c in choices)
    return Item(name, context, spaced, _place(row["answer"], choices))


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
