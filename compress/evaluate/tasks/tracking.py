"""Variable tracking: a value goes from variable to variable through the context, and the last one is asked.

"A = 41. B = A. C = B. The value of C is" asks for 41. Lines of other chains stand between. It is the variable tracking
of RULER (2404.06654) in a short form, and needs several steps where retrieval needs one.
"""

from __future__ import annotations

import random
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compress.evaluate.items import Item, Material

WAY = "greedy"
SUITES: Mapping[str, Mapping[str, Any]] = {"quick": {"count": 24}, "full": {}}


@dataclass(frozen=True)
class Config:
    """Settings of the task."""

    count: int = 200  # items
    chains: int = 3  # values; one of them is asked
    steps: int = 2  # variables that a value goes to from its first one
    seed: int = 0  # of values, names and order

    def __post_init__(self) -> None:
        if min(self.count, self.chains) < 1 or self.steps < 0:
            raise ValueError("count and chains must be at least 1, steps at least 0")
        if self.chains * (self.steps + 1) > len(string.ascii_uppercase):
            raise ValueError(f"chains of steps + 1 variables may have {len(string.ascii_uppercase)} of them in all")


def items(config: Config, material: Material) -> list[Item]:
    """Return the items."""
    made = []
    for i in range(config.count):
        draw = random.Random(f"{config.seed} tracking {i}")
        names = draw.sample(string.ascii_uppercase, config.chains * (config.steps + 1))
        values = draw.sample(range(10, 100), config.chains)
        chains = [names[k :: config.chains] for k in range(config.chains)]
        left = [_lines(chain, value) for chain, value in zip(chains, values, strict=True)]
        lines = []
        while any(left):  # each chain in its order, the chains mixed
            lines.append(draw.choice([chain for chain in left if chain]).pop(0))
        context = " ".join(lines) + f" The value of {chains[0][-1]} is"
        made.append(Item(f"{i}", context, (f" {values[0]}",)))
    return made


def _lines(chain: list[str], value: int) -> list[str]:
    """Return "A = 41." and "B = A." for a chain of variables."""
    return [f"{name} = {said}." for name, said in zip(chain, [str(value), *chain], strict=False)]
