"""Read what a recipe states about itself: `about`, and `measured`, which decide nothing of what is written.

    about:
      goal: 4-bit integers for engines that read them
      method: GPTQ with sweeps of coordinate descent (compress/quant/gptq.py)
      papers: ["2210.17323"]             # numbers of arXiv
      notes: What is no figure.
    measured:                            # one entry for each run of scores; without this section nothing is measured
      - model: tests/models/books-8m
        date: 2026-11-23
        text: tests/data/books_heldout.txt
        tokens: 65408                    # [tokens] scored
        bpw: 4.125
        kl: 0.0026

Both sections are left out of the loaded recipe, so that no checkpoint and no fingerprint depends on them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from yaml import ScalarNode

from compress.recipe.yaml import Entries, check_keys, error_at, mapping, sequence, value

SECTIONS = ("about", "measured")
REQUIRED_KEYS = ("model", "date")


class About(NamedTuple):
    """What a recipe is for."""

    goal: str = ""
    method: str = ""  # with what differs from the papers
    papers: tuple[str, ...] = ()  # numbers of arXiv
    notes: str = ""


class Measurement(NamedTuple):
    """One run of scores; "" where something was not measured. Figures are text, with the digits that were written."""

    model: str = ""
    date: str = ""  # year-month-day
    calibration: str = ""  # text that statistics were collected on
    text: str = ""  # that was scored
    dtype: str = ""  # of the scores
    context: str = ""  # [tokens] behind which a cache is scored
    tokens: str = ""  # scored
    past: str = ""  # [tokens] at least before each scored one
    bits: str = ""  # of a coded number of the cache
    bpw: str = ""  # [bits] stored for a quantized weight
    whole_bpw: str = ""  # [bits] stored for a weight of the whole model
    exact_bytes_per_token: str = ""  # of the exact cache
    bytes_per_token: str = ""  # of the cache at this context
    static_bytes_per_token: str = ""  # of calibrated tensors, for one sequence
    kl: str = ""  # [nats a token] to the original, or to the exact cache
    se: str = ""  # standard error of kl
    perplexity: str = ""
    original: str = ""  # perplexity of the original
    perplexity_ratio: str = ""  # to that of the exact cache
    same_token: str = ""  # [%] of tokens whose most likely successor stays
    gain_kept: str = ""  # [%] of the gain from repeated passages
    needles: str = ""  # "17 of 17"
    seconds: str = ""
    cpu_seconds: str = ""
    notes: str = ""


WORDS = frozenset({"model", "date", "calibration", "text", "dtype", "needles", "notes"})  # the others are numbers


def about(entries: Entries) -> About:
    """Return the section `about` of a recipe, empty without one; RecipeError."""
    if "about" not in entries:
        return About()
    block = mapping(entries["about"][1], "about")
    check_keys(block, About._fields, "about")
    texts = {key: value(block, key, str) for key in block if key != "papers"}
    return About(**texts, papers=value(block, "papers", tuple[str, ...], ()))


def measurements(entries: Entries) -> tuple[Measurement, ...]:
    """Return the section `measured` of a recipe, nothing without one; RecipeError."""
    runs = []
    for node in sequence(entries, "measured"):
        block = mapping(node, "a measurement")
        check_keys(block, Measurement._fields, "a measurement")
        if missing := [key for key in REQUIRED_KEYS if key not in block]:
            raise error_at(node, f"a measurement needs {' and '.join(missing)}")
        runs.append(Measurement(**{key: _figure(block, key) for key in block}))
    return tuple(runs)


def _figure(block: Entries, key: str) -> str:
    """Return a value as it is written, checked."""
    at, node = block[key]
    text = node.value if isinstance(node, ScalarNode) else ""
    if key == "date":
        if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", text):
            raise error_at(at, "date must be year-month-day, such as 2026-11-23")
    else:
        value(block, key, str if key in WORDS else float)
    return text
