"""Write the page of a study from its study.json: which recipe loses what at which size, and what it costs to make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compress import process_memory
from compress.pages import html, svg, tasks
from compress.pages.scatter import Mark, scatter
from compress.progress import duration

MIB = 2**20
Study = Mapping[str, Any]
Cell = Mapping[str, Any]
CACHE_KEYS = ("bytes_per_token", "exact_bytes_per_token", "context")
CALIBRATION_AXES = ("calibration.num_samples=", "calibration.seq_len=")


def page(study: Study) -> str:
    """Return the page as HTML. study: study.json."""
    texts = study["settings"]["texts"]
    weights = [cell for cell in study["cells"] if not cell["is_cache_only"]]
    caches = [cell for cell in study["cells"] if cell["is_cache_only"]]
    sections = [
        _frontiers(study, weights, texts),
        _table(study, weights, texts),
        _caches(study, caches, texts),
        calibrations(study["cells"], texts),
        tasks.section([cell for cell in (study["original"], *study["cells"]) if cell is not None]),
        _cost(study["cells"]),
        _not_measured(study),
        _settings(study),
    ]
    return html.page(f"Recipes on {study['model']}", _headline(study), sections, study)


def score(cell: Cell, text: str, key: str = "kl_mean") -> Any:
    """Return a score of a cell on a text, None where there is none."""
    return next((row.get(key) for row in cell["texts"] if row["text"] == text), None)


def _headline(study: Study) -> str:
    """Return the original's figures and how far the study is."""
    original, figures = study["original"], []
    if original is not None:
        figures.append((process_memory.show(original["nbytes"]), "the original"))
        for row in original["texts"]:
            figures.append((f"{row['perplexity']:.2f}", f"its perplexity on {row['text']}, {row['tokens']:,} tokens"))
    figures.append((str(len(study["cells"])), "cells measured"))
    figures += [(str(len(study[name])), name) for name in ("failed", "pending") if study[name]]
    said = "Loss is KL: the divergence of the predictions from those of the original, in nats a token; 0 is no loss."
    return html.facts(figures) + html.paragraph(said)


def _frontiers(study: Study, cells: Sequence[Cell], texts: Sequence[str]) -> str:
    """Return KL over bytes, a chart for each text."""
    parts = []
    for text in texts:
        best = set(study["frontier"]["weights"].get(text, ()))
        marks = [
            Mark(
                cell["nbytes"] / MIB,
                value,
                cell["label"],
                cell["purpose"],
                cell["key"] in best,
                score(cell, text, "kl_se") or 0.0,
            )
            for cell in cells
            if (value := score(cell, text)) is not None
        ]
        if len({mark.x for mark in marks}) > 1:
            axes = svg.Axis("whole file, MiB", is_log=True), svg.Axis("KL, nats a token", is_log=True)
            caption = f"Loss on {text} by size of all stored tensors. Point at a mark for its figures."
            parts.append(html.figure(scatter(f"KL by size on {text}", marks, axes), caption))
    return html.section("Loss by size", *parts)


def _table(study: Study, cells: Sequence[Cell], texts: Sequence[str]) -> str:
    """Return the figures of all recipes that change weights."""
    if not cells:
        return ""
    best = {key for keys in study["frontier"]["weights"].values() for key in keys}
    names = ["recipe", "best at its size", "whole bits", "packed bits", "MiB", "cache, bytes a token"]
    rows = [
        [
            cell["label"],
            "yes" if cell["key"] in best else "",
            cell["whole_bpw"],
            cell["bpw"],
            cell["nbytes"] / MIB,
            (cell["cache"] or {}).get("bytes_per_token"),
            *_scores(cell, texts),
        ]
        for cell in cells
    ]
    return html.section(
        "All recipes", _without_empty_columns("Select a column's name to sort", [*names, *_score_names(texts)], rows)
    )


def _without_empty_columns(caption: str, names: Sequence[str], rows: Sequence[Sequence[html.Cell]]) -> str:
    """Return a table without the columns in which nothing stands."""
    kept = [at for at in range(len(names)) if any(row[at] not in (None, "") for row in rows)]
    return html.table(caption, [names[at] for at in kept], [[row[at] for at in kept] for row in rows])


def _scores(cell: Cell, texts: Sequence[str]) -> list[html.Cell]:
    """Return what the columns of `_score_names` show."""
    keys = (("kl_mean", "kl_se"), ("same_top1",), ("perplexity",), ("tokens",))
    return [score(cell, text, key) for alike in keys for text in texts for key in alike]


def _score_names(texts: Sequence[str]) -> list[str]:
    groups = (("KL", "s.e."), ("same top-1",), ("perplexity",), ("tokens",))
    stems = [f" {text.rpartition('.')[0] or text}" if len(texts) > 1 else "" for text in texts]
    return [f"{name}{stem}" for alike in groups for stem in stems for name in alike]


def _caches(study: Study, cells: Sequence[Cell], texts: Sequence[str]) -> str:
    """Return chart and table of recipes of the cache alone."""
    sized = [cell for cell in cells if cell["cache"]]
    if not cells:
        return ""
    parts = []
    for text in texts:
        best = set(study["frontier"]["cache"].get(text, ()))
        marks = [
            Mark(cell["cache"]["bytes_per_token"], value, cell["label"], "cache", cell["key"] in best)
            for cell in sized
            if (value := score(cell, text)) is not None
        ]
        if marks:
            context = sized[0]["cache"]["context"]
            axes = svg.Axis(f"bytes a token at {context:,} tokens"), svg.Axis("KL, nats a token", is_log=True)
            parts.append(
                html.figure(
                    scatter(f"KL by size of the cache on {text}", marks, axes, 400),
                    f"Loss on {text}, in windows of {study['settings']['window']} tokens read through the cache.",
                )
            )
    names = ("recipe", "bytes a token", "exact", "context", *_score_names(texts))
    rows = [
        [cell["label"], *((cell["cache"] or {}).get(key) for key in CACHE_KEYS), *_scores(cell, texts)]
        for cell in cells
    ]
    return html.section("Caches", *parts, html.table("Caches, weights as they are", names, rows))


def _cost(cells: Sequence[Cell]) -> str:
    """Return time and memory, predicted and measured."""
    if not cells:
        return ""
    names = [
        *("recipe", "seconds to make", "of them quantizing", "peak, MiB", "predicted", "seconds to score", "of tasks"),
        *("prefill, tokens/s", "decode, tokens/s", "on", "samples", "of tokens"),
    ]
    rows: list[list[html.Cell]] = []
    for cell in cells:
        cost, speed, text = cell["cost"], cell["speed"] or {}, cell["calibration"] or {}
        peaks = [value / MIB if (value := cost[key]) else None for key in ("measured_peak", "predicted_peak")]
        rows.append(
            [
                cell["label"],
                cost["seconds"],
                cost["quantize_seconds"],
                *peaks,
                cost["scoring_seconds"],
                cost.get("tasks_seconds"),
                *(speed.get(key) for key in ("prefill_tokens_per_s", "decode_tokens_per_s")),
                "its own text" if text.get("self_generated") else text.get("source", "no text"),
                text.get("num_samples"),
                text.get("seq_len"),
            ]
        )
    seconds = {str(row[0]): float(row[1] or 0.0) for row in sorted(rows, key=lambda row: -float(row[1] or 0.0))}
    whole = sum(seconds.values()) + sum(
        float(cell["cost"].get(key) or 0.0) for cell in cells for key in ("scoring_seconds", "tasks_seconds")
    )
    remarks = {
        "resumed_blocks": "Interrupted, so that the time is of the last part only",
        "reused_measurements": "Without the time of measuring options, which another cell or an interrupted run took",
    }
    marked = {key: [cell["label"] for cell in cells if cell["cost"].get(key)] for key in remarks}
    remark = " ".join(f"{remarks[key]}: {', '.join(labels)}." for key, labels in marked.items() if labels)
    return html.section(
        "Time and memory",
        html.paragraph(f"{duration(whole)} for all cells together. {remark}"),
        _without_empty_columns("What it takes to make each", names, rows),
        html.fold("As bars", html.figure(svg.bars("Seconds to make", seconds, svg.Axis("seconds")), "Seconds.")),
    )


def _not_measured(study: Study) -> str:
    """Return what could not be measured, and what is still to come."""
    rows = [[cell["label"], cell["reason"]] for cell in study["failed"]]
    waiting = "; ".join(study["pending"])  # each may hold commas
    return html.section(
        "Not measured",
        html.table("Failed; --retry measures them once more", ("recipe", "why"), rows) if rows else "",
        html.paragraph(f"Still to be measured: {waiting}.") if waiting else "",
    )


def _settings(study: Study) -> str:
    """Return how all was measured."""
    settings = study["settings"]
    measured = [cell for cell in (study["original"], *study["cells"]) if cell is not None]
    versions = measured[0]["versions"] if measured else {}
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    remarks = [[cell["label"], note] for cell in study["cells"] for note in cell["notes"]]
    said = (
        f"Windows of {settings['window']} tokens, at most {settings['max_tokens']:,} tokens of each text, in "
        f"{settings['dtype']} on {settings['device']}, seed {settings['seed']}; {software}. "
        "Standard errors are over windows. A recipe with a cache is scored through it."
    )
    table = html.table("Remarks", ("recipe", "what"), remarks) if remarks else ""
    return html.section(
        "How it was measured",
        html.paragraph(said),
        html.fold(f"{len(remarks)} remarks of the runs", table) if remarks else "",
    )


def calibrations(cells: Sequence[Cell], texts: Sequence[str]) -> str:
    """Return a matrix for each recipe that was calibrated in several ways; "" if there is none."""
    recipes: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell["calibration"]:
            rest = [each for each in cell["overrides"] if not each.startswith(CALIBRATION_AXES)]
            recipes.setdefault(", ".join((cell["name"], *rest)), []).append(cell)
    parts = [_calibration_matrix(name, alike, texts) for name, alike in recipes.items() if len(alike) > 1]
    said = html.paragraph(
        "One row for each calibration, one column for each scored text; the darker, the larger the loss. Compare a "
        "column's cells: a difference of less than twice the standard error says nothing."
    )
    return html.section("Calibration", said, *parts) if parts else ""


def _calibration_matrix(name: str, cells: Sequence[Cell], texts: Sequence[str]) -> str:
    """Return heat map and table of one recipe."""
    cells = sorted(
        cells, key=lambda cell: (_calibration_facts(cell)[0], _calibration_facts(cell)[1], _calibration_facts(cell)[2])
    )
    rows = [
        " ".join((_calibration_facts(cell)[0], f"{_calibration_facts(cell)[1]}×{_calibration_facts(cell)[2]}"))
        for cell in cells
    ]
    values: dict[tuple[int, int], float] = {}
    body: list[list[html.Cell]] = []
    for index, cell in enumerate(cells):
        scores = {row["text"]: row for row in cell["texts"]}
        values |= {(index, at): scores[text]["kl_mean"] for at, text in enumerate(texts) if text in scores}
        figures = [scores.get(text, {}).get(key) for text in texts for key in ("kl_mean", "kl_se", "perplexity")]
        body.append([*_calibration_facts(cell), *figures])
    names = ["calibrated on", "samples", "tokens each"]
    names += [f"{what}, {text}" for text in texts for what in ("KL", "s.e.", "perplexity")]
    title = f"KL of {name} by calibration and scored text"
    return (
        html.figure(svg.heat_map(title, rows, list(texts), values), f"{title}, nats a token.")
        + html.table(f"{name} by calibration", names, body)
        + html.paragraph(_extremes(cells, texts))
    )


def _calibration_facts(cell: Cell) -> tuple[str, int, int]:
    calibration = cell["calibration"]
    return (
        "its own text" if calibration["self_generated"] else calibration["source"],
        calibration["num_samples"],
        calibration["seq_len"],
    )


def _extremes(cells: Sequence[Cell], texts: Sequence[str]) -> str:
    """Say for each text which calibration loses least, and by how much the worst is worse."""
    parts = []
    for text in texts:
        losses = [
            (row["kl_mean"], _calibration_facts(cell)) for cell in cells for row in cell["texts"] if row["text"] == text
        ]
        if len(losses) > 1:
            (least, best), (most, worst) = min(losses), max(losses)
            parts.append(
                f"On {text} the least loss is {svg.number(least)} ({best[0]}, {best[1]}×{best[2]}), the largest "
                f"{svg.number(most)} ({worst[0]}, {worst[1]}×{worst[2]}), {most / max(least, 1e-12):.2f} times as much."
            )
    return " ".join(parts)
