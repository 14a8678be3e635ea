"""The page of a study: every recipe has its mark, its row and a label that hides nothing; hostile names stay text."""

from __future__ import annotations

import csv
import io
import json
import math
import random
from typing import Any
from xml.etree import ElementTree

import pytest

from compress.evaluate.items import Outcome, Task
from compress.pages import html, scatter, study, svg
from compress.study import summary, tasks

HOSTILE = '<script>alert("x")</script>'
SPACE = "{http://www.w3.org/2000/svg}"


def cell(name: str, nbytes: int, kl: float, **more: Any) -> dict[str, Any]:
    row = {"text": "a.txt", "kl_mean": kl, "kl_se": kl / 10, "same_top1": 0.9, "perplexity": 9.0, "tokens": 100}
    cost = dict.fromkeys(("seconds", "quantize_seconds", "measured_peak", "predicted_peak", "scoring_seconds"), 2)
    return {
        **{"key": name, "name": name, "label": name, "overrides": [], "purpose": "weights", "is_cache_only": False},
        **{"bpw": 2.0, "whole_bpw": 3.0, "nbytes": nbytes, "cache": None, "texts": [row], "calibration": None},
        **{"suites": {}, "cost": {**cost, "resumed_blocks": 0}, "speed": None, "notes": [], "versions": {"torch": "2"}},
        **more,
    }


def made(cells: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    settings = {"texts": ["a.txt"], "window": 8, "max_tokens": 100, "dtype": "float32", "device": "cpu", "seed": 0}
    return {
        **{"version": 1, "model": "m", "settings": settings, "original": None, "cells": cells, "failed": []},
        **{"pending": [], "frontier": summary.frontiers(cells)},
        **more,
    }


def test_the_frontier_is_what_no_other_beats() -> None:
    rng = random.Random(0)
    cells = [cell(f"c{i}", rng.randrange(1, 40), rng.randrange(1, 30) / 100) for i in range(60)]
    kept = set(summary.frontiers(cells)["weights"]["a.txt"])

    def beaten(one: dict[str, Any]) -> bool:
        size, loss = one["nbytes"], one["texts"][0]["kl_mean"]
        others = [(x["nbytes"], x["texts"][0]["kl_mean"]) for x in cells if x is not one]
        return any(s <= size and k <= loss and (s, k) != (size, loss) for s, k in others)

    best = [(x["nbytes"], x["texts"][0]["kl_mean"]) for x in cells if not beaten(x)]
    assert sorted(set(best)) == sorted((x["nbytes"], x["texts"][0]["kl_mean"]) for x in cells if x["key"] in kept)
    assert len(kept) == len(set(best)) > 3


def boxes(drawing: str) -> list[tuple[float, float, float, float]]:
    """What the labels of a drawing cover."""
    words = [x for x in ElementTree.fromstring(drawing).iter(f"{SPACE}text") if "label" in x.get("class", "")]
    found = []
    for word in words:
        left, bottom = float(word.get("x", "")), float(word.get("y", ""))
        found.append((left, bottom - 9, left + 6.0 * len(word.text or ""), bottom + 2))
    return found


def test_labels_of_a_crowd_hide_neither_points_nor_each_other() -> None:
    rng = random.Random(1)
    marks = [
        scatter.Mark(2 + rng.random() * 3, 10 ** rng.uniform(-3, -1), f"recipe-{i}", "weights", i % 9 == 0)
        for i in range(45)
    ]
    drawing = scatter.scatter("Frontier", marks, (svg.Axis("bytes", True), svg.Axis("KL", True)))
    found = boxes(drawing)
    assert len(found) >= 43
    for i, one in enumerate(found):
        assert one[0] > 0 and one[2] < svg.WIDTH
        for other in found[i + 1 :]:
            assert one[2] < other[0] or one[0] > other[2] or one[3] < other[1] or one[1] > other[3]
    points = [
        (float(x.get("cx", "")), float(x.get("cy", ""))) for x in ElementTree.fromstring(drawing).iter(f"{SPACE}circle")
    ]
    assert not [(p, b) for p in points for b in found if b[0] < p[0] < b[2] and b[1] < p[1] < b[3]]


def test_a_logarithmic_axis_leaves_out_what_it_cannot_show() -> None:
    marks = [scatter.Mark(1, 0.0, "zero", "a", False), scatter.Mark(2, math.nan, "nan", "a", False)]
    marks += [scatter.Mark(3, 0.1, HOSTILE, "a", True)]
    drawing = scatter.scatter("x", marks, (svg.Axis("b"), svg.Axis("KL", True)))
    assert drawing.count("<circle") == 1 and "<script" not in drawing


def test_the_page_shows_every_cell_and_why_others_are_missing() -> None:
    cells = [
        cell("small", 10, 0.2),
        cell("large", 20, 0.1),
        cell(
            "kv", 30, 0.01, is_cache_only=True, cache={"context": 9, "bytes_per_token": 5, "exact_bytes_per_token": 9}
        ),
    ]
    failed = [{"label": HOSTILE, "reason": "does not fit"}]
    page = study.page(made(cells, failed=failed, pending=["later"]))
    assert "<script>alert" not in page and "does not fit" in page and "Still to be measured: later." in page
    for words in ("Loss by size", "Caches", "Time and memory", "How it was measured"):
        assert words in page
    assert "<h2>Calibration</h2>" not in page and "<h2>Tasks</h2>" not in page
    assert "How it was measured" in study.page(made([]))


def answered(right: dict[str, int], original: dict[str, int] | None = None) -> dict[str, Any]:
    """Suites of a cell: of 10 items of each task so many right."""

    def outcomes(count: int) -> list[Outcome]:
        return [Outcome(str(i), i < count, str(i < count), nll=1.0 + i) for i in range(10)]

    rows = [(name, outcomes(count), original and outcomes(original[name])) for name, count in right.items()]
    return {"quick": [tasks.row(Task(name, "greedy", []), own, base or None) for name, own, base in rows]}


def test_tasks_are_shown_by_size_and_beside_the_original() -> None:
    all_right = {"copy": 9, "sum": 5}
    cells = [
        cell("small", 10, 0.2, suites=answered({"copy": 2, "sum": 3}, all_right)),
        cell("worse", 15, 0.15, suites=answered({"copy": 1, "sum": 2}, all_right)),
        cell("large", 20, 0.1, suites=answered({"copy": 9, "sum": 4}, all_right)),
        cell("kv", 40, 0.01, is_cache_only=True),
    ]
    original = cell("original", 40, 0.0, suites=answered(all_right), purpose="Original")
    original["texts"][0].pop("kl_mean")
    found = made(cells, original=original)
    page = study.page(found)
    assert "Beaten by no other: small, large, original" in page and page.count("Right answers by size") >= 3
    row = cells[0]["suites"]["quick"][0]
    assert (row["score"], row["base"], row["n"], row["paired"]["lost"]) == (0.2, 0.9, 10, 7)
    assert row["se"] == pytest.approx(math.sqrt(0.2 * 0.8 / 9)) and row["paired"]["p_value"] == 2 / 2**7
    assert "-70.0% (" in page and "20.0%*" in page and "90.0%*" not in page
    small, _, _, kv = csv.DictReader(io.StringIO(summary.table({**found, "original": None})))
    assert (small["copy_score"], small["copy_n"], small["copy_p_value"]) == ("0.2", "10", "0.015625")
    assert kv["copy_score"] == "" and "copy_score" not in summary.table(made([cell("int8", 1, 0.1)]))


def test_numbers_that_json_does_not_have_are_null() -> None:
    said = html.json_for_script(
        {"a": [math.inf, -math.inf, 1.5], "b": (math.nan, HOSTILE), "c": {"d": None, "e": True}}
    )
    assert "<" not in said
    assert json.loads(said, parse_constant=pytest.fail) == {
        **{"a": [None, None, 1.5], "b": [None, HOSTILE], "c": {"d": None, "e": True}}
    }


@pytest.mark.parametrize("count", [1, 3])
def test_calibrations_are_compared_where_there_are_several(count: int) -> None:
    cells = [
        cell(
            "int3",
            10,
            0.1 * (at + 1),
            overrides=["calibration.num_samples=8"],
            calibration={"source": f"s{at}.txt", "num_samples": 8, "seq_len": 16, "self_generated": at == 2},
        )
        for at in range(count)
    ]
    found = study.calibrations(cells, ["a.txt"])
    assert (found == "") == (count == 1)
    if count > 1:
        assert "least loss is 0.1 (s0.txt, 8×16), the largest 0.3 (its own text, 8×16), 3.00 times" in found
