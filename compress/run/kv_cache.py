"""The cache of a checkpoint in the making: checked before the run, calibrated and written after it."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from compress import plugins, process_memory
from compress.calib.kv import GRADIENTS, SINKS, calibrate
from compress.errors import RecipeError
from compress.kv import cache as caches
from compress.kv import layer as layers
from compress.kv.codec import Spec
from compress.kv.evict import settings as eviction
from compress.kv.settings import EXACT, KINDS, CacheSettings, Coding, Codings
from compress.model.cache_pass import CachedHeads, CachedLayers, cached_layers
from compress.model.skeleton import Skeleton
from compress.run import cache_bytes
from compress.runtime import kv_config
from compress.storage.checkpoint import open_checkpoint, sha256
from compress.storage.json_text import OBJECT

STAGE = "cache"  # of a run (compress/storage/workdir.py)
BATCH = 4  # samples in a forward pass, at most
RECORD = {"section": OBJECT, "calibration": (dict, type(None))}
CALIBRATED = 16384  # tokens, at most: a layer's keys, values and queries of all of them are in memory

if TYPE_CHECKING:
    from compress.progress import Progress
    from compress.run.job import RunState
    from compress.storage.workdir import Output


def check(config: Any, settings: CacheSettings) -> Codings:
    """Return the codings of the layers of a model of this configuration; RecipeError where the settings do not fit.

    No weight is read: it is known before any work whether generation can use the cache.
    """
    if getattr(config.get_text_config(), "cross_attention_layers", None):
        raise RecipeError(
            "kv_cache: layers of this model attend to images, whose cache its own code reads; remove kv_cache"
        )
    types = caches.layer_types(config)
    if caches.CODED not in types:
        raise RecipeError(caches.no_layer(types))
    if getattr(config.get_text_config(), "use_cache", True) is False:
        raise RecipeError(
            "kv_cache: the model's configuration says use_cache: false, so that generation keeps no cache; set it to "
            "true in config.json, or remove kv_cache"
        )
    cached = cached_layers(config)
    if cached.own_cache:
        raise RecipeError(
            f"kv_cache: this model takes no cache but one of its own class, {cached.own_cache}; remove kv_cache"
        )
    if not cached.by_layer:
        raise RecipeError(caches.no_layer())
    _check_model(config, settings, cached)
    codings = caches.coded_layers(config, settings)
    for index, layer in enumerate(codings):
        heads = cached.by_layer.get(index)
        for kind, coding in layer.items():
            if heads is not None and coding.method != EXACT:
                shape = heads.keys if kind == "keys" else heads.values
                queries = max(1, cached.queries // shape[0])
                spec = Spec(kind, index, len(codings), *shape, queries)  # type: ignore[arg-type]
                is_before_rope = _check_coding(coding, spec, heads, cached)
                _check_eviction(settings, coding, spec, heads, is_before_rope)
    return codings


def _check_model(config: Any, settings: CacheSettings, cached: CachedLayers) -> None:
    """Raise RecipeError where the model does not allow what the settings ask of all layers."""
    caches.make_cache(config, settings)  # for its errors
    if settings.evict is not None and settings.evict.prunes and not cached.is_sliceable:
        raise RecipeError(layers.UNSLICED)
    if settings.read is not None and not cached.is_fused:
        raise RecipeError(
            "kv_cache.read: only attention that reads stored codes can choose tokens, and the attention of this model "
            "cannot be replaced; remove read"
        )


def left_exact(config: Any) -> str:
    """Return what to say of the layers whose type is not coded, "" where there is none."""
    types = caches.layer_types(config)
    counts = Counter(kind for kind in types if kind not in (caches.CODED, "dummy"))
    if not counts:
        return ""
    said = ", ".join(f"{count} of {kind}" for kind, count in counts.items())
    return f"the cache of {sum(counts.values())} of {len(types)} layers ({said}) stays as it is; the others' is coded"


def _check_eviction(
    settings: CacheSettings, coding: Coding, spec: Spec, heads: CachedHeads, is_before_rope: bool
) -> None:
    """Raise RecipeError where tokens of a layer cannot be evicted as the settings ask."""
    if settings.evict is None or settings.evict.exempts(spec.layer):
        return
    reason = eviction.refusal(settings.evict, coding, spec.kind, is_before_rope)
    if heads.unwatched:
        reason = f"tokens cannot be evicted from this model, because {heads.unwatched}; remove kv_cache.evict"
    if reason is not None:
        raise RecipeError(f"{spec.where}: {reason}")


def _check_coding(coding: Coding, spec: Spec, heads: CachedHeads, cached: CachedLayers) -> bool:
    """Return whether the keys of a layer are stored before RoPE; RecipeError unless it can be stored like this."""
    plugin = plugins.load("kv", coding.method)
    is_before_rope = spec.kind == "keys" and "keys_pre" in plugin.NEEDS
    if not plugin.NEEDS:
        is_before_rope = layers.build(coding, spec, {}).rope == "pre"
    elif heads.unwatched:
        raise RecipeError(
            f"{spec.where}: {coding.method} cannot be calibrated on this model, because {heads.unwatched}; choose a "
            "method that is not calibrated, such as kivi"
        )
    elif hasattr(plugin, "check_heads"):
        plugin.check_heads(coding.config, spec)
    if is_before_rope and not (heads.rotary and cached.is_half_split):
        raise RecipeError(
            f"{spec.where}: {coding.method} stores keys before the rotary embedding, but this model has none of the "
            "half-split form; choose another method, such as kivi, or rope: post where the method has it"
        )
    if caches.needs_queries(coding, spec.kind) and not cached.is_fused:
        raise RecipeError(caches.no_queries(spec.where, coding))
    return is_before_rope


def samples(seq_len: int) -> int:
    """Return how many samples of so many tokens a cache is calibrated on, at most."""
    return max(1, CALIBRATED // seq_len)


def sampled(config: Any, settings: CacheSettings, tokens: int) -> tuple[int, int]:
    """Return the bytes of the samples of one layer, float32, on so many tokens, and those that learning takes beside.

    Learning begins with joining the samples of each name.
    """
    cached, held, learning = cached_layers(config), 0, 0
    for index, kinds in enumerate(caches.coded_layers(config, settings)):
        modules = [plugins.load("kv", coding.method) for coding in kinds.values()]
        modules += [] if settings.read is None else [plugins.load("read", settings.read.method)]
        needed = frozenset[str]().union(*(module.NEEDS for module in modules))
        heads = cached.by_layer.get(index)
        if not needed or heads is None:
            continue
        channels = {"keys": math.prod(heads.keys), "values": math.prod(heads.values)}
        channels["keys_pre"], channels["queries"] = channels["keys"], cached.queries * heads.keys[1]
        channels |= dict.fromkeys(("queries_pre", "queries_scaled", "gradients_output"), channels["queries"])
        channels |= {"gradients": channels["keys"] + channels["values"], **dict.fromkeys(SINKS, 0)}
        channels["attended"] = heads.keys[0]
        work = max(module.WORK for module in modules if module.NEEDS)
        held = max(held, 4 * sum(channels[name] for name in needed | {*KINDS}))
        learning = max(learning, 4 * max(channels.values()), work * max(channels[x] for x in needed - GRADIENTS))
    return held * min(tokens, CALIBRATED), learning * min(tokens, CALIBRATED)


def build(output: Output, facts: RunState, progress: Progress) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The section for a finished checkpoint by the recipe of its job, and what the report says of it.

    Codecs are calibrated on the text of the job, CALIBRATED tokens of it, and on the model as it was written. What an
    interrupted run has calibrated is taken from it. None without a recipe, and where only the transforms of a recipe
    were asked for.
    """
    asked = facts.job
    if asked.recipe.kv_cache is None or (asked.recipe.packs and not asked.pack):
        return None, None
    record = output.finished_stage(STAGE, RECORD)
    if record is None or not _is_intact(output.model, record["section"]):
        progress("calibrating the cache", 0, 0)
        section, found = _calibrated(output.model, facts, asked.recipe.kv_cache)
        record = {"section": section, "calibration": found}
        output.finish_stage(STAGE, record)
    section = record["section"]
    if said := left_exact(facts.prepared.skeleton.config):
        facts.notes["kv_cache"] = [said]
    return section, {"calibration": record["calibration"], "size": _size(output.model, facts, section), **section}


def _size(directory: Path, facts: RunState, section: dict[str, Any]) -> dict[str, Any]:
    """Return what the cache of a checkpoint takes, with its calibrated tensors."""
    skeleton = facts.prepared.skeleton
    settings = kv_config.read(section, len(caches.layer_types(skeleton.config)))
    static = kv_config.read_static(section, directory, skeleton.config, settings)
    return cache_bytes.at_context(skeleton.config, settings, static, skeleton.dtype).plain()


def _is_intact(directory: Path, section: dict[str, Any]) -> bool:
    """Whether the file of calibrated tensors, where there is one, is the one that the section speaks of."""
    static, path = section.get("static"), directory / kv_config.FILE
    return static is None or (path.is_file() and sha256(path) == static["sha256"])


def _calibrated(
    directory: Path, facts: RunState, settings: CacheSettings
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Calibrate and write the cache of a checkpoint: its section, and facts of the calibration if there was one."""
    asked = facts.job
    skeleton = Skeleton(open_checkpoint(directory))
    codings = caches.coded_layers(skeleton.config, settings)
    static: dict[str, Tensor] = {}
    found = None
    if settings.needs():
        assert facts.calibration is not None
        tokens = facts.calibration.tokens
        tokens = tokens[: samples(tokens.shape[1])]
        file = directory.parent / "cache-states" if facts.prepared.arrangement.spill else None
        static, found = calibrate(
            skeleton,
            codings,
            tokens,
            asked.device,
            min(BATCH, facts.prepared.arrangement.batch),
            file,
            settings.read,
        )
        process_memory.check(asked.max_memory)
    section = kv_config.write(directory, settings, len(codings), static)
    kv_config.read_static(section, directory, skeleton.config, kv_config.read(section, len(codings)))
    return section, found
