"""The text that compress comes with: what it holds, that it is mixed, that it is installed, and when it is taken."""

from __future__ import annotations

import json
import re
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from compress.calib.documents import documents
from compress.cli.run_options import RunOptions
from compress.storage import paths

ROOT = Path(__file__).parents[2]
EVALUATED = ("books_heldout.txt",)  # in tests/data: never calibrated on


@pytest.fixture(scope="module")
def pieces() -> list[dict[str, str]]:
    return [json.loads(line) for line in paths.default_text().read_text(encoding="utf-8").splitlines()]


def test_each_piece_says_what_it_is_and_where_it_is_from(pieces: list[dict[str, str]]) -> None:
    assert all(sorted(piece) == ["from", "kind", "text"] and piece["text"].strip() for piece in pieces)
    stated = (paths.default_text().parent / "README.md").read_text(encoding="utf-8")
    assert all(f"| {kind} |" in stated for kind in {piece["kind"] for piece in pieces})
    assert f"{len(pieces)} pieces" in stated
    books = {piece["from"].split(", ")[1] for piece in pieces if piece["kind"] == "prose"}
    assert all(book in stated for book in books)


def test_pieces_are_read_as_documents(pieces: list[dict[str, str]]) -> None:
    assert list(documents(paths.default_text())) == [piece["text"] for piece in pieces]


def test_every_stretch_of_the_text_is_mixed(pieces: list[dict[str, str]]) -> None:
    """A quarter of the pieces has a share of each large kind that is near that of the whole."""
    whole = Counter(piece["kind"] for piece in pieces)
    quarter = len(pieces) // 4
    for begin in range(0, 4 * quarter, quarter):
        part = Counter(piece["kind"] for piece in pieces[begin : begin + quarter])
        assert all(0.6 < 4 * part[kind] / count < 1.5 for kind, count in whole.items() if count > 20)


def test_no_text_is_one_that_is_evaluated_on(pieces: list[dict[str, str]]) -> None:
    for name in EVALUATED:
        text = (ROOT / "tests" / "data" / name).read_text(encoding="utf-8")
        lines = {line for piece in pieces for line in piece["text"].splitlines() if len(line) > 80}
        assert len(lines) > 100 and not [line for line in lines if line in text]


def test_the_text_is_installed() -> None:
    (line,) = re.findall(r'^"compress.calib" = (\[.*\])$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    inside = paths.default_text().relative_to(paths.default_text().parents[1])
    assert any(fnmatchcase(str(inside), pattern) for pattern in json.loads(line))


@pytest.mark.parametrize("given", [None, "self", "mine.txt"])
def test_what_is_calibrated_on(given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text("a text")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").touch()
    job = RunOptions(str(tmp_path / "model"), "int4", calib=given, device="cpu").job()
    assert job.calib == {None: str(paths.default_text()), "self": None}.get(given, given)
