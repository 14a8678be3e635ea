"""Show how fast a checkpoint is: figures for its page's headline, and a section of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compress.pages import html, svg

Row = Mapping[str, Any]


def headline(found: Sequence[Row]) -> list[tuple[str, str]]:
    """Return the rate of decoding that was measured last, and beside the original's; nothing where none was."""
    shown = []
    for row in found[-1:]:
        shown.append((svg.number(row["decode_tokens_per_s"]), f"tokens decoded a second, {_where(row)}"))
        if row["base_decode_tokens_per_s"]:
            ratio = row["decode_tokens_per_s"] / row["base_decode_tokens_per_s"]
            shown.append((f"{ratio:.2f}×", "as fast as the original in decoding"))
    return shown


def section(found: Sequence[Row]) -> str:
    """Return the section of what `compress bench` has kept in scores.json; "" without any."""
    parts = [part for row in found for part in _measured(row)]
    said = "In bfloat16. compress bench --base times the original in turns with the checkpoint."
    return html.section("Speed", *parts, html.paragraph(said, "faint")) if parts else ""


def _measured(row: Row) -> list[str]:
    prefill, decode = (svg.number(row[key]) for key in ("prefill_tokens_per_s", "decode_tokens_per_s"))
    where = _where(row)
    said = (
        f"On {where}: {prefill} tokens a second of a prompt of {row['prompt_tokens']:,}, then {decode} tokens a second."
    )
    if row["base_prefill_tokens_per_s"] and row["base_decode_tokens_per_s"]:
        rates = (("prefill", "reading the prompt"), ("decode", "decoding"))
        times = [
            f"{row[f'{kind}_tokens_per_s'] / row[f'base_{kind}_tokens_per_s']:.2f} in {step}" for kind, step in rates
        ]
        said += f" Times as fast as {row['base']}, in turns with it: {', '.join(times)}."
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
