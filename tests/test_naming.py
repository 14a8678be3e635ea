"""Names say what they hold. Offenders of before the rule are listed in names.yaml, and the list only shrinks."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from helpers import names

LISTED = yaml.safe_load(names.LISTED.read_text(encoding="utf-8"))
MOST_PARTICIPLES = 0.101  # of all functions; 5% is the aim


@pytest.mark.parametrize("kind", sorted(LISTED))
def test_no_new_offender(kind: str) -> None:
    new = set(names.offenders()[kind]) - set(LISTED[kind])
    assert not new, "a better name, please: see Names in CONTRIBUTING.md"


@pytest.mark.parametrize("kind", sorted(LISTED))
def test_who_has_a_better_name_leaves_the_list(kind: str) -> None:
    mended = set(LISTED[kind]) - set(names.offenders()[kind])
    assert not mended, "take these out of tests/names.yaml: PYTHONPATH=tests python -m helpers.names --write"


def test_few_functions_are_one_participle() -> None:
    assert names.share_of_participles() <= MOST_PARTICIPLES


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "source.py"
    path.write_text(text, encoding="utf-8")
    return path


def test_check_of_constants(tmp_path: Path) -> None:
    source = (
        "LEAST = 8  # of them\nMIN_ROWS = 8  # rows\nfound = 3  # of it\nA, _B = 1, 2  # in each\nC: int = 1  # of x\n"
    )
    assert sorted(names.completed_constants(write(tmp_path, source))) == ["A", "C", "LEAST", "_B"]


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("_given", True), ("led", True), ("held", True), ("_matched", True), ("is_held", False), ("seed", False)],
)
def test_check_of_participles(name: str, is_one: bool) -> None:
    assert names.is_participle(name) is is_one


def test_check_of_locals(tmp_path: Path) -> None:
    source = "def f():\n    found = 1\ndef g(found):\n    return found\n"
    assert list(names.found_locals(write(tmp_path, source))) == ["f"]
