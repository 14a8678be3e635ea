"""Draw charts as SVG text: bars, a heat map, and the frame that scatter.py fills with points.

Colors are the CSS variables of `html.STYLE`, so that a chart follows the page between light and dark. A chart scales to
the width of its column. Each has a title and a description, which screen readers read, and its marks have tooltips.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

# Width of a drawing, in its own units.
WIDTH = 720.0
# Margins above, right, below and left.
MARGIN = (14.0, 16.0, 46.0, 80.0)
SERIES = 6  # colors of series: --series-0 ...
TICK = 4.0
STEPS_PER_AXIS = 5
LOW, HIGH = 0.6, 0.835  # shares of the heat below and above which figures on it have a color of their own


STYLE = """<style>svg{--paper:#fff;--ink:#1f2328;--grid:#e3e6ea;--series-0:#c0392b;--series-1:#2471a3;
--series-2:#1e8449;--series-3:#9a6b00;--series-4:#7d3c98;--series-5:#4d5656;font:12px sans-serif;background:#fff}
text{fill:var(--ink)}
.label{font-size:10.5px}.best{font-weight:bold}.grid{stroke:var(--grid)}.axis{stroke:#8a9199}
.leader{stroke:#b5bac0;stroke-width:.7}.front{fill:none;stroke:#b5bac0}</style>"""


class Axis(NamedTuple):
    """Name of an axis, and whether it is logarithmic."""

    name: str
    is_log: bool = False


class Scale:
    """Maps numbers of an axis to places of the drawing."""

    def __init__(self, values: Sequence[float], axis: Axis, ends: tuple[float, float], from_zero: bool = False) -> None:
        self.axis, self.ends = axis, ends
        known = [value for value in values if math.isfinite(value) and (value > 0 or not axis.is_log)] or [1.0]
        low, high = min(known), max(known)
        if axis.is_log:
            low, high = math.log10(low), math.log10(high)
        elif from_zero:
            low, high = min(0.0, low), max(0.0, high)
        room = (high - low or abs(high) or 1.0) * 0.05
        self.low = low if from_zero and not axis.is_log else low - room
        self.high = high + room

    def place(self, value: float) -> float:
        if self.axis.is_log:
            value = math.log10(value) if value > 0 else self.low
        share = (value - self.low) / (self.high - self.low)
        return self.ends[0] + share * (self.ends[1] - self.ends[0])

    def ticks(self) -> list[float]:
        """Return round numbers that lie on the axis."""
        if not self.axis.is_log:
            return _round_steps(self.low, self.high)
        marks = (1.0,) if self.high - self.low > 3 else (1.0, 2.0, 5.0) if self.high - self.low > 0.8 else _TENTHS
        powers = range(math.floor(self.low), math.ceil(self.high) + 1)
        values = [mark * 10.0**power for power in powers for mark in marks]
        values = [value for value in values if self.low <= math.log10(value) <= self.high]
        return values if len(values) > 1 else _round_steps(10.0**self.low, 10.0**self.high)


_TENTHS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)


def _round_steps(low: float, high: float) -> list[float]:
    step = 10.0 ** math.floor(math.log10((high - low) / STEPS_PER_AXIS))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= STEPS_PER_AXIS + 1)
    first = math.ceil(low / step)
    return [step * number for number in range(first, math.floor(high / step) + 1)]


def number(value: float) -> str:
    """Write a number for people, with three digits that count."""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        text = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
        return text
    return f"{value:.2e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def _tick(value: float) -> str:
    """Write a number of an axis, which is round: 1e-4, not 1.00e-4, which would reach the name of the axis."""
    return re.sub(r"\.?0+e", "e", number(value))


def text(x: float, y: float, content: str, anchor: str = "start", kind: str = "") -> str:
    """Return words at a place."""
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{name}>{escape(content)}</text>'


def drawing(height: float, title: str, description: str, body: Sequence[str]) -> str:
    """Return a whole drawing with its name and description."""
    said = f"<title>{escape(title)}</title><desc>{escape(description)}</desc>"
    label = escape(f"{title}. {description}", quote=True)
    return (
        f'<svg viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" aria-label="{label}" '
        f'xmlns="http://www.w3.org/2000/svg">{said}{"".join(body)}</svg>'
    )


def with_style(drawn: str) -> str:
    """Return a drawing with its style inside, as a file that stands alone."""
    begin = drawn.index(">") + 1
    return f"{drawn[:begin]}{STYLE}{drawn[begin:]}\n"


def frame(x: Scale, y: Scale, height: float) -> list[str]:
    """Return grid, ticks and names of both axes."""
    top, right, below, left = MARGIN
    parts = []
    for value in y.ticks():
        at = y.place(value)
        parts.append(f'<line class="grid" x1="{left}" x2="{WIDTH - right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(text(left - 6, at + TICK, _tick(value), "end"))
    floor = height - below
    for value in x.ticks():
        at = x.place(value)
        parts.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{floor}" y2="{floor + TICK}"/>')
        parts.append(text(at, floor + 18, _tick(value), "middle"))
    parts.append(f'<line class="axis" x1="{left}" x2="{WIDTH - right}" y1="{floor}" y2="{floor}"/>')
    parts.append(text((left + WIDTH - right) / 2, height - 8, x.axis.name, "middle", "name"))
    middle = (top + floor) / 2
    turned = f'<g transform="rotate(-90 14 {middle:.1f})">{text(14, middle, y.axis.name, "middle", "name")}</g>'
    return [*parts, turned]


def bars(title: str, values: dict[str, float], axis: Axis) -> str:
    """Draw one horizontal bar for each name."""
    row, left = 20.0, min(260.0, 24 + 6.6 * max(map(len, values), default=1))
    height = row * len(values) + 50
    scale = Scale([*values.values()], axis, (left, WIDTH - 70), from_zero=True)
    body = []
    for place, (name, value) in enumerate(values.items()):
        y, end = 6 + row * place, scale.place(value)
        body.append(text(left - 6, y + 13, name, "end"))
        body.append(
            f'<rect class="bar" x="{left:.1f}" y="{y:.1f}" width="{max(0.5, end - left):.1f}" height="{row - 5:.1f}">'
        )
        body.append(f"<title>{escape(name)}: {number(value)}</title></rect>")
        body.append(text(end + 5, y + 13, number(value)))
    bottom = 6 + row * len(values)
    body.append(text((left + WIDTH - 70) / 2, bottom + 24, axis.name, "middle", "name"))
    return drawing(height, title, f"{axis.name} of {len(values)} items", body)


def heat_map(title: str, rows: Sequence[str], columns: Sequence[str], cells: dict[tuple[int, int], float]) -> str:
    """Draw a cell for each row and column, the darker the larger; cells: (row, column) -> value; others stay empty.

    Colors follow the logarithm where the largest positive value is more than 20 times the smallest.
    """
    left, top = min(240.0, 24 + 7.0 * max(map(len, rows), default=1)), 26.0
    wide = (WIDTH - left - 8) / max(1, len(columns))
    tall = max(12.0, min(26.0, 700 / max(1, len(rows))))
    known = sorted(value for value in cells.values() if math.isfinite(value) and value > 0)
    is_log = bool(known) and known[-1] > 20 * known[0]
    body = [
        text(left + wide * (i + 0.5), 16, name[: max(3, int(wide / 6.6))], "middle") for i, name in enumerate(columns)
    ]
    every = max(1, math.ceil(len(rows) / 40))
    for row, name in enumerate(rows):
        if row % every == 0:
            body.append(text(left - 6, top + tall * (row + 0.5) + TICK, name, "end"))
    for (row, column), value in cells.items():
        share = _share(value, known, is_log)
        place = f'x="{left + wide * column:.1f}" y="{top + tall * row:.1f}"'
        tip = f"{rows[row]}, {columns[column]}: {number(value)}"
        body.append(f'<rect {place} width="{wide - 1:.1f}" height="{tall - 1:.1f}" class="cell"/>')
        body.append(
            f'<rect {place} width="{wide - 1:.1f}" height="{tall - 1:.1f}" class="heat" '
            f'style="opacity:{share:.3f}"><title>{escape(tip)}</title></rect>'
        )
        if tall >= 15 and wide >= 46:
            kind = "low" if share < LOW else "mid" if share < HIGH else "high"
            at = (left + wide * (column + 0.5), top + tall * (row + 0.5) + TICK)
            body.append(text(*at, number(value), "middle", f"value {kind}"))
    height = top + tall * len(rows) + 8
    return drawing(height, title, f"{len(rows)} rows by {len(columns)} columns", body)


def _share(value: float, known: Sequence[float], is_log: bool) -> float:
    """Return how dark a cell is, 0.06 to 1."""
    if not known or value <= 0 or not math.isfinite(value):
        return 1.0 if math.isinf(value) and value > 0 else 0.06
    low, high = (math.log(known[0]), math.log(known[-1])) if is_log else (0.0, known[-1])
    at = math.log(value) if is_log else value
    return 0.06 + 0.94 * ((at - low) / (high - low) if high > low else 0.5)
