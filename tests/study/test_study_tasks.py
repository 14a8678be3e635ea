"""Tasks of a study: the figures are those of `compress eval`, and the original answers once for all cells."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from compress.errors import OutputError
from compress.evaluate import Execution, answers, suite, task_runs
from compress.evaluate.items import Outcome
from compress.model import load
from compress.study import cell, grid, summary, tasks
from compress.study.folder import StudyFolder
from compress.study.grid import Axes, Settings
from helpers.runs import TEXT

HELD_OUT = TEXT.with_name("books_heldout.txt")
FEW = ["continuation", "tracking"]  # by likelihood and greedy; the suite has more


@pytest.fixture
def settings(pico_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(task_runs, "tasks_of", lambda name: FEW)
    return Settings(str(pico_dir("llama")), (str(HELD_OUT),), 64, 256, keep=True, suite="quick")


def test_figures_are_those_of_eval(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    scored = answers.score

    def counted(reader: Any, *more: Any) -> list[Outcome]:
        asked.append(Path(reader.model.name_or_path).name)
        return scored(reader, *more)

    monkeypatch.setattr(answers, "score", counted)
    study = StudyFolder(tmp_path / "study")
    study.open({"model": "m"})
    cells = {each.name: study.ask(each, settings, {"model": "m"}) for each in grid.cells(Axes(("int8", "kv4")))}
    for each in cells.values():
        cell.run(each)
    assert sorted(asked) == [*["checkpoint"] * 4, *[Path(settings.model).name] * 2]  # the original once for each task
    results = {name: each.result for name, each in cells.items()}
    assert [result and result["status"] for result in results.values()] == ["done"] * 3
    packed, original, cached = (results[name] for name in ("int8", grid.ORIGINAL, "kv4"))
    assert packed and original and cached
    before_all = original["suites"]["quick"]
    asked_directly = partial(suite.SuiteRequest, "quick", settings.texts, seq_len=64)
    compared = [
        (row, before, task)
        for name, result, kv in (("int8", packed, None), ("kv4", cached, {}))
        for row, before, task in zip(
            result["suites"]["quick"],
            before_all,
            suite.run(cells[name].checkpoint, Path(settings.model), asked_directly(kv=kv), Execution()).tasks,
            strict=True,
        )
    ]
    for own, before, alone in compared:
        assert alone.paired is not None and own["paired"] == vars(alone.paired)
        assert (own["task"], own["score"], own["n"], own["nll"]) == (
            *(alone.task, alone.accuracy, alone.items, alone.nll),
        )
        assert own["base"] == before["score"] == alone.paired.base_accuracy and before["paired"] is None
        assert before["nll"] == pytest.approx(alone.paired.base_nll)
    found = summary.write(study)
    assert found["original"]["suites"] == original["suites"] and found["cells"][0]["suites"] == packed["suites"]
    assert "<h2>Tasks</h2>" in (study.folder / "study.html").read_text()


def test_others_wait_for_the_answers_of_the_original(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, found = StudyFolder(tmp_path / "study"), list[Any]()
    study.open({"model": "m"})
    monkeypatch.setattr(load, "load_model", lambda *given: pytest.fail("the answers are there"))
    made, _ = tasks._tasks_with_material(settings)
    kept = [Outcome("a", True, "\u2028\n", figures={"f1": 0.5}), Outcome("b", False, "", figures={"f1": 0.0})]
    waiting = threading.Thread(target=lambda: found.append(tasks.measure(study, settings, None)))
    with study.hold_lock("answers/lock"):
        waiting.start()
        waiting.join(1.0)
        assert waiting.is_alive() and not found
        for task in made:
            study.keep_answers(task, kept)
    waiting.join(60)
    ((suites, seconds),) = found
    assert [(row["score"], row["n"]) for row in suites["quick"]] == [(0.5, 2)] * 2 and seconds is not None
    assert study.answers(made[0]) == kept
    with pytest.raises(OutputError, match="answers other questions than task continuation asks now"):
        study.answers(dataclasses.replace(made[0], items=made[0].items[1:]))
    (study.answered / f"{FEW[0]}.json").write_text('{"outcomes": [{"name": "a"}]}')
    with pytest.raises(OutputError, match="is damaged"):
        study.answers(made[0])


def test_nothing_is_asked_where_nothing_was_asked_for(tmp_path: Path) -> None:
    assert tasks.measure(StudyFolder(tmp_path), Settings("none", ()), None) == ({}, None)
    assert not list(tmp_path.iterdir())
