"""Copying: a passage stands in the context once; its beginning comes again, and the rest is asked.

Half of the items have a passage of your text, half have one of frequent tokens in random order, which nothing but the
copy tells. What attention does to copy (induction heads) needs no knowledge of any language. Arora et al., "Zoology"
(2312.04927), tie this recall to the quality of language models.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compress.evaluate.items import Item, Material

WAY = "greedy"
FREQUENT = 256  # tokens that random passages are of
SUITES: Mapping[str, Mapping[str, Any]] = {"quick": {"count": 32}, "full": {}}


@dataclass(frozen=True)
class Config:
    """Settings of the task."""

    count: int = 200  # items
    length: int = 24  # [tokens] of the passage
    cue: int = 8  # [tokens] of the passage that come again before the answer
    answer: int = 4  # [tokens] that are asked
    seed: int = 0  # of the passages

    def __post_init__(self) -> None:
        if min(self.count, self.cue, self.answer) < 1:
            raise ValueError("count, cue and answer must be at least 1")
        if self.cue + self.answer > self.length:
            raise ValueError(f"length {self.length} is less than cue and answer, {self.cue + self.answer}")


def items(config: Config, material: Material) -> list[Item]:
    """Return the items; none where the model has no room for a passage with what is asked of it."""
    if len(material.begin) + config.length + config.cue + config.answer > material.positions:
        return []
    made = []
    tokens, words = material.frequent(FREQUENT), material.windows.flatten().tolist()
    for i in range(config.count):
        draw = random.Random(f"{config.seed} copying {i}")
        if i % 2 and len(words) >= config.length:
            start = draw.randrange(len(words) - config.length + 1)
            passage = words[start : start + config.length]
        else:
            passage = draw.choices(tokens, k=config.length)
        end = config.cue + config.answer
        context = (*material.begin, *passage, *passage[: config.cue])
        made.append(Item(f"{i}", context, (tuple(passage[config.cue : end]),)))
    return made
