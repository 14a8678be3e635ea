"""Choose the calibration text that a job takes, count the bytes that it demands, and arrange it to fit into memory."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from compress import plugins
from compress.calib import data as calib_data
from compress.calib import enough, gradient_pass, prefix
from compress.calib.enough import Need
from compress.calib.prefix import Prefix
from compress.errors import RecipeError
from compress.model import architectures
from compress.model.skeleton import Skeleton
from compress.quant import parts
from compress.run import kv_cache, loss_gradients, memory_plan, sizes
from compress.run.job import Job, Prepared
from compress.types import LayerPlan, Plan

READER_NBYTES = 64 << 20  # libraries that read parquet files and data sets
MAX_DOCUMENT_NBYTES = 8 << 20  # more of a document is not counted


class TextSize(NamedTuple):
    """The calibration text of a job, without copies that are rolled on."""

    samples: int  # 0: none is needed
    seq_len: int  # tokens of each
    sentence: str = ""  # how many were chosen, and why; "" where the recipe says it


def arrange(job: Job, skeleton: Skeleton, plans: Sequence[Plan], tables: Sequence[LayerPlan], every: bool) -> Prepared:
    """Return the job prepared for the first of its plans. Raises BudgetError where it does not fit into memory.

    tables: all that one of an allocation's options makes of a table. every: statistics of all inputs are taken.
    """
    step = job.recipe.tuning("model") if job.pack else None
    if step is not None and architectures.gives_states(skeleton.config):
        raise RecipeError(
            f"tune: {step.method} trains by the divergence of predictions, and this model makes none; leave it out"
        )
    text = choose_text(job, skeleton, plans, every)
    samples, seq_len = text.samples * job.recipe.calibration.rolled, text.seq_len
    demands = _memory_demands(job, skeleton, plans, samples, seq_len)
    demands = dataclasses.replace(demands, all_statistics=every, tables=tuple(tables))
    arrangement = memory_plan.arrange(plans[0], skeleton, samples, seq_len, job.max_memory, demands)
    begun = _prefix(job, skeleton, samples)
    return Prepared(skeleton, plans[0], arrangement, samples, seq_len, begun, demands.output_gradients, text.sentence)


def choose_text(job: Job, skeleton: Skeleton, plans: Sequence[Plan], every: bool) -> TextSize:
    """Return the calibration text that a job takes for any of the plans.

    every: statistics of all inputs are taken, whether a method needs them or not.
    """
    settings = job.recipe.calibration
    layers = [layer for each in plans for layer in each.packed if every or _needs_text(job, layer)]
    is_for_weights = bool(layers) or every or any(_scope(step) == "block" for step in job.recipe.transform)
    is_for_weights = is_for_weights or (job.pack and bool(job.recipe.tune or job.recipe.pruning))
    edited = skeleton.edits.samples if skeleton.edits is not None else 0
    if not (is_for_weights or edited or _calibrates_cache(job)):
        if job.imatrix is not None and not any(sizes.needs_text(layer) for each in plans for layer in each.packed):
            raise RecipeError(
                f"recipe {job.recipe.name!r} goes by no sizes of inputs, so that an importance matrix changes nothing; "
                "leave out --imatrix"
            )
        return TextSize(0, 0)
    if job.imatrix is not None:
        raise RecipeError(
            f"recipe {job.recipe.name!r} needs calibration text for more than the sizes of inputs (allocation, tuning, "
            "transforms, gradients, low-rank parts, scales of inputs or a cache); leave out --imatrix"
        )
    default = enough.SEQ_LEN if job.recipe.kv_cache is None else enough.CACHE_SEQ_LEN
    asked = default if settings.seq_len == "auto" else settings.seq_len
    seq_len = architectures.sound_states(skeleton.model) or min(
        asked, architectures.most_tokens(skeleton.model) or asked
    )
    few = max(edited, kv_cache.samples(seq_len) if _calibrates_cache(job) else 0)
    if settings.num_samples != "auto":
        return TextSize(settings.num_samples if is_for_weights else min(few, settings.num_samples), seq_len)
    if settings.tokens != "auto":
        samples = -(-settings.tokens // seq_len)
        return TextSize(samples if is_for_weights else min(few, samples), seq_len)
    if not is_for_weights:
        return TextSize(few, seq_len)
    chosen = enough.choose([*_needs_of_layers(layers, skeleton), *_needs_of_steps(job)])
    samples = max(few, -(-chosen.tokens // seq_len))
    counted = f"{samples * seq_len:,} tokens ({samples:,} x {seq_len:,})"
    return TextSize(samples, seq_len, f"calibration takes {counted}, enough for {chosen.reason}")


def _needs_text(job: Job, layer: LayerPlan) -> bool:
    """Return whether a linear needs text: of one that goes by an importance matrix, for more than its Hessian."""
    if job.imatrix is None or layer.scheme.lowrank is not None:
        return sizes.needs_text(layer)
    of_inputs = sizes.needs_in_scale(layer) or sizes.needs_thresholds(layer)
    return of_inputs or sizes.needs_output_gradients(layer)


def _scope(step: Any) -> str:
    """Return whether a transform is of one block after the other ("block") or of the whole model ("model")."""
    return str(plugins.load("transform", step.method).SCOPE)


def _calibrates_cache(job: Job) -> bool:
    """Return whether the recipe's cache is calibrated on text."""
    return job.recipe.kv_cache is not None and bool(job.recipe.kv_cache.needs())


def _needs_of_layers(layers: Sequence[LayerPlan], skeleton: Skeleton) -> Iterator[Need]:
    """Yield what each linear asks of the text. Of a linear without data that is as much as of any."""
    share = _expert_share(layers, skeleton)
    for layer in layers:
        scheme, width = layer.scheme, layer.spec.shape[1]
        factor, reason = max((_factor(scheme.lowrank), "low-rank parts"), (_factor(scheme.config), scheme.method))
        yield Need(width, parts.lowest_bpw(layer), factor, reason, share if layer.spec.is_expert else 1.0)


def _needs_of_steps(job: Job) -> Iterator[Need]:
    """Yield what each transform, and each step of tuning, asks of the text."""
    for step in (*job.recipe.transform, *(job.recipe.tune if job.pack else ())):
        yield Need(factor=_factor(step.config), reason=step.method)


def _factor(config: Any) -> float:
    """Return how many times the tokens of a Hessian a method asks for by its settings."""
    return float(getattr(config, "tokens_factor", 1.0))


def _expert_share(layers: Sequence[LayerPlan], skeleton: Skeleton) -> float:
    """Return the share of the tokens that reach an expert in the mean; 1 where that is not known."""
    chosen = architectures.experts_of_a_token(skeleton.config.get_text_config())
    by_block: dict[int, set[str]] = {}
    for layer in layers:
        if layer.spec.is_expert:
            by_block.setdefault(layer.spec.block, set()).add(layer.spec.name.rsplit(".", 1)[0])
    most = max(map(len, by_block.values()), default=0)
    return min(1.0, chosen / most) if chosen and most else 1.0


def _memory_demands(
    job: Job, skeleton: Skeleton, plans: Sequence[Plan], samples: int, seq_len: int
) -> memory_plan.MemoryDemands:
    """Return what a job's recipe demands beside quantizing its linears. Raises RecipeError for tuning out of order."""
    recipe, cache = job.recipe, None
    if recipe.kv_cache is not None and _calibrates_cache(job):
        facts = samples * seq_len, len(skeleton.blocks), skeleton.dtype.itemsize
        cache = kv_cache.calibration_sizes(skeleton.config, recipe.kv_cache, *facts)
    read_tokens, reader_nbytes, document_nbytes = _size_reading(job, samples, seq_len)
    return memory_plan.MemoryDemands(
        is_paired=samples > 0 and job.is_paired,
        searches=any(_scope(step) == "block" for step in recipe.transform),
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


def _prefix(job: Job, skeleton: Skeleton, samples: int) -> Prefix:
    """Return what each calibration sample will begin with; nothing of sound."""
    bos, directory = job.recipe.calibration.bos, skeleton.checkpoint.directory
    if not samples or architectures.sound_states(skeleton.model) is not None:
        return prefix.NONE
    return prefix.of_directory(directory, bos) if job.calib is not None else calib_data.self_prefix(directory, bos)


def _is_tuned_by_gradients(job: Job) -> bool:
    """Return whether tuning needs gradients; RecipeError where a transform of the recipe outdates them."""
    is_needed = job.pack and sizes.tuning_needs_gradients(job.recipe)
    steps = [step for step in job.recipe.transform if _scope(step) == "block"]
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
