"""LLM-KICK's protocols: judgements against definitions, files read as documented, one line for what cannot be used."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.errors import CalibrationError, RecipeError
from compress.evaluate import task_runs, task_scores
from compress.evaluate.items import Material, Outcome
from compress.papers.tasks import kick

KINDS = ("kick_knowledge", "kick_choices", "kick_open_book", "kick_closed_book", "kick_summary")
QUESTION = {
    "question": "Who wrote Emma?",
    "answers": ["Jane Austen", "Austen"],
    "evidence": "Emma is by Jane Austen. " * 400,
}
CHOICE = {"subject": "world_history", "question": "When?", "choices": ["one", "two", "three", "four"], "answer": "C"}
SUMMARY = {"document": "A fox jumps over a dog. " * 50, "summary": "a fox jumps", "instruction": "Say it shortly."}


def stuff(positions: int = 8192) -> Material:
    """A tokenizer of bytes."""
    return Material(
        lambda text: list(text.encode()), lambda ids: bytes(ids).decode(), (), 256, positions, torch.zeros(0, 8)
    )


def lines(path: Path, *rows: Any) -> str:
    path.write_text(
        "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n", encoding="utf-8"
    )
    return str(path)


def made(name: str, file: str, positions: int = 8192, **settings: Any) -> Any:
    return task_runs.task(name, stuff(positions), file=file, **settings)


def test_containment() -> None:
    assert kick.contains("It was JANE  austen, of course", ["Jane Austen"]) and not kick.contains(
        "Jane", ["Jane Austen"]
    )
    assert not kick.contains("anything", [" "])
    assert kick.contains_either_way("Austen", ["Jane Austen"]) and kick.contains_either_way(
        "the Jane Austen!", ["jane austen"]
    )
    assert not kick.contains_either_way("", ["Jane"]) and not kick.contains_either_way("The.", ["Jane"])
    assert kick.first_written_line("\n  \n Paris \nRome") == "Paris" and kick.first_written_line(" \n") == ""


def test_token_f1() -> None:
    assert kick.token_f1("The cat sat", ["a cat sat down", "dog"]) == pytest.approx(2 * 2 / (2 + 3))
    assert kick.token_f1("x", ["y"]) == 0 and kick.token_f1("Cat.", ["the cat"]) == 1


def test_rouge_against_all_subsequences() -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        own, theirs = ([str(int(x)) for x in torch.randint(3, (n,), generator=draw)] for n in (6, 5))
        common = max(k for k in range(6) if {*itertools.combinations(own, k)} & {*itertools.combinations(theirs, k)})
        assert kick.rouge_l(" ".join(own), " ".join(theirs)) == pytest.approx(2 * common / 11)
    assert kick.coverage("the fox, the dog", "a fox jumps") == pytest.approx(1 / 3) and kick.rouge_l("", "a") == 0


def test_knowledge(tmp_path: Path) -> None:
    task = made(
        "kick_knowledge",
        lines(tmp_path / "q.jsonl", QUESTION, {"question": "x", "answer": "y", "id": "own"}, "", QUESTION),
    )
    assert task.way == "written" and [item.name for item in task.items] == ["1", "own", "4"]
    assert "Who wrote Emma?" in task.items[0].context
    assert task.correct(task.items[0], "probably janeausten") and not task.correct(task.items[0], "Bronte")


def test_retrieval_cuts_the_evidence(tmp_path: Path) -> None:
    file = lines(tmp_path / "q.jsonl", QUESTION)
    task, closed = made("kick_open_book", file), made("kick_closed_book", file)
    assert task.items[0].context == QUESTION["evidence"][:3072] + "\n\nQuestion: Who wrote Emma?\nAnswer:"
    assert closed.items[0].context == "Question: Who wrote Emma?\nAnswer:"
    small = made("kick_open_book", file, positions=300).items[0]
    assert 200 < len(small.context) <= 300 - 32 and small.context.endswith("Emma?\nAnswer:")
    for each in (task, closed):
        assert each.correct(each.items[0], " Austen\nBronte") and not each.correct(each.items[0], "Bronte\nAusten")
        assert each.figures(each.items[0], "Jane Bronte\nAusten") == {"token_f1": pytest.approx(0.5)}


def test_choices_have_examples_of_their_subject(tmp_path: Path) -> None:
    other = {**CHOICE, "subject": "law", "question": "Why?", "answer": 1}
    rows = [{**CHOICE, "question": f"When {i}?"} for i in range(4)] + [{**other, "split": "dev"}, other]
    file = lines(tmp_path / "c.jsonl", *rows)
    task = made("kick_choices", file, shots=2)
    assert (
        [item.name for item in task.items] == ["3", "4", "6"] and task.items[0].right == 2 and task.items[2].right == 1
    )
    assert task.items[0].answers == (" A", " B", " C", " D")
    context = task.items[0].context
    assert re.findall(r"When (\d)\?", context) == ["0", "1", "2"] and context.count("Answer: C\n\n") == 2
    assert context.startswith("The following are multiple choice questions (with answers) about world history.\n\n")
    assert context.endswith("D. four\nAnswer:") and "Why" not in context
    short = made("kick_choices", file, positions=len(context) + 1, shots=2).items[0].context
    assert re.findall(r"When (\d)\?", short) == ["0", "2"] and len(short) < len(context)
    assert len(made("kick_choices", file, shots=0).items) == 5
    with pytest.raises(CalibrationError, match="all 4 questions serve as examples"):
        made("kick_choices", lines(tmp_path / "one.jsonl", *rows[:4]), shots=9)


def test_summaries(tmp_path: Path) -> None:
    task = made("kick_summary", lines(tmp_path / "s.jsonl", SUMMARY), positions=400)
    item = task.items[0]
    assert item.context.endswith("\n\nSay it shortly.\nSummary:") and len(item.context) + 128 <= 400
    assert task.correct(item, "a fox jumps") and not task.correct(item, "nothing")
    assert task.figures(item, "a fox") == {"rouge_l": pytest.approx(0.8), "coverage": pytest.approx(2 / 3)}


@pytest.mark.parametrize(
    ("name", "row", "said"),
    [
        ("kick_knowledge", "{", "line 2: "),
        ("kick_knowledge", [1], "line 2: no JSON object"),
        ("kick_knowledge", {"answers": ["x"]}, 'line 2: no text under "question"'),
        ("kick_knowledge", {"question": "x", "answers": [3]}, 'line 2: "answers" is no text and no list of texts'),
        ("kick_open_book", {"question": "x", "answers": ["y"]}, 'line 2: no text under "evidence"'),
        ("kick_closed_book", {**QUESTION, "id": "1"}, "line 2: the id '1' stands on an earlier line"),
        ("kick_choices", {**CHOICE, "answer": "E"}, "line 2: \"answer\" 'E' is none of the letters ABCD"),
        ("kick_choices", {**CHOICE, "choices": ["x"]}, 'line 2: "choices" is no list of 2 to 26 texts'),
        ("kick_summary", {"document": "x"}, 'line 2: no text under "summary"'),
    ],
)
def test_bad_lines(name: str, row: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=re.escape(said)):
        made(name, lines(tmp_path / "q.jsonl", {**QUESTION, **CHOICE, **SUMMARY}, row))


@pytest.mark.parametrize("name", KINDS)
def test_files_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=f"name one with questions, {name}=FILE"):
        made(name, "")
    with pytest.raises(RecipeError, match="count -1 is negative"):
        made(name, "questions.jsonl", count=-1)
    with pytest.raises(CalibrationError, match="cannot read the questions"):
        made(name, str(tmp_path / "nowhere"))
    with pytest.raises(CalibrationError, match="has no questions"):
        made(name, lines(tmp_path / "empty.jsonl", ""))


def test_both_books_in_one_line() -> None:
    """12 questions: the model loses half of what the original knows, and nothing with the evidence in front."""

    def scored(name: str, base: int, model: int) -> task_scores.TaskScore:
        outcomes = [[Outcome(str(i), i < right, "") for i in range(12)] for right in (model, base)]
        return task_scores.summary(name, "written", *outcomes)

    closed, opened = scored("kick_closed_book", 8, 4), scored("kick_open_book", 10, 10)
    said = kick.compare_books([opened, closed])
    assert closed.paired is not None and "with the book closed, 1.00 (" in said and "with it open" in said
    low, high = closed.paired.ratio_low or 9, closed.paired.ratio_high or 0
    assert f"0.50 ({low:.2f} to {high:.2f}) with the book closed" in said and low < 0.5 < high
    assert kick.compare_books([closed]) == kick.compare_books([scored("kick_closed_book", 0, 1), opened]) == ""


def test_figures_are_paired() -> None:
    own = [Outcome(str(i), False, "", figures={"f": value}) for i, value in enumerate((0.1, 0.4, 0.7))]
    base = [Outcome(str(i), False, "", figures={"f": value}) for i, value in enumerate((0.2, 0.8, 0.8))]
    found = task_scores.summary("t", "written", own, base[::-1])
    assert found.figures == {"f": pytest.approx(0.4)} and found.paired is not None
    pair = found.paired.figures["f"]
    assert pair["base"] == pytest.approx(0.6) and pair["difference"] == pytest.approx(-0.2)
    assert pair["low"] < -0.2 < pair["high"]
