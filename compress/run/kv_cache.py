"""The cache of a checkpoint in the making: checked before the run, calibrated and written after it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from compress import plugins, process_memory
from compress.calib.kv import calibrate
from compress.errors import RecipeError
from compress.kv.cache import CODED, make_cache
from compress.kv.cache import build as build_codec
from compress.kv.codec import Spec
from compress.kv.settings import KINDS, Settings, exact, resolve
from compress.model.skeleton import Skeleton
from compress.recipe import kv
from compress.runtime import kv_config
from compress.storage.checkpoint import open_checkpoint, sha256

STAGE = "cache"  # of a run (compress/storage/workdir.py)
CALIBRATED = 16384  # tokens, at most: a layer's keys, values and queries of all of them are in memory

if TYPE_CHECKING:
    from compress.progress import Progress
    from compress.recipe.kv import CacheRecipe
    from compress.run.job import RunState
    from compress.storage.workdir import Output


def check(config: Any, recipe: CacheRecipe) -> Settings:
    """The recipe's settings for a model of this configuration; RecipeError where they do not fit.

    Codecs without calibration are built for the width of a head that the configuration states, if it states one.
    """
    table = kv.table(recipe)
    make_cache(config, table)
    settings = resolve(table, kv_config.layer_count(config))
    if CODED not in kv_config.layer_types(config):
        raise RecipeError("kv_cache: no layer of this model has the full attention that is coded; remove kv_cache")
    queries, heads, width = _heads(config)
    if getattr(config.get_text_config(decoder=True), "kv_lora_rank", None) is not None:  # caches of another shape
        return settings
    for index, layer in enumerate(coded(config, settings).layers):
        for kind in KINDS:
            if not plugins.load("kv", layer[kind].method).NEEDS:
                spec = Spec(kind, index, len(settings.layers), heads, width, max(1, queries // heads))  # type: ignore[arg-type]
                build_codec(layer[kind], spec, {})
    return settings


def sampled(config: Any, tokens: int) -> int:
    """Bytes of a layer's keys, values and queries, float32, that `build` calibrates on where it has so many tokens."""
    queries, heads, width = _heads(config)
    return 4 * width * (2 * heads + queries) * min(tokens, CALIBRATED)


def _heads(config: Any) -> tuple[int, int, int]:
    """Query heads, KV heads and the width of a head, as a configuration states them."""
    decoder = config.get_text_config(decoder=True)
    queries = decoder.num_attention_heads
    width = getattr(decoder, "head_dim", None) or decoder.hidden_size // queries
    return queries, getattr(decoder, "num_key_value_heads", None) or queries, width


def coded(config: Any, settings: Settings) -> Settings:
    """The settings, exact for layers that a cache leaves to transformers: these have no codec and need no samples."""
    plain = dict.fromkeys(KINDS, exact())
    types = kv_config.layer_types(config)
    layers = [layer if kind == CODED else plain for kind, layer in zip(types, settings.layers, strict=True)]
    return replace(settings, layers=tuple(layers))


def build(output: Output, facts: RunState, progress: Progress) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The section for a finished checkpoint by the recipe of its job, and what the report says of it.

    Codecs are calibrated on the text of the job, CALIBRATED tokens of it, and on the model as it was written. What an
    interrupted run has calibrated is taken from it. None without a recipe, and where only the transforms of a recipe
    were asked for.
    """
    asked = facts.job
    if asked.recipe.kv_cache is None or (asked.recipe.packs and not asked.pack):
        return None, None
    record = output.finished_stage(STAGE)
    if record is None or not _is_intact(output.model, record["section"]):
        progress("calibrating the cache", 0, 0)
        section, found = _calibrated(output.model, facts, asked.recipe.kv_cache)
        record = {"section": section, "calibration": found}
        output.finish_stage(STAGE, record)
    section = record["section"]
    return section, {"calibration": record["calibration"], **section}


def _is_intact(directory: Path, section: dict[str, Any]) -> bool:
    """Whether the file of calibrated tensors, where there is one, is the one that the section speaks of."""
    static, path = section.get("static"), directory / kv_config.FILE
    return static is None or (path.is_file() and sha256(path) == static["sha256"])


def _calibrated(directory: Path, facts: RunState, recipe: CacheRecipe) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Calibrate and write the cache of a checkpoint: its section, and facts of the calibration if there was one."""
    asked = facts.job
    skeleton = Skeleton(open_checkpoint(directory))
    settings = check(skeleton.config, recipe)
    static: dict[str, Tensor] = {}
    found = None
    if kv.needs(recipe):
        assert facts.calibration is not None
        wanted = coded(skeleton.config, settings)
        tokens = facts.calibration.tokens
        tokens = tokens[: max(1, CALIBRATED // tokens.shape[1])]
        file = directory.parent / "cache-states" if facts.prepared.arrangement.spill else None
        static, found = calibrate(skeleton, wanted, tokens, asked.device, file=file)
        process_memory.check(asked.max_memory)
    section = kv_config.write(directory, settings, static)
    kv_config.table(section, len(settings.layers))  # reads it back
    return section, found
