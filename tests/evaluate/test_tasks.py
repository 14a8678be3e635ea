"""Tasks give the same items every time, and scoring equals slow obvious references."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from compress import plugins
from compress.errors import CalibrationError, RecipeError
from compress.evaluate import answers, task_runs, task_scores
from compress.evaluate.items import Item, Material, Outcome, Task
from compress.evaluate.reader import Reader
from helpers.pico import build, pico_tokenizer

TEXT = (Path(__file__).parents[1] / "data" / "books_heldout.txt").read_text(encoding="utf-8")[:6000]
DRAWN = [name for name in plugins.names("task") if plugins.constant("task", name, "SUITES")]


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama", {"max_position_embeddings": 2048})


@pytest.fixture(scope="module")
def material() -> Material:
    tokenizer = pico_tokenizer()

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    windows = torch.tensor(encode(TEXT)[:5632]).view(-1, 256)
    return Material(encode, lambda ids: tokenizer.decode(list(ids)), (), 256, 2048, windows)


@pytest.mark.parametrize("name", DRAWN)
def test_items(name: str, material: Material) -> None:
    """Names are unique, items fit the model, settings are obeyed, and the same settings give the same items."""
    made = task_runs.task(name, material, "quick")
    assert made == task_runs.task(name, material, "quick") and len(made.items) >= 8
    assert len({item.name for item in made.items}) == len(made.items)
    assert task_runs.task(name, material, "quick", seed=1).items != made.items
    for item in made.items:
        assert 0 <= item.right < len(item.answers) and len(set(item.answers)) == len(item.answers)
        for law in item.law or ():
            assert sum(law.values()) == pytest.approx(1)


def test_a_setting_that_there_is_not(material: Material) -> None:
    with pytest.raises(RecipeError, match="unknown setting of task copying 'cuont'; known: .*; did you mean 'count'"):
        task_runs.task("copying", material, cuont=3)
    with pytest.raises(RecipeError, match="task copying: length 4 is less than cue and answer, 12"):
        task_runs.task("copying", material, length=4)
    with pytest.raises(RecipeError, match="unknown suite 'quik'; known: quick, full; did you mean 'quick'"):
        task_runs.tasks_of("quik")


def reference(model: Any, context: list[int], answer: list[int]) -> torch.Tensor:
    """float64 log-probabilities [answer, vocab] where an answer stands, one sequence at a time."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([context + answer])).logits[0].double()
    return logits.log_softmax(-1)[len(context) - 1 : -1]


def test_choices_by_likelihood(model: Any, material: Material) -> None:
    contexts = ["The capital is", "Once upon a time there was a very small house, and in it"]
    said = (" Rome", " Paris, the city", " Oslo")
    task = Task("t", "likelihood", [Item(c, c, said, 1) for c in contexts])
    for outcome in answers.score(Reader(model), task, material):
        context = material.encode(outcome.name)
        sums = []
        for text in said:
            answer = material.encode(text)
            rows = reference(model, context, answer)
            sums.append(float(sum(rows[k, token] for k, token in enumerate(answer))))
        by_bytes = [value / len(text) for value, text in zip(sums, said, strict=True)]
        assert outcome.chosen == str(sums.index(max(sums))) and outcome.right == (sums.index(max(sums)) == 1)
        assert outcome.right_by_bytes == (by_bytes.index(max(by_bytes)) == 1)
        assert outcome.nll == pytest.approx(-sums[1] / len(said[1]), rel=1e-5)


def test_greedy_is_what_greedy_decoding_writes(model: Any, material: Material) -> None:
    """An answer that the model writes itself is right, another one is not; the law's divergence by hand."""
    context = tuple(material.encode("Call me Ishmael. Some years ago"))
    written = answers.writing.write(
        model, torch.tensor([context]), 3, answers.writing.Draw("m", 0.0, torch.Generator())
    )
    likeliest = tuple(written[0, len(context) :].tolist())
    other = (*likeliest[:2], (likeliest[2] + 1) % 256)
    law = ({1: 0.7, 2: 0.3},)
    items = [Item("a", context, (likeliest,)), Item("b", context, (other,)), Item("c", context, ((5,),), law=law)]
    found = answers.score(Reader(model), Task("t", "greedy", items), material)
    assert [o.right for o in found] == [True, False, likeliest[0] == 5]
    assert found[1].tokens_right == pytest.approx(2 / 3)
    row = reference(model, list(context), [5])[0]
    expected = 0.7 * (math.log(0.7) - row[1]) + 0.3 * (math.log(0.3) - row[2])
    assert found[2].kl == pytest.approx(float(expected), rel=1e-5)


def test_batches_change_nothing(model: Any, material: Material) -> None:
    task = task_runs.task("continuation", material, "quick", count=6)
    all_at_once = answers.score(Reader(model), task, material)
    for tokens in (1, 100):
        for a, b in zip(all_at_once, answers.score(Reader(model), task, material, batch_tokens=tokens), strict=True):
            assert (a.name, a.right, a.chosen) == (b.name, b.right, b.chosen) and a.nll == pytest.approx(
                b.nll, rel=1e-5
            )


def test_what_is_written_is_judged_by_the_task(model: Any, material: Material) -> None:
    seen: list[str] = []
    items = [Item("a", "Once upon", new_tokens=5), Item("b", tuple(material.encode("Twice")), new_tokens=5)]
    task = Task("t", "written", items, lambda item, text: bool(seen.append(text)) or item.name == "b")
    assert [o.right for o in answers.score(Reader(model), task, material)] == [False, True]
    assert [o.chosen for o in answers.score(Reader(model), task, material)] == seen[:2] and all(seen)


def test_items_that_cannot_be_read(model: Any, material: Material) -> None:
    for item, said in (
        (Item("a", "", (" b",)), "item a: the context has no tokens"),
        (Item("a", "b", ("",)), "item a: the answer 1 has no tokens"),
        (Item("a", (1,) * 2048, ((1, 2),)), "2049 tokens, the model reads 2048"),
    ):
        with pytest.raises(CalibrationError, match=said):
            answers.score(Reader(model), Task("t", "greedy", [item]), material)


def test_questions_of_a_file(tmp_path: Path, material: Material) -> None:
    path = tmp_path / "q.jsonl"
    rows: list[dict[str, Any]] = [
        {"question": "Two and two are", "choices": ["three", "four"], "answer": 1},
        {"context": "Sky:", "choices": [" red", " blue"], "answer": "B", "id": "sky"},
        {"question": "Grass is", "choices": ["green", "red"], "answer": "green"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    made = task_runs.task("choices", material, file=str(path))
    assert [(item.name, item.right) for item in made.items] == [("1", 1), ("sky", 1), ("3", 0)]
    assert made.items[0].answers == (" three", " four") and made.items[1].answers == (" red", " blue")
    for line, said in (
        ("{", "Expecting"),
        ("[]", "no JSON object; write"),
        ('{"choices": ["a", "b"], "answer": 0}', 'no text under "question"'),
        ('{"question": "a", "choices": ["a"], "answer": 0}', '"choices" is no list of at least two texts'),
        ('{"question": "a", "choices": ["a", "b"]}', 'no "answer"'),
        ('{"question": "a", "choices": ["a", "b"], "answer": 2}', '"answer" 2 is none of the 2 choices'),
        ('{"question": "a", "choices": ["a", "b"], "answer": 0, "id": "1"}', "the id '1' stands on an earlier line"),
    ):
        path.write_text(json.dumps(rows[0]) + "\n" + line)
        with pytest.raises(CalibrationError, match=f"q.jsonl, line 2: .*{said}"):
            task_runs.task("choices", material, file=str(path))
    with pytest.raises(RecipeError, match="task choices: file: name one"):
        task_runs.task("choices", material)


def test_figures_of_a_task() -> None:
    """Eight items: two lost, one gained, one wrong answer changed."""
    right = [(1, 1), (1, 1), (1, 0), (1, 0), (0, 1), (0, 0), (0, 0), (1, 1)]
    base = [Outcome(str(i), bool(a), "x", nll=1.0) for i, (a, _) in enumerate(right)]
    model = [Outcome(str(i), bool(b), "x" if a == b else "y", nll=1.0 + i / 10) for i, (a, b) in enumerate(right)]
    model[5] = Outcome("5", False, "z", nll=1.5)
    found = task_scores.summary("t", "greedy", model, base[::-1])
    paired = found.paired
    assert paired is not None and (paired.lost, paired.gained, paired.flips, paired.all_flips) == (2, 1, 3 / 8, 0.5)
    assert (found.accuracy, paired.base_accuracy, paired.difference) == (0.5, 0.625, -0.125)
    assert paired.ratio == pytest.approx(4 / 5) and (paired.ratio_low or 9) < 0.8 < (paired.ratio_high or 0)
    assert paired.nll_difference == pytest.approx(0.35) and paired.p_value == 1.0
    assert (paired.nll_low or 9) < 0.35 < (paired.nll_high or 0)
    task = Task("t", "greedy", [Item(str(i), "", facts={"depth": 1.0 - i % 2}) for i in range(8)], by="depth")
    at_0, at_1 = task_scores.groups(task, model, base[::-1])
    assert (at_0.value, at_0.items, at_0.accuracy, at_0.base_accuracy, at_0.base_nll) == (0.0, 4, 0.5, 0.75, 1.0)
    assert (at_1.value, at_1.items, at_1.accuracy, at_1.base_accuracy) == (1.0, 4, 0.5, 0.5)
    assert at_0.nll == pytest.approx((1.1 + 1.3 + 1.5 + 1.7) / 4)
    for wrong in (base[:7], [*base[:7], Outcome("9", True, "x")]):
        with pytest.raises(ValueError, match="not of the same items"):
            task_scores.summary("t", "greedy", model, wrong)
