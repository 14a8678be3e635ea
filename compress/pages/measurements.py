"""Write sections of a checkpoint's page on what was measured after it was made.

Each shows what a command has kept in scores.json: `compress bench` speed, `compress sampling` what is drawn in each
generation setting, and `compress inspect --page --study` the other recipes of a study, with those joined that no other
beats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compress.pages import html, svg
from compress.pages.scatter import Mark, scatter, unbeaten

MIB = 2**20
OWN_LABEL = "this checkpoint"
Row = Mapping[str, Any]


def speed_headline(found: Sequence[Row]) -> list[tuple[str, str]]:
    """Return the rate of decoding that was measured last, and beside the original's; nothing where none was."""
    shown = []
    for row in found[-1:]:
        shown.append((svg.number(row["decode_tokens_per_s"]), f"tokens decoded a second, {_where(row)}"))
        if row["base_decode_tokens_per_s"]:
            ratio = row["decode_tokens_per_s"] / row["base_decode_tokens_per_s"]
            shown.append((f"{ratio:.2f}×", "as fast as the original in decoding"))
    return shown


def speed(found: Sequence[Row]) -> str:
    """Return the section of what `compress bench` has kept in scores.json; "" without any."""
    parts = [part for row in found for part in _timed_once(row)]
    said = "In bfloat16. compress bench --base times the original in turns with the checkpoint."
    return html.section("Speed", *parts, html.paragraph(said, "faint")) if parts else ""


def _timed_once(row: Row) -> list[str]:
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


def sampling(found: Sequence[Row]) -> str:
    """Return the section of what `compress sampling` has kept in scores.json; "" without any."""
    parts = [part for each in found for part in _of_text(each)]
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


def _of_text(drawn: Row) -> list[str]:
    """Return the parts for one text."""
    rows = drawn["settings"]
    filters = list(dict.fromkeys(row["filters"] for row in rows))
    temperatures = sorted({row["temperature"] for row in rows})
    names = [f"{value:g}" for value in temperatures]
    places = [(filters.index(row["filters"]), temperatures.index(row["temperature"])) for row in rows]
    lost = {place: 1 - row["acceptance"] for place, row in zip(places, rows, strict=True)}
    differs = {place: 1 - row["same_gumbel"] for place, row in zip(places, rows, strict=True)}
    about = f"{drawn['tokens']:,} tokens of {drawn['text']}, against {drawn['base']}"
    parts = [
        html.paragraph(f"What both models would draw, on {about}. Columns are temperatures, rows filters."),
        html.figure(
            svg.heat_map(f"Total variation of what is sampled, {drawn['text']}", filters, names, lost),
            "Total variation between the filtered distributions: 0 is no difference, 1 is no token in common. "
            "1 minus it is the acceptance of speculative sampling.",
        ),
        html.figure(
            svg.heat_map(f"Share of tokens that differ with equal seeds, {drawn['text']}", filters, names, differs),
            "How often equal Gumbel noise, which is what equal seeds give, leads to another token.",
        ),
        html.paragraph("The temperature at which the compressed model, unfiltered, is closest to its original:"),
        *(html.paragraph(verdict(row)) for row in drawn["temperatures"]),
        html.fold(f"All {len(rows)} settings", _settings_table(drawn)),
    ]
    return parts + ([_drawn_table(drawn)] if drawn["sampled"] else [])


def _settings_table(found: Row) -> str:
    keys = ("acceptance", "kl_kept", "jaccard", "outside", "same_cdf", "same_gumbel", "entropy", "base_entropy")
    names = ("acceptance", "KL, kept", "Jaccard", "lost mass", "same, CDF", "same, Gumbel", "entropy", "original's")
    rows = [[row["filters"], row["temperature"], *(row[key] for key in keys)] for row in found["settings"]]
    return html.table(f"Distributions, {found['text']}", ("filters", "temperature", *names), rows)


def _drawn_table(found: Row) -> str:
    names = ("filters", "temperature", "who", "rep-4", "distinct-2", "self-BLEU", "tokens", "entropy", "reverse KL")
    rows = []
    for row in found["sampled"]:
        for who, key in (("original", "base"), ("compressed", "model")):
            own = row[key]
            figures = (own["repetition"]["4"], own["distinct"]["2"], own["self_bleu"], own["length"], own["entropy"])
            rows.append([row["filters"], row["temperature"], who, *figures, own["reverse_kl"]])
    return html.table(f"What was sampled, {found['text']}", names, rows)


def among_recipes(studies: Sequence[Row], nbytes: int, measured: Sequence[Row]) -> str:
    """Return the section; "" without a study.

    studies: what `compress.study.losses.points` gives; nbytes: of the checkpoint; measured: its scores, of which the
    first on the same text is drawn.
    """
    return html.section("Among other recipes", *(_among_recipes_on(study, nbytes, measured) for study in studies))


def _among_recipes_on(study: Row, nbytes: int, measured: Sequence[Row]) -> str:
    """Return the chart of a text."""
    text, recipes = study["text"], [row for row in study["recipes"] if row["kl_mean"] > 0]
    if not recipes:
        return ""
    begun = study.get("begins_with", "")
    own = next((row for row in measured if (row["text"], row.get("begins_with", "")) == (text, begun)), None)
    marks = [Mark(x["nbytes"] / MIB, x["kl_mean"], x["label"], "recipe", False, x["kl_se"] or 0.0) for x in recipes]
    said = f"Recipes of a study of {study['model']} on {text}, in windows of {study['window']} tokens"
    said += html.after_name(begun)
    if own is not None and own["kl_mean"] > 0:
        marks.append(Mark(nbytes / MIB, own["kl_mean"], OWN_LABEL, OWN_LABEL, False, own["kl_se"] or 0.0))
        said += f"; this checkpoint in windows of {own['seq_len']}, {own['tokens']:,} tokens"
        said += f", through the cache {own['cache']}, beside {own['base']}" if own.get("cache") else ""
    else:
        said += f"; this checkpoint was not scored on {text}: "
        said += "compress inspect DIR --page --base ORIGINAL --text FILE does"
    best = set(unbeaten(marks, lambda mark: mark.x, lambda mark: mark.y))
    axes = svg.Axis("whole file, MiB", is_log=True), svg.Axis("KL, nats a token", is_log=True)
    shown = [mark._replace(is_best=mark in best) for mark in marks]
    return html.figure(scatter(f"KL by size on {text}", shown, axes), f"{said}.")
