"""A run whose recipe says what it must reach ends with a verdict."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from compress import api, recipe
from compress.cli import app as command_line
from compress.errors import CalibrationError, RecipeError
from compress.evaluate import acceptance
from compress.recipe.schema import Acceptance
from compress.run import verify
from helpers.runs import RTN, TEXT, cli, command, job, report_of


@pytest.fixture(scope="module")
def short(pico_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, object]:
    """What `quantize --json` says and writes with a bound that no rounding keeps."""
    out = tmp_path_factory.mktemp("accepted") / "out"
    words = [*command(pico_dir("llama"), RTN, out), "--accept", "kl=1e-12", "--accept", f"text={TEXT}", "--json"]
    return out, cli(*words)


def test_a_result_that_falls_short_is_kept(short: tuple[Path, object]) -> None:
    out, result = short
    assert result.code == 3 and "3 the result falls short" in (command_line.__doc__ or "")
    verdict = json.loads(result.out)["acceptance"]
    assert verdict == report_of(out)["acceptance"]
    assert not verdict["accepted"] and verdict["reasons"][0].endswith("is above 1e-12")
    assert verdict["kl"]["mean"] > 0 and verdict["kl"]["tokens"] > 100
    verify.verify(out)  # the manifest has the hash of the report with its verdict
    assert verdict["text"].startswith("falls short: KL ")
    assert "accept:\n  kl: 1.0e-12\n" in (out / "recipe.yaml").read_text()


def test_a_result_is_accepted(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    wanted = job(pico_dir("llama"), RTN, tmp_path / "out")
    accept = Acceptance(kl=50.0, task={"copying": -1.0}, text=str(TEXT))
    wanted = dataclasses.replace(wanted, recipe=dataclasses.replace(wanted.recipe, accept=accept))
    verdict = api.quantize(wanted)["acceptance"]
    broken = [reason for reason in verdict["reasons"] if not reason.startswith("looks broken")]
    assert broken == [] and verdict["task"]["copying"]["items"] > 0
    assert (tmp_path / "out" / "scores.json").is_file()


def test_what_cannot_be_judged_is_refused_first(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    wanted = job(pico_dir("llama"), RTN, tmp_path / "out")
    for accept, calib, error, says in (
        (Acceptance(kl=0.1, text="nowhere.txt"), None, CalibrationError, "nowhere.txt"),
        (Acceptance(kl=0.1), str(acceptance.paths.default_text()), RecipeError, "kl needs a text that"),
        (Acceptance(task={"copi": -0.1}), None, RecipeError, "copi"),
    ):
        changed = dataclasses.replace(wanted.recipe, accept=accept)
        with pytest.raises(error, match=says):
            api.quantize(dataclasses.replace(wanted, recipe=changed, calib=calib))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("word", ["kl", "kl=", "=0.1"])
def test_wrong_usage(word: str, pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    result = cli("quantize", str(pico_dir("llama")), "--accept", word, "--out", str(tmp_path / "out"))
    assert result.code == 2 and "--accept" in result.err


def test_names_of_bounds() -> None:
    loaded = recipe.load("int8", ["accept.kl=0.1", "accept.task.recall=-0.02"])
    assert loaded.accept == Acceptance(0.1, {"recall": -0.02})
