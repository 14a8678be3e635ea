"""Continuation: which of some passages follows a piece of your text, by likelihood; the others are from elsewhere.

It asks what HellaSwag (1905.07830) asks, without written distractors and over text of your own kind. Small models have
many items right, so that flips show where knowledge tasks are all wrong. All passages have the same number of tokens.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compress.evaluate.items import Item, Material

WAY = "likelihood"
SUITES: Mapping[str, Mapping[str, Any]] = {"quick": {"count": 32}, "full": {}}


@dataclass(frozen=True)
class Config:
    """Settings of the task."""

    count: int = 300  # items
    context: int = 24  # [tokens] of the piece
    answer: int = 4  # [tokens] of a passage
    choices: int = 4  # passages to choose from
    seed: int = 0  # of the places in the text

    def __post_init__(self) -> None:
        if min(self.count, self.context, self.answer) < 1 or self.choices < 2:
            raise ValueError("count, context and answer must be at least 1, choices at least 2")


def items(config: Config, material: Material) -> list[Item]:
    """Return the items; none without enough text."""
    words, size = material.windows.flatten().tolist(), config.context + config.answer
    if len(material.begin) + size > material.positions or len(words) < 4 * config.choices * size:
        return []
    made = []
    for i in range(config.count):
        draw = random.Random(f"{config.seed} continuation {i}")
        start = draw.randrange(len(words) - size + 1)
        true = tuple(words[start + config.context : start + size])
        passages = {true}
        for _ in range(100 * config.choices):  # a text of one word repeated has no others
            if len(passages) < config.choices:
                place = draw.randrange(len(words) - config.answer + 1)
                passages.add(tuple(words[place : place + config.answer]))
        if len(passages) < config.choices:
            return []
        answers = draw.sample(sorted(passages), config.choices)
        context = (*material.begin, *words[start : start + config.context])
        made.append(Item(f"{i}", context, tuple(answers), answers.index(true)))
    return made
