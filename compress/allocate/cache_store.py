"""Keep what the options of a recipe's cache cost in the folder of measurements, and measure what is missing.

The whole model is loaded, as it is stored for the bytes and in float32 for the divergence, and a measurement that is
killed starts over. Half of the calibration text calibrates codecs, the other half is scored, its samples joined to
windows of `window_length`: errors grow with the past that they add up over, so that damages at 2,048 tokens say little
of 8,192. What the loss of weights adds to that of the cache is left out.

Bytes are those of tensors in use; memory grows by up to an eighth more, so that n tokens cost O(n) copies.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from compress import process_memory
from compress.allocate import cache_costs, cache_options
from compress.allocate.cache_options import CacheOption
from compress.allocate.cache_units import CacheCosts, CacheOffer, LayerCosts, TensorCosts
from compress.errors import BudgetError, CheckpointError, NotMeasuredError
from compress.evaluate.reader import Execution, load_model
from compress.kernels import llvm
from compress.model import fingerprint
from compress.progress import Progress, make_counter
from compress.recipe.schema import Allocation
from compress.run.job import Job, Prepared
from compress.storage import json_text
from compress.storage.checkpoint import Checkpoint, read_json, write_text
from compress.storage.json_text import INTEGER, NUMBER, TEXT

MAX_CALIBRATION_SAMPLES = 32
MAX_SCORED_TOKENS = 8192  # the whole scored text, and so a window
COSTS_LAYOUT: dict[str, Any] = {  # `CacheCosts` in a file
    "units": [
        {
            **{"layer": INTEGER, "kind": TEXT, "numel": INTEGER},
            **{"nbytes": [INTEGER], "errors": [NUMBER], "kls": [NUMBER]},
        }
    ],
    "fixed_nbytes": INTEGER,
    "tokens": INTEGER,
    "window": INTEGER,
    "forgotten": [{"layer": INTEGER, "errors": [NUMBER], "kls": [NUMBER], "stored": [NUMBER], "tokens": INTEGER}],
}


def window_length(tokens: Tensor, context: int) -> int:
    """Return the tokens of a scored window: the context, as far as MAX_SCORED_TOKENS and half of the text go.

    tokens int64 [samples, seq_len], of calibration. A sample that is longer than the context is not cut: what stays
    exact has to fit.
    """
    return max(tokens.shape[1], min(context, MAX_SCORED_TOKENS, _split_samples(tokens)[1].numel()))


def _split_samples(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the samples that calibrate, and those that are scored: the same one where there is only one."""
    half = min(MAX_CALIBRATION_SAMPLES, max(1, len(tokens) // 2))
    return tokens[:half], tokens[half:] if len(tokens) > half else tokens


def measure_costs(
    job: Job, checkpoint: Checkpoint, options: Sequence[CacheOption], context: int, tokens: Tensor, progress: Progress
) -> CacheCosts:
    """Return the costs of the options of a job's cache at a context; tokens int64 [samples, seq_len].

    Raises BudgetError where the model does not fit into the job's memory.
    """
    settings = job.recipe.kv_cache
    assert settings is not None, "the recipe was checked"
    whole = 4 * sum(math.prod(stored.shape) for stored in checkpoint.tensors.values())
    if job.max_memory is not None and process_memory.resident() + whole > job.max_memory:
        raise BudgetError(
            f"measuring a cache takes the whole model in float32, {process_memory.show(whole)}, more than --max-memory "
            "leaves; raise it, or give the bits of the cache in the recipe"
        )
    samples, scored = _split_samples(tokens)
    scored, length = scored.flatten(), window_length(tokens, context)
    scored = scored[: max(1, min(MAX_SCORED_TOKENS, scored.numel()) // length) * length].view(-1, length)
    progress("measuring the bytes of caches", 0, 0)
    stored = load_model(checkpoint.directory, Execution("auto", job.device))
    caches = cache_costs.calibrate_options(stored, settings, options, samples)
    offered = cache_costs.OfferedCache(settings, options, context)
    sizes = cache_costs.measure_option_sizes(stored, scored[:1], caches, offered)
    del stored
    model = load_model(checkpoint.directory, Execution("float32", job.device))
    caches = cache_costs.calibrate_options(model, settings, options, samples)
    say = make_counter(progress, "measuring the divergence of caches", len(scored))
    measured = cache_costs.measure_codes(model, scored, caches, sizes, say)
    say = make_counter(
        progress, "measuring the divergence of evicting", len(scored) * len(cache_options.evictions(settings, options))
    )
    forgotten = cache_costs.measure_evictions(model, scored, offered, sizes, say)
    process_memory.check(job.max_memory)
    return dataclasses.replace(measured, forgotten=forgotten)


def offer(
    job: Job, allocation: Allocation, prepared: Prepared, tokens: Tensor, folder: Path, progress: Progress
) -> CacheOffer:
    """Return what the cache of a job may take; tokens int64 [samples, seq_len], of calibration.

    Raises NotMeasuredError where the folder does not hold it and the job may not measure.
    """
    settings, context, checkpoint = job.recipe.kv_cache, allocation.context, prepared.skeleton.checkpoint
    assert settings is not None and context is not None, "the recipe was checked"
    options = cache_options.options(settings, allocation.cache_bits, allocation.cache_options)
    layers = cache_options.check(prepared.skeleton.config.get_text_config(), settings, options, context)
    known = {
        "model": fingerprint.fingerprint(checkpoint),
        "kv_cache": settings.plain(),
        "options": [{**option.settings, "tokens": option.keep} for option in options],
        "context": context,
        "window": window_length(tokens, context),
        "text": hashlib.sha256(tokens.numpy().tobytes()).hexdigest(),
        "processor": sorted(llvm.features()) if llvm.available() else [],  # compiled readers keep tensors of their own
        "software versions": fingerprint.versions(),
    }
    path = folder / f"cache-{hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]}.json"
    if not path.is_file():
        if not job.measures:
            raise NotMeasuredError(f"{folder} has nothing of this cache")
        costs = measure_costs(job, checkpoint, options, context, tokens, progress)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({**known, "costs": dataclasses.asdict(costs)}, indent=1) + "\n")
    return CacheOffer(options, _read(path), context, layers)


def _read(path: Path) -> CacheCosts:
    """Return the costs in a file; CheckpointError if it is damaged."""
    stored, lists = read_json(path), ("nbytes", "errors", "kls", "stored")
    if wrong := json_text.mismatch(stored, {"costs": COSTS_LAYOUT}):
        raise CheckpointError(f"{path} is damaged, or of another version ({wrong}); remove it to measure anew")
    kinds, fixed, counted, window, forgotten = (stored["costs"][key] for key in COSTS_LAYOUT)

    def as_tuples(row: dict[str, Any]) -> dict[str, Any]:
        return {key: tuple(value) if key in lists else value for key, value in row.items()}

    units = tuple(TensorCosts(**as_tuples(row)) for row in kinds)
    return CacheCosts(units, fixed, counted, window, tuple(LayerCosts(**as_tuples(row)) for row in forgotten))
