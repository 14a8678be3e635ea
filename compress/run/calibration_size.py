"""Decide how much calibration text a job takes: what its recipe says, or as much as is enough (calib/enough.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from compress import plugins
from compress.calib import enough
from compress.calib.enough import Need
from compress.model import architectures
from compress.model.skeleton import Skeleton
from compress.recipe.schema import AUTO
from compress.run import kv_cache, sizes
from compress.run.job import Job
from compress.types import LayerPlan, Plan

# Names of a configuration for the experts that a token is sent to.
EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_top_k")


class TextSize(NamedTuple):
    """The calibration text of a job, without copies that are rolled on."""

    samples: int  # 0: none is needed
    seq_len: int  # tokens of each
    sentence: str = ""  # how many were chosen, and why; "" where the recipe says it


def choose(job: Job, skeleton: Skeleton, plans: Sequence[Plan], every: bool) -> TextSize:
    """Return the calibration text that a job takes for any of the plans.

    every: statistics of all inputs are taken, whether a method needs them or not.
    """
    settings = job.recipe.calibration
    layers = [layer for each in plans for layer in each.packed if every or sizes.needs_text(layer)]
    is_for_weights = bool(layers) or every or any(step_scope(step) == "block" for step in job.recipe.transform)
    is_for_weights = is_for_weights or (job.pack and bool(job.recipe.tune or job.recipe.pruning))
    edited = skeleton.edits.samples if skeleton.edits is not None else 0
    if not (is_for_weights or edited or calibrates_cache(job)):
        return TextSize(0, 0)
    default = enough.SEQ_LEN if job.recipe.kv_cache is None else enough.CACHE_SEQ_LEN
    asked = default if settings.seq_len == AUTO else settings.seq_len
    seq_len = min(asked, architectures.most_tokens(skeleton.model) or asked)
    few = max(edited, kv_cache.samples(seq_len) if calibrates_cache(job) else 0)
    if settings.num_samples != AUTO:
        return TextSize(settings.num_samples if is_for_weights else min(few, settings.num_samples), seq_len)
    if settings.tokens != AUTO:
        samples = -(-settings.tokens // seq_len)
        return TextSize(samples if is_for_weights else min(few, samples), seq_len)
    if not is_for_weights:
        return TextSize(few, seq_len)
    chosen = enough.choose([*_needs_of_layers(layers, skeleton), *_needs_of_steps(job)])
    samples = max(few, -(-chosen.tokens // seq_len))
    counted = f"{samples * seq_len:,} tokens ({samples:,} x {seq_len:,})"
    return TextSize(samples, seq_len, f"calibration takes {counted}, enough for {chosen.reason}")


def step_scope(step: Any) -> str:
    """Return whether a transform is of one block after the other ("block") or of the whole model ("model")."""
    return str(plugins.load("transform", step.method).SCOPE)


def calibrates_cache(job: Job) -> bool:
    """Return whether the recipe's cache is calibrated on text."""
    return job.recipe.kv_cache is not None and bool(job.recipe.kv_cache.needs())


def _needs_of_layers(layers: Sequence[LayerPlan], skeleton: Skeleton) -> Iterator[Need]:
    """Yield what each linear asks of the text. Of a linear without data that is as much as of any."""
    share = _expert_share(layers, skeleton)
    for layer in layers:
        scheme, width = layer.scheme, layer.spec.shape[1]
        factor, reason = max((_factor(scheme.lowrank), "low-rank parts"), (_factor(scheme.config), scheme.method))
        yield Need(width, layer.bpw, factor, reason, share if layer.spec.is_expert else 1.0)


def _needs_of_steps(job: Job) -> Iterator[Need]:
    """Yield what each transform, and each step of tuning, asks of the text."""
    for step in (*job.recipe.transform, *(job.recipe.tune if job.pack else ())):
        yield Need(factor=_factor(step.config), reason=step.method)


def _factor(config: Any) -> float:
    """Return how many times the tokens of a Hessian a method asks for by its settings."""
    return float(getattr(config, "tokens_factor", 1.0))


def _expert_share(layers: Sequence[LayerPlan], skeleton: Skeleton) -> float:
    """Return the share of the tokens that reach an expert in the mean; 1 where that is not known."""
    config = skeleton.config.get_text_config()
    chosen = next((n for key in EXPERTS_OF_A_TOKEN if isinstance(n := getattr(config, key, None), int)), None)
    by_block: dict[int, set[str]] = {}
    for layer in layers:
        if layer.spec.is_expert:
            by_block.setdefault(layer.spec.block, set()).add(layer.spec.name.rsplit(".", 1)[0])
    most = max(map(len, by_block.values()), default=0)
    return min(1.0, chosen / most) if chosen and most else 1.0
