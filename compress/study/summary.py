"""Gather the results of a study: study.json for programs, study.csv for spreadsheets, study.html to look at.

All three are made from the cells alone, in an order of their own, so that a study that was interrupted, or measured by
several processes, gives the same files but for times and memory.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from compress.calib.documents import source_name
from compress.pages import html, tasks
from compress.pages import study as page
from compress.pages.scatter import unbeaten
from compress.storage.checkpoint import write_text
from compress.storage.workdir import writing
from compress.study import grid
from compress.study.folder import DONE, StudyFolder

JSON, CSV, PAGE = "study.json", "study.csv", "study.html"
SCORES = ("text", "tokens", "kl_mean", "kl_se", "kl_p99", "same_top1", "perplexity", "base_perplexity")
COST = (
    *("seconds", "quantize_seconds", "resumed_blocks", "reused_measurements"),
    *("predicted_peak", "measured_peak", "scoring_seconds", "scoring_peak"),
)
TASK = ("score", "se", "n", "p_value")  # columns of each task that was asked, its name before
COLUMNS = (
    *("label", "name", "overrides", "status", "purpose", "bpw", "whole_bpw", "nbytes", "cache_bytes_per_token"),
    *SCORES,
    *("calib", "samples", "seq_len"),
    *COST,
    *("prefill_tokens_per_s", "decode_tokens_per_s", "reason", "key"),
)
Result = Mapping[str, Any]


def write(folder: StudyFolder) -> dict[str, Any]:
    """Write the files of a study and return what study.json holds."""
    with writing(folder.folder), folder.hold_lock():
        study = gather(folder)
        plain: dict[str, Any] = html.finite(study)
        write_text(folder.folder / JSON, json.dumps(plain, indent=1, allow_nan=False) + "\n")
        write_text(folder.folder / CSV, table(study))
        write_text(folder.folder / PAGE, page.page(study))
    return plain


def gather(folder: StudyFolder) -> dict[str, Any]:
    """Return all results, done ones by size and failed ones by name, and the labels of what is still to be measured."""
    asked = [(cell, cell.result) for cell in folder.cells()]
    results = [result for _, result in asked if result is not None]
    done = [result for result in results if result["status"] == DONE]
    original = next((result for result in done if result["name"] == grid.ORIGINAL), None)
    cells = sorted((x for x in done if x is not original), key=lambda x: (x["nbytes"], x["key"]))
    named = labels([*done, *(x for x in results if x["status"] != DONE)])
    cells = [{**cell, "label": named[cell["key"]]} for cell in cells]
    failed = [{**x, "label": named[x["key"]]} for x in results if x["status"] != DONE]
    settings: dict[str, Any] = asked[0][0].request["settings"] if asked else {"model": "", "texts": []}
    return {
        "version": grid.VERSION,
        "model": Path(settings["model"].rstrip("/")).name,
        "fingerprint": folder.identity["model"],
        "settings": {
            "texts": [source_name(text) for text in settings["texts"]],
            **{name: settings.get(name) for name in ("window", "max_tokens", "dtype", "device", "seed")},
        },
        "original": original,
        "cells": cells,
        "failed": sorted(failed, key=lambda x: (x["label"], x["key"])),
        "pending": sorted(cell.request["label"] for cell, result in asked if result is None),
        "frontier": frontiers(cells),
    }


def labels(results: Sequence[Result]) -> dict[str, str]:
    """Return key -> the shortest label that tells a cell from the others: its recipe, and what several of it vary."""
    alike: dict[str, list[Result]] = {}
    for result in results:
        alike.setdefault(result["name"], []).append(result)
    labelled = {}
    for name, members in alike.items():
        shared = set.intersection(*(set(member["overrides"]) for member in members))
        sources = {member["calib"] for member in members}
        for member in members:
            varied = [_short(each) for each in member["overrides"] if each not in shared]
            source = [member["calib"] or "no text"] if len(sources) > 1 else []
            labelled[member["key"]] = " ".join((name, *varied, *source))
    return labelled


def _short(override: str) -> str:
    """Return an override without the section it is in."""
    key, _, value = override.partition("=")
    return f"{key.rpartition('.')[2]}={value}"


def frontiers(cells: Sequence[Result]) -> dict[str, dict[str, list[str]]]:
    """Return for weights and for caches: text -> keys of the cells that no other beats in both size and KL."""
    kinds = {
        "weights": ([cell for cell in cells if not cell["is_cache_only"]], lambda cell: cell["nbytes"]),
        "cache": ([cell for cell in cells if cell["is_cache_only"] and cell["cache"]], _cache_size),
    }
    fronts: dict[str, dict[str, list[str]]] = {}
    for kind, (members, size) in kinds.items():
        texts = dict.fromkeys(row["text"] for cell in members for row in cell["texts"])
        fronts[kind] = {text: _front(members, size, text) for text in texts}
    return fronts


def _front(cells: Sequence[Result], size: Callable[[Result], float], text: str) -> list[str]:
    """Return the keys of the cells that no other beats on a text."""
    points = [(size(cell), value, cell["key"]) for cell in cells if (value := loss(cell, text)) is not None]
    return [key for _, _, key in unbeaten(sorted(points), lambda point: point[0], lambda point: point[1])]


def loss(cell: Result, text: str) -> float | None:
    """Return the KL of a cell on a text, None where it was not scored on it."""
    return next((row["kl_mean"] for row in cell["texts"] if row["text"] == text and "kl_mean" in row), None)


def table(found: Mapping[str, Any]) -> str:
    """Return CSV with a row for each cell and text; bytes, seconds, nats a token.

    Tasks have columns of their own, TASK_score and so on, where any were asked; they stand in each row of a cell.
    """
    stream = io.StringIO()
    first = [found["original"]] if found["original"] else []
    cells = (*first, *found["cells"], *found["failed"])
    asked = dict.fromkeys(row["task"] for cell in cells for row in tasks.rows(cell))
    columns = (*COLUMNS, *(f"{task}_{key}" for task in asked for key in TASK))
    rows = csv.DictWriter(stream, columns, extrasaction="ignore", lineterminator="\n")
    rows.writeheader()
    for cell in cells:
        calibration = cell.get("calibration") or {}
        plain = {
            **cell,
            "overrides": " ".join(cell["overrides"]),
            "cache_bytes_per_token": (cell.get("cache") or {}).get("bytes_per_token"),
            "samples": calibration.get("num_samples"),
            "seq_len": calibration.get("seq_len"),
            **(cell.get("cost") or {}),
            **(cell.get("speed") or {}),
            **_tasks(cell),
        }
        for row in cell.get("texts") or [{}]:
            rows.writerow({**plain, **{key: row.get(key) for key in SCORES}})
    return stream.getvalue()


def _tasks(cell: Result) -> dict[str, Any]:
    """Return what the columns of tasks hold; the original has no p_value."""
    columns = [(row["task"], {**row, **(row["paired"] or {})}) for row in tasks.rows(cell)]
    return {f"{task}_{key}": row.get(key) for task, row in columns for key in TASK}


def _cache_size(cell: Result) -> float:
    return float(cell["cache"]["bytes_per_token"])
