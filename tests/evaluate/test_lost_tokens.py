"""Where KL is lost: shares that sum to one, the worst tokens found by hand, and the page that shows them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compress.evaluate import pair
from compress.evaluate.reader import Reader
from compress.model import load
from compress.pages import suite as page
from helpers.pico import build, save

WINDOWS, LENGTH = 3, 24


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """A model and its original, of which one bias towards a token is the only difference."""
    folder = save(build("llama"), tmp_path_factory.mktemp("lost") / "base")
    model, base = (load.load_model(folder, "float32", "cpu") for _ in range(2))
    with torch.no_grad():
        model.lm_head.weight[7] *= 3
    return [model, base]


def laws(models: list[Any], windows: torch.Tensor) -> list[torch.Tensor]:
    """Probabilities in float64: of the model and of the original."""
    with torch.no_grad():
        return [model(input_ids=windows).logits[:, :-1].double().softmax(-1) for model in models]


def spelled(tokens: Any) -> str:
    return "".join(f"<{token}>" for token in tokens)


def test_the_worst_tokens_are_those_of_a_slow_search(models: list[Any]) -> None:
    windows = torch.randint(0, 256, (WINDOWS, LENGTH), generator=torch.Generator().manual_seed(3))
    model, base = laws(models, windows)
    kl = (base * (base.log() - model.log())).sum(-1)
    found = pair.find_lost_tokens([Reader(each) for each in models], windows, kl, "a.txt", spelled)
    places = sorted(((float(kl[i, j]), i, j) for i in range(WINDOWS) for j in range(LENGTH - 1)), reverse=True)
    assert len(found.worst) == pair.WORST_TOKENS
    for each, (value, i, j) in zip(found.worst, places, strict=False):
        own = int(windows[i, j + 1])
        assert each.kl == value and each.token == f"<{own}>"
        assert each.before == spelled(windows[i, max(0, j + 1 - pair.TOKENS_BEFORE) : j + 1].tolist())
        assert each.probability == pytest.approx(float(model[i, j, own]), rel=1e-4)
        assert each.base_probability == pytest.approx(float(base[i, j, own]), rel=1e-4)
        for law, token, share in (
            (model, each.expected, each.confidence),
            (base, each.base_expected, each.base_confidence),
        ):
            assert token == f"<{int(law[i, j].argmax())}>" and share == pytest.approx(float(law[i, j].max()), rel=1e-4)


def test_equal_models_have_lost_nothing(models: list[Any]) -> None:
    windows = torch.zeros(1, 4, dtype=torch.long)
    found = pair.find_lost_tokens(
        [Reader(each) for each in models], windows, torch.zeros(1, 3, dtype=torch.float64), "a.txt", spelled
    )
    assert (found.half, found.worst) == (0.0, ()) and found.classes[0]["tokens"] == 1.0 and len(found.classes) == 1
    assert "largest KL" not in page.lost_tokens([found.plain()])


def test_classes_hold_every_token_once() -> None:
    values = torch.tensor([0.0, 1e-9, 1e-6, 0.02, 0.02, 0.5, 1.0, 3.0, 70.0], dtype=torch.float64)
    found = pair.kl_classes(values)
    for each in found[1:-1]:  # the outermost ones hold what lies beyond them, too
        inside = (values >= each["low"]) & (values < each["high"])
        assert each["tokens"] == pytest.approx(float(inside.double().mean()))
        assert each["kl"] == pytest.approx(float(values[inside].sum() / values.sum()))
    assert found[0]["tokens"] == pytest.approx(3 / 9) and found[-1]["kl"] == pytest.approx(70 / float(values.sum()))
    assert sum(each["tokens"] for each in found) == pytest.approx(1) == sum(each["kl"] for each in found)
    assert [a["high"] for a in found[:-1]] == [b["low"] for b in found[1:]]


def test_half_of_the_sum() -> None:
    assert pair.half_share(torch.tensor([1.0, 1.0, 1.0, 1.0])) == 0.5
    assert pair.half_share(torch.tensor([0.0, 9.0, 1.0, 0.0])) == 0.25
    assert pair.half_share(torch.tensor([1.0, 1.0, 1.1])) == pytest.approx(2 / 3)


def test_a_letter_of_two_tokens_is_shown_whole_where_it_ends() -> None:
    def decode(tokens: Any) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")

    letter = list("é".encode())
    assert pair._piece(decode, [97], 98) == "b"
    assert pair._piece(decode, [97], letter[0]) == "\ufffd"
    assert pair._piece(decode, [97, letter[0]], letter[1]) == "é"


def test_what_is_not_printable_is_seen() -> None:
    assert page.quote('a\n\t"\x00\u2028') == '“a↵⇥"��”'
    found = {"text": "<b>", "half": 0.031, "classes": [], "worst": []}
    assert page.half_of_loss(found) == "half of the KL on <b> lies on 3.1% of its tokens"
    assert "<b>" not in page.lost_tokens([found])
