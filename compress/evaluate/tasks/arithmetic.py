"""Arithmetic: sums, differences and products of small numbers behind solved examples.

"12 + 30 = 42" and so on, one a line, then a line to be completed. The share of the answer's tokens that are right tells
more of a small model than whole answers: a tokenizer that splits numbers into digits makes it the share of digits.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compress.evaluate.items import Item, Material

WAY = "greedy"
BY = "sign"
SUITES: Mapping[str, Mapping[str, Any]] = {"quick": {"count": 30}, "full": {}}
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass(frozen=True)
class Config:
    """Settings of the task."""

    count: int = 300  # items
    examples: int = 4  # solved lines before the one that is asked
    largest: int = 99  # operand of sums and differences; of products 12
    seed: int = 0  # of the numbers

    def __post_init__(self) -> None:
        if self.count < 1 or self.examples < 0 or self.largest < 1:
            raise ValueError("count and largest must be at least 1, examples at least 0")


def items(config: Config, material: Material) -> list[Item]:
    """Return the items; the three signs take turns."""
    made = []
    for i in range(config.count):
        draw = random.Random(f"{config.seed} arithmetic {i}")
        sign = list(SIGNS)[i % len(SIGNS)]
        lines = [_line(draw, sign, config.largest) for _ in range(config.examples + 1)]
        solved = "".join(f"{question}{answer}\n" for question, answer in lines[:-1])
        question, answer = lines[-1]
        made.append(Item(f"{i}", solved + question, (answer,), facts={"sign": sign}))
    return made


def _line(draw: random.Random, sign: str, largest: int) -> tuple[str, str]:
    """Return "12 + 30 =" and " 42"; no result is negative."""
    limit = min(largest, 12) if sign == "*" else largest
    a, b = sorted((draw.randint(0, limit), draw.randint(0, limit)), reverse=True)
    return f"{a} {sign} {b} =", f" {SIGNS[sign](a, b)}"
