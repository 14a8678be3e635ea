"""Cells of a study: all combinations, once each, under names that say what decides their figures."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from compress.errors import RecipeError
from compress.study import folder, grid, losses
from compress.study.grid import Axes, Cell, Settings
from helpers.runs import TEXT


def labels(axes: Axes) -> list[str]:
    return [cell.label for cell in grid.cells(axes)]


def test_patterns_name_recipes_once() -> None:
    assert grid.match_recipes(["int*", "int4"]) == tuple(
        dict.fromkeys(n for n in grid.recipe.names() if n.startswith("int"))
    )
    assert grid.match_recipes([]) == tuple(grid.recipe.names())
    with pytest.raises(RecipeError, match="no built-in recipe matches zz"):
        grid.match_recipes(["zz*"])


def test_values_are_split_outside_of_brackets_and_quotes() -> None:
    assert grid.values("2, 3,[1,2],{a: 1, b: 2},'x,y'") == ("2", "3", "[1,2]", "{a: 1, b: 2}", "'x,y'")
    with pytest.raises(RecipeError, match="empty value"):
        grid.values("2,,3")
    with pytest.raises(RecipeError, match="expected KEY=V1,V2"):
        grid.axis("bits")


def test_axes_multiply_and_cheap_cells_come_first() -> None:
    found = grid.cells(Axes(("int4", "int8", "kv4"), bits=("2", "3"), calib=("a.txt", grid.SELF), samples=(8,)))
    names = [cell.name for cell in found]
    assert names[0] == grid.ORIGINAL and names.count("int4") == 4 and names.count("kv4") == names.count("int8") == 2
    assert [cell.cost for cell in found] == sorted(cell.cost for cell in found)
    assert {cell.calib for cell in found if cell.name == "int4"} == {"a.txt", None}
    assert {cell.calib for cell in found if not cell.needs_text} == {None}  # what needs no text is measured once
    assert all(cell.recipe.kv_cache.keys.config.bits in (2, 3) for cell in found if cell.name == "kv4")  # type: ignore[union-attr]


def test_equal_cells_are_one() -> None:
    once = grid.cells(Axes(("int4",), bits=("4",)))
    assert len(grid.cells(Axes(("int4", "int4"), bits=("4", "4")))) == len(once) == 2


def test_what_no_recipe_takes_is_an_error() -> None:
    with pytest.raises(RecipeError, match="group_sise"):
        grid.cells(Axes(("int4", "int8"), overrides=(("group_sise", ("32",)),)))
    with pytest.raises(RecipeError, match="17"):
        grid.cells(Axes(("int4", "kv4"), bits=("4", "17")))
    found = grid.cells(Axes(("int4", "kv4"), overrides=(("quantize.group_size", ("32", "64")),)))
    assert [cell.name for cell in found].count("int4") == 2 and [cell.name for cell in found].count("kv4") == 1


def test_keys_follow_what_decides_figures(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one")
    (cell,) = (cell for cell in grid.cells(Axes(("int4",), calib=(str(text),))) if cell.recipe is not None)
    known = cell.key({"model": "a"})
    assert known.startswith("int4-") and cell.key({"model": "a"}) == known != cell.key({"model": "b"})
    renamed = tmp_path / "other.txt"
    renamed.write_text("one")
    assert Cell(cell.recipe, (), str(renamed), True).key({"model": "a"}) == known  # the same text elsewhere
    text.write_text("two")
    assert cell.key({"model": "a"}) != known
    assert len({each.key({}) for each in grid.cells(Axes(("int4",), bits=("2", "3", "4")))}) == 4


def test_keys_of_cells_without_tasks_stay(tmp_path: Path) -> None:
    """The study that comes along was measured before there were tasks; its second text is not at hand, its hash is."""
    shipped = json.loads((Path(losses.__file__).parent / losses.SHIPPED / "books-8m.json").read_text())
    hashed = "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0"
    settings = Settings("any", (str(TEXT.with_name("books_heldout.txt")), hashed), max_tokens=16384)

    def key(**asked: object) -> str:
        return Cell(None).key(folder.identity(dataclasses.replace(settings, **asked), shipped["fingerprint"]))  # type: ignore[arg-type]

    assert key() == key(suite=None, tasks=()) == shipped["original"]["key"]
    questions = tmp_path / "q.jsonl"
    questions.write_text("one")
    tasks = ("arithmetic", f"choices={questions}")
    known = key(tasks=tasks)
    assert len({key(), known, key(suite="quick"), key(suite="full"), key(tasks=tasks[:1])}) == 5
    assert key(quantize_dtype=None) == key() != key(quantize_dtype="float32") != key(quantize_dtype="bfloat16")
    assert key(tasks=tasks[::-1]) == known
    questions.write_text("two")
    assert key(tasks=tasks) != known
