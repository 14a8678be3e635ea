"""In-context retrieval, open book: questions with their evidence, from a JSON-lines file of yours (LLM-KICK).

    {"question": "...", "answers": ["...", "..."], "evidence": "..."}

LLM-KICK takes TriviaQA with the evidence of Wikipedia and the web, cut at 3,072 characters. The first line that is
written counts. It is right if it contains an accepted answer, or an accepted answer contains it (lower case, without
punctuation and articles). The share of right answers here to that of kick_closed_book on the same file says whether a
model has lost facts or the skill to find them in its context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compress.evaluate.items import Item, Material, answers_of, check_file, read_lines, text_of
from compress.papers.tasks import kick

WAY = "written"
SUITES: Mapping[str, Mapping[str, Any]] = {}
correct, figures, remark = kick.is_answered, kick.answer_f1, kick.compare_books


@dataclass(frozen=True)
class Config:
    """Settings of the task."""

    file: str = ""  # JSON lines
    count: int = 0  # questions from the start of the file; 0: all
    new_tokens: int = 32  # that an answer may have
    evidence: int = 3072  # characters of the evidence; fewer where the model has no room

    def __post_init__(self) -> None:
        check_file(self.file, "kick_open_book", self.count, new_tokens=self.new_tokens, evidence=self.evidence)


def items(config: Config, material: Material) -> list[Item]:
    """Return the questions; CalibrationError, with the line, for one that cannot be used."""

    def item_of(row: Mapping[str, Any], name: str) -> Item:
        question = text_of(row, "question")
        evidence = text_of(row, "evidence")[: config.evidence]
        tail = f"\n\nQuestion: {question}\nAnswer:"
        evidence = kick.cut_to_room(evidence, tail, config.new_tokens, material)
        return Item(
            name,
            f"{evidence}{tail}",
            new_tokens=config.new_tokens,
            facts={"answers": answers_of(row)},
        )

    return read_lines(config.file, config.count, item_of, kick.LINE_FORM)
