"""Long-range recall: pairs of a key and a value stand in the context, and one key comes again.

Keys and values are frequent tokens in random order, so that nothing but the context tells them: multi-query associative
recall of Arora et al., "Zoology" (2312.04927), with one query an item. Distances of the pair that is asked are even.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compress.evaluate.items import Item, Material

WAY = "greedy"
FREQUENT = 256  # tokens that keys and values are drawn from, at least
SUITES: Mapping[str, Mapping[str, Any]] = {"quick": {"count": 32, "pairs": 16}, "full": {}}


@dataclass(frozen=True)
class Config:
    """Settings of the task."""

    count: int = 200  # items
    pairs: int = 64  # of key and value in a context
    seed: int = 0  # of keys and values

    def __post_init__(self) -> None:
        if self.count < 1 or self.pairs < 1:
            raise ValueError("count and pairs must be at least 1")


def items(config: Config, material: Material) -> list[Item]:
    """Return the items; none where the model or its vocabulary is too small."""
    if len(material.begin) + 2 * config.pairs + 1 > material.positions or 2 * config.pairs > material.vocab_size:
        return []
    made, frequent = [], material.frequent(max(FREQUENT, 2 * config.pairs))
    for i in range(config.count):
        draw = random.Random(f"{config.seed} recall {i}")
        tokens = draw.sample(frequent, 2 * config.pairs)
        asked = 2 * (i % config.pairs)
        context = (*material.begin, *tokens, tokens[asked])
        made.append(Item(f"{i}", context, ((tokens[asked + 1],),)))
    return made
