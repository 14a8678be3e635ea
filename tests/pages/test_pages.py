"""Pages: charts that are well formed, text that stays text, colors that can be read, layers that are named."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest

from compress.pages import checkpoint, html, measurements, svg
from compress.pages.scatter import Mark, scatter
from compress.run.report import OPTIONAL, PAGE_KEYS
from compress.storage import json_text

HOSTILE = '<script>alert("x")</script> & co'
VOID = {"meta", "br", "link"}


class Balanced(HTMLParser):
    """Counts what is opened, and stops at what is closed out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.references += [value or "" for key, value in attrs if key in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(page: str) -> Balanced:
    found = Balanced()
    found.feed(page)
    assert not found.open
    return found


def elements(drawing: str, name: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(drawing).findall(f".//{{http://www.w3.org/2000/svg}}{name}")


def test_bars_are_as_long_as_their_values() -> None:
    drawing = svg.bars("Sizes", {"a": 1.0, HOSTILE: 4.0, "zero": 0.0}, svg.Axis("MiB"))
    lengths = [float(rect.get("width", "")) for rect in elements(drawing, "rect")]
    assert lengths[1] / lengths[0] == pytest.approx(4.0, rel=0.01) and lengths[2] == 0.5
    assert HOSTILE in {x.text for x in elements(drawing, "text")} and "alert(" in drawing and "<script" not in drawing


@pytest.mark.parametrize("is_log", [False, True])
def test_points_keep_order_and_distance(is_log: bool) -> None:
    values = [0.001, 0.01, 0.1]
    marks = [Mark(x, y, f"p{x}", "one", False) for x, y in zip((1.0, 2.0, 4.0), values, strict=True)]
    drawing = scatter("Frontier", marks, (svg.Axis("bytes"), svg.Axis("KL", is_log)))
    circles = elements(drawing, "circle")
    across, up = ([float(each.get(key, "")) for each in circles] for key in ("cx", "cy"))
    assert (across[2] - across[1]) / (across[1] - across[0]) == pytest.approx(2, rel=0.01)
    share = (up[1] - up[0]) / (up[2] - up[0])
    assert share == pytest.approx(0.5 if is_log else 0.009 / 0.099, abs=0.01)
    assert "p0.01" not in drawing and {"p1.0", "p2.0", "p4.0"} <= {x.text for x in elements(drawing, "text")}


def test_ticks_are_round_and_on_the_axis() -> None:
    for low, high in ((0.0, 1.0), (3.2, 3.9), (-5.0, 70000.0), (1e-7, 3e-7)):
        ticks = svg._round_steps(low, high)
        steps = {round((b - a) / (ticks[1] - ticks[0]), 6) for a, b in zip(ticks, ticks[1:], strict=False)}
        assert 3 <= len(ticks) <= 8 and low <= ticks[0] and ticks[-1] <= high * (1 + 1e-9) and steps == {1.0}


def test_numbers_for_people() -> None:
    shown = {0: "0", 0.0123456: "0.0123", 12345.6: "12,346", 1.2345e-6: "1.23e-6", 3.2e7: "3.20e7", math.inf: "inf"}
    assert {value: svg.number(value) for value in shown} == shown


def test_small_ticks_are_short() -> None:
    marks = [Mark(float(i), 10.0**-i, f"p{i}", "one", False) for i in range(1, 8)]
    drawing = scatter("Losses", marks, (svg.Axis("bytes"), svg.Axis("KL", True)))
    assert {"1e-6", "1e-4"} <= {x.text for x in elements(drawing, "text")}
    assert svg._tick(2.5e-6) == "2.5e-6" and svg._tick(1e10) == "1e10" and svg._tick(0.1) == "0.1"


def test_heat_map_has_a_tip_for_each_cell() -> None:
    cells = {(0, 0): 0.001, (0, 1): 1.0, (1, 1): math.inf}
    drawing = svg.heat_map("Errors", ["block 0", "block 1"], ["q", "k"], cells)
    heat = [x for x in elements(drawing, "rect") if x.get("class") == "heat"]
    dark = [float(re.findall(r"[\d.]+", x.get("style", ""))[0]) for x in heat]
    tips = ["".join(x.itertext()) for x in heat]
    assert tips == ["block 0, q: 0.001", "block 0, k: 1", "block 1, k: inf"] and dark == [0.06, 1.0, 1.0]


def test_drawings_are_named() -> None:
    root = ElementTree.fromstring(svg.bars("Sizes", {"a": 1.0}, svg.Axis("MiB")))
    assert root.get("role") == "img" and root.get("aria-label", "").startswith("Sizes. ")


def test_scores_through_a_cache_are_not_taken_for_those_of_the_weights() -> None:
    """Without other scores the head names cache and base; what looks broken stands there with or without scores."""
    row = {"kl_mean": 0.25, "kl_se": None, "perplexity": 20.0, "base_perplexity": 19.0, "same_top1": 0.9}
    plain = {"base": "base", "cache": "", "texts": [{**row, "kl_mean": 0.5}], "findings": []}
    cached = {"base": "packed", "cache": "kv2", "texts": [row], "findings": []}
    task = {**plain, "texts": [], "findings": ["that"]}
    report = {"nbytes": {"total": 10}, "bpw": 2.0, "source_nbytes": 20}

    def head(*suites: Any, **more: Any) -> str:
        return checkpoint._headline(report, {"suites": list(suites), **more})

    assert "KL to packed, nats a token, through the cache kv2" in head(cached) and "19.00 of packed" in head(cached)
    for found in (head(cached, plain), head(cached, texts=[{**row, "kl_mean": 0.5}])):
        assert "KL to the original, nats a token<" in found and ">0.5<" in found and "kv2" not in found
    assert "Not scored yet" in head(task) and "Looks broken:</strong> that" in head(task)
    assert "kv2" in head(cached, task) and "Not scored yet" not in head(cached, task)


def test_a_checkpoint_among_the_recipes_of_a_study() -> None:
    """On the text that it was scored on; elsewhere the page says so. Only what is beaten by none is joined."""
    points = [("small", 1, 0.5), ("beaten", 3, 0.6), ("large", 4, 0.1)]
    recipes = [
        {"label": label, "nbytes": n << 20, "kl_mean": kl, "kl_se": None, "tokens": 9} for label, n, kl in points
    ]
    study = {"model": HOSTILE, "text": "a.txt", "window": 512, "recipes": recipes}
    own = {"text": "a.txt", "kl_mean": 0.2, "kl_se": 0.01, "seq_len": 256, "tokens": 4080}
    page = measurements.among_recipes([study], 2 << 20, [{**own, "text": "b.txt"}, own])
    parsed(page)
    assert "Beaten by no other: small, this checkpoint, large" in page and "in windows of 256, 4,080 tokens" in page
    page = measurements.among_recipes([study], 2 << 20, [{**own, "cache": "kv2", "base": "packed"}])
    assert "4,080 tokens, through the cache kv2, beside packed." in page
    page = measurements.among_recipes([study], 2 << 20, [{**own, "text": "b.txt"}])
    assert "Beaten by no other: small, large" in page and "this checkpoint was not scored on a.txt" in page
    assert (
        measurements.among_recipes([{**study, "recipes": []}], 1, [own])
        == measurements.among_recipes([], 1, [own])
        == ""
    )


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def mixed(below: str, above: str, opacity: float) -> str:
    pairs = ((int(below[i : i + 2], 16), int(above[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a * (1 - opacity) + b * opacity):02x}" for a, b in pairs)


def contrast(one: str, other: str) -> float:
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("part", [0, 1, 2], ids=["light", "dark", "print"])
def test_contrast(part: int) -> None:
    """WCAG 2.2 AA: 4.5 for text; 3 for marks of charts, which the same colors pass anyway."""
    themes = [dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in html.STYLE.split(":root")[1:]]
    theme = themes[part]
    on_paper = ["ink", "faint", "accent", "good", "bad", "heat", *(f"series-{i}" for i in range(svg.SERIES))]
    assert all(contrast(theme[name], theme["paper"]) >= 4.5 for name in on_paper)
    assert all(contrast(theme[name], theme["panel"]) >= 4.5 for name in ("ink", "faint"))
    kinds = (("low", 0.06, svg.LOW), ("mid", svg.LOW, svg.HIGH), ("high", svg.HIGH, 1.0))
    for kind, least, most in kinds:  # of figures in heat maps, over all shares of the heat
        shares = [least + (most - least) * step / 20 for step in range(21)]
        assert all(contrast(theme[f"on-{kind}"], mixed(theme["panel"], theme["heat"], x)) >= 4.5 for x in shares)


def test_tables_escape_and_sort_by_numbers() -> None:
    page = html.page("T", "", [html.section("S", html.table("C", ("what", "n"), [[HOSTILE, 1234567], ["b", 0.5]]))])
    found = parsed(page)
    assert found.seen.count("td") == 4 and found.seen.count("script") == 1
    assert 'data-value="1234567">1,234,567<' in page and 'data-value="0.5">0.5<' in page


def test_shares_stand_and_sort_like_numbers() -> None:
    table = html.table("C", ("name", "share", "both"), [["9", "-12.5%", "3%"], ["a", "1,200%", "3% of 4"]])
    assert '<td data-value="-12.5">-12.5%</td>' in table and '<td data-value="1200">1,200%</td>' in table
    assert table.count('<th scope="col" class="words">') == 2 and '<td class="words">3% of 4</td>' in table


def test_rules_for_paper_come_last() -> None:
    """Else those for screens, which are as specific, win over them, and paper cuts off what screens scroll."""
    last = html.STYLE.rindex("@media print")
    assert all(html.STYLE.rindex(f"{name} {{") > last for name in (".frame", "svg", "table", "td.words:first-child"))


def test_data_in_a_page_is_read_back() -> None:
    data = {"text": "</script><b>", "value": 0.1}
    page = html.page("T", "", [], data)
    inner = page.split('id="data">')[1].split("</script>")[0]
    assert json.loads(inner) == data and parsed(page).seen.count("b") == 0


def layer(name: str, error: float) -> dict[str, Any]:
    return {
        **{"name": name, "shape": [8, 8], "method": "gptq", "format": "int", "params": {}, "bpw": 4.5, "nbytes": 36},
        **{"weight_error": error, "output_error": error, "tokens": 10, "seconds": 0.1, "notes": []},
    }


@pytest.fixture
def report() -> dict[str, Any]:
    layers = [
        layer(f"model.layers.{block}.{path}", 0.01 + 0.001 * block) for block in range(6) for path in ("q_proj", "o")
    ]
    group = {"pattern": "model.layers.*.q_proj", "count": 6, "shape": [8, 8], "method": "gptq", "format": "int"}
    return {
        **{"model": HOSTILE, "base": None, "recipe": "int4", "bpw": 4.5, "layers": layers, "kv_cache": None},
        "whole": {"bpw": 5.25, "share": 0.9, "parameters": 1000},
        "nbytes": {"quantized linears": 400, "norms and the rest": 24, "total": 424},
        "source_nbytes": 2000,
        "calibration": {"source": "t.txt", "num_samples": 4, "seq_len": 16, "tokens_available": 99, "notes": []},
        "seconds": {"total": 3.0, "quantize": 2.0, "predicted_quantize": 2.5},
        "memory": {"limit": None, "predicted_peak": 2 << 20, "measured_peak": 1 << 20},
        "plan": [{**group, "bpw": 4.5, "nbytes": 216}],
        **{
            "fallbacks": {"x": ["singular", "said"]},
            "notes": {"y": ["said"]},
            "kept": {"lm_head": "tied"},
            "self_check": "passed",
        },
        **{"device": "cpu", "versions": {"compress": "0.1.0"}},
    }


def test_page_of_a_checkpoint(report: dict[str, Any]) -> None:
    score = {
        **{"text": "a.txt", "tokens": 10, "windows": 2, "seq_len": 6, "kl_mean": 0.0123, "kl_se": 0.001, "kl_p95": 1.0},
        **{"kl_p99": 2.0, "kl_max": 3.0, "perplexity": 20.5, "base_perplexity": 20.0, "same_top1": 0.905},
    }
    written = {"prompt": "Once", "base": " upon", "model": HOSTILE}
    page = checkpoint.page(report, "method: gptq\n", {"texts": [score], "generations": [written]})
    found = parsed(page)
    assert found.seen.count("script") == 2 and not found.references  # its own two, and nothing from elsewhere
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import", page)
    for shown in ("5.25", "4.50", "4.7×", "0.0123", "20.50 (20.00", "90.5%", "lm_head", "tied", "t.txt"):
        assert shown.split(" (")[0] in page
    assert ">singular; said<" in page and "Not scored yet" not in page and page.count("<svg") >= 3
    unscored = checkpoint.page(report, "", None)
    assert "Not scored yet" in unscored and "What both write" not in unscored


def test_planted_defect_is_named(report: dict[str, Any]) -> None:
    assert checkpoint.suspects(report["layers"]) == []
    damaged = copy.deepcopy(report)
    damaged["layers"][6]["output_error"] = 0.5
    assert [name for name, _ in checkpoint.suspects(damaged["layers"])] == ["model.layers.3.q_proj"]
    assert "model.layers.3.q_proj (" in checkpoint.page(damaged, "")


def test_experts_share_a_column_and_a_page_has_its_limit(report: dict[str, Any]) -> None:
    """Of 6 blocks with 500 experts: cells are means, a bad one is named, the page stays small."""
    experts = [
        layer(f"model.layers.{block}.mlp.experts.{e}.up_proj", 0.02 if e % 2 else 0.04)
        for block in range(6)
        for e in range(500)
    ]
    experts[700]["output_error"], experts[701]["output_error"] = 0.9, None
    mixed = {**report, "layers": report["layers"] + experts}
    page = checkpoint.page(mixed, "")
    drawn = elements(re.findall(r"<svg.*?</svg>", page)[0], "rect")
    assert len([rect for rect in drawn if rect.get("class") == "heat"]) == 6 * 3
    assert "block 0, up_proj: 0.03" in page and "mean over them" in page
    assert [name for name, _ in checkpoint.suspects(mixed["layers"])] == ["model.layers.1.mlp.experts.200.up_proj"]
    assert f"{checkpoint.MOST:,} of 3,012 layers" in page and len(page) < 1.5e6
    assert "mean over them" not in checkpoint.page(report, "")


def test_many_of_one_reason_are_said_once(report: dict[str, Any]) -> None:
    """Forty layers that fell back for one reason, and six others."""
    fell = {f"l{i}": ["few tokens"] for i in range(40)} | {f"m{i}": [f"odd {i}"] for i in range(6)}
    page = checkpoint.page({**report, "fallbacks": fell}, "")
    assert "Fell back to another method: few tokens (40); odd 0 (1); odd 1 (1); odd 2 (1); odd 3 (1); 2 more" in page
    assert "<summary>All 46</summary>" in page and "Not quantized: " not in page
    parsed(page)


def places(value: Any, front: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to each value in JSON, of lists to the first."""
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))[:1]
    for key, inner in items:
        yield (*front, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*front, key))


def test_every_report_is_shown_or_refused(report: dict[str, Any]) -> None:
    """What stands anywhere in a report, its layout refuses it or the page can show it."""
    layout = PAGE_KEYS | OPTIONAL
    assert json_text.mismatch(report, layout) is None
    refused = 0
    for place in places(report):
        for wrong in (None, math.nan, math.inf, -1, 10**39, "x", "", [], {}, [1], {"a": 1}, ...):
            hostile = copy.deepcopy(report)
            inner = hostile
            for key in place[:-1]:
                inner = inner[key]
            if wrong is ...:
                del inner[place[-1]]
            else:
                inner[place[-1]] = wrong
            if json_text.mismatch(hostile, layout) is None:
                checkpoint.page(hostile, "")
            else:
                refused += 1
    assert refused > 300


def test_page_from_headers_alone(report: dict[str, Any]) -> None:
    names = ("bpw", "whole", "nbytes", "plan")
    page = checkpoint.page({**{name: report[name] for name in names}, "source_nbytes": None, "incomplete": "why"}, "")
    assert "why" in page and "5.25" in page
    parsed(page)
