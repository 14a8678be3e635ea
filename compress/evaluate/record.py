"""Keep what was measured of a checkpoint beside it, in scores.json, for its page and for programs.

    {"texts": [{"text", "perplexity", "kl_mean", ...}], "generations": [{"prompt", "base", "model"}],
     "suites": [{"suite", "base", "texts", "tasks", "findings", ...}],
     "sampling": [{"text", "seq_len", "settings", "temperatures", "sampled", ...}],
     "speed": [{"device", "threads", "batch", "decode_tokens_per_s", ...}],
     "studies": [{"model", "text", "recipes": [{"label", "nbytes", "kl_mean", ...}]}]}

A text, a prompt or a suite that was measured before is replaced. The file is no part of the checkpoint: nothing that
loads a model reads it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compress.errors import CheckpointError
from compress.evaluate.scores import Comparison
from compress.storage import json_text
from compress.storage.checkpoint import read_json, write_text
from compress.storage.json_text import INTEGER, LINES, NUMBER, OBJECT, SOME, TEXT
from compress.storage.manifest import SCORES as FILE

REPORT = "report.json"  # what a checkpoint of ours has, and a page is made of
SCORED: Any = {
    **{"text": TEXT, "tokens": INTEGER, "windows": INTEGER, "seq_len": INTEGER},
    **dict.fromkeys(("perplexity", "base_perplexity", "kl_mean", "kl_p95", "kl_p99", "kl_max"), NUMBER),
    **{"same_top1": NUMBER, "kl_se": SOME, "begins_with": TEXT},
}
PAIRED: Any = {
    **dict.fromkeys(("base_accuracy", "difference", "difference_low", "difference_high", "p_value"), NUMBER),
    **{"flips": NUMBER, "all_flips": NUMBER, "lost": INTEGER, "gained": INTEGER},
    **dict.fromkeys(("base_nll", "nll_difference", "nll_low", "nll_high", "base_kl"), SOME),
    **dict.fromkeys(("ratio", "ratio_low", "ratio_high"), SOME),
}
TASK: Any = {
    **{"task": TEXT, "way": TEXT, "items": INTEGER, "paired": PAIRED, "by": TEXT},
    "groups": [
        {
            **{"value": (*NUMBER, str), "items": INTEGER, "accuracy": NUMBER, "base_accuracy": NUMBER},
            **{"nll": SOME, "base_nll": SOME},
        }
    ],
    **dict.fromkeys(("accuracy", "accuracy_low", "accuracy_high"), NUMBER),
    **dict.fromkeys(("accuracy_by_bytes", "tokens_right", "nll", "nll_se", "kl", "kl_se"), SOME),
}
WRITTEN: Any = dict.fromkeys(("prompt", "base", "model"), LINES)
LOST_LAYOUT: Any = {  # `plain` of pair.LostTokens
    **{"text": TEXT, "half": NUMBER, "classes": [dict.fromkeys(("low", "high", "tokens", "kl"), NUMBER)]},
    "worst": [
        {
            **dict.fromkeys(("before", "token", "base_expected", "expected"), LINES),
            **dict.fromkeys(("kl", "base_probability", "probability", "base_confidence", "confidence"), NUMBER),
        }
    ],
}
LAYOUT: dict[str, Any] = {
    "texts": [SCORED],
    "generations": [WRITTEN],
    "suites": [
        {
            **{"suite": TEXT, "base": TEXT, "texts": [SCORED], "floor": OBJECT, "tasks": [TASK], "findings": [TEXT]},
            **{"remarks": [TEXT], "seconds": NUMBER, "cache": TEXT, "cache_read": TEXT},
            **{"written": [WRITTEN], "lost": [LOST_LAYOUT], "begins_with": TEXT},
        }
    ],
}
_SHARES = ("acceptance", "jaccard", "outside", "same_cdf", "same_gumbel", "kl_kept", "entropy", "base_entropy")
_WRITTEN = {
    **dict.fromkeys(("length", "self_bleu", "entropy", "reverse_kl"), NUMBER),
    **{"repetition": {str: NUMBER, "4": NUMBER}, "distinct": {str: NUMBER, "2": NUMBER}},
}
SAMPLING_LAYOUT = [  # `plain` of sampling.SamplingComparison
    {
        **{"text": TEXT, "base": TEXT, "tokens": INTEGER, "seq_len": INTEGER, "begins_with": TEXT},
        "settings": [{"temperature": NUMBER, "filters": TEXT, **dict.fromkeys(_SHARES, NUMBER)}],
        "temperatures": [
            {
                **dict.fromkeys(("temperature", "best", "kl", "kl_best"), NUMBER),
                **{"low": SOME, "high": SOME, "change": (bool,), "at_limit": (bool,)},
            }
        ],
        "sampled": [{"temperature": NUMBER, "filters": TEXT, "base": _WRITTEN, "model": _WRITTEN}],
    }
]
SPEED_LAYOUT = [  # `plain` of speed.Speed
    {
        **{"device": TEXT, **dict.fromkeys(("threads", "batch", "prompt_tokens", "new_tokens"), INTEGER)},
        **dict.fromkeys(("prefill_tokens_per_s", "decode_tokens_per_s"), NUMBER),
        **{"base": TEXT, "base_prefill_tokens_per_s": SOME, "base_decode_tokens_per_s": SOME},
        "layers": [
            {
                **{"shape": [INTEGER], "format": TEXT, "count": INTEGER, "kernel": (bool,)},
                **dict.fromkeys(("bpw", "seconds", "ratio"), NUMBER),
            }
        ],
    }
]
WITHOUT_PREFIX = {"begins_with": ""}  # windows of older files begin with no token of the tokenizer's
LATER: dict[str, dict[str, Any]] = {  # what older files have not
    "texts": WITHOUT_PREFIX,
    "sampling": {**WITHOUT_PREFIX, "beams": []},
    "studies": WITHOUT_PREFIX,
    "suites": {**WITHOUT_PREFIX, "cache": "", "cache_read": "", "written": [], "lost": []},
    "speed": {"base": "", "base_prefill_tokens_per_s": None, "base_decode_tokens_per_s": None},
}
REMEDY = "delete it and measure again"
STUDIES_LAYOUT = [  # `points` of compress/study/losses.py
    {
        **{"model": TEXT, "text": TEXT, "window": INTEGER, "begins_with": TEXT},
        "recipes": [{"label": TEXT, "nbytes": INTEGER, "kl_mean": NUMBER, "kl_se": SOME, "tokens": INTEGER}],
    }
]
MEASURED: dict[str, Any] = {
    "sampling": SAMPLING_LAYOUT,
    "speed": SPEED_LAYOUT,
    "studies": STUDIES_LAYOUT,
}  # in a file only where it was measured


SAME_TEXT = ("text", "seq_len", "begins_with")  # what two scores of one text have in common


def is_kept(directory: Path) -> bool:
    """Tell whether what is measured of a checkpoint is kept: compress has written it."""
    return (directory / REPORT).is_file()


def load(directory: Path) -> dict[str, Any]:
    """Return what is kept of a checkpoint; empty lists without a file. CheckpointError for a damaged one."""
    path, kept = directory / FILE, dict[str, Any](texts=[], generations=[], suites=[])
    if path.is_file():
        kept |= _with_later_keys(read_json(path, REMEDY))
        layout = {**LAYOUT, **{name: rows for name, rows in MEASURED.items() if name in kept}}
        if wrong := json_text.mismatch(kept, layout):
            raise CheckpointError(f"{path} is damaged, or of another version ({wrong}); {REMEDY}")
    return kept


def _with_later_keys(found: dict[str, Any]) -> dict[str, Any]:
    """Return what a file holds, with LATER where it lacks it."""
    for name, later in LATER.items():
        rows = found.get(name, ())
        if isinstance(rows, list):
            found[name] = [{**later, **row} if isinstance(row, dict) else row for row in rows]
    suites = found.get("suites")
    for suite in suites if isinstance(suites, list) else ():
        if isinstance(suite, dict) and isinstance(suite.get("texts"), list):
            suite["texts"] = [{**WITHOUT_PREFIX, **row} if isinstance(row, dict) else row for row in suite["texts"]]
    return found


def add(
    directory: Path,
    texts: Sequence[Comparison] = (),
    generations: Sequence[Mapping[str, str]] = (),
    suites: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Add scores, generations and results of suites to what is kept of a checkpoint; return all."""
    kept = load(directory)
    kept["texts"] = _replace_rows(kept["texts"], [dataclasses.asdict(each) for each in texts], SAME_TEXT)
    kept["generations"] = _replace_rows(kept["generations"], generations, ("prompt",))
    kept["suites"] = _replace_rows(kept["suites"], suites, ("suite", "base", "cache", "begins_with"))
    write_text(directory / FILE, json.dumps(kept, indent=1) + "\n")
    return kept


def add_sampling(directory: Path, found: Mapping[str, Any]) -> None:
    """Add what generation settings do (`sampling.SamplingComparison.plain`) to what is kept of a checkpoint."""
    _add(directory, "sampling", [found], SAME_TEXT)


def add_speed(directory: Path, found: Mapping[str, Any]) -> None:
    """Add rates (`speed.Speed.plain`) to what is kept of a checkpoint."""
    _add(directory, "speed", [found], ("device", "threads", "batch", "prompt_tokens", "new_tokens"))


def add_studies(directory: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add recipes of a study (`study.losses.points`), that the page shows the checkpoint among."""
    _add(directory, "studies", rows, ("model", "text", "begins_with"))


def _add(directory: Path, name: str, rows: Sequence[Mapping[str, Any]], by: Sequence[str]) -> None:
    kept = load(directory)
    kept[name] = _replace_rows(kept.get(name, ()), rows, by)
    write_text(directory / FILE, json.dumps(kept, indent=1) + "\n")


def _replace_rows(
    former: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]], by: Sequence[str]
) -> list[Mapping[str, Any]]:
    names = {tuple(row[key] for key in by) for row in new}
    return [*(row for row in former if tuple(row[key] for key in by) not in names), *new]
