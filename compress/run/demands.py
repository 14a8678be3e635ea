"""Count the bytes that a job demands, and arrange it to fit into memory."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from compress import plugins
from compress.calib import data as calib_data
from compress.calib import gradient_pass, prefix
from compress.calib.prefix import Prefix
from compress.errors import RecipeError
from compress.model.skeleton import Skeleton
from compress.run import calibration_size, kv_cache, loss_gradients, memory_plan, sizes
from compress.run.job import Job, Prepared
from compress.types import LayerPlan, Plan

READER_NBYTES = 64 << 20  # libraries that read parquet files and data sets
MAX_DOCUMENT_NBYTES = 8 << 20  # more of a document is not counted


def arrange(job: Job, skeleton: Skeleton, plans: Sequence[Plan], tables: Sequence[LayerPlan], every: bool) -> Prepared:
    """Return the job prepared for the first of its plans. Raises BudgetError where it does not fit into memory.

    tables: all that one of an allocation's options makes of a table. every: statistics of all inputs are taken.
    """
    text = calibration_size.choose(job, skeleton, plans, every)
    samples, seq_len = text.samples * job.recipe.calibration.rolled, text.seq_len
    demands = _memory_demands(job, skeleton, plans, samples, seq_len)
    demands = dataclasses.replace(demands, all_statistics=every, tables=tuple(tables))
    arrangement = memory_plan.arrange(plans[0], skeleton, samples, seq_len, job.max_memory, demands)
    begun = _prefix(job, skeleton.checkpoint.directory, samples)
    return Prepared(skeleton, plans[0], arrangement, samples, seq_len, begun, demands.output_gradients, text.sentence)


def _memory_demands(
    job: Job, skeleton: Skeleton, plans: Sequence[Plan], samples: int, seq_len: int
) -> memory_plan.MemoryDemands:
    """Return what a job's recipe demands beside quantizing its linears. Raises RecipeError for tuning out of order."""
    recipe, cache = job.recipe, None
    if recipe.kv_cache is not None and calibration_size.calibrates_cache(job):
        facts = samples * seq_len, len(skeleton.blocks), skeleton.dtype.itemsize
        cache = kv_cache.calibration_sizes(skeleton.config, recipe.kv_cache, *facts)
    read_tokens, reader_nbytes, document_nbytes = _size_reading(job, samples, seq_len)
    return memory_plan.MemoryDemands(
        is_paired=samples > 0 and job.is_paired,
        searches=any(calibration_size.step_scope(step) == "block" for step in recipe.transform),
        weighs_tokens=recipe.calibration.importance != "none",
        other_plans=tuple(plans[1:]),
        cache=cache,
        read_tokens=read_tokens,
        reader_nbytes=reader_nbytes,
        document_nbytes=document_nbytes,
        block_tuning=_tuning_workspace(job, "block"),
        model_tuning=_tuning_workspace(job, "model"),
        tuning_gradients=_is_tuned_by_gradients(job),
        output_gradients=_output_gradients(job, skeleton, plans, samples, seq_len),
    )


def _tuning_workspace(job: Job, scope: Literal["block", "model"]) -> Callable[..., int] | None:
    """Return what counts the bytes of the job's tuning of each block, or of the whole model; None without it."""
    step = job.recipe.tuning(scope) if job.pack else None
    return None if step is None else partial(plugins.load("tune", step.method).workspace, step.config)


def _prefix(job: Job, directory: Path, samples: int) -> Prefix:
    """Return what each calibration sample will begin with."""
    bos = job.recipe.calibration.bos
    if not samples:
        return prefix.NONE
    return prefix.of_directory(directory, bos) if job.calib is not None else calib_data.self_prefix(directory, bos)


def _is_tuned_by_gradients(job: Job) -> bool:
    """Return whether tuning needs gradients; RecipeError where a transform of the recipe outdates them."""
    is_needed = job.pack and sizes.tuning_needs_gradients(job.recipe)
    steps = [step for step in job.recipe.transform if calibration_size.step_scope(step) == "block"]
    changing = ", ".join(dict.fromkeys(step.method for step in steps))
    if is_needed and changing:
        raise RecipeError(f"tune: preserve goes by gradients of weights that {changing} changes later; set preserve: 0")
    return is_needed


def _output_gradients(
    job: Job, skeleton: Skeleton, plans: Sequence[Plan], samples: int, seq_len: int
) -> sizes.GradientSizes | None:
    """Return the bytes of the gradients at outputs of linears, None if no linear needs them."""
    if not any(sizes.needs_output_gradients(layer) for each in plans for layer in each.layers):
        return None
    used = loss_gradients.samples(job.recipe.calibration.gradient_tokens, samples, seq_len)
    dtype = gradient_pass.computed_dtype(skeleton, job.device)
    return sizes.output_gradient_sizes(skeleton, used, seq_len, dtype.itemsize)


def _size_reading(job: Job, samples: int, seq_len: int) -> tuple[int, int, int]:
    """Return the tokens of a calibration text that are read, and the bytes of its library and its largest document.

    A document is there as read, cut, and decoded. How large it is shows only when it is read: a file of documents has
    one of its size, or of MAX_DOCUMENT_NBYTES.
    """
    if job.calib is None:
        return 0, 0, 0
    text = Path(job.calib)
    suffix = text.suffix.lower() if os.path.isfile(text) else None  # False for what no file can be called
    document = min(text.stat().st_size, MAX_DOCUMENT_NBYTES) if suffix in (".jsonl", ".json", ".parquet") else 0
    library = READER_NBYTES if suffix in (None, ".parquet") else 0
    return calib_data.most_read(job.calib, samples, seq_len), library, 3 * document


def random_tokens(job: Job, prepared: Prepared) -> Tensor:
    """Return tokens [samples, seq_len] that stand for the calibration text where a block is timed."""
    vocabulary = prepared.skeleton.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(job.seed)
    return torch.randint(vocabulary, (prepared.samples, prepared.seq_len), generator=generator)
