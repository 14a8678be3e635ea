"""Show what the calibration text does to the loss: source, number and length of samples against the scored texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compress.pages import html, svg

AXES = ("calibration.num_samples=", "calibration.seq_len=")
Cell = Mapping[str, Any]


def section(cells: Sequence[Cell], texts: Sequence[str]) -> str:
    """Return a matrix for each recipe that was calibrated in several ways; "" if there is none."""
    recipes: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell["calibration"]:
            rest = [each for each in cell["overrides"] if not each.startswith(AXES)]
            recipes.setdefault(", ".join((cell["name"], *rest)), []).append(cell)
    parts = [_matrix(name, alike, texts) for name, alike in recipes.items() if len(alike) > 1]
    said = html.paragraph(
        "One row for each calibration, one column for each scored text; the darker, the larger the loss. Compare a "
        "column's cells: a difference of less than twice the standard error says nothing."
    )
    return html.section("Calibration", said, *parts) if parts else ""


def _matrix(name: str, cells: Sequence[Cell], texts: Sequence[str]) -> str:
    """Return heat map and table of one recipe."""
    cells = sorted(cells, key=lambda cell: (_facts(cell)[0], _facts(cell)[1], _facts(cell)[2]))
    rows = [" ".join((_facts(cell)[0], f"{_facts(cell)[1]}×{_facts(cell)[2]}")) for cell in cells]
    values: dict[tuple[int, int], float] = {}
    body: list[list[html.Cell]] = []
    for index, cell in enumerate(cells):
        scores = {row["text"]: row for row in cell["texts"]}
        values |= {(index, at): scores[text]["kl_mean"] for at, text in enumerate(texts) if text in scores}
        figures = [scores.get(text, {}).get(key) for text in texts for key in ("kl_mean", "kl_se", "perplexity")]
        body.append([*_facts(cell), *figures])
    names = ["calibrated on", "samples", "tokens each"]
    names += [f"{what}, {text}" for text in texts for what in ("KL", "s.e.", "perplexity")]
    title = f"KL of {name} by calibration and scored text"
    return (
        html.figure(svg.heat_map(title, rows, list(texts), values), f"{title}, nats a token.")
        + html.table(f"{name} by calibration", names, body)
        + html.paragraph(_said(cells, texts))
    )


def _facts(cell: Cell) -> tuple[str, int, int]:
    found = cell["calibration"]
    return "its own text" if found["self_generated"] else found["source"], found["num_samples"], found["seq_len"]


def _said(cells: Sequence[Cell], texts: Sequence[str]) -> str:
    """Say for each text which calibration loses least, and by how much the worst is worse."""
    parts = []
    for text in texts:
        found = [(row["kl_mean"], _facts(cell)) for cell in cells for row in cell["texts"] if row["text"] == text]
        if len(found) > 1:
            (least, best), (most, worst) = min(found), max(found)
            parts.append(
                f"On {text} the least loss is {svg.number(least)} ({best[0]}, {best[1]}×{best[2]}), the largest "
                f"{svg.number(most)} ({worst[0]}, {worst[1]}×{worst[2]}), {most / max(least, 1e-12):.2f} times as much."
            )
    return " ".join(parts)
