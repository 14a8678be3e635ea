"""Predict the seconds of a run from counts of what it does, times the speeds of the machine; nothing is run.

Counted are the passes over the calibration text, its statistics, the gradients at outputs of linears, and what each
method says of its own work (`work`, beside its `workspace`). A run is not counted whose methods do not say so, or which
searches, learns or tunes: `predict` returns None for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from compress import plugins
from compress.calib import gradient_pass
from compress.model.skeleton import Skeleton
from compress.quant import two_sided
from compress.run import sizes, speeds
from compress.run.job import Job, Prepared
from compress.types import LayerPlan, LinearSpec, Work

STARTING = 3.0  # [s] of reading headers, tokenizing and checking what is written
OTHER_STEPS = 150  # a weight: loading, measuring its errors, packing, writing, reading back
UPPER = 0.95  # measured: of a whole product's time, what a symmetric one takes with its conversions
GRADIENT_PASSES = 4  # forward, again, and back, which is slower
HEAD_PASSES = 2  # forward and back
ERROR_ROWS = 512  # the most of a weight whose outputs are measured
SCORED = 2  # an attention that weighs tokens takes so many times more


class Seconds(NamedTuple):
    """What a run takes."""

    before: float  # until the first block begins
    blocks: float  # from then on

    @property
    def total(self) -> float:
        """All of it."""
        return self.before + self.blocks


def predict(job: Job, prepared: Prepared) -> Seconds | None:
    """Return the seconds of a run; None where counts do not tell."""
    recipe, plan = job.recipe, prepared.plan
    layers = [*plan.layers, *plan.tables]
    if not job.pack or recipe.transform or recipe.tune or recipe.pruning is not None or job.device != "cpu":
        return None
    if any(layer.scheme.lowrank is not None for layer in layers):
        return None
    works = [_work(layer) for layer in layers]
    known = [work for work in works if work is not None]
    if len(known) < len(works):
        return None
    machine = speeds.of_machine(prepared.skeleton.dtype)
    total = Work(sum(work.products for work in known), sum(work.steps for work in known))
    total = total.plus(_statistics(layers, prepared.samples * prepared.seq_len))
    spent = total.products / machine.float32 + total.steps / machine.steps
    spent += _passes(job, prepared, machine)
    threads = torch.get_num_threads()
    return Seconds(STARTING + _gradients(job, prepared, machine) / threads, spent / threads)


def _work(layer: LayerPlan) -> Work | None:
    """Return what quantizing a linear takes beside its statistics; None if its method does not say."""
    rows, columns = layer.spec.shape
    own = Work(0, OTHER_STEPS * rows * columns)
    if layer.scheme.config is None:
        return own
    method = plugins.load("quant", layer.scheme.method)
    if not hasattr(method, "work"):
        return None
    own = own.plus(method.work(layer.scheme.config, layer.spec.shape))
    if sizes.needs_statistics(layer):
        own = own.plus(Work(2 * min(rows, ERROR_ROWS) * columns**2, 0))
    return own.plus(two_sided.work(layer.spec.shape)) if layer.scheme.two_sided else own


def _statistics(layers: list[LayerPlan], tokens: int) -> Work:
    """Return what summing x x^T over the tokens takes; that of experts, which share the tokens, is left out."""
    inputs = {key: users[0].spec for key, users in sizes.readers(layers).items()}
    return Work(sum(UPPER * tokens * spec.shape[1] ** 2 for spec in inputs.values() if not spec.is_expert), 0)


def _passes(job: Job, prepared: Prepared, machine: speeds.Speeds) -> float:
    """Return the seconds of one thread for the passes of the text through all blocks."""
    tokens, skeleton = prepared.samples * prepared.seq_len, prepared.skeleton
    if not tokens:
        return 0.0
    linears, attention = _of_token(skeleton.linears(is_needed=False)[0], skeleton, prepared.seq_len)
    weighs = 1 + SCORED * (job.recipe.calibration.importance != "none")
    sides = 2 + int(job.is_paired)
    return tokens * (sides * linears / machine.block + (sides - 1 + weighs) * attention / machine.attention)


def _gradients(job: Job, prepared: Prepared, machine: speeds.Speeds) -> float:
    """Return the seconds of one thread for taking gradients, as if none were kept."""
    if prepared.gradients is None or not prepared.gradients.tokens:
        return 0.0
    skeleton, tokens = prepared.skeleton, prepared.gradients.tokens
    in_type = speeds.of_machine(gradient_pass.computed_dtype(skeleton, job.device))
    specs = skeleton.linears(is_needed=False)[0]
    linears, attention = _of_token(specs, skeleton, prepared.seq_len)
    head = HEAD_PASSES * skeleton.vocab_size * skeleton.config.get_text_config().hidden_size
    outputs = sum(UPPER * spec.shape[0] ** 2 for spec in specs if not spec.is_expert)
    each = (GRADIENT_PASSES * linears + head) / in_type.block + (GRADIENT_PASSES + 1) * attention / in_type.attention
    return tokens * (each + outputs / machine.float32)


def _of_token(specs: Iterable[LinearSpec], skeleton: Skeleton, seq_len: int) -> tuple[float, float]:
    """Return the multiply-adds of linears, and those of attention, that a token takes in all blocks."""
    config = skeleton.config.get_text_config()
    linears, blocks = 0.0, set[int]()
    experts = max(1, getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1)
    chosen = getattr(config, "num_experts_per_tok", None) or experts
    for spec in specs:
        linears += spec.shape[0] * spec.shape[1] * (chosen / experts if spec.is_expert else 1)
        blocks.add(spec.block)
    width = getattr(config, "num_attention_heads", 1) * (getattr(config, "head_dim", None) or 0) or config.hidden_size
    return linears, float(len(blocks) * seq_len * width)
