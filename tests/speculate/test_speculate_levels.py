"""Drafts by a level of the weights: the text of the whole weights, programs for both, and what a checkpoint drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import compress
from compress.errors import RecipeError
from compress.runtime import step
from compress.speculate import generation
from compress.speculate.cost import acceptance_from_kl
from compress.speculate.drafts import level
from helpers.nested_models import nested_model
from helpers.tiny_laws import session_of

TIE = 2e-3  # of logits: passes of one and of several tokens are summed in other orders


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    made = nested_model("llama", (2, 4))
    step.speed_up(made)
    return made


def prompt(count: int = 12) -> Tensor:
    return torch.randint(0, 200, (1, count), generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("drafts", ["level", "level=2,length=3", "ngram,length=2+level=2,length=4"])
def test_the_text_is_that_of_the_whole_weights(drafts: str, model: Any) -> None:
    own = compress.speculate.with_settings(drafts)
    text = model.generate(prompt(), max_new_tokens=60, eos_token_id=None, do_sample=False, custom_generate=own)
    assert model.level is None and text.shape == (1, 72)
    with torch.no_grad():
        logits = model(text).logits[0, 11:-1]
    assert (logits.amax(-1) - logits.gather(1, text[0, 12:, None])[:, 0]).max() < TIE
    if "length" in drafts:
        assert 0 < own.statistics.accepted < own.statistics.drafted


def test_drawn_texts_are_drawn_again_by_the_same_seed(model: Any) -> None:
    texts = []
    for seed in (0, 0, 1):
        generator = torch.Generator().manual_seed(seed)
        own = compress.speculate.with_settings("level=2,length=3", generator=generator)
        texts.append(model.generate(prompt(), max_new_tokens=30, do_sample=True, temperature=0.8, custom_generate=own))
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])


def test_a_nested_model_drafts_at_its_lowest_level(model: Any) -> None:
    assert generation.default_drafts(model) == "ngram+level"
    session = session_of(torch.zeros(3, 3, 3), (0, 1))
    session.model = model
    lowest: Any = level.build(level.Config(), session)
    assert lowest.level == 2 and lowest.prior == acceptance_from_kl(level.NOMINAL_KL[2])
    with pytest.raises(RecipeError, match="level: 6 is none of the levels 2 below the whole"):
        level.build(level.Config(6), session)
    with pytest.raises(ValueError, match="level -1 is no number of bits"):
        level.Config(-1)
