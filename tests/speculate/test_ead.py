"""EAD: entropies and changes of level against a plain reading of the rule, and the model left as it was found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from compress import speculate
from compress.errors import RecipeError
from compress.papers.speculate import ead
from compress.speculate.drafting import Proposal, Verified
from compress.speculate.statistics import Statistics
from helpers.nested_models import nested_model
from helpers.pico import PICO

IDS = torch.randint(0, 250, (1, 20), generator=torch.Generator().manual_seed(0))
HOW: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}


def test_entropies_are_in_bits() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 3
    p = logits.double().softmax(-1)
    torch.testing.assert_close(ead.entropy(logits).double(), -(p * p.log2()).sum(-1), atol=1e-5, rtol=0)
    flat = torch.full((1, 8), -torch.inf)
    flat[:, :4] = 2.0
    assert float(ead.entropy(flat)) == pytest.approx(2.0)


def law(bits: float) -> Tensor:
    """Logits of two tokens with an entropy of so many bits, at most 1."""
    low, high = 0.5, 1.0
    for _ in range(60):
        p = (low + high) / 2
        found = -(p * torch.tensor(p).log2() + (1 - p) * torch.tensor(1 - p).clamp(min=1e-30).log2())
        low, high = (p, high) if found > bits else (low, p)
    return torch.tensor([[low, 1 - low]]).log()


def test_the_level_follows_the_mean_of_the_last_entropies() -> None:
    levels: list[int | None] = []
    model = SimpleNamespace(levels=(2, 4, 8), level=4, set_level=levels.append)  # the large model is a level
    session: Any = SimpleNamespace(model=model, statistics=Statistics())
    draft = ead.build(ead.Config(0.5, 3), session)
    assert isinstance(draft, ead.EntropyAdaptive)
    entropies = (0.1, 0.1, 0.1, 0.9, 0.9, 0.9, 0.9, 0.1, 0.1, 0.1, 0.1, 0.1)
    expected, is_low, stay = [], False, 0
    for place, bits in enumerate(entropies):
        draft.observe(session, Verified(None, Proposal([]), 0, law(bits), None))
        recent = entropies[max(0, place - 2) : place + 1]
        wants, stay = sum(recent) / len(recent) <= 0.5, stay + 1
        if wants != is_low and stay >= 3:
            is_low, stay = wants, 0
        expected.append(is_low)
        assert draft.is_low == is_low
    assert set(expected) == {False, True}
    assert draft.situation(session) is None
    draft.end(session)
    assert set(levels) == {2, 4} and levels[-1] == 4
    assert session.statistics.notes == [f"{sum(draft.lows)} of 12 tokens by level 2 (ead)"]


@pytest.mark.parametrize(("threshold", "level"), [(0.0, None), (99.0, 4)])
def test_thresholds_at_the_ends_are_one_model_alone(threshold: float, level: int | None) -> None:
    model = nested_model("llama", (4, 4))
    made = speculate.with_settings(f"ead={threshold:g},tokens=1")
    found = model.generate(IDS, custom_generate=made, **HOW)
    assert vars(model)["level"] is None
    if level is None:
        assert torch.equal(found, model.generate(IDS, **HOW))
        assert made.statistics.notes == ["0 of 23 tokens by level 4 (ead)"]
        return
    assert made.statistics.notes == ["22 of 23 tokens by level 4 (ead)"]
    assert "22 of 23 tokens by level 4" in made.statistics.text()
    tokens = IDS[0].tolist()
    with torch.no_grad():
        read = model(IDS)
        for place in range(24):
            tokens.append(int(read.logits[0, -1].argmax()))
            model.set_level(None if place == 0 else 4)  # the whole reads the prompt and the token behind it
            read = model(torch.tensor([tokens[-1:]]), past_key_values=read.past_key_values)
    assert found[0].tolist() == tokens


def test_a_model_without_levels_is_refused() -> None:
    with pytest.raises(RecipeError, match="ead: the checkpoint has no levels"):
        PICO["llama"]().generate(IDS, custom_generate=speculate.with_settings("ead"), **HOW)
    with pytest.raises(RecipeError, match="has the levels 4, 8"):
        nested_model("llama").generate(IDS, custom_generate=speculate.with_settings("ead,low=2"), **HOW)


def test_an_error_leaves_the_whole_weights() -> None:
    model, seen = nested_model("llama"), 0

    def fails(*args: Any) -> Tensor:
        nonlocal seen
        seen += 1
        if seen == 9:
            raise RuntimeError("stop")
        return torch.zeros(1, dtype=torch.bool)

    with pytest.raises(RuntimeError, match="stop"):
        model.generate(
            IDS, custom_generate=speculate.with_settings("ead=99,tokens=1"), stopping_criteria=[fails], **HOW
        )
    assert vars(model)["level"] is None
