"""Offer the options of a recipe's cache, measured or read from the folder of measurements.

Bytes are those of tensors in use; memory grows by up to an eighth more, so that n tokens cost O(n) copies.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.allocate import kv_budget, kv_measure, kv_options
from compress.allocate.kv_budget import CacheCosts, CacheOffer, LayerCosts, TensorCosts
from compress.errors import CheckpointError, NotMeasuredError
from compress.importers import open_checkpoint
from compress.kernels import llvm
from compress.model import fingerprint, load
from compress.progress import Progress
from compress.recipe.schema import Allocation
from compress.run import source
from compress.run.job import Job
from compress.storage import json_text
from compress.storage.checkpoint import read_json, write_text
from compress.storage.json_text import INTEGER, NUMBER, TEXT
from compress.storage.workdir import check_owner

COSTS: dict[str, Any] = {  # in a file: `CacheCosts`
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


def offer(job: Job, allocation: Allocation, tokens: Tensor, folder: Path, progress: Progress) -> CacheOffer:
    """Return what the cache of a job may take; tokens int64 [samples, seq_len], of calibration.

    Raises NotMeasuredError where the folder does not hold it and the job may not measure.
    """
    recipe, context = job.recipe.kv_cache, allocation.context
    assert recipe is not None and context is not None, "the recipe was checked"
    directory = source.of(job)
    options = kv_budget.options(recipe, allocation.cache_bits, allocation.cache_options)
    layers = kv_options.check(load.load_config(directory), recipe, options, context)
    known = {
        "model": fingerprint.fingerprint(open_checkpoint(directory)),
        "kv_cache": recipe.plain(),
        "options": [{**option.settings, "tokens": option.keep} for option in options],
        "context": context,
        "window": kv_measure.window_length(tokens, context),
        "text": hashlib.sha256(tokens.numpy().tobytes()).hexdigest(),
        "processor": sorted(llvm.features()) if llvm.available() else [],  # compiled readers keep tensors of their own
        "software versions": fingerprint.versions(),
    }
    path = folder / f"cache-{hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]}.json"
    if folder.exists():
        check_owner(folder, "--measurements")
    if not path.is_file():
        if not job.measures:
            raise NotMeasuredError(f"{folder} has nothing of this cache")
        costs = kv_measure.costs(job, options, context, tokens, progress)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({**known, "costs": dataclasses.asdict(costs)}, indent=1) + "\n")
    stored, lists = read_json(path), ("nbytes", "errors", "kls", "stored")
    if wrong := json_text.mismatch(stored, {"costs": COSTS}):
        raise CheckpointError(f"{path} is damaged, or of another version ({wrong}); remove it to measure anew")
    listed, fixed, counted, window, forgotten = (stored["costs"][key] for key in COSTS)

    def read(row: dict[str, Any]) -> dict[str, Any]:
        return {key: tuple(value) if key in lists else value for key, value in row.items()}

    units = tuple(TensorCosts(**read(unit)) for unit in listed)
    found = CacheCosts(units, fixed, counted, window, tuple(LayerCosts(**read(layer)) for layer in forgotten))
    return CacheOffer(options, found, context, layers)
