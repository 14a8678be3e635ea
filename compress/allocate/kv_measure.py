"""Measure the bytes and damages of every option of a cache on the original model.

The whole model is loaded, as it is stored for the bytes and in float32 for the divergence, and a measurement that is
killed starts over. Half of the calibration text calibrates codecs, the other half is scored, its samples joined to
windows of `window_length`: errors grow with the past that they add up over, so that damages at 2,048 tokens say little
of 8,192. What the loss of weights adds to that of the cache is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from compress import process_memory
from compress.allocate import kv_options, kv_tokens
from compress.allocate.kv_budget import CacheCosts, CacheOption
from compress.errors import BudgetError
from compress.evaluate.cache_scores import counter
from compress.evaluate.reader import Execution, load_model
from compress.importers import open_checkpoint
from compress.progress import Progress
from compress.run import source
from compress.run.job import Job

CALIBRATED = 32  # samples, at most
SCORED = 8192  # tokens, at most, and of a window


def window_length(tokens: Tensor, context: int) -> int:
    """Return the tokens of the windows that are scored: the context, as far as SCORED and half of the text go.

    tokens int64 [samples, seq_len], of calibration. A sample that is longer than the context is not cut: what stays
    exact has to fit.
    """
    return max(tokens.shape[1], min(context, SCORED, _parted(tokens)[1].numel()))


def _parted(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the samples that calibrate, and those that are scored: the same one where there is only one."""
    half = min(CALIBRATED, max(1, len(tokens) // 2))
    return tokens[:half], tokens[half:] if len(tokens) > half else tokens


def costs(job: Job, options: Sequence[CacheOption], context: int, tokens: Tensor, progress: Progress) -> CacheCosts:
    """Return the costs of the options of a job's cache at a context; tokens int64 [samples, seq_len].

    Raises BudgetError where the model does not fit into the job's memory.
    """
    recipe, directory = job.recipe.kv_cache, source.of(job)
    assert recipe is not None, "the recipe was checked"
    whole = 4 * sum(math.prod(stored.shape) for stored in open_checkpoint(directory).tensors.values())
    if job.max_memory is not None and process_memory.resident() + whole > job.max_memory:
        raise BudgetError(
            f"measuring a cache takes the whole model in float32, {process_memory.show(whole)}, more than --max-memory "
            "leaves; raise it, or give the bits of the cache in the recipe"
        )
    samples, scored = _parted(tokens)
    scored, length = scored.flatten(), window_length(tokens, context)
    scored = scored[: max(1, min(SCORED, scored.numel()) // length) * length].view(-1, length)
    progress("measuring the bytes of caches", 0, 0)
    stored = load_model(directory, Execution("auto", job.device))
    caches = kv_options.offered(stored, recipe, options, samples)
    asked = kv_tokens.Asked(recipe, options, context)
    sizes = kv_tokens.sized(stored, scored[:1], caches, asked)
    del stored
    model = load_model(directory, Execution("float32", job.device))
    caches = kv_options.offered(model, recipe, options, samples)
    say = counter(progress, "measuring the divergence of caches", len(scored))
    measured = kv_options.measure(model, scored, caches, sizes, say)
    say = counter(progress, "measuring the divergence of evicting", len(scored) * len(asked.evictions()))
    forgotten = kv_tokens.measure(model, scored, asked, sizes, say)
    process_memory.check(job.max_memory)
    return replace(measured, forgotten=forgotten)
