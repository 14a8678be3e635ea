"""Reasoning: multiple choice with examples in front, answered by the letters A to D (LLM-KICK, MMLU).

    {"subject": "anatomy", "question": "...", "choices": ["...", "...", "...", "..."], "answer": "C"}

LLM-KICK takes MMLU with 5 examples. The context names the subject, shows `shots` questions with their answers and then
the one that is asked; the answer is the letter whose logit is largest. Examples are the first `shots` lines with
"split": "dev" of the same subject, or else the first lines of that subject; these are not asked. `answer` is a letter
or a place from 0. A line without a subject belongs to one common subject.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compress.errors import CalibrationError, shown
from compress.evaluate.items import Item, Material, check_file, read_lines, text_of
from compress.papers.tasks import kick

WAY = "likelihood"
SUITES: Mapping[str, Mapping[str, Any]] = {}


@dataclass(frozen=True)
class Config:
    """Settings of the task."""

    file: str = ""  # JSON lines
    count: int = 0  # lines from the start of the file, examples too; 0: all
    shots: int = 5  # examples in front of a question, fewer where they do not fit; 0: none

    def __post_init__(self) -> None:
        check_file(self.file, "kick_choices", self.count)
        if self.shots < 0:
            raise ValueError(f"shots {self.shots} is negative")


def items(config: Config, material: Material) -> list[Item]:
    """Return the questions that are asked; CalibrationError, with the line, for one that cannot be used."""
    read = read_lines(config.file, config.count, _question, kick.LINE_FORM)
    subjects: dict[str, list[Item]] = {}
    for each in read:
        subjects.setdefault(each.facts["subject"], []).append(each)
    questions = []
    for subject, lines in subjects.items():
        of_dev = [each for each in lines if each.facts["is_dev"]]
        examples = of_dev[: config.shots] or lines[: config.shots]
        asked = [each for each in lines if not each.facts["is_dev"] and each not in examples]
        questions += [replace(each, context=_context(subject, examples, each, material)) for each in asked]
    if not questions:
        raise CalibrationError(
            f"{config.file}: all {len(read)} questions serve as examples; give more, or lower shots ({config.shots})"
        )
    return questions


def _question(row: Mapping[str, Any], name: str) -> Item:
    choices = row.get("choices")
    if not isinstance(choices, list) or not 2 <= len(choices) <= 26:
        raise ValueError('"choices" is no list of 2 to 26 texts')
    letters = string.ascii_uppercase[: len(choices)]
    lines = [
        text_of(row, "question"),
        *(f"{k}. {choice}" for k, choice in zip(letters, choices, strict=True)),
    ]
    subject = row.get("subject", "")
    if not isinstance(subject, str):
        raise ValueError(f'"subject" {shown(subject)} is no text')
    facts = {"subject": subject, "is_dev": row.get("split") == "dev"}
    right = _place(row.get("answer"), letters)
    return Item(name, "\n".join([*lines, "Answer:"]), tuple(f" {k}" for k in letters), right, facts=facts)


def _place(answer: Any, letters: str) -> int:
    if type(answer) is int and 0 <= answer < len(letters):
        return answer
    if isinstance(answer, str) and len(answer.strip()) == 1 and answer.strip().upper() in letters:
        return letters.index(answer.strip().upper())
    raise ValueError(f'"answer" {shown(answer)} is none of the letters {letters} and no place from 0')


def _context(subject: str, examples: Sequence[Item], asked: Item, material: Material) -> str:
    """Return what is read: as many examples as the model has room for, then the question."""
    about = f" about {subject.replace('_', ' ')}" if subject else ""
    head = f"The following are multiple choice questions (with answers){about}.\n\n"
    solved = [f"{each.context}{each.answers[each.right]}\n\n" for each in examples]
    for count in range(len(solved), -1, -1):
        context = head + "".join(solved[:count]) + str(asked.context)
        if count == 0 or len(material.begin) + len(material.encode(context)) + 2 <= material.positions:
            return context
    raise AssertionError
