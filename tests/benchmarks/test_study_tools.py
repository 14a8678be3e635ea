"""Studies are put together cell by cell, and the files that LLM-KICK's tasks read are taken by these tasks."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest

from benchmarks import kick_data, merge_studies
from compress.evaluate.items import Item, answers_of, read_lines, text_of

SHIPPED = json.loads((resources.files("compress.study") / "shipped" / "books-8m.json").read_text())


def test_parts_of_a_study_make_the_whole() -> None:
    halves = [{**SHIPPED, "cells": SHIPPED["cells"][i::2], "failed": [], "pending": ["x"]} for i in (0, 1)]
    halves[1]["failed"] = [*SHIPPED["failed"], {**SHIPPED["cells"][0], "status": "failed"}]
    merged = merge_studies.merge(halves[0], halves[1])
    assert merged == SHIPPED
    assert merge_studies.merge(SHIPPED, SHIPPED) == SHIPPED


def test_cells_of_a_changed_recipe_take_the_place_of_the_former() -> None:
    former = SHIPPED["cells"][0]
    anew = {**SHIPPED, "cells": [{**former, "key": "anew"}], "failed": []}
    assert len(merge_studies.merge(SHIPPED, anew)["cells"]) == len(SHIPPED["cells"]) + 1
    keys = {cell["key"] for cell in merge_studies.merge(SHIPPED, anew, replace=True)["cells"]}
    assert keys == {cell["key"] for cell in SHIPPED["cells"]} - {former["key"]} | {"anew"}


def test_failures_take_places_and_lose_them() -> None:
    former, failed = SHIPPED["cells"][0], {**SHIPPED["cells"][0], "key": "anew", "status": "failed"}
    fails = {**SHIPPED, "cells": [], "failed": [failed]}
    merged = merge_studies.merge(SHIPPED, fails, replace=True)
    assert former not in merged["cells"] and merged["failed"] == sorted(
        [*SHIPPED["failed"], failed], key=lambda cell: (cell["label"], cell["key"])
    )
    mended = merge_studies.merge(fails, {**SHIPPED, "cells": [former], "failed": []}, replace=True)
    assert [cell["key"] for cell in mended["cells"]] == [former["key"]] and mended["failed"] == []


def test_another_study_is_refused() -> None:
    other = {**SHIPPED, "settings": {**SHIPPED["settings"], "window": 7}}
    with pytest.raises(ValueError, match="the studies have another settings; measure the second"):
        merge_studies.merge(SHIPPED, other)


def test_files_of_facts(tmp_path: Path) -> None:
    kick_data.main(tmp_path)
    written = {path.stem: path.read_bytes() for path in tmp_path.iterdir()}
    kick_data.main(tmp_path)
    assert written == {path.stem: path.read_bytes() for path in tmp_path.iterdir()}
    for name in ("facts", "qa"):
        items = read_lines(
            str(tmp_path / f"{name}.jsonl"),
            0,
            lambda row, number: Item(number, text_of(row, "question"), facts={"answers": answers_of(row)}),
            "",
        )
        assert len(items) == len(written[name].splitlines())
    for line in map(json.loads, written["qa"].decode().splitlines()):
        assert line["answers"][0] in line["evidence"]
    for name in ("choices", "known", "cloze"):
        for line in map(json.loads, written[name].decode().splitlines()):
            assert len(set(line["choices"])) == 4 and 0 <= line["answer"] < 4
            if name == "cloze":
                assert not any(choice in line["question"] for choice in line["choices"])
