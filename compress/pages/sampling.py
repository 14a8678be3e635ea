"""Draw what compressed and original model sample in each generation setting: a section of a checkpoint's page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compress.pages import html, svg

Row = Mapping[str, Any]


def section(found: Sequence[Row]) -> str:
    """Return the section of what `compress sampling` has kept in scores.json; "" without any."""
    parts = [part for each in found for part in _measured(each)]
    return html.section("Generation settings", *parts)


def verdict(row: Row) -> str:
    """Say in a sentence which temperature a compressed model wants where its base has another."""
    at, best = row["temperature"], row["best"]
    if row["low"] is None:
        return f"At {at:g}: {best:.3f}, from too few windows for an interval; no change."
    interval = f"95% interval {row['low']:.3f} to {row['high']:.3f}"
    if not row["change"]:
        return f"At {at:g}: no change ({best:.3f}, {interval})."
    beyond = ", at the end of what was searched" if row["at_limit"] else ""
    return (
        f"At {at:g}: use {best:.3f} ({interval}{beyond}); KL {svg.number(row['kl'])} to {svg.number(row['kl_best'])}."
    )


def _measured(found: Row) -> list[str]:
    """Return the parts for one text."""
    rows = found["settings"]
    filters = list(dict.fromkeys(row["filters"] for row in rows))
    temperatures = sorted({row["temperature"] for row in rows})
    names = [f"{value:g}" for value in temperatures]
    places = [(filters.index(row["filters"]), temperatures.index(row["temperature"])) for row in rows]
    lost = {place: 1 - row["acceptance"] for place, row in zip(places, rows, strict=True)}
    differs = {place: 1 - row["same_gumbel"] for place, row in zip(places, rows, strict=True)}
    about = f"{found['tokens']:,} tokens of {found['text']}, against {found['base']}"
    parts = [
        html.paragraph(f"What both models would draw, on {about}. Columns are temperatures, rows filters."),
        html.figure(
            svg.heat_map(f"Total variation of what is sampled, {found['text']}", filters, names, lost),
            "Total variation between the filtered distributions: 0 is no difference, 1 is no token in common. "
            "1 minus it is the acceptance of speculative sampling.",
        ),
        html.figure(
            svg.heat_map(f"Share of tokens that differ with equal seeds, {found['text']}", filters, names, differs),
            "How often equal Gumbel noise, which is what equal seeds give, leads to another token.",
        ),
        html.paragraph("The temperature at which the compressed model, unfiltered, is closest to its original:"),
        *(html.paragraph(verdict(row)) for row in found["temperatures"]),
        html.folded(f"All {len(rows)} settings", _table(found)),
    ]
    return parts + ([_sampled(found)] if found["sampled"] else [])


def _table(found: Row) -> str:
    keys = ("acceptance", "kl_kept", "jaccard", "outside", "same_cdf", "same_gumbel", "entropy", "base_entropy")
    names = ("acceptance", "KL, kept", "Jaccard", "lost mass", "same, CDF", "same, Gumbel", "entropy", "original's")
    rows = [[row["filters"], row["temperature"], *(row[key] for key in keys)] for row in found["settings"]]
    return html.table(f"Distributions, {found['text']}", ("filters", "temperature", *names), rows)


def _sampled(found: Row) -> str:
    names = ("filters", "temperature", "who", "rep-4", "distinct-2", "self-BLEU", "tokens", "entropy", "reverse KL")
    rows = []
    for row in found["sampled"]:
        for who, key in (("original", "base"), ("compressed", "model")):
            own = row[key]
            figures = (own["repetition"]["4"], own["distinct"]["2"], own["self_bleu"], own["length"], own["entropy"])
            rows.append([row["filters"], row["temperature"], who, *figures, own["reverse_kl"]])
    return html.table(f"What was sampled, {found['text']}", names, rows)
