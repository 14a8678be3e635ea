"""One type declares the options of a run, and every command that makes or measures one offers them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from compress.cli import run_options
from compress.cli.app import app
from compress.cli.run_options import GOAL, OUTPUT, RunOptions


@dataclasses.dataclass(frozen=True)
class Wider(RunOptions):
    """With an option more."""

    rank: Annotated[int, typer.Option(min=1, help="Of something new.")] = 4


FIELDS = [field.name for field in dataclasses.fields(RunOptions)]
WITHOUT = {
    "quantize": (),
    "plan": ("overwrite", "restart", "base_model", "work", "accept"),
    "transform": (*GOAL, "measurements", "processes", "budget", "allow_partial", "export", "imatrix"),
    "allocate": (*OUTPUT, "accept", "imatrix"),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_a_command_offers_the_shared_options(name: str) -> None:
    command = get_command(app).commands[name]  # type: ignore[attr-defined]  # a group
    offered = [parameter.name for parameter in command.params if parameter.name in FIELDS and not parameter.hidden]
    assert offered == [field for field in FIELDS if field not in WITHOUT[name]]
    recipe = next(parameter for parameter in command.params if parameter.name == "recipe")
    assert recipe.required == (name == "transform")


def test_a_new_field_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command gets one object with what was said and the defaults of all else, those it does not offer included."""

    got: list[tuple[Wider, bool]] = []
    monkeypatch.setattr(run_options, "RunOptions", Wider)
    app = typer.Typer()

    @app.command("try")
    @run_options.takes_run_options(without=OUTPUT, recipe="other")
    def attempt(given: Wider, own: bool = False) -> None:
        """Try."""
        got.append((given, own))

    words = ["model", "--rank", "7", "--set", "a=1", "--set", "b=2", "--own"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert got == [(Wider(model="model", recipe="other", overrides=["a=1", "b=2"], rank=7), True)]
    assert CliRunner().invoke(app, ["model", "--out", "x"]).exit_code == 2
    assert CliRunner().invoke(app, ["model", "--rank", "0"]).exit_code == 2


def test_what_is_not_there_stops_before_the_recipe_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for words, said in {
        ("plan", "./nowhere", "--recipe", "none"): "./nowhere is neither a directory nor a hub id",
        ("plan", str(tmp_path), "--recipe", "none", "--calib", "no.txt"): "no.txt is neither a file nor a data set",
        ("eval", str(tmp_path), "--text", "no.jsonl"): "no.jsonl is neither a file nor a data set",
    }.items():
        result = CliRunner().invoke(app, list(words))
        assert result.exit_code == 1 and said in result.stderr
