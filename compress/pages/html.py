"""Build a page of HTML that needs nothing beside itself: style, sections, tables, figures.

The markup is in templates/, which escape text wherever it enters. Tables scroll inside their own frame on a narrow
screen. A page has no script but the one that sorts tables, and all of it can be read without.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

TEMPLATES = PackageLoader("compress.pages", "templates")
ENVIRONMENT = Environment(
    loader=TEMPLATES,
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
STYLE = TEMPLATES.get_source(ENVIRONMENT, "page.css")[0]
SORTING = TEMPLATES.get_source(ENVIRONMENT, "page.js")[0]

Cell = str | float | int | None
# Text that stands in a table like a number.
FIGURE = re.compile(r"[+-]?\d[\d,]*(\.\d+)?%?\*?$")


class _Shown(NamedTuple):
    """A cell of a table."""

    text: str
    value: str | None = None  # that columns are sorted by, of a number
    kind: str = ""  # "words", or "" for a column of numbers


class _Column(NamedTuple):
    """The head of a column."""

    name: str
    kind: str


def _part(name: str, *values: Any) -> str:
    """Return a part of templates/parts.html, filled."""
    return str(getattr(ENVIRONMENT.get_template("parts.html").module, name)(*values))


def page(title: str, lead: str, sections: Sequence[str], data: Any = None) -> str:
    """Return the whole page. lead: HTML under the title; data: what stands in the page for programs, as JSON."""
    return ENVIRONMENT.get_template("page.html").render(
        title=title,
        lead=Markup(lead),
        sections=Markup("".join(sections)),
        data="" if data is None else Markup(json_for_script(data)),
        style=Markup(STYLE),
        sorting=Markup(SORTING),
    )


def json_for_script(data: Any) -> str:
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
    content = "\n".join(part for part in parts if part)
    return _part("section", title, Markup(content)) if content else ""


def paragraph(content: str, kind: str = "") -> str:
    """Return a paragraph of plain text."""
    return _part("paragraph", content, kind)


def alarm(finding: str) -> str:
    """Return a paragraph that stands out, on what looks broken."""
    return _part("alarm", finding)


def keep_lines(text: str) -> str:
    """Return text with its lines and spaces as they are."""
    return _part("preformatted", text)


def side_by_side(prompt: str, original: str, compressed: str) -> str:
    """Return what the original and the compressed model write behind a prompt."""
    return _part("side_by_side", prompt, original, compressed)


def after_name(prefix: str) -> str:
    """Return what follows the name of a text whose windows begin with these tokens; "" for none."""
    return f", begun with {prefix}" if prefix else ""


def figure(drawing: str, caption: str) -> str:
    """Return a drawing with a caption."""
    return _part("figure", Markup(drawing), caption)


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Return the headline: (value, what it is) each in a box."""
    return _part("facts", pairs)


def fold(summary: str, content: str) -> str:
    """Return content that is shown when its summary is opened."""
    return _part("folded", summary, Markup(content))


def table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], digits: int = 4) -> str:
    """Return a table whose columns sort on click; numbers are shown with `digits` digits that count."""
    by_column = [[row[i] for row in rows] for i in range(len(columns))]
    kinds = [
        "words" if any(isinstance(cell, str) and not FIGURE.match(cell) for cell in cells) else ""
        for cells in by_column
    ]
    heads = [_Column(name, kind) for name, kind in zip(columns, kinds, strict=True)]
    body = [[_cell(value, kind, digits) for value, kind in zip(row, kinds, strict=True)] for row in rows]
    return _part("table", caption, heads, body)


def _cell(value: Cell, kind: str, digits: int) -> _Shown:
    if value is None:
        return _Shown("")
    if isinstance(value, str):
        is_figure = FIGURE.match(value) is not None
        return _Shown(value, value.rstrip("%").replace(",", "") if is_figure else None, kind)
    is_whole = isinstance(value, int) or (math.isfinite(value) and 10 ** (digits - 1) <= abs(value) < 1e15)
    return _Shown(f"{value:,.0f}" if is_whole else f"{value:.{digits}g}", str(value))
