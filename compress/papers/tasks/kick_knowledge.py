"""Knowledge: factoid questions of a JSON-lines file of yours, answered freely and without examples (LLM-KICK).

    {"question": "who wrote the novel emma", "answers": ["Jane Austen", "Austen"]}

LLM-KICK takes FreebaseQA. The answer is right if any accepted one occurs in what was written, in lower case and without
blanks. `prompt` is what the model reads, with {question} in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compress.evaluate.items import Item, Material, answers_of, check_file, read_lines, text_of
from compress.papers.tasks import kick

WAY = "written"
SUITES: Mapping[str, Mapping[str, Any]] = {}


@dataclass(frozen=True)
class Config:
    """Settings of the task."""

    file: str = ""  # JSON lines
    count: int = 0  # questions from the start of the file; 0: all
    new_tokens: int = 32  # that an answer may have
    prompt: str = "Please give answer to this question: {question}\nThe answer is "

    def __post_init__(self) -> None:
        check_file(self.file, "kick_knowledge", self.count, new_tokens=self.new_tokens)
        if "{question}" not in self.prompt:
            raise ValueError("prompt has no {question}")


def items(config: Config, material: Material) -> list[Item]:
    """Return the questions; CalibrationError, with the line, for one that cannot be used."""

    def item_of(row: Mapping[str, Any], name: str) -> Item:
        answers = answers_of(row)
        context = config.prompt.replace("{question}", text_of(row, "question"))
        return Item(name, context, new_tokens=config.new_tokens, facts={"answers": answers})

    return read_lines(config.file, config.count, item_of, kick.LINE_FORM)


def correct(item: Item, text: str) -> bool:
    """Tell whether any accepted answer occurs in the text."""
    return kick.contains(text, item.facts["answers"])
