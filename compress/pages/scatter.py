"""Draw many labelled points over two axes, with those that no other beats joined by a line.

Labels are placed one after the other, the joined points first: close to their point where there is room, else farther
away with a thin line to it. One for which there is no room at all is left out; every point has a tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

from compress.pages import svg

LETTER, LINE = 6.1, 12.0  # width of a letter and height of a line, of a label
RADIUS = 4.5
# Distances of a label from its point that are tried.
DISTANCES = (9.0, 17.0, 28.0, 42.0, 58.0, 76.0, 96.0)
# Directions that are tried at each distance.
DIRECTIONS = 16
LEADER = 17.0  # distance from which on a line shows where a label belongs


class Mark(NamedTuple):
    """A point."""

    x: float
    y: float
    label: str
    group: str  # points of a group have one color
    is_best: bool  # whether it is on the line
    error: float = 0.0  # standard error of y


def unbeaten(points: Iterable[Any], size: Callable[[Any], float], loss: Callable[[Any], float]) -> list[Any]:
    """Return those that no other beats in both size and loss, smallest first; of equal sizes the one of less loss."""
    front, lowest = [], math.inf
    for point in sorted(points, key=lambda point: (size(point), loss(point))):
        if loss(point) < lowest:
            lowest = loss(point)
            front.append(point)
    return front


class _Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def is_inside(self, frame: _Box) -> bool:
        is_wide = self.left >= frame.left and self.right <= frame.right
        return is_wide and self.top >= frame.top and self.bottom <= frame.bottom

    def overlaps(self, other: _Box) -> bool:
        return not (
            self.right < other.left or self.left > other.right or self.bottom < other.top or self.top > other.bottom
        )


def scatter(title: str, marks: Sequence[Mark], axes: tuple[svg.Axis, svg.Axis], height: float = 520) -> str:
    """Return the drawing; a logarithmic axis leaves out what is not positive."""
    shown = [mark for mark in marks if (mark.y > 0 or not axes[1].is_log) and math.isfinite(mark.y)]
    top, right, below, left = svg.MARGIN
    x = svg.Scale([mark.x for mark in shown], axes[0], (left, svg.WIDTH - right))
    reached = [mark.y + sign * mark.error for mark in shown for sign in (-1, 1)]
    y = svg.Scale(reached, axes[1], (height - below, top + 22))
    places = [(x.place(mark.x), y.place(mark.y)) for mark in shown]
    groups = list(dict.fromkeys(mark.group for mark in marks))
    colors = {group: f"var(--series-{index % svg.SERIES})" for index, group in enumerate(groups)}
    body = svg.frame(x, y, height)
    line = sorted(place for mark, place in zip(shown, places, strict=True) if mark.is_best)
    if len(line) > 1:
        body.append(f'<polyline class="front" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in line)}"/>')
    for mark, (a, b) in zip(shown, places, strict=True):
        body += _point(mark, (a, b), colors[mark.group], axes)
        if mark.error > 0 and mark.y > mark.error:
            low, high = (y.place(mark.y + sign * mark.error) for sign in (-1, 1))
            if low - high > 2 * RADIUS:
                body.append(f'<line class="axis" x1="{a:.1f}" x2="{a:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>')
    body += _labels(shown, places, _Box(left, top + 20, svg.WIDTH - 2, height - below - 2))
    body += _legend(groups, colors, left)
    best = ", ".join(mark.label for mark in sorted(shown) if mark.is_best)
    said = f"{axes[1].name} over {axes[0].name}, {len(shown)} points. Beaten by no other: {best}"
    return svg.drawing(height, title, said, body)


def _point(mark: Mark, place: tuple[float, float], color: str, axes: tuple[svg.Axis, svg.Axis]) -> Iterator[str]:
    """Give a filled point for one on the line, else a ring."""
    tip = f"{mark.label}: {axes[0].name} {svg.number(mark.x)}, {axes[1].name} {svg.number(mark.y)}"
    tip += f" ± {svg.number(mark.error)}" if mark.error else ""
    inside = color if mark.is_best else "var(--paper)"
    yield f'<circle cx="{place[0]:.1f}" cy="{place[1]:.1f}" r="{RADIUS}" style="fill:{inside};stroke:{color}" '
    yield f'stroke-width="1.6"><title>{escape(tip)}</title></circle>'


def _labels(marks: Sequence[Mark], places: Sequence[tuple[float, float]], frame: _Box) -> list[str]:
    """Return labels that hide neither points nor each other; lines to them cross words only where there is no way."""
    reach = RADIUS + 1.5
    taken = [_Box(a - reach, b - reach, a + reach, b + reach) for a, b in places]
    line = sorted(place for mark, place in zip(marks, places, strict=True) if mark.is_best)
    taken += [spot for pair in zip(line, line[1:], strict=False) for spot in _spots(*pair)]
    words, parts = list[_Box](), list[str]()
    left = sorted(range(len(marks)), key=lambda at: (not marks[at].is_best, places[at]))
    for may_cross in (False, True):
        for at in list(left):
            for box, distance in _candidates(marks[at].label, places[at]):
                if not box.is_inside(frame) or any(box.overlaps(other) for other in taken):
                    continue
                end = (min(max(places[at][0], box.left), box.right), min(max(places[at][1], box.top), box.bottom))
                spots = _spots(places[at], end) if distance >= LEADER else []
                if not may_cross and any(spot.overlaps(other) for spot in spots for other in words):
                    continue
                left.remove(at)
                words.append(box)
                taken += [box, *spots]
                parts += _leader(places[at], end) if spots else []
                kind = "label best" if marks[at].is_best else "label"
                parts.append(svg.text(box.left + 1, box.bottom - 3, marks[at].label, "start", kind))
                break
    return parts


def _leader(begin: tuple[float, float], end: tuple[float, float]) -> list[str]:
    ends = f'x1="{begin[0]:.1f}" y1="{begin[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"'
    return [f'<line class="leader" {ends}/>']


def _spots(begin: tuple[float, float], end: tuple[float, float]) -> list[_Box]:
    """Return places along a line, without its ends."""
    count = max(9, int(math.dist(begin, end) / 6))
    shares = [(step + 1) / (count + 1) for step in range(count)]
    along = [(begin[0] + share * (end[0] - begin[0]), begin[1] + share * (end[1] - begin[1])) for share in shares]
    return [_Box(x, y, x, y) for x, y in along]


def _candidates(label: str, place: tuple[float, float]) -> Iterator[tuple[_Box, float]]:
    """Give boxes for a label around a point, near ones first, to the right and above before others."""
    wide = LETTER * len(label) + 2
    for distance in DISTANCES:
        for turn in range(DIRECTIONS):
            angle = 2 * math.pi * ((turn + 1) // 2 * (1 if turn % 2 else -1)) / DIRECTIONS - 0.3
            a, b = place[0] + distance * math.cos(angle), place[1] + distance * math.sin(angle)
            lean = math.cos(angle)
            left = a if lean > 0.35 else a - wide if lean < -0.35 else a - wide / 2
            rise = math.sin(angle)
            top = b - LINE if rise < -0.35 else b if rise > 0.35 else b - LINE / 2
            yield _Box(left, top, left + wide, top + LINE), distance


def _legend(groups: Sequence[str], colors: dict[str, str], left: float) -> Iterator[str]:
    """Give the colors of the groups, and what a line and a filled point mean."""
    at = left + 4
    for group in groups if len(groups) > 1 else ():
        yield f'<circle cx="{at + 5:.1f}" cy="9" r="{RADIUS}" style="fill:{colors[group]}"/>'
        yield svg.text(at + 14, 13, group)
        at += 26 + LETTER * len(group)
    yield svg.text(svg.WIDTH - 4, 13, "filled, joined: beaten by no other", "end", "name")
