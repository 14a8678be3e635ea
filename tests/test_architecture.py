"""The structure of the sources keeps what it has reached; tests/helpers/structure.py measures it."""

from __future__ import annotations

import pytest

from helpers import structure

MAX_FAN_OUT = 15  # modules of ours that one module imports
MAX_PAIRS = 27  # modules with one importer that would fit into its file
MAX_CORE_LINES = 106_000
MAX_KEYS = 520  # settings of plugins and parameters of formats


def test_no_modules_import_each_other() -> None:
    assert structure.cycles() == []


def test_a_module_imports_few_others() -> None:
    assert {name: count for name, count in structure.fan_out().items() if count > MAX_FAN_OUT} == {}


def test_what_one_file_would_hold_is_one_file() -> None:
    assert len(structure.pairs()) <= MAX_PAIRS, structure.pairs()


def test_the_core_stays_a_core() -> None:
    core = [name for name in structure.modules() if not structure.is_paper(name)]
    assert structure.total(core) <= MAX_CORE_LINES


def test_the_core_does_not_know_the_papers() -> None:
    core = [name for name in structure.modules() if not structure.is_paper(name)]
    knowing = {name: papers for name in core if (papers := set(filter(structure.is_paper, structure.imports(name))))}
    assert knowing == {}


def test_methods_get_no_more_keys() -> None:
    assert len(structure.keys()) <= MAX_KEYS


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("b", "a")])
def test_check_of_cycles(monkeypatch: pytest.MonkeyPatch, first: str, second: str) -> None:
    graph = {"a": {"b"}, "b": {"a"}, "c": {first, second}}
    monkeypatch.setattr(structure, "modules", lambda: graph)
    monkeypatch.setattr(structure, "imports", lambda name: graph[name])
    assert structure.cycles() == [["a", "b"]]
