"""Say what the files of a study's cells hold, so that a damaged one, or one of another version, is found on reading.

The layouts are those of compress/storage/json_text.py.
"""

from __future__ import annotations

from typing import Any

from compress.storage.json_text import INTEGER, LINES, NUMBER, TEXT, Maybe, mismatch

DONE, FAILED = "done", "failed"
ASKED: Any = {
    **{"name": LINES, "label": LINES, "overrides": [LINES], "calib": Maybe(LINES)},
    **{"needs_text": (bool,), "cost": INTEGER, "has_recipe": (bool,)},
    "settings": {
        **{"model": LINES, "texts": [LINES], "dtype": TEXT, "device": TEXT, "keep": (bool,)},
        **dict.fromkeys(("window", "max_tokens", "seed"), INTEGER),
        **{"max_memory": Maybe(INTEGER), "speed": Maybe((bool,), True), "suite": Maybe(TEXT, True)},
        **{"tasks": Maybe([LINES], True), "quantize_dtype": Maybe(TEXT, True)},
    },
}
RUN: Any = {"identity": {"model": TEXT}}
NAMED: Any = {  # every result
    **{"version": INTEGER, "key": TEXT, "status": TEXT, "name": LINES, "label": LINES, "overrides": [LINES]},
    **{"calib": Maybe(LINES)},
}
SIZE: Any = {"bytes_per_token": NUMBER, "exact_bytes_per_token": NUMBER, "context": INTEGER}
TEXTS: Any = [
    {
        **{"text": LINES, "tokens": INTEGER, "perplexity": NUMBER},
        **dict.fromkeys(("kl_mean", "kl_se", "kl_p99", "same_top1", "base_perplexity"), Maybe(NUMBER, True)),
    }
]
PAIRED: Any = {
    **dict.fromkeys(("difference", "difference_low", "difference_high", "p_value"), NUMBER),
    **{"lost": INTEGER, "gained": INTEGER},
    **dict.fromkeys(("nll_difference", "nll_low", "nll_high"), Maybe(NUMBER)),
}
TASKS: Any = [
    {
        **{"task": LINES, "score": NUMBER, "n": INTEGER, "paired": Maybe(PAIRED)},
        **dict.fromkeys(("se", "base", "nll", "nll_se"), Maybe(NUMBER)),
    }
]
MEASURED: Any = {  # a cell that was measured
    **{"is_cache_only": (bool,), "purpose": LINES, "nbytes": INTEGER, "texts": TEXTS, "versions": {str: LINES}},
    **{"suites": Maybe({str: TASKS}, True), "parameters": Maybe(INTEGER, True), "positions": Maybe(INTEGER, True)},
    "speed": Maybe(
        {
            **{"device": TEXT, "threads": INTEGER, "prompt_tokens": INTEGER, "new_tokens": INTEGER},
            **dict.fromkeys(("prefill_tokens_per_s", "decode_tokens_per_s"), NUMBER),
        }
    ),
    "cost": {
        **{"scoring_seconds": NUMBER},
        **dict.fromkeys(("scoring_peak", "tasks_seconds"), Maybe(NUMBER, True)),
    },
}
QUANTIZED: Any = {  # one with a recipe
    **{"bpw": Maybe(NUMBER), "whole_bpw": Maybe(NUMBER), "packed_share": Maybe(NUMBER, True)},
    **{"cache": Maybe(SIZE), "notes": [LINES]},
    "calibration": Maybe(
        {**{"source": LINES, "num_samples": INTEGER, "seq_len": INTEGER}, "self_generated": (bool,)},
    ),
    "cost": {
        **MEASURED["cost"],
        **{"seconds": NUMBER, "quantize_seconds": NUMBER, "resumed_blocks": INTEGER},
        **dict.fromkeys(("predicted_peak", "measured_peak"), Maybe(NUMBER)),
    },
}


def of_result(found: Any, key: str, original: str) -> str | None:
    """Return what is wrong with the result of the cell `key`, None if nothing is. original: the name of that cell."""
    if wrong := mismatch(found, NAMED):
        return wrong
    layouts: dict[str, Any] = {
        FAILED: {"reason": LINES},
        DONE: MEASURED if found["name"] == original else {**MEASURED, **QUANTIZED},
    }
    if found["status"] not in layouts:
        return f"status is {found['status']}"
    if found["key"] != key:
        return f"it is of the cell {found['key']}"
    return mismatch(found, layouts[found["status"]])
