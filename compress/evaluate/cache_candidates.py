"""Load a model and make the caches that are measured on it, calibrated where they need it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from compress.calib.data import token_windows
from compress.calib.kv import calibrate
from compress.errors import CalibrationError, RecipeError
from compress.evaluate.cache_scores import Candidate, readable
from compress.evaluate.scores import Execution
from compress.kv import generation, hooks
from compress.kv.cache import coded_layers
from compress.kv.settings import CacheSettings
from compress.model import load as lm
from compress.model.positions import max_positions
from compress.progress import Progress
from compress.recipe.schema import Bos
from compress.run import kv_cache
from compress.run.calibration_text import say_fewer
from compress.runtime.kv_config import stored_section

CALIBRATION = (32, 512)  # samples and their length, for recipes that are calibrated here
OWN = "own"  # the cache of the checkpoint itself


def load_model(directory: Path, execution: Execution) -> PreTrainedModel:
    """Load a model and add the hooks that caches need."""
    model = lm.load_model(directory, execution.dtype, execution.device)
    hooks.attach(model)
    if generation.can_read_codes(model):
        generation.switch(model)
    return model


def with_cache(
    directory: Path, execution: Execution, caches: Mapping[str, CacheSettings], calib: str | None, progress: Progress
) -> tuple[PreTrainedModel, Candidate]:
    """Load a model that writes through one cache, and return that cache, too; without any, the checkpoint's own."""
    check(directory, caches, calib)
    model = load_model(directory, execution)
    (found,) = candidates(model, directory, caches, calib, progress, execution.bos)
    generation.attach(model, found.settings, found.static)
    return model, found


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
    found = {}
    for name, settings in caches.items():
        try:
            kv_cache.check(config, settings)
            found[name] = settings
        except RecipeError as error:
            if left_out is None:
                raise RecipeError(f"recipe {name}: {error}") from error
            left_out(f"{name} is left out: {error}")
    if caches and not found:
        raise RecipeError("no cache recipe fits this model; the lines above say why")
    return found


def candidates(
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
        return [readable(model, Candidate(OWN, stored.settings, stored.static))]
    found = []
    for name, settings in caches.items():
        static: dict[str, Tensor] = {}
        if settings.needs():
            progress(f"calibrating {name}", 0, 0)
            tokens = _calibration_tokens(model, directory, name, calib, bos)
            static, _ = calibrate(model, coded_layers(model.config, settings), tokens, reading=settings.read)
        found.append(readable(model, Candidate(name, settings, static)))
    return found


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
