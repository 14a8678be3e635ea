"""Retrieval at depth: a sentence stands somewhere in a long text, and what it said is asked at the end.

"The password of Oslo is amber feather." is put into text of the user's at a depth, and " The password of Oslo is" comes
at the end. Items go over depths and lengths. This is the "needle in a haystack" of long-context suites such as RULER
(2404.06654), with words that every tokenizer has. There is one needle in an item; the order of depths is that of items.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compress.evaluate.items import Item, Material
from compress.evaluate.needles import DEPTHS, FIRST, NAMES, SECOND, make_needle, plant

WAY = "greedy"
BY = "depth"
SUITES: Mapping[str, Mapping[str, Any]] = {"quick": {"count": 10, "lengths": (160,)}, "full": {}}


@dataclass(frozen=True)
class Config:
    """Settings of the task."""

    count: int = 60  # items of each length
    lengths: tuple[int, ...] = (256, 512, 1024)  # [tokens] of an item; those that the model cannot read are left out
    seed: int = 0  # of names and passwords

    def __post_init__(self) -> None:
        if self.count < 1 or not self.lengths or min(self.lengths) < 64:
            raise ValueError("lengths must be at least 64, count at least 1")


def items(config: Config, material: Material) -> list[Item]:
    """Return the items; none without text, or where no length fits the model."""
    words = material.windows.flatten().tolist()
    made = []
    for length in config.lengths:
        if length > min(material.positions, len(words)):
            continue
        for i in range(config.count):
            made.append(_item(config.seed, length, i, words, material))
    return made


def _item(seed: int, length: int, number: int, words: list[int], material: Material) -> Item:
    draw = random.Random(f"{seed} retrieval {length} {number}")
    depth = DEPTHS[number % len(DEPTHS)]
    needle = make_needle(material.encode, draw.choice(NAMES), draw.choice(FIRST), draw.choice(SECOND))
    room = length - len(material.begin) - len(needle.sentence) - len(needle.cue) - len(needle.answer)
    start = draw.randrange(len(words) - room + 1)
    text = words[start : start + room]
    context = (*material.begin, *plant(text, [needle], [round(depth * room)]), *needle.cue)
    return Item(f"{length}-{number}", context, (needle.answer,), facts={"depth": depth})
