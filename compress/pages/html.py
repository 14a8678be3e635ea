"""Build a page of HTML that needs nothing beside itself: style, sections, tables, figures.

Text is escaped wherever it enters. Tables scroll inside their own frame on a narrow screen. A page has no script but
the one that sorts tables, and all of it can be read without.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

STYLE = """
:root { color-scheme: light dark;
  --paper: #ffffff; --ink: #1a1d21; --faint: #565d66; --line: #d7dbe0; --panel: #f5f6f8; --accent: #0b5cad;
  --good: #176639; --bad: #a8231d; --heat: #b3341c; --on-low: #000000; --on-mid: #000000; --on-high: #ffffff;
  --series-0: #0b5cad; --series-1: #b3341c; --series-2: #1d7044; --series-3: #7a3e9d; --series-4: #8a5a00;
  --series-5: #0f6f78; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14171a; --ink: #e8eaed; --faint: #a7aeb7; --line: #3a4047; --panel: #1d2125; --accent: #7db7f5;
  --good: #6fce97; --bad: #ff9a8f; --heat: #ff9470; --on-low: #ffffff; --on-mid: #000000; --on-high: #000000;
  --series-0: #7db7f5; --series-1: #ff9470; --series-2: #6fce97; --series-3: #d0a3ee; --series-4: #e3b75a;
  --series-5: #6fcad3; } }
@media print { :root { --paper: #ffffff; --ink: #000000; --faint: #444444; --line: #bbbbbb; --panel: #ffffff;
  --accent: #0b5cad; --good: #176639; --bad: #a8231d; --heat: #b3341c; --on-low: #000000; --on-mid: #000000;
  --on-high: #ffffff; --series-0: #0b5cad; --series-1: #b3341c; --series-2: #1d7044; --series-3: #7a3e9d;
  --series-4: #8a5a00; --series-5: #0f6f78; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .5rem; border-bottom: 1px solid var(--line); padding-bottom: .2rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
p { margin: .5rem 0; max-width: 46rem; } .faint, figcaption, caption { color: var(--faint); font-size: .9rem; }
a { color: var(--accent); } code { font: .9em ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .6rem; margin: 1rem 0;
  padding: 0; list-style: none; }
.facts li { background: var(--panel); border: 1px solid var(--line); border-radius: .4rem; padding: .6rem .7rem; }
.facts b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; line-height: 1.25; }
.facts span { color: var(--faint); font-size: .85rem; display: block; }
.frame { overflow-x: auto; margin: .6rem 0; } .good { color: var(--good); } .bad { color: var(--bad); }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; min-width: 50%; }
caption { text-align: left; padding-bottom: .3rem; }
th, td { padding: .25rem .7rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line);
  vertical-align: top; } td[data-value] { white-space: nowrap; }
td.words { min-width: 5rem; } td.words:first-child { min-width: 8.5rem; }
th { color: var(--faint); font-weight: 600; } .words { text-align: left; }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid var(--accent); }
figure { margin: .8rem 0; overflow-x: auto; } svg { width: 100%; min-width: 34rem; height: auto; display: block; }
figcaption { position: sticky; left: 0; }
svg text { font: 11.5px system-ui, sans-serif; fill: var(--ink); } svg .name { fill: var(--faint); }
svg .label { fill: var(--ink); } svg .grid { stroke: var(--line); } svg .axis { stroke: var(--faint); }
svg polyline { fill: none; stroke-width: 2; } svg .bar { fill: var(--series-0); } svg .cell { fill: var(--panel); }
svg .mark { stroke: var(--bad); stroke-dasharray: 4 3; } svg .heat { fill: var(--heat); }
svg .front { stroke: var(--faint); stroke-width: 1.4; } svg .leader { stroke: var(--faint); stroke-width: .7; }
svg .best { font-weight: 600; } svg .value { font-size: 10px; } svg .low { fill: var(--on-low); }
svg .mid { fill: var(--on-mid); } svg .high { fill: var(--on-high); }
@media screen and (max-width: 44rem) { table { width: max-content; } td.words { max-width: 17rem; } }
details { margin: .6rem 0; } summary { cursor: pointer; color: var(--accent); }
blockquote { margin: .4rem 0; padding: .5rem .8rem; background: var(--panel); border-left: 3px solid var(--line);
  white-space: pre-wrap; overflow-wrap: anywhere; font-size: .92rem; }
.beside { display: grid; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); gap: .8rem; }
pre { background: var(--panel); border: 1px solid var(--line); padding: .7rem; overflow-x: auto; font-size: .85rem; }
@media print { .beside, figure, blockquote, tr { break-inside: avoid; }
  h2, h3 { break-after: avoid; } svg { min-width: 0; } figure, .frame { overflow: visible; }
  table { font-size: .7rem; } th, td { padding-right: .4rem; } td.words, td.words:first-child { min-width: 0; } }
"""

SORTING = """
for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
  const head = button.closest("th"), body = head.closest("table").tBodies[0], at = head.cellIndex;
  const up = head.getAttribute("aria-sort") !== "ascending";
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const key = row => row.cells[at].dataset.value ?? row.cells[at].textContent;
  const by = (a, b) => { const x = key(a), y = key(b), n = x - y; return isNaN(n) ? x.localeCompare(y) : n; };
  body.append(...[...body.rows].sort((a, b) => up ? by(a, b) : by(b, a)));
});
"""

Cell = str | float | int | None
FIGURE = re.compile(r"[+-]?\d[\d,]*(\.\d+)?%?\*?$")  # text that stands in a table like a number


def page(title: str, lead: str, sections: Sequence[str], data: Any = None) -> str:
    """Return the whole page. lead: HTML under the title; data: what stands in the page for programs, as JSON."""
    kept = "" if data is None else f'<script type="application/json" id="data">{embedded(data)}</script>\n'
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<header>\n<h1>{escape(title)}</h1>\n{lead}\n</header>\n<main>\n"
        f"{''.join(sections)}</main>\n{kept}<script>{SORTING}</script>\n</body>\n</html>\n"
    )


def embedded(data: Any) -> str:
    """Return JSON that may stand inside a script element."""
    return json.dumps(finite(data), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def finite(data: Any) -> Any:
    """Return JSON values with null for the numbers that JSON does not have: infinity and NaN."""
    if isinstance(data, Mapping):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def section(title: str, *parts: str) -> str:
    """Return a section with a heading; "" where it would be empty."""
    inner = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(title)}</h2>\n{inner}\n</section>\n" if inner else ""


def paragraph(content: str, kind: str = "") -> str:
    """Return a paragraph of plain text."""
    return f"<p{_class(kind)}>{escape(content)}</p>"


def begun(text: str) -> str:
    """Return what follows the name of a text whose windows begin with these tokens; "" for none."""
    return f", begun with {text}" if text else ""


def figure(drawing: str, caption: str) -> str:
    """Return a drawing with a caption."""
    return f'<figure tabindex="0">{drawing}<figcaption>{escape(caption)}</figcaption></figure>'


def facts(found: Sequence[tuple[str, str]]) -> str:
    """Return the headline: (value, what it is) each in a box."""
    items = "".join(f"<li><b>{escape(value)}</b><span>{escape(name)}</span></li>" for value, name in found)
    return f'<ul class="facts">{items}</ul>'


def folded(summary: str, content: str) -> str:
    """Return content that is shown when its summary is opened."""
    return f"<details><summary>{escape(summary)}</summary>\n{content}\n</details>"


def table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], digits: int = 4) -> str:
    """Return a table whose columns sort on click; numbers are shown with `digits` digits that count."""
    by_column = [[row[i] for row in rows] for i in range(len(columns))]
    is_words = [any(isinstance(cell, str) and not FIGURE.match(cell) for cell in cells) for cells in by_column]
    head = "".join(
        f'<th scope="col"{_class("words" if words else "")}><button type="button">{escape(name)}</button></th>'
        for name, words in zip(columns, is_words, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(_cell(value, words, digits) for value, words in zip(row, is_words, strict=True)) + "</tr>\n"
        for row in rows
    )
    return (
        f'<div class="frame" tabindex="0" role="region" aria-label="{escape(caption, quote=True)}"><table>'
        f"<caption>{escape(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>"
    )


def _cell(value: Cell, words: bool, digits: int) -> str:
    if value is None:
        return "<td></td>"
    if isinstance(value, str) and FIGURE.match(value):
        return f'<td data-value="{value.rstrip("%").replace(",", "")}">{value}</td>'
    if isinstance(value, str):
        return f"<td{_class('words' if words else '')}>{escape(value)}</td>"
    is_whole = isinstance(value, int) or (math.isfinite(value) and 10 ** (digits - 1) <= abs(value) < 1e15)
    shown = f"{value:,.0f}" if is_whole else f"{value:.{digits}g}"
    return f'<td data-value="{value}">{shown}</td>'


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
