"""Show a checkpoint among the recipes of a study: loss by size, with those joined that no other beats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compress.pages import html, svg
from compress.pages.scatter import Mark, scatter, unbeaten

MIB = 2**20
OWN = "this checkpoint"
Row = Mapping[str, Any]


def section(studies: Sequence[Row], nbytes: int, measured: Sequence[Row]) -> str:
    """Return the section; "" without a study.

    studies: what `compress.study.losses.points` gives; nbytes: of the checkpoint; measured: its scores, of which the
    first on the same text is drawn.
    """
    return html.section("Among other recipes", *(_chart(study, nbytes, measured) for study in studies))


def _chart(study: Row, nbytes: int, measured: Sequence[Row]) -> str:
    """Return the chart of a text."""
    text, recipes = study["text"], [row for row in study["recipes"] if row["kl_mean"] > 0]
    if not recipes:
        return ""
    begun = study.get("begins_with", "")
    own = next((row for row in measured if (row["text"], row.get("begins_with", "")) == (text, begun)), None)
    marks = [Mark(x["nbytes"] / MIB, x["kl_mean"], x["label"], "recipe", False, x["kl_se"] or 0.0) for x in recipes]
    said = (
        f"Recipes of a study of {study['model']} on {text}, in windows of {study['window']} tokens{html.begun(begun)}"
    )
    if own is not None and own["kl_mean"] > 0:
        marks.append(Mark(nbytes / MIB, own["kl_mean"], OWN, OWN, False, own["kl_se"] or 0.0))
        said += f"; this checkpoint in windows of {own['seq_len']}, {own['tokens']:,} tokens"
        said += f", through the cache {own['cache']}, beside {own['base']}" if own.get("cache") else ""
    else:
        said += f"; this checkpoint was not scored on {text}: "
        said += "compress inspect DIR --page --base ORIGINAL --text FILE does"
    best = set(unbeaten(marks, lambda mark: mark.x, lambda mark: mark.y))
    axes = svg.Axis("whole file, MiB", is_log=True), svg.Axis("KL, nats a token", is_log=True)
    shown = [mark._replace(is_best=mark in best) for mark in marks]
    return html.figure(scatter(f"KL by size on {text}", shown, axes), f"{said}.")
