"""Plan what an engine can serve of a model in a given memory: the original and a recipe, each with either cache."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.kv.settings import CacheSettings
from compress.model import load
from compress.model.architectures import max_positions
from compress.model.skeleton import Skeleton
from compress.recipe import Recipe
from compress.run import capacity, plan_summary, prepare, source
from compress.run.capacity import DTYPE, PLAIN, ServingMemory
from compress.run.job import Job
from compress.run.rank_weights import Devices, HeldWeights
from compress.runtime import kv_config
from compress.types import Plan


def of_job(job: Job, memory: ServingMemory) -> dict[str, Any]:
    """Return what serves of the original in bfloat16 and of the job's recipe, with either cache, as JSON values.

    A packed checkpoint stands in the place of a recipe. Of a directory without weights config.json is enough.
    """
    skeleton = Skeleton(source.open_or_imagine(job))
    config, devices = skeleton.config, Devices(skeleton, memory.devices)
    name, settings, static = job.recipe.name, job.recipe.kv_cache, dict[str, Tensor]()
    weights, section = dict[str, HeldWeights](), skeleton.checkpoint.config.get("quantization_config")
    if section:
        name, (settings, static) = skeleton.checkpoint.directory.name, _stored_cache(skeleton)
    if section and (section.get("modules") or "kv_cache" not in section):  # else it tells of a cache alone
        planned = plan_summary.plan_of_packed(skeleton)
        if memory.devices == 1:  # what is stored has other shapes than the original
            weights[PLAIN] = HeldWeights(planned.numel * DTYPE.itemsize)
        weights[name] = devices.weights(planned, DTYPE)
    else:
        weights[PLAIN] = devices.weights(None, DTYPE)
        if job.recipe.packs and not section:
            weights[name] = _count_held(job.recipe, prepare.make_plans(job, skeleton, [job.recipe])[0][0], devices)
    caches = {PLAIN: capacity.served_cache(config, None, memory)}
    if settings is not None:
        caches[name] = capacity.served_cache(config, settings, memory, static)
    positions = max_positions(config.get_text_config())
    choices = [
        {"weights": of, "cache": by, **capacity.count(held.nbytes, kept, memory, positions), "whole": dict(held.whole)}
        for of, held in weights.items()
        for by, kept in caches.items()
    ]
    told = {**memory._asdict(), "positions": positions, "has_weights": source.has_weights(job)}
    return {**told, "choices": choices}


def beside(job: Job, nbytes: int, settings: CacheSettings | None, memory: ServingMemory) -> dict[str, Any]:
    """Return what serves of a job's model beside so many bytes of weights, as JSON values; settings: of its cache."""
    config = load.whole_config(source.of(job))
    kept = capacity.served_cache(config, settings, memory)
    return capacity.count(nbytes, kept, memory, max_positions(config.get_text_config()))


def cache_nbytes(directory: Path, tokens: int, sequences: int) -> int:
    """Return the bytes that a CPU's engine needs for so many sequences of so many tokens, not coded, and for one more.

    Some engines keep a block back, and hold whole blocks of 2 MiB.
    """
    config, memory = load.whole_config(directory), ServingMemory(0, block=capacity.TOKENS_PER_BLOCK["cpu"])
    return capacity.served_cache(config, None, memory).nbytes(tokens) * (sequences + 1) + (8 << 20)


def _count_held(recipe: Recipe, planned: Plan, devices: Devices) -> HeldWeights:
    """Return what a device holds of a plan; in proportion to what bits come to that are still to be allocated."""
    held = devices.weights(planned, DTYPE)
    nbytes, _ = bound_nbytes(recipe, planned)
    return HeldWeights(held.nbytes * nbytes // planned.nbytes, held.whole) if nbytes != planned.nbytes else held


def bound_nbytes(recipe: Recipe, planned: Plan) -> tuple[int, bool]:
    """Return the bytes of a plan, and whether they are only a bound, because bits are still to be allocated."""
    allocation = recipe.allocate
    if allocation is None or allocation.target is None or allocation.target.unit != "bpw":
        return planned.nbytes, allocation is not None
    linears = sum(layer.spec.numel for layer in planned.layers)
    rest = planned.nbytes - sum(layer.nbytes for layer in planned.layers)
    return rest + math.ceil(allocation.target.value * linears / 8), True


def _stored_cache(skeleton: Skeleton) -> tuple[CacheSettings | None, dict[str, Tensor]]:
    """Return the cache of a packed checkpoint, None without one, and its calibrated tensors."""
    directory, config = skeleton.checkpoint.directory, skeleton.config
    section = kv_config.stored_section(skeleton.checkpoint.config)
    if section is None:
        return None, {}
    settings = kv_config.read(section, config.get_text_config(decoder=True).num_hidden_layers)
    return settings, kv_config.read_static(section, directory, config, settings)
