"""Plant sentences in a long text that are asked for later: what the needles of a cache and the task `retrieval` share.

A needle is " The password of Oslo is amber feather.", of words that every tokenizer has. Its cue, " The password of
Oslo is", asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Encode = Callable[[str], Sequence[int]]  # text -> tokens, none added

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # shares of the text that needles may stand in
NAMES = (
    *("Oslo", "Cairo", "Lima", "Rome", "Delhi", "Paris", "Kiev", "Quito", "Dublin", "Tokyo", "Berlin", "Boston"),
    *("Madrid", "Athens", "Vienna", "Warsaw", "Moscow", "London"),
)
FIRST = (
    *("amber", "silver", "golden", "crimson", "purple", "hollow", "silent", "frozen", "broken", "gentle", "wooden"),
    *("hidden", "yellow", "bitter", "narrow", "ancient"),
)
SECOND = (
    *("feather", "river", "candle", "garden", "mirror", "ladder", "basket", "hammer", "window", "pepper", "anchor"),
    *("bottle", "castle", "button", "needle", "orange"),
)


class Needle(NamedTuple):
    """The tokens of a needle."""

    cue: tuple[int, ...]  # in front of the answer
    answer: tuple[int, ...]
    sentence: tuple[int, ...]  # both, and the full stop


def make_needle(encode: Encode, name: str, first: str, second: str) -> Needle:
    """Return the needle with a name and the two words of its password."""
    cue, answer = tuple(encode(f" The password of {name} is")), tuple(encode(f" {first} {second}"))
    return Needle(cue, answer, (*cue, *answer, *encode(".")))


def plant(text: Sequence[int], needles: Sequence[Needle], places: Sequence[int]) -> list[int]:
    """Return the text with the needles in front of its tokens of these numbers, which ascend."""
    pieces: list[int] = []
    start = 0
    for needle, stop in zip(needles, places, strict=True):
        pieces += [*text[start:stop], *needle.sentence]
        start = stop
    return [*pieces, *text[start:]]
