"""Make the caches that are measured on a model, calibrated where they need it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.calib.data import token_windows
from compress.calib.kv import calibrate
from compress.errors import CalibrationError, RecipeError
from compress.evaluate.reader import Candidate, Execution, Reader, load_model, readable
from compress.kv.cache import coded_layers
from compress.kv.settings import CacheSettings
from compress.model import load as lm
from compress.model.architectures import max_positions
from compress.progress import Progress, silent
from compress.recipe.schema import Bos
from compress.run import kv_cache
from compress.run.calibration_text import say_fewer
from compress.runtime.kv_config import stored_section

CALIBRATION = (32, 512)  # samples and tokens of each, for recipes that are calibrated here
OWN_CACHE = "own"  # the name of the cache that a checkpoint stores


def open_reader(
    directory: Path,
    execution: Execution,
    caches: Mapping[str, CacheSettings],
    calib: str | None,
    progress: Progress = silent,
) -> Reader:
    """Load a model that reads and writes through one cache; without any in `caches`, through the checkpoint's own."""
    check(directory, caches, calib)
    model = load_model(directory, execution)
    (candidate,) = candidates_of(model, directory, caches, calib, progress, execution.bos)
    reader = Reader(model, candidate, directory.name)
    reader.attach_cache()
    return reader


def check(directory: Path, caches: Mapping[str, CacheSettings], calib: str | None) -> None:
    """Raise RecipeError or CalibrationError for a cache that the model cannot use as it is named; reads no weights."""
    config = lm.load_config(directory)
    for name, settings in fitting(config, caches, None).items():
        if settings.needs() and calib is None:
            raise _without_text(name)
    if not caches and stored_section(config.to_dict()) is None:
        raise _without_cache(directory)


def fitting(
    config: Any, caches: Mapping[str, CacheSettings], left_out: Callable[[str], None] | None
) -> dict[str, CacheSettings]:
    """Return the caches that a model of this configuration can use.

    `left_out` is told of each of the others, in a line. Without it, and where all are left out, RecipeError is raised.
    """
    fit = {}
    for name, settings in caches.items():
        try:
            kv_cache.check(config, settings)
            fit[name] = settings
        except RecipeError as error:
            if left_out is None:
                raise RecipeError(f"recipe {name}: {error}") from error
            left_out(f"{name} is left out: {error}")
    if caches and not fit:
        raise RecipeError("no cache recipe fits this model; the lines above say why")
    return fit


def candidates_of(
    model: Any,
    directory: Path,
    caches: Mapping[str, CacheSettings],
    calib: str | None,
    progress: Progress,
    bos: Bos = "auto",
) -> list[Candidate]:
    """Return the caches as candidates, calibrated where they need it; without any, the checkpoint's own.

    bos: what each window of the calibration text begins with (calib/prefix.py).
    """
    stored = getattr(model, "kv_cache", None)
    if not caches:
        if stored is None:
            raise _without_cache(directory)
        return [readable(model, Candidate(OWN_CACHE, stored.settings, stored.static))]
    candidates = []
    for name, settings in caches.items():
        static: dict[str, Tensor] = {}
        if settings.needs():
            progress(f"calibrating {name}", 0, 0)
            tokens = _calibration_tokens(model, directory, name, calib, bos)
            static, _ = calibrate(model, coded_layers(model.config, settings), tokens, reading=settings.read)
        candidates.append(readable(model, Candidate(name, settings, static)))
    return candidates


def _without_cache(directory: Path) -> RecipeError:
    return RecipeError(f"{directory} stores no cache of its own; name a recipe")


def _without_text(name: str) -> CalibrationError:
    return CalibrationError(f"the cache recipe {name} is calibrated: give a text with --calib, not the one to score")


def _calibration_tokens(model: Any, directory: Path, name: str, calib: str | None, bos: Bos) -> Tensor:
    if calib is None:
        raise _without_text(name)
    count, length = CALIBRATION
    length = min(length, max_positions(model.config.get_text_config()) or length)
    tokenizer = lm.load_tokenizer(directory)
    vocabulary = model.config.get_text_config().vocab_size
    windows, tokens = token_windows(calib, tokenizer, length, vocabulary, count * length, bos)
    if not len(windows):
        raise CalibrationError(f"{calib} has no window of {length} tokens; give more text to calibrate on")
    if len(windows) < count:
        say_fewer(len(windows), count, tokens)
    return windows[:count]
