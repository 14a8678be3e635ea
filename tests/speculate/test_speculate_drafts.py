"""Specifications of drafts, and drafts of n-grams against a slow search."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from compress.errors import RecipeError
from compress.speculate import specification
from compress.speculate.drafting import ModelDraft
from compress.speculate.drafts import ngram
from compress.speculate.drafts.ngram import NgramDraft
from helpers.tiny_laws import session_of


def test_what_a_specification_means() -> None:
    (one, two) = specification.parse("ngram,shortest=3,longest=5,length=4 + level=4")
    assert one.plugins == {"ngram": {"shortest": 3, "longest": 5}} and one.length == 4
    assert two.plugins == {"level": {"level": 4}} and two.length is None
    assert specification.parse("ngram=1")[0].plugins == {"ngram": {"shortest": 1}}
    assert specification.parse("level")[0].plugins == {"level": {}}


WRONG = {
    "": "empty item",
    "ngram+": "empty item",
    "ngram,": "empty item",
    "ngram,shortest=": "empty item",
    "ngrams": "unknown draft 'ngrams'.*did you mean 'ngram'",
    "skip=evenn": "unknown draft 'evenn'",
    "shortest=2": "unknown draft 'shortest'",
    "ngram,short=2": "unknown setting of ngram 'short'.*did you mean 'shortest'",
    "ngram,shortest=x": "shortest is an integer, not the text 'x'",
    "ngram,shortest=9": "shortest 9 is not from 1 to longest, 6",
    "ngram,length=0": "length is from 1 to 8, not '0'",
    "length=3": "a length and no draft",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_a_specification_cannot_mean(text: str) -> None:
    with pytest.raises(RecipeError, match=WRONG[text]):
        specification.parse(text)


def test_drafts_of_their_own_are_not_parts_of_a_model() -> None:
    session = session_of(torch.zeros(3, 3, 3), (0, 1))
    assert isinstance(specification.parse("ngram")[0].build(session), NgramDraft)
    with pytest.raises(RecipeError, match="cannot be combined by a comma; write a plus sign"):
        specification.parse("ngram,level=4")[0].build(session)


def slow(tokens: list[int], sizes: range, count: int) -> tuple[int | None, list[int]]:
    """The longest run that ends the text and stood before, and what followed it where it stood last."""
    for size in sizes:
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                period = len(tokens) - end
                return size, [tokens[end + i % period] for i in range(count)]
    return None, []


def test_ngrams_are_those_of_a_slow_search() -> None:
    generator = random.Random(0)
    session: Any = session_of(torch.zeros(3, 3, 3), (0, 1))
    draft = ngram.build(ngram.Config(2, 4), session)
    seen = set()
    for _ in range(300):
        session.append([generator.randrange(5) for _ in range(generator.randrange(1, 4))])
        size, expected = slow(session.tokens, range(4, 1, -1), 5)
        assert draft.situation(session) == size
        seen.add(size)
        if size is not None:
            assert draft.propose(session, 5) == (expected, None)
    assert seen == {None, 2, 3, 4}


def test_a_copy_that_reaches_the_end_goes_on() -> None:
    session: Any = session_of(torch.zeros(3, 3, 3), (7, 8, 1, 2, 1, 2))
    draft = ngram.build(ngram.Config(2, 4), session)
    assert draft.situation(session) == 2
    assert draft.propose(session, 5).tokens == [1, 2, 1, 2, 1]


def test_model_drafts_lose_what_their_parts_lose() -> None:
    class Part:
        wants_hidden = False

        def __init__(self, prior: float | None) -> None:
            self.prior = prior

    parts: Any = [Part(0.9), Part(None), Part(0.95)]
    assert ModelDraft(parts).prior == pytest.approx(0.85)
    assert ModelDraft(parts[1:2]).prior is None
    parts[1].wants_hidden = True
    assert ModelDraft(parts).wants_hidden and not ModelDraft(parts[:1]).wants_hidden
