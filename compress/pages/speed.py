"""Show how fast a checkpoint is: figures for its page's headline, and a section of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compress.pages import html, svg

Row = Mapping[str, Any]


def headline(found: Sequence[Row]) -> list[tuple[str, str]]:
    """Return the rate of decoding that was measured last; nothing where none was."""
    return [(svg.number(row["decode_tokens_per_s"]), f"tokens decoded a second, {_where(row)}") for row in found[-1:]]


def section(found: Sequence[Row]) -> str:
    """Return the section of what `compress bench` has kept in scores.json; "" without any."""
    parts = [part for row in found for part in _measured(row)]
    said = "In bfloat16. Compare with a run of compress bench on the original on the same machine."
    return html.section("Speed", *parts, html.paragraph(said, "faint")) if parts else ""


def _measured(row: Row) -> list[str]:
    prefill, decode = (svg.number(row[key]) for key in ("prefill_tokens_per_s", "decode_tokens_per_s"))
    where = _where(row)
    said = (
        f"On {where}: {prefill} tokens a second of a prompt of {row['prompt_tokens']:,}, then {decode} tokens a second."
    )
    names = ("layer", "count", "format", "bits", "read by", "µs", "times as fast as bfloat16")
    rows = [
        [
            "×".join(map(str, each["shape"])),
            each["count"],
            each["format"],
            each["bpw"],
            "a kernel" if each["kernel"] else "decoding",
            each["seconds"] * 1e6,
            each["ratio"],
        ]
        for each in row["layers"]
    ]
    return [html.paragraph(said), html.table(f"Shapes of packed layers, {where}", names, rows) if rows else ""]


def _where(row: Row) -> str:
    threads = f", {row['threads']} threads" if row["device"] == "cpu" and row["threads"] != 1 else ""
    threads = ", 1 thread" if row["device"] == "cpu" and row["threads"] == 1 else threads
    return f"{row['device']}{threads}, batch {row['batch']}"
