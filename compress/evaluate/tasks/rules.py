"""In-context rules: a random automaton writes symbols, and the next one is asked, whose true law is known.

Each item draws its own Markov chain over a few frequent tokens: from each symbol it goes to one of a few others with
PROBABILITIES. What follows can be learned from the context alone. The divergence KL(law || model) is absolute: 0 is the
best that any model can do, whatever the original does. An item is right where the model's likeliest token is the law's.
After "In-Context Language Learning: Architectures and Algorithms" (2401.12973), with chains of first order in the place
of random regular languages.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compress.evaluate.items import Item, Material

WAY = "greedy"
FREQUENT = 64  # tokens that symbols are drawn from, at least
SUITES: Mapping[str, Mapping[str, Any]] = {"quick": {"count": 24, "length": 96}, "full": {}}
PROBABILITIES = (0.7, 0.2, 0.1)  # the symbols that may follow another have these


@dataclass(frozen=True)
class Config:
    """Settings of the task."""

    count: int = 200  # items
    length: int = 256  # [tokens] of the context
    symbols: int = 6  # of an automaton
    seed: int = 0  # of automata and what they write

    def __post_init__(self) -> None:
        if self.count < 1 or self.symbols < len(PROBABILITIES) or self.length < self.symbols:
            raise ValueError(
                f"symbols must be at least {len(PROBABILITIES)}, length at least symbols, count at least 1"
            )


def items(config: Config, material: Material) -> list[Item]:
    """Return the items; none where the model or its vocabulary is too small."""
    if len(material.begin) + config.length > material.positions or config.symbols > material.vocab_size:
        return []
    made, frequent = [], material.frequent(max(FREQUENT, config.symbols))
    for i in range(config.count):
        draw = random.Random(f"{config.seed} rules {i}")
        symbols = draw.sample(frequent, config.symbols)
        follows = {symbol: draw.sample(symbols, len(PROBABILITIES)) for symbol in symbols}
        written = [symbols[0]]
        while len(written) < config.length:
            written += draw.choices(follows[written[-1]], PROBABILITIES)
        law = dict(zip(follows[written[-1]], PROBABILITIES, strict=True))
        made.append(Item(f"{i}", (*material.begin, *written), ((follows[written[-1]][0],),), law=(law,)))
    return made
