"""Measure one cell in a process of its own, as `python -m compress.study.cell FOLDER` does.

The process quantizes the model into FOLDER/checkpoint, which goes on where an earlier process has stopped, scores it,
and writes FOLDER/cell.json last. It ends when the process that has started it ends: that one holds the other end of
its standard input. Every error is the result of the cell, in one line; only what ends the process leaves none.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compress import evaluate as evaluation
from compress import process_memory
from compress.errors import CompressError, first_line
from compress.evaluate import speed
from compress.run.source import resolve
from compress.study import checkpoints, jobs, kept_states, tasks
from compress.study.folder import DONE, CellFolder, failure

if TYPE_CHECKING:
    from compress.recipe import Recipe
    from compress.study.grid import Settings

SPEED = (64, 16)  # tokens of the prompt and behind it, of a timed model
NOTES = 5  # remarks of a run that a result keeps, at most


def run(own: CellFolder) -> None:
    """Measure a cell and write its result, or why there is none."""
    try:
        result = {"status": DONE, **measure(own)}
    except CompressError as error:
        result = failure(str(error).replace("--dtype", "--quantize-dtype"))  # of a study; its --dtype is of scores
    except MemoryError:
        result = failure("out of memory")
    except Exception as error:  # noqa: BLE001  (a defect in one recipe is no end of the study)
        is_memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        result = failure("out of memory" if is_memory else f"{type(error).__name__}: {first_line(error)}")
        sys.excepthook(*sys.exc_info())
    own.clear(keep=own.settings.keep and result["status"] == DONE)
    own.finish({**own.describe(), **result})
    with suppress(CompressError, OSError):
        jobs.forget_measurements(own.study)


def measure(own: CellFolder) -> dict[str, Any]:
    """Return the figures of a cell. Raises CompressError."""
    settings = own.settings
    if not own.request["has_recipe"]:
        return _original(own, settings)
    job = jobs.job_of(own)
    resolved = job.recipe
    report, was_measured = checkpoints.quantize(own, job)
    has_cache = resolved.kv_cache is not None
    process_memory.reset_peak()
    begun = time.monotonic()
    numbers = range(len(settings.texts))
    texts = [kept_states.score(own.study.folder, settings, i, own.checkpoint, has_cache) for i in numbers]
    scoring = round(time.monotonic() - begun, 2)
    figures = {
        "is_cache_only": not resolved.packs,
        "purpose": _purpose(resolved),
        **_sizes(report),
        "texts": texts,
        "calibration": report["calibration"],
        "fallbacks": len(report["fallbacks"]),
        "notes": [note for notes in report["notes"].values() for note in notes][:NOTES],
        "self_check": report["self_check"],
        "cost": {
            "seconds": report["seconds"]["total"],
            "quantize_seconds": report["seconds"]["quantize"],
            "resumed_blocks": report["resumed_blocks"],
            "reused_measurements": was_measured,
            "predicted_peak": report["memory"]["predicted_peak"],
            "measured_peak": report["memory"]["measured_peak"],
            "scoring_seconds": scoring,
            "scoring_peak": process_memory.measured_peak(),
        },
    }
    figures["suites"], seconds = tasks.measure(own.study, settings, own.checkpoint, has_cache)
    figures["cost"]["tasks_seconds"] = seconds
    return {**figures, "speed": _speed(own.checkpoint, settings)}


def _sizes(report: dict[str, Any]) -> dict[str, Any]:
    """Return bits, bytes and what the cache takes, from a report."""
    whole = report.get("whole") or {}
    return {
        "bpw": report["bpw"] if report["layers"] else None,
        "whole_bpw": whole.get("bpw"),
        "packed_share": whole.get("share"),
        "nbytes": report["nbytes"]["total"],
        "cache": (report.get("kv_cache") or {}).get("size"),
    }


def _original(own: CellFolder, settings: Settings) -> dict[str, Any]:
    """Return the figures of the model as it is."""
    directory = resolve(settings.model)
    execution = evaluation.Execution(dtype=settings.dtype, device=settings.device, bos=settings.bos)
    process_memory.reset_peak()
    begun = time.monotonic()
    texts = [
        dataclasses.asdict(
            evaluation.evaluate(directory, text, None, settings.window, settings.max_tokens, execution, None)
        )
        for text in settings.texts
    ]
    cost = {
        "scoring_seconds": round(time.monotonic() - begun, 2),
        "scoring_peak": process_memory.measured_peak(),
    }
    suites, cost["tasks_seconds"] = tasks.measure(own.study, settings, None)
    return {
        "is_cache_only": False,
        "purpose": "Original",
        **checkpoints.describe_original(directory),
        "texts": texts,
        "suites": suites,
        "cost": cost,
        "speed": _speed(directory, settings),
    }


def _speed(directory: Path, settings: Settings) -> dict[str, Any] | None:
    """Return tokens a second, if they were asked for."""
    if not settings.speed:
        return None
    timed = speed.measure(directory, settings.device, 1, *SPEED)
    kept = ("device", "threads", "prompt_tokens", "new_tokens", "prefill_tokens_per_s", "decode_tokens_per_s")
    return {name: getattr(timed, name) for name in kept}


def _purpose(resolved: Recipe) -> str:
    """Return in a word what a recipe compresses."""
    if not resolved.packs:
        return "cache"
    if resolved.kv_cache is not None:
        return "weights and cache"
    return "weights" if resolved.quantize.activations is None else "weights and activations"


def _end_with_parent() -> None:
    """End this process when the one that has started it ends."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


def main(folder: Path) -> None:
    """Measure the cell in a folder for the process that holds the other end of the standard input."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    run(CellFolder(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
