"""Summaries as instructed: a text and an instruction from a JSON-lines file of yours, against a reference (LLM-KICK).

    {"document": "...", "summary": "...", "instruction": "Summarize in two sentences."}

LLM-KICK has GPT-4 judge coherence, consistency, fluency and relevance beside a reference of GPT-3.5. That judge is not
run. What was written counts as right where its ROUGE-L against the reference is at least `enough`; read the difference
to the original model, not the number: a good summary in other words has a low ROUGE-L.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compress.evaluate.items import Item, Material, check_file, read_lines, text_of
from compress.papers.tasks import kick

WAY = "written"
SUITES: Mapping[str, Mapping[str, Any]] = {}


@dataclass(frozen=True)
class Config:
    """Settings of the task."""

    file: str = ""  # JSON lines
    count: int = 0  # texts from the start of the file; 0: all
    new_tokens: int = 128  # that a summary may have
    enough: float = 0.2  # ROUGE-L from which a summary counts as right

    def __post_init__(self) -> None:
        check_file(self.file, "kick_summary", self.count, new_tokens=self.new_tokens)
        if not 0 < self.enough <= 1:
            raise ValueError(f"enough {self.enough:g} is not above 0 and at most 1")


def items(config: Config, material: Material) -> list[Item]:
    """Return the texts; CalibrationError, with the line, for one that cannot be used.

    A text that the model has no room for is cut at its end.
    """

    def item_of(row: Mapping[str, Any], name: str) -> Item:
        instruction = row.get("instruction", "Summarize the text.")
        if not isinstance(instruction, str):
            raise ValueError('"instruction" is no text')
        tail = f"\n\n{instruction}\nSummary:"
        document = kick.cut_to_room(text_of(row, "document"), tail, config.new_tokens, material)
        facts = {"reference": text_of(row, "summary"), "enough": config.enough}
        return Item(name, document + tail, new_tokens=config.new_tokens, facts=facts)

    return read_lines(config.file, config.count, item_of, kick.LINE_FORM)


def correct(item: Item, text: str) -> bool:
    """Tell whether a summary is close enough to the reference."""
    return kick.rouge_l(text, item.facts["reference"]) >= item.facts["enough"]


def figures(item: Item, text: str) -> dict[str, float]:
    """Return ROUGE-L, and the share of the reference's words that were written."""
    reference = item.facts["reference"]
    return {"rouge_l": kick.rouge_l(text, reference), "coverage": kick.coverage(text, reference)}
