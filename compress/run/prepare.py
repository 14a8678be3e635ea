"""Decide everything about a job before a weight is read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from compress import plugins
from compress.calib import data as calib_data
from compress.calib import prefix
from compress.calib.kv import GRADIENTS
from compress.calib.prefix import Prefix
from compress.errors import CheckpointError, RecipeError
from compress.importers import companions, open_checkpoint
from compress.model import dry_load, positions
from compress.model.skeleton import Skeleton
from compress.numerics import kl
from compress.progress import note
from compress.recipe import Recipe
from compress.run import (
    calibration_text,
    expert_pruning,
    kv_cache,
    memory_plan,
    outside_plan,
    plan,
    plan_summary,
    remote_code,
    sizes,
    source,
)
from compress.run.job import Job, Prepared
from compress.storage import paths
from compress.storage.checkpoint import Checkpoint
from compress.types import Plan, Scheme

ARROW = 64 << 20  # bytes of the library that reads parquet files and data sets
DOCUMENT = 8 << 20  # bytes of a document that are counted at most


def prepare(job: Job) -> Prepared:
    """Open the model, apply the recipe, arrange the memory. Of the weights only headers are read."""
    return prepare_all(job, [job.recipe])[0]


def prepare_all(
    job: Job, recipes: Sequence[Recipe], every: bool = False, tables: Sequence[Scheme | None] = ()
) -> tuple[Prepared, list[Plan]]:
    """Prepare a job for the first of several recipes that differ in their schemes; return the plans of all.

    `every`: statistics of all inputs, and so calibration text, whether a method needs them or not. `tables`: all
    schemes of the tables outside of the blocks, where an allocation chooses one.
    """
    calibration_text.check(job)
    checkpoint = open_checkpoint(source.of(job))
    paths.check_apart(job.out, *map(Path, source.given(job)))
    if packed := checkpoint.config.get("quantization_config"):
        method = packed.get("quant_method") if isinstance(packed, dict) else packed
        raise CheckpointError(f"{job.model} is already quantized ({method}); give the original checkpoint")
    skeleton = Skeleton(checkpoint)
    skeleton.check_tensors()
    _look_around(checkpoint)
    scopes = {step.method: plugins.load("transform", step.method).SCOPE for step in job.recipe.transform}
    for step in job.recipe.transform:
        if scopes[step.method] == "model":
            skeleton.edits = plugins.load("transform", step.method).apply(skeleton, step.config, job.seed)
    if job.recipe.kv_cache is not None:
        kv_cache.check(skeleton.config, job.recipe.kv_cache)
    plans = [plan.make(recipe, skeleton, job.pack) for recipe in recipes]
    options = plan.table_options(job.recipe, skeleton, tables)
    if job.pack:
        matrices = plan_summary.matrix_sizes(skeleton)
        plans = [plan_summary.add_reasons(each, skeleton, matrices) for each in plans]
        for each in plans if not job.allow_partial else ():
            plan_summary.check(each, checkpoint.directory, matrices, job.recipe.ignore)
        expert_pruning.check(job.recipe, plans[0])
        dry_load.check_planned(skeleton, outside_plan.with_smallest_tables(plans[0], options))
    settings, samples, seq_len = job.recipe.calibration, 0, 0
    calibrates_cache = job.recipe.kv_cache is not None and bool(job.recipe.kv_cache.needs())
    needs_text = every or "block" in scopes.values() or any(sizes.needs_text(x) for p in plans for x in p.packed)
    tune, whole = (job.recipe.tuning(scope) if job.pack else None for scope in ("block", "model"))
    needs_text = needs_text or (job.pack and bool(job.recipe.tune or job.recipe.pruning))
    tried = skeleton.edits.samples if skeleton.edits is not None else 0
    if needs_text or tried or calibrates_cache:
        seq_len = min(settings.seq_len, positions.most_tokens(skeleton.model) or settings.seq_len)
        few = max(tried, kv_cache.samples(seq_len) if calibrates_cache else 0)
        samples = (settings.num_samples if needs_text else min(few, settings.num_samples)) * settings.rolled
    read_tokens, reader_nbytes, document_nbytes = _reading(job, samples, seq_len)
    demands = memory_plan.MemoryDemands(
        is_paired=samples > 0 and job.is_paired,
        searches="block" in scopes.values(),
        weighs_tokens=settings.importance != "none",
        other_plans=tuple(plans[1:]),
        all_statistics=every,
        cache=_cache_sizes(job.recipe, skeleton, samples * seq_len) if calibrates_cache else None,
        read_tokens=read_tokens,
        reader_nbytes=reader_nbytes,
        document_nbytes=document_nbytes,
        block_tuning=partial(plugins.load("tune", tune.method).workspace, tune.config) if tune is not None else None,
        model_tuning=partial(plugins.load("tune", whole.method).workspace, whole.config) if whole is not None else None,
        tuning_gradients=_is_tuned_by_gradients(job, scopes),
        tables=tuple(layer for table in options for layer in table.layers.values()),
    )
    arrangement = memory_plan.arrange(plans[0], skeleton, samples, seq_len, job.max_memory, demands)
    begun = _prefix(job, checkpoint.directory, samples)
    return Prepared(skeleton, plans[0], arrangement, samples, seq_len, begun), plans


def _prefix(job: Job, directory: Path, samples: int) -> Prefix:
    """Return what each calibration sample will begin with."""
    bos = job.recipe.calibration.bos
    if not samples:
        return prefix.NONE
    return prefix.of_directory(directory, bos) if job.calib is not None else calib_data.self_prefix(directory, bos)


def _look_around(checkpoint: Checkpoint) -> None:
    """Check the files beside the weights, and note what is left out of them. Raises CheckpointError."""
    remote_code.check_tokenizer(checkpoint.directory)
    for remark in companions.notes(checkpoint):
        note(remark)


def _is_tuned_by_gradients(job: Job, scopes: Mapping[str, str]) -> bool:
    """Return whether tuning needs gradients; RecipeError where a transform, name -> scope, outdates them."""
    is_needed = job.pack and sizes.tuning_needs_gradients(job.recipe)
    if is_needed and "block" in scopes.values():
        changing = ", ".join(name for name, scope in scopes.items() if scope == "block")
        raise RecipeError(f"tune: preserve goes by gradients of weights that {changing} changes later; set preserve: 0")
    return is_needed


def _reading(job: Job, samples: int, seq_len: int) -> tuple[int, int, int]:
    """Return the tokens of a calibration text that are read, and the bytes of its library and its largest document.

    A document is there as read, cut, and decoded. How large it is shows only when it is read: a file of documents has
    one of its size, or of DOCUMENT.
    """
    if job.calib is None:
        return 0, 0, 0
    source = Path(job.calib)
    suffix = source.suffix.lower() if os.path.isfile(source) else None  # False for what no file can be called
    document = min(source.stat().st_size, DOCUMENT) if suffix in (".jsonl", ".json", ".parquet") else 0
    library = ARROW if suffix in (None, ".parquet") else 0
    return calib_data.most_read(job.calib, samples, seq_len), library, 3 * document


def _cache_sizes(recipe: Recipe, skeleton: Skeleton, tokens: int) -> memory_plan.CacheSizes:
    assert recipe.kv_cache is not None, "the caller has checked"
    hidden = skeleton.config.get_text_config().hidden_size * skeleton.dtype.itemsize
    is_backward = bool(GRADIENTS & recipe.kv_cache.needs())
    sides = len(skeleton.blocks) + 2 if is_backward else 1
    logits = memory_plan.LOGITS * kl.LOGITS_NBYTES if is_backward else 0
    states = sides * min(tokens, kv_cache.CALIBRATED) * hidden
    sampled, learning = kv_cache.sampled(skeleton.config, recipe.kv_cache, tokens)
    return memory_plan.CacheSizes(sampled, learning, states, logits, kv_cache.BATCH)


def random_tokens(job: Job, prepared: Prepared) -> Tensor:
    """Return tokens [samples, seq_len] that stand for the calibration text where a block is timed."""
    vocabulary = prepared.skeleton.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(job.seed)
    return torch.randint(vocabulary, (prepared.samples, prepared.seq_len), generator=generator)
