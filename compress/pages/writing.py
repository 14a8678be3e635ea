"""Show what two models write behind the same prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from compress.pages import html

Rows = Sequence[Mapping[str, str]]


def beside(rows: Rows) -> str:
    """Return prompts with what the original and the compressed model write, side by side; "" for none."""
    return "".join(_pair(row) for row in rows)


def _pair(row: Mapping[str, str]) -> str:
    both = "".join(
        f"<div><h3>{name}</h3><blockquote>{escape(row[key])}</blockquote></div>"
        for name, key in (("Original", "base"), ("Compressed", "model"))
    )
    return f'{html.paragraph("Prompt: " + row["prompt"])}<div class="beside">{both}</div>'
