"""Predict the time of a run, by counts or from timing one block where they do not tell, and the disk that it takes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from torch import nn

from compress import plugins
from compress.model import blockwise
from compress.progress import Progress, silent
from compress.run import counts, demands, prepare, sizes
from compress.run.checkpoint_blocks import CheckpointBlocks
from compress.run.job import Job, Prepared, RunState
from compress.run.loop import BlockLoop, LinearOptions
from compress.storage.workdir import Output
from compress.tune.trained import DiskSizes

GRADIENT_PASSES = 4  # times the calibration passes of as many tokens that taking gradients at outputs costs


class TimedBlocks(CheckpointBlocks):
    """Do the same work on a block, to time it, and write nothing."""

    token_seconds = 0.0  # of a token on its way through the block, where a model is tuned as a whole

    def finish(self, index: int, block: nn.Module, notes: list[str]) -> None:
        """Tune the block, and train its low-rank parts."""
        self.tune(block)
        self.train(index, block)
        if self.run.job.recipe.tuning("model") is None:
            return
        hidden, call = next(iter(self.stream.batches(index)))
        started = time.monotonic()
        blockwise.run_block(block, call, hidden, self.skeleton.block_prefix(index).rstrip("."))
        self.token_seconds = (time.monotonic() - started) / hidden.shape[:2].numel()


def prepare_and_time(job: Job, progress: Progress, on_plan: Callable[[Prepared], None]) -> tuple[Prepared, float]:
    """Return a job prepared, and the seconds that it would take; `on_plan` may refuse the plan before that is known."""
    progress("reading headers", 0, 0)
    prepared = prepare.prepare(job)
    on_plan(prepared)
    if (seconds := predict_by_counts(job, prepared)) is not None:
        return prepared, seconds.total
    progress("timing one block", 0, 0)
    return prepared, predict_seconds(job, prepared)


def predict_by_counts(job: Job, prepared: Prepared) -> counts.Seconds | None:
    """Return the seconds of a run by counts; None where they do not tell."""
    return counts.predict(job, prepared)


def predict_seconds(job: Job, prepared: Prepared) -> float:
    """Return the time of the whole loop, from one batch and all linears of the block with the most to write.

    Tables outside of the blocks are taken to cost what as many weights of the blocks do.
    Without what a transform of the whole model searches or learns before.
    """
    batch = min(prepared.arrangement.batch, prepared.samples)
    arrangement = dataclasses.replace(prepared.arrangement, spill=False)
    trial = dataclasses.replace(prepared, samples=batch, arrangement=arrangement)
    tokens = demands.random_tokens(job, trial) if batch else None
    output = Output(job.out)
    loop = BlockLoop(job, trial, one_option_each(trial), tokens, output.work, silent)
    blocks = TimedBlocks(RunState(job, trial), output, loop.stream)
    seconds = loop.predict_seconds(blocks, -(-prepared.samples // batch) if batch else 0)
    seconds += _gradient_seconds(prepared, loop.stream.seconds / (batch * prepared.seq_len)) if batch else 0.0
    inner, outer = (sum(layer.spec.numel for layer in x) for x in (prepared.plan.layers, prepared.plan.tables))
    return (seconds * (1 + outer / inner) if inner else seconds) + _tuning_seconds(job, prepared, blocks.token_seconds)


def _gradient_seconds(prepared: Prepared, token: float) -> float:
    """Return the time of taking gradients at outputs of linears, as if none were kept; token: seconds in a block."""
    tokens = prepared.gradients.tokens if prepared.gradients is not None else 0
    return GRADIENT_PASSES * tokens * len(prepared.skeleton.blocks) * token


def _tuning_seconds(job: Job, prepared: Prepared, token: float) -> float:
    """Return the time of tuning the whole model, 0 without it; token: seconds of one in a block."""
    step, skeleton = job.recipe.tuning("model"), prepared.skeleton
    if step is None or not job.pack or not prepared.plan.layers:
        return 0.0
    head = skeleton.vocab_size * skeleton.config.get_text_config().hidden_size
    head_share = head / sum(layer.spec.numel for layer in prepared.plan.layers)
    count = plugins.load("tune", step.method).positions(step.config, prepared.samples, prepared.seq_len)
    return float(count * token * len(skeleton.blocks) * (1 + head_share))


def one_option_each(prepared: Prepared) -> LinearOptions:
    """Return the one option of each linear."""
    return {layer.spec.name: {"": layer} for layer in prepared.plan.layers}


def disk_nbytes(job: Job, prepared: Prepared) -> int:
    """Return the bytes that a run writes: the checkpoint, and the stream (both sides if paired) if it spills.

    Before there is a stream, gradients have states of their own; once it is gone, tuning of the whole model has.
    """
    skeleton, samples, seq_len = prepared.skeleton, prepared.samples, prepared.seq_len
    hidden = skeleton.config.get_text_config().hidden_size
    sides = 2 if job.is_paired else 1
    stream = sides * samples * seq_len * hidden * skeleton.dtype.itemsize if prepared.arrangement.spill else 0
    gradients = prepared.gradients.states if prepared.gradients is not None and prepared.arrangement.spill else 0
    tuning = 0
    if (step := job.recipe.tuning("model")) is not None and job.pack:
        trained = sum(map(sizes.stored_floats, prepared.plan.layers))
        disk_sizes = DiskSizes(samples, seq_len, hidden, skeleton.vocab_size, trained)
        tuning = plugins.load("tune", step.method).disk(step.config, disk_sizes)
    return prepared.plan.nbytes + max(stream, gradients, tuning)
