"""In-context retrieval, closed book: the questions of kick_open_book without their evidence (LLM-KICK).

The same file, the same judgement. Only what the model knows by itself can answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compress.evaluate.items import Item, Material, answers_of, check_file, read_lines, text_of
from compress.papers.tasks import kick

WAY = "written"
SUITES: Mapping[str, Mapping[str, Any]] = {}
correct, figures = kick.is_answered, kick.answer_f1


@dataclass(frozen=True)
class Config:
    """Settings of the task."""

    file: str = ""  # JSON lines
    count: int = 0  # questions from the start of the file; 0: all
    new_tokens: int = 32  # that an answer may have

    def __post_init__(self) -> None:
        check_file(self.file, "kick_closed_book", self.count, new_tokens=self.new_tokens)


def items(config: Config, material: Material) -> list[Item]:
    """Return the questions; CalibrationError, with the line, for one that cannot be used."""

    def item_of(row: Mapping[str, Any], name: str) -> Item:
        context = f"Question: {text_of(row, 'question')}\nAnswer:"
        answers = answers_of(row)
        return Item(name, context, new_tokens=config.new_tokens, facts={"answers": answers})

    return read_lines(config.file, config.count, item_of, kick.LINE_FORM)
