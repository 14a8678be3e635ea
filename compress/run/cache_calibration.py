"""Calibrate the cache of a written checkpoint, and write its section of config.json and its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from compress import process_memory
from compress.calib.kv import calibrate
from compress.kv import cache as caches
from compress.kv.settings import CacheSettings
from compress.model.skeleton import Skeleton
from compress.progress import Progress
from compress.run import kv_cache
from compress.run.job import RunState
from compress.runtime import kv_config
from compress.storage.checkpoint import open_checkpoint, sha256
from compress.storage.json_text import OBJECT
from compress.storage.workdir import Output

CACHE_STAGE = "cache"  # the name of this stage of a run (compress/storage/workdir.py)
CACHE_RECORD = {"section": OBJECT, "calibration": (dict, type(None))}


def build(output: Output, run: RunState, progress: Progress) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return the section of config.json for the recipe's cache, and its facts for the report; None without a cache.

    Codecs are calibrated on CALIBRATION_TOKENS of the job's text, and on the model as it was written. What an
    interrupted run has calibrated is taken from it. A job that only transforms has no cache.
    """
    recipe = run.job.recipe
    if recipe.kv_cache is None or (recipe.packs and not run.job.pack):
        return None, None
    record = output.finished_stage(CACHE_STAGE, CACHE_RECORD)
    if record is None or not _is_intact(output.model, record["section"]):
        progress("calibrating the cache", 0, 0)
        section, calibration = _calibrate(output.model, run, recipe.kv_cache)
        record = {"section": section, "calibration": calibration}
        output.finish_stage(CACHE_STAGE, record)
    section = record["section"]
    if note := kv_cache.left_exact(run.prepared.skeleton.config, recipe.kv_cache):
        run.notes["kv_cache"] = [note]
    return section, {"calibration": record["calibration"], "size": _size(output.model, run, section), **section}


def _size(directory: Path, run: RunState, section: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes of a checkpoint's cache, its calibrated tensors included, as JSON values."""
    skeleton = run.prepared.skeleton
    settings = kv_config.read(section, len(caches.layer_types(skeleton.config)))
    static = kv_config.read_static(section, directory, skeleton.config, settings)
    return kv_cache.bytes_at_context(skeleton.config, settings, static, skeleton.dtype).plain()


def _is_intact(directory: Path, section: dict[str, Any]) -> bool:
    """Return whether the file of calibrated tensors, where there is one, has the hash that the section names."""
    static, path = section.get("static"), directory / kv_config.FILE
    return static is None or (path.is_file() and sha256(path) == static["sha256"])


def _calibrate(directory: Path, run: RunState, settings: CacheSettings) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Calibrate and write the cache of a checkpoint; return its section, and facts of the calibration, None without."""
    skeleton = Skeleton(open_checkpoint(directory))
    codings = caches.coded_layers(skeleton.config, settings)
    static: dict[str, Tensor] = {}
    calibration = None
    if settings.needs():
        assert run.calibration is not None
        tokens = run.calibration.tokens
        tokens = tokens[: kv_cache.samples(tokens.shape[1])]
        file = directory.parent / "cache-states" if run.prepared.arrangement.spill else None
        static, calibration = calibrate(
            skeleton,
            codings,
            tokens,
            run.job.device,
            min(kv_cache.SAMPLES_PER_BATCH, run.prepared.arrangement.batch),
            file,
            settings.read,
        )
        process_memory.check(run.job.max_memory)
    section = kv_config.write(directory, settings, len(codings), static)
    kv_config.read_static(section, directory, skeleton.config, kv_config.read(section, len(codings)))
    return section, calibration
