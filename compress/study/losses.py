"""Read what recipes lost in earlier studies: those that come with the package, or one of the user's own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from compress import recipe
from compress.errors import CheckpointError, OutputError
from compress.evaluate import record
from compress.pages import scatter
from compress.storage import json_text
from compress.storage.checkpoint import read_json
from compress.storage.json_text import INTEGER, NUMBER, SOME, TEXT, Maybe

SHIPPED = "shipped"  # folder of the package
CALIBRATION = "calibration."  # section of a recipe whose values may differ from the shipped ones
SIZE: Any = {"bytes_per_token": NUMBER, "exact_bytes_per_token": NUMBER}
SCORES: Any = {"text": TEXT, **dict.fromkeys(("kl_mean", "kl_se"), Maybe(NUMBER, True)), "tokens": INTEGER}
LAYOUT: Any = {
    "version": INTEGER,
    "model": TEXT,
    "settings": {"texts": [TEXT], "window": INTEGER},
    "cells": [
        {
            **{"name": TEXT, "overrides": [TEXT], "nbytes": INTEGER, "bpw": SOME, "texts": [SCORES]},
            **{"label": Maybe(TEXT, True), "is_cache_only": Maybe((bool,), True), "cache": Maybe(SIZE, True)},
        }
    ],
    **{"original": Maybe({"parameters": Maybe(INTEGER, True)}, True), "fingerprint": Maybe(TEXT, True)},
}


@dataclass(frozen=True)
class RecipeLoss:
    """What one recipe lost on one text."""

    recipe: str
    kl: float  # nats a token
    se: float | None  # standard error of it
    tokens: int  # scored
    nbytes: int  # of all stored tensors of the model that was studied
    bpw: float | None  # bits per packed weight; None where no weight is packed
    cache_share: float | None  # of the bytes of an exact cache; None where the cache stays exact


@dataclass(frozen=True)
class Known:
    """A study, as far as it is of the built-in recipes as they are."""

    model: str
    text: str
    parameters: int  # of the original; 0: not known
    fingerprint: str
    losses: Mapping[str, RecipeLoss]  # by recipe, that change weights
    caches: Mapping[str, RecipeLoss]  # by recipe, of the cache alone

    @property
    def frontier(self) -> list[RecipeLoss]:
        """What no other beats in both loss and size, by the whole file or by bits a packed weight."""
        sizes = (lambda loss: float(loss.nbytes)), (lambda loss: float(loss.bpw or 16.0))
        front = {loss.recipe for size in sizes for loss in unbeaten(list(self.losses.values()), size)}
        return [loss for loss in self.losses.values() if loss.recipe in front]


def unbeaten(losses: Sequence[Any], size: Any) -> list[Any]:
    """Return those that lose less than all that are not larger, smallest first; size: of one."""
    return scatter.unbeaten(losses, size, lambda loss: loss.kl)


def points(path: Path) -> list[dict[str, Any]]:
    """Return the recipes for weights in a study, of each text: what a checkpoint's page draws beside it.

    Each has "model", "text", "window", "begins_with" and "recipes": "label", "nbytes", "kl_mean", "kl_se", "tokens".
    Raises OutputError for what is no study.
    """
    study = _read_study(path)
    keys = ("kl_mean", "kl_se", "tokens")
    rows = []
    for text in study["settings"]["texts"]:
        recipes = [
            {
                "label": str(cell.get("label", cell["name"])),
                "nbytes": cell["nbytes"],
                **{key: row.get(key) for key in keys},
            }
            for cell in study["cells"]
            if not cell.get("is_cache_only") and (row := _row(cell, text)) is not None
        ]
        scored = (row for cell in study["cells"] if (row := _row(cell, text)) is not None)
        begun = next(scored, {}).get("begins_with", "")
        shared = {"model": study["model"], "text": text, "window": study["settings"]["window"]}
        rows.append({**shared, "begins_with": begun, "recipes": recipes})
    if wrong := json_text.mismatch(rows, record.STUDIES_LAYOUT):
        raise OutputError(f"{path} is no study, or of another version ({wrong})")
    return rows


def read_shipped() -> list[Known]:
    """Return the studies that come with the package, by the name of their file."""
    folder = files("compress.study") / SHIPPED
    return [read(Path(str(each))) for each in sorted(folder.iterdir(), key=str) if each.name.endswith(".json")]


def _read_study(path: Path) -> dict[str, Any]:
    """Return what a study.json holds. Raises OutputError for what is none."""
    try:
        study = read_json(path)
    except CheckpointError as error:
        raise OutputError(f"{path} cannot be read; give the study.json of `compress study`") from error
    wrong = json_text.mismatch(study, LAYOUT)
    if wrong or not study["settings"]["texts"]:
        raise OutputError(f"{path} is no study, or of another version ({wrong or 'no text'})")
    return study


def _row(cell: Mapping[str, Any], text: str) -> Mapping[str, Any] | None:
    """Return the scores of a cell on a text, None where it has none."""
    rows = (each for each in cell["texts"] if each.get("text") == text and each.get("kl_mean") is not None)
    return next(rows, None)


def read(path: Path) -> Known:
    """Return the study in a file. Raises OutputError for what is none."""
    study = _read_study(path)
    text, names = study["settings"]["texts"][0], set(recipe.names())
    losses: dict[str, RecipeLoss] = {}
    caches: dict[str, RecipeLoss] = {}
    for cell in study["cells"]:
        is_plain = all(each.startswith(CALIBRATION) for each in cell["overrides"])
        row = _row(cell, text)
        if cell["name"] in names and is_plain and row is not None:
            kept = caches if cell.get("is_cache_only") else losses
            loss = _loss(cell, row)
            if cell["name"] not in kept or loss.kl < kept[cell["name"]].kl:
                kept[cell["name"]] = loss
    parameters = (study.get("original") or {}).get("parameters") or 0
    return Known(study["model"], text, parameters, study.get("fingerprint") or "", losses, caches)


def _loss(cell: Mapping[str, Any], row: Mapping[str, Any]) -> RecipeLoss:
    cache = cell.get("cache")
    exact = cache["exact_bytes_per_token"] if cache else 0
    share = cache["bytes_per_token"] / exact if cache and exact else None
    return RecipeLoss(cell["name"], row["kl_mean"], row.get("kl_se"), row["tokens"], cell["nbytes"], cell["bpw"], share)


def nearest(studies: Sequence[Known], parameters: int, fingerprint: str) -> Known:
    """Return the study of the same model, or else that of the model whose number of parameters is closest."""

    def distance(study: Known) -> tuple[bool, float]:
        known = study.fingerprint == fingerprint
        return not known, abs(math.log(max(1, study.parameters) / max(1, parameters)))

    return min(studies, key=distance)


def rank_agreement(one: Known, other: Known) -> tuple[float, int] | None:
    """Return Spearman's correlation of the losses of the recipes that two studies share, and how many these are."""
    shared = [name for name in one.losses if name in other.losses]
    if len(shared) < 3:
        return None
    ranks = [
        {name: place for place, name in enumerate(sorted(shared, key=lambda name: study.losses[name].kl))}
        for study in (one, other)
    ]
    squares = sum((ranks[0][name] - ranks[1][name]) ** 2 for name in shared)
    count = len(shared)
    return 1 - 6 * squares / (count * (count**2 - 1)), count
