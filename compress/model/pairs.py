"""Find how a tokenizer puts two texts together, for models that score a pair of them."""

from __future__ import annotations

from typing import Any, NamedTuple

SAMPLE = "a"  # a text that shows what a tokenizer adds


class Template(NamedTuple):
    """The tokens that a tokenizer puts around texts; none where its own are not found."""

    before: tuple[int, ...] = ()
    between: tuple[int, ...] = ()  # two texts
    behind: tuple[int, ...] = ()


def around_pair(tokenizer: Any) -> Template:
    """Return what a tokenizer puts around a pair of texts."""
    whole, bare = list(tokenizer(SAMPLE, SAMPLE, verbose=False)["input_ids"]), encode(tokenizer)[1]
    first = find(whole, bare)
    second = None if first is None else find(whole, bare, first + len(bare))
    if first is None or second is None:
        return Template()
    parts = whole[:first], whole[first + len(bare) : second], whole[second + len(bare) :]
    return Template(*map(tuple, parts))


def encode(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the tokens of a text with and without what a tokenizer adds."""
    return (
        list(tokenizer(SAMPLE, verbose=False)["input_ids"]),
        list(tokenizer(SAMPLE, add_special_tokens=False, verbose=False)["input_ids"]),
    )


def find(whole: list[int], part: list[int], start: int = 0) -> int | None:
    """Return where a part begins, from `start` on; None where it does not stand."""
    places = range(start, len(whole) - len(part) + 1) if part else range(0)
    return next((at for at in places if whole[at : at + len(part)] == part), None)
