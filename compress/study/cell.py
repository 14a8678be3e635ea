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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compress import api, process_memory, recipe
from compress import evaluate as evaluation
from compress.errors import CompressError, cut, first_line
from compress.evaluate import cache_scores, speed
from compress.importers import open_checkpoint
from compress.model import fingerprint, load
from compress.model.positions import max_positions
from compress.run.job import Job
from compress.run.source import resolve
from compress.storage.checkpoint import read_json
from compress.study import grid, self_written, tasks
from compress.study.folder import RECIPE, CellFolder
from compress.study.layouts import DONE, FAILED

if TYPE_CHECKING:
    from compress.recipe import Recipe
    from compress.study.grid import Settings

SPEED = (64, 16)  # tokens of the prompt and behind it, of a timed model
NOTES = 5  # remarks of a run that a result keeps, at most


def run(own: CellFolder) -> None:
    """Measure a cell and write its result, or why there is none."""
    try:
        result = {"status": DONE, **measured(own)}
    except CompressError as error:
        result = failure(str(error).replace("--dtype", "--quantize-dtype"))  # of a study; its --dtype is of scores
    except MemoryError:
        result = failure("out of memory")
    except Exception as error:  # noqa: BLE001  (a defect in one recipe is no end of the study)
        is_memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        result = failure("out of memory" if is_memory else f"{type(error).__name__}: {first_line(error)}")
        sys.excepthook(*sys.exc_info())
    own.clear(keep=own.settings.keep and result["status"] == DONE)
    own.finish({**described(own), **result})


def described(own: CellFolder) -> dict[str, Any]:
    """Return what a result says of its cell."""
    asked = own.asked
    return {
        "version": grid.VERSION,
        "key": own.key,
        **{name: asked[name] for name in ("name", "label", "overrides")},
        "calib": grid.source_name(asked["calib"]) if asked["calib"] else (grid.SELF if asked["needs_text"] else None),
        "versions": fingerprint.versions(),
        "device": asked["settings"]["device"],
        "seed": asked["settings"]["seed"],
    }


def failure(reason: str) -> dict[str, Any]:
    """Return the result of a cell that could not be measured, and why, in one line."""
    return {"status": FAILED, "reason": cut(reason, 300)}


def measured(own: CellFolder) -> dict[str, Any]:
    """Return the figures of a cell. Raises CompressError."""
    settings, asked = own.settings, own.asked
    if not asked["has_recipe"]:
        return _original(own, settings)
    resolved = dataclasses.replace(recipe.load(str(own.path / RECIPE)), name=asked["name"])
    found = _quantized(own, settings, resolved)
    has_cache = resolved.kv_cache is not None
    process_memory.reset_peak()
    begun = time.monotonic()
    texts = [_scores(own.checkpoint, settings, text, has_cache) for text in settings.texts]
    scoring = round(time.monotonic() - begun, 2)
    figures = {
        "is_cache_only": not resolved.packs,
        "purpose": _purpose(resolved),
        **_sizes(found),
        "texts": texts,
        "calibration": found["calibration"],
        "fallbacks": len(found["fallbacks"]),
        "notes": [note for notes in found["notes"].values() for note in notes][:NOTES],
        "self_check": found["self_check"],
        "cost": {
            "seconds": found["seconds"]["total"],
            "quantize_seconds": found["seconds"]["quantize"],
            "resumed_blocks": found["resumed_blocks"],
            "predicted_peak": found["memory"]["predicted_peak"],
            "measured_peak": found["memory"]["measured_peak"],
            "scoring_seconds": scoring,
            "scoring_peak": process_memory.measured_peak(),
        },
    }
    figures["suites"], seconds = tasks.measured(own.study, settings, own.checkpoint, has_cache)
    figures["cost"]["tasks_seconds"] = seconds
    return {**figures, "speed": _speed(own.checkpoint, settings)}


def _quantized(own: CellFolder, settings: Settings, resolved: Recipe) -> dict[str, Any]:
    """Return the report of the cell's checkpoint, which is made unless an earlier process has."""
    if own.checkpoint.is_dir():
        return read_json(own.checkpoint / "report.json")
    asked = own.asked
    job = Job(
        settings.model,
        resolved,
        own.checkpoint,
        calib=asked["calib"],
        max_memory=settings.max_memory,
        device=settings.device,
        dtype=settings.quantize_dtype,
        seed=settings.seed,
        pack=resolved.packs,
    )
    self_written.put(own.study, job)
    return api.quantize(job)


def _sizes(found: dict[str, Any]) -> dict[str, Any]:
    """Return bits, bytes and what the cache takes, from a report."""
    whole = found.get("whole") or {}
    return {
        "bpw": found["bpw"] if found["layers"] else None,
        "whole_bpw": whole.get("bpw"),
        "packed_share": whole.get("share"),
        "nbytes": found["nbytes"]["total"],
        "cache": (found.get("kv_cache") or {}).get("size"),
    }


def _scores(directory: Path, settings: Settings, text: str, has_cache: bool) -> dict[str, Any]:
    """Return scores against the original: through the checkpoint's own cache if it has one."""
    execution = evaluation.Execution(dtype=settings.dtype, device=settings.device, bos=settings.bos)
    base = resolve(settings.model)
    if not has_cache:
        scores = evaluation.evaluate(directory, text, base, settings.window, settings.max_tokens, execution)
        return dataclasses.asdict(scores)
    lengths = settings.window, settings.max_tokens
    through, read = cache_scores.evaluate([directory, base], text, {}, None, lengths, execution)
    return {**dataclasses.asdict(through), "cache_read": read.text}


def _original(own: CellFolder, settings: Settings) -> dict[str, Any]:
    """Return the figures of the model as it is."""
    directory = resolve(settings.model)
    checkpoint = open_checkpoint(directory)
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
    suites, cost["tasks_seconds"] = tasks.measured(own.study, settings, None)
    return {
        "is_cache_only": False,
        "purpose": "Original",
        "nbytes": checkpoint.nbytes,
        "parameters": sum(tensor.nbytes // tensor.dtype.itemsize for tensor in checkpoint.tensors.values()),
        "positions": max_positions(load.load_config(directory)),
        "texts": texts,
        "suites": suites,
        "cost": cost,
        "speed": _speed(directory, settings),
    }


def _speed(directory: Path, settings: Settings) -> dict[str, Any] | None:
    """Return tokens a second, if they were asked for."""
    if not settings.speed:
        return None
    found = speed.measure(directory, settings.device, 1, *SPEED)
    kept = ("device", "threads", "prompt_tokens", "new_tokens", "prefill_tokens_per_s", "decode_tokens_per_s")
    return {name: getattr(found, name) for name in kept}


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
