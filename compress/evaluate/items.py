"""Say what a task asks of a model, what a model answered, and what tasks make their questions of.

An item is one question. Its name joins the answers of two models. A task scores its items in one of three ways:

    likelihood   The model reads the context behind each of the answers; it chooses the one with the largest summed
                 log-likelihood. A second choice divides by the bytes of each answer, so that long answers are not at
                 a disadvantage.
    greedy       One teacher-forced pass over context and right answer. The item is right if every token of the answer
                 is the likeliest one, which is what greedy decoding would write.
    written      The model writes `new_tokens` tokens greedily; the task's own `correct(item, text)` judges the text.

The first two also give the negative log-likelihood of the right answer, which tells models apart where none is right.

Tasks whose questions are the user's read them from JSON lines, an object each (`read_lines`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from compress.errors import CalibrationError, first_line, shown
from compress.storage import json_text
from compress.storage.files import read_text

Way = Literal["likelihood", "greedy", "written"]
Text = str | tuple[int, ...]  # text, or the tokens of it
Law = tuple[Mapping[int, float], ...]  # for each token of an answer: token -> its true probability, which sum to 1


@dataclass(frozen=True)
class Item:
    """One question of a task."""

    name: str  # unique within the task, and the same for every model
    context: Text  # what the model reads; special tokens of the tokenizer are put before a text, not before tokens
    answers: tuple[Text, ...] = ()  # what may follow; a text begins with its space. May be empty for `written`
    right: int = 0  # the number of the right answer
    new_tokens: int = 32  # most that are written; for `written`
    law: Law | None = None  # of the right answer's tokens, where it is known; for `greedy`
    facts: Mapping[str, Any] = field(default_factory=dict)  # what `correct` needs to know, and what tables go by


@dataclass(frozen=True)
class Outcome:
    """What a model made of an item."""

    name: str  # of the item
    right: bool
    chosen: str  # what the model answered: equal texts are equal answers
    nll: float | None = None  # nats a token of the right answer
    right_by_bytes: bool | None = None  # of `likelihood`: the choice by log-likelihood per byte is right
    tokens_right: float | None = None  # of `greedy`: share of the answer's tokens that are the likeliest ones
    kl: float | None = None  # KL(law || model), nats a token, where the law is known
    figures: Mapping[str, float] = field(default_factory=dict)  # what else a task says of what was written


Correct = Callable[[Item, str], bool]


@dataclass(frozen=True)
class Task:
    """Items with the way in which they are scored."""

    name: str
    way: Way
    items: Sequence[Item]
    correct: Correct | None = None  # for `written`
    figures: Callable[[Item, str], Mapping[str, float]] | None = None  # for `written`, where a task has more to say
    by: str = ""  # fact of its items whose values have figures of their own; "": none
    remark: Callable[[Sequence[Any]], str] | None = None  # what the scores of all tasks of a run say together

    @property
    def digest(self) -> str:
        """SHA-256 of the questions and of the way in which they are scored, in hexadecimal digits."""
        return hashlib.sha256(repr((self.way, tuple(self.items))).encode()).hexdigest()


def encode_with(tokenizer: Any) -> Callable[[str], list[int]]:
    """Return a function that gives the tokens of a text, no special ones added."""

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    return encode


@dataclass(frozen=True)
class Material:
    """What a task makes items of: the tokenizer of the original, its limits, and some text of the user's."""

    encode: Callable[[str], list[int]]  # text -> tokens, none added
    decode: Callable[[Sequence[int]], str]  # tokens -> text, special ones left out
    begin: tuple[int, ...]  # tokens that the tokenizer puts before a text; often none
    vocab_size: int  # ids below this may be asked
    positions: int  # most tokens of a context with its answer
    windows: Tensor  # int64 [windows, tokens] of the user's first text: what stands between things to be found

    def frequent(self, count: int) -> list[int]:
        """Return the tokens that are frequent in the text, at most `count`; without enough text, any tokens."""
        tokens, counts = self.windows.unique(return_counts=True)
        by_count = tokens[counts.argsort(descending=True, stable=True)][:count].tolist()
        return by_count if len(by_count) == count else list(range(min(count, self.vocab_size)))


def check_file(file: str, task: str, count: int, **positive: int) -> None:
    """Raise ValueError for a task's settings without a file, a negative count, or a number that is not positive."""
    if not file:
        raise ValueError(f"file: name one with questions, {task}=FILE")
    if count < 0:
        raise ValueError(f"count {count} is negative")
    for name, value in positive.items():
        if value < 1:
            raise ValueError(f"{name} {value} is not positive")


def read_lines(file: str, count: int, make: Callable[[Mapping[str, Any], str], Item], form: str) -> list[Item]:
    """Return an item for each of the first `count` lines of a JSON-lines file, 0: all.

    make(row, name) raises ValueError for a row that is none; the name is the row's "id", or the number of its line.
    form: what a line looks like, or where that is said. Raises CalibrationError, with the line.
    """
    path = Path(file)
    try:
        lines = read_text(path, "utf-8-sig").splitlines()
    except (OSError, UnicodeError) as error:
        raise CalibrationError(f"cannot read the questions of {path} ({first_line(error)})") from error
    items: dict[str, Item] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if count and len(items) == count:
            break
        try:
            row = json_text.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"no JSON object; {form}")
            item = make(row, str(row.get("id", number)))
        except ValueError as error:
            raise CalibrationError(f"{path}, line {number}: {first_line(error)}") from error
        if item.name in items:
            raise CalibrationError(f"{path}, line {number}: the id {shown(item.name)} stands on an earlier line, too")
        items[item.name] = item
    if not items:
        raise CalibrationError(f"{path} has no questions; {form}")
    return list(items.values())


def text_of(row: Mapping[str, Any], key: str) -> str:
    """Return a text that a row must have; ValueError without."""
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f'no text under "{key}"')
    return value


def texts_of(row: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return texts that a row must have, given as one or as a list; ValueError without."""
    value = row.get(key)
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not listed or not all(isinstance(x, str) and x.strip() for x in listed):
        raise ValueError(f'"{key}" is no text and no list of texts')
    return tuple(listed)


def answers_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what counts as right, under "answers" or "answer"; ValueError without."""
    return texts_of(row, "answers" if "answers" in row else "answer")
