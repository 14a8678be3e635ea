"""The command line of a study: what is wrong is said before anything is measured, and a real study goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from compress.cli.app import app
from helpers.runs import TEXT

HELD_OUT = TEXT.with_name("books_heldout.txt")


def words(model: Path, out: Path, *more: str) -> list[str]:
    shared = ["--text", str(HELD_OUT), "--window", "64", "--max-tokens", "256"]
    return ["study", str(model), "--out", str(out), *shared, *more]


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (["--recipes", "int44"], 1, "int44"),
        (["--recipes", "int4", "--set", "bitz=3"], 1, "bitz"),
        (["--recipes", "int4", "--samples", "many"], 2, "no positive whole numbers"),
        (["--recipes", "int4", "--calib", "./none.txt"], 1, "none.txt"),
        (["--recipes", "int8", "--window", "100000"], 1, "windows of 100000 tokens cannot be scored; 2 to 256 can"),
        (["--recipes", "int8", "--text", f"{HELD_OUT.parent}/../data2/../data/{HELD_OUT.name}"], 1, "data2"),
        (["--recipes", "int8", "--cell-time", "soon"], 2, "soon"),
        (["--recipes", "int8", "--suite", "quik"], 1, "did you mean 'quick'"),
        (["--recipes", "int8", "--task", "aritmetic"], 1, "did you mean 'arithmetic'"),
        (["--recipes", "int8", "--task", "choices=./none.jsonl"], 1, "cannot read the questions"),
        (["--recipes", "int8", "--task", "rules", "--task", "rules"], 1, "--task rules is given twice"),
    ],
)
def test_wrong_requests_leave_nothing(
    pico_dir: Callable[..., Path], tmp_path: Path, more: list[str], code: int, said: str
) -> None:
    done = CliRunner().invoke(app, words(pico_dir("llama"), tmp_path / "s", *more))
    assert done.exit_code == code and said in done.output
    assert not (tmp_path / "s").exists()


def test_a_study_is_not_written_into_its_model(pico_dir: Callable[..., Path]) -> None:
    model = pico_dir("llama")
    done = CliRunner().invoke(app, words(model, model / "s"))
    assert done.exit_code == 1 and "which is read; give another --out" in done.output
    assert not (model / "s").exists()


def test_a_study_is_not_written_among_other_files(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("kept")
    done = CliRunner().invoke(app, words(pico_dir("llama"), tmp_path, "--recipes", "int8"))
    assert done.exit_code == 1 and "holds 'notes.txt' and no study; give another --out" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.slow
def test_a_study_is_added_to(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Real cells, each in a process of its own."""
    runner, out = CliRunner(), tmp_path / "s"
    first = runner.invoke(app, words(pico_dir("llama"), out, "--recipes", "int8", "--json"))
    assert first.exit_code == 0, first.output
    before = (out / "study.json").read_text()
    again = runner.invoke(app, words(pico_dir("llama"), out, "--recipes", "int8"))
    assert "2 cells, 0 of them to be measured" in again.output and (out / "study.json").read_text() == before
    more = runner.invoke(app, words(pico_dir("llama"), out, "--recipes", "moe2.5bit"))
    assert more.exit_code == 0 and "moe2.5bit failed: " in more.output
    found = json.loads((out / "study.json").read_text())
    assert [row["name"] for row in found["cells"]] == ["int8"]
    assert [row["name"] for row in found["failed"]] == ["moe2.5bit"] and not found["pending"]
    other = runner.invoke(app, words(pico_dir("llama"), out, "--recipes", "int8", "--seed", "1"))
    assert other.exit_code == 1 and "holds a study with another seed" in other.output
    other = runner.invoke(app, words(pico_dir("llama"), out, "--recipes", "int8", "--quantize-dtype", "bfloat16"))
    assert other.exit_code == 1 and "holds a study with another quantize type" in other.output
