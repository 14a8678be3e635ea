"""Messages are one line of printable characters, whatever the values in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from compress.cli.options import errors as command_errors
from compress.errors import MESSAGE, REASON, SHOWN, CompressError, RecipeError, first_line, shown


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a", "'a'"),
        ("it's", '"it\'s"'),
        (4, "4"),
        (1e30, "1e+30"),
        (float("nan"), "nan"),
        (None, "None"),
        (["a", 1], "['a', 1]"),
        ({"a": [1]}, "{'a': [1]}"),
        ("\ud800\x1b[31m\n", "'\\ud800\\x1b[31m\\n'"),
    ],
)
def test_a_value_is_shown_as_python_writes_it(value: object, expected: str) -> None:
    assert shown(value) == expected


def test_integers_too_long_for_python() -> None:
    assert shown(10**6000) == "an integer of some 6001 digits"
    assert shown([-(10**6000)]) == "[an integer of some 6001 digits]"


def test_what_is_shown_is_short_and_printable() -> None:
    deep: list[object] = []
    for _ in range(10_000):
        deep = [deep]
    for value in ("x" * 10**6, list(range(10**6)), dict.fromkeys(range(10**5)), deep, "\x00\x07\u202e" * 1000, 10**99):
        assert len(shown(value)) <= SHOWN and shown(value).isprintable(), value
    assert shown("begin" + "x" * 1000 + "end").startswith("'beginx") and shown("x" * 1000 + "end").endswith("xend'")


def test_a_message_is_one_line() -> None:
    error = RecipeError("/tmp/a\nb\x1b[31m/\udcff is no file; give another")
    assert str(error) == "/tmp/a b\\x1b[31m/\\udcff is no file; give another"
    long = str(CompressError("where: " + "x" * 10**6 + "; do this"))
    assert len(long) <= MESSAGE and long.startswith("where: x") and long.endswith("; do this")


def test_other_libraries_messages_are_cut() -> None:
    assert first_line(ValueError("first\nsecond")) == "first"
    assert first_line(ValueError()) == "ValueError"
    assert len(first_line(ValueError("x" * 10**6))) <= REASON


@pytest.mark.parametrize("path", ["/nowhere/at/all", "/"])
def test_an_error_of_the_system_with_a_path_is_one_line(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught, command_errors():
        Path(path).read_bytes()
    line = capsys.readouterr().err
    assert caught.value.exit_code == 1 and line.startswith(f"compress: {path}: ") and line.count("\n") == 1


def test_a_defect_shows_its_traceback() -> None:
    for error in (ValueError("x"), OSError("without a number"), KeyError("x")):
        with pytest.raises(type(error)), command_errors():
            raise error
