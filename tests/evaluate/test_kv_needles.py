"""Needles: what is planted where, scores against a slow reference, cells that the exact cache misses, and the table."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from typer.testing import CliRunner

from compress.cli.app import app
from compress.evaluate import cache_needles as needles
from compress.evaluate.reader import Candidate, fill
from compress.kv.settings import cache_settings
from helpers.kv_cases import ready, windows
from helpers.pico import build
from helpers.runs import TEXT

SHORT = {"residual_length": 16, "flush": 8, "sink": 4}
IDENTITY = cache_settings({"method": "identity", **SHORT})
KIVI = cache_settings({"method": "kivi", "bits": 1, "group_size": 8, **SHORT})
EXACT = (4, 16 + 4 + 4 * 8)  # tokens at the start and at the end


def encode(text: str) -> list[int]:
    """Return a token for each word, so that contexts are short."""
    return [1 + sum(map(ord, word)) % 250 for word in text.replace(".", " .").split()]


def candidate(settings: Any) -> Candidate:
    return Candidate("", settings, {})


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return ready(build("llama"))


def planted(model: PreTrainedModel, count: int = 3, length: int = 220) -> list[needles.NeedleContext]:
    return needles.contexts(windows(2, length), encode, count, [candidate(KIVI)], model.config)


def test_needles_lie_at_all_depths_outside_of_what_stays_exact(model: PreTrainedModel) -> None:
    for number, context in enumerate(planted(model)):
        text = context.prompt[0].tolist()
        asked = sum(question.shape[1] for question, _ in context.questions)
        assert len(text) + asked == 220 and sorted(context.order) == list(range(5))
        at = []
        for question, count in context.questions:
            said = question[0].tolist()
            assert count == 2 and len(said) == 7
            (found,) = [i for i in range(len(text)) if text[i : i + 7] == said]
            at.append(found)
        assert at == sorted(at) and at[0] == EXACT[0] and at[-1] + 8 == len(text) - EXACT[1]
        steps = torch.tensor(at).diff()
        assert steps.max() - steps.min() <= 1
        filler = windows(2, 220)[number % 2].tolist()
        kept = [text[i] for i in range(len(text)) if not any(a <= i < a + 8 for a in at)]
        assert kept == filler[: len(kept)]
    first, other = planted(model, 3)[0], planted(model, 3)[2]  # in the same window
    assert not torch.equal(first.prompt, other.prompt)
    assert torch.equal(first.prompt, planted(model, 1)[0].prompt)
    assert planted(model, 2, 120) == []  # no room


def test_scores_are_those_of_a_pass_over_everything(model: PreTrainedModel) -> None:
    """Through an exact cache: the answer's tokens in one pass, without any cache, in float64."""
    found = planted(model, 2)
    cells = torch.stack([needles.answers(model, c, DynamicCache(config=model.config)) for c in found], 1)
    reference = build("llama").double()
    for i, context in enumerate(found):
        tokens = [context.prompt, *(context.questions[index][0] for index in context.order)]
        with torch.no_grad():
            logits = reference(torch.cat(tokens, 1)).logits[0].log_softmax(-1)
        end = context.prompt.shape[1]
        for index in context.order:
            question, count = context.questions[index]
            end += question.shape[1]
            rows, answer = logits[end - count - 1 : end - 1], question[0, -count:]
            assert float(cells[0, i, index]) == pytest.approx(-float(rows[range(count), answer].mean()), rel=1e-4)
            assert bool(cells[1, i, index]) == bool((rows.argmax(-1) == answer).all())


def test_a_cache_that_changes_nothing_loses_nothing(model: PreTrainedModel) -> None:
    found = planted(model, 2)
    said: list[int] = []
    cells: dict[str, Tensor] = {}
    for name, made in (("exact", DynamicCache(config=model.config)), ("identity", IDENTITY), ("kivi", KIVI)):
        cache = made if name == "exact" else candidate(made).cache(model.config)
        cells[name] = needles.answers(model, found[0], cache)
    torch.testing.assert_close(cells["identity"], cells["exact"], rtol=1e-4, atol=1e-5)
    assert (cells["kivi"] - cells["exact"])[0].abs().max() > 1e-3
    scores = needles.measure(model, found, [candidate(IDENTITY), candidate(KIVI)], said.append)
    assert said == [1, 1] and {score.asked for score in scores} == {10}
    assert scores[0].kept == scores[1].kept  # of the same exact cache


def test_cells_that_the_exact_cache_misses_are_left_out() -> None:
    exact = torch.stack((torch.full((3, 5), 0.5), torch.ones(3, 5))).double()
    exact[1, 0, :2] = exact[1, 2, :] = 0  # seven of fifteen missed: one context wholly
    found = exact.clone()
    found[0] += torch.arange(15).view(3, 5) / 10
    found[1, 1, 3] = 0
    score = needles.score(exact, found)
    kept = [(0, 2), (0, 3), (0, 4), *((1, i) for i in range(5))]
    more = [(5 * row + depth) / 10 for row, depth in kept]
    mean = sum(more) / 8
    assert (score.asked, score.kept, score.exact_nll, score.right) == (15, 8, 0.5, pytest.approx(7 / 8))
    assert score.nll == pytest.approx(mean)
    of_contexts = [sum(m - mean for m in more[:3]), sum(m - mean for m in more[3:])]
    assert score.nll_se == pytest.approx(math.sqrt(2 * sum(s * s for s in of_contexts)) / 8)
    assert [depth.cells for depth in score.depths] == [1, 1, 2, 2, 2]
    assert score.depths[3].right == 0.5 and score.depths[0].nll == pytest.approx(0.5)
    exact[1] = 0
    nothing = needles.score(exact, found)
    assert (nothing.kept, nothing.right, nothing.nll, nothing.nll_se) == (0, None, None, None)
    assert [depth.right for depth in nothing.depths] == [None] * 5


def test_standard_errors_shrink_as_contexts_are_added() -> None:
    generator = torch.Generator().manual_seed(0)
    errors = []
    for count in (40, 640):
        exact = torch.stack((torch.zeros(count, 5), torch.ones(count, 5))).double()
        found = exact.clone()
        found[0] = torch.randn(count, 1, generator=generator).double() + torch.zeros(5)  # all cells of a context alike
        score = needles.score(exact, found)
        assert score.nll_se == pytest.approx(1 / math.sqrt(count), rel=0.25)
        errors.append(score.nll_se)
    assert errors[0] is not None and errors[1] is not None and errors[1] < errors[0] / 3


def test_only_the_last_logits_are_asked_for(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, sizes = windows(1, 64), []
    head = model.lm_head.register_forward_hook(lambda module, args, out: sizes.append(out.shape[1]))
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    last = fill(model, tokens, caches[0])
    with torch.no_grad():
        whole = model(input_ids=tokens, past_key_values=caches[1], use_cache=True).logits
    head.remove()
    assert sizes == [1, 64]
    torch.testing.assert_close(last, whole[:, -1:])
    torch.testing.assert_close(caches[0].layers[1].keys, caches[1].layers[1].keys)


@pytest.mark.slow
def test_the_command_shows_them(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "one.yaml"
    path.write_text("description: d\nkv_cache: {method: kivi, bits: 2, residual_length: 0, flush: 4, sink: 0}\n")
    fixed = {"keys": "{axis: token}"}
    words = ["kv", "bench", str(pico_dir("llama")), "--kv", str(path), "--set", f"keys={fixed['keys']}"]
    # a token of the pico model is a byte, so that five needles of about 50 tokens and as many questions hardly fit
    words += ["--text", str(TEXT), "--context", "256", "--max-tokens", "600", "--no-speed", "--device", "cpu"]
    result = CliRunner().invoke(app, [*words, "--needles", "2", "--json"])
    assert result.exit_code == 0, result.stderr
    (row,) = json.loads(result.stdout)["rows"]
    assert row["needles"] is None  # no room
    result = CliRunner().invoke(app, [*words, "--needles", "0"])
    assert result.exit_code == 0 and "needles" not in result.stdout
