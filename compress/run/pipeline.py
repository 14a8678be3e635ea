"""Open a run: prepare the job, hold its output directory, go on as the interrupted run did; predict its time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from compress import plugins, process_memory, ranks
from compress.errors import OutputError
from compress.progress import Progress, silent
from compress.run import calibration_text, identity, memory_plan, prepare, shards, sizes, tables, trained_tensors
from compress.run.checkpoint_blocks import CheckpointBlocks, TimedBlocks
from compress.run.job import Job, Prepared, RunState
from compress.run.loop import BlockLoop, LinearOptions
from compress.storage.workdir import Output, check_space, writing
from compress.tune.whole_model import DiskSizes


@contextmanager
def opened(
    job: Job, progress: Progress, on_plan: Callable[[Prepared], None] | None = None
) -> Iterator[tuple[BlockLoop, CheckpointBlocks]]:
    """Give the loop of a job that has nothing left to allocate, and the blocks of its checkpoint to run it with.

    `on_plan` sees what was decided before the work starts.

    Raises CompressError; what is finished stays on disk for the next run.
    """
    processes = ranks.current()
    process_memory.return_freed_memory()
    process_memory.trim()
    prepared = prepare.prepare(job)
    if on_plan is not None:
        on_plan(prepared)
    with _held(job) as output, writing(output.work):
        if processes.is_main:
            check_space(output.work, _disk_need(job, prepared) - output.written())
            if output.is_copied:
                check_space(output.out, prepared.plan.nbytes - output.copied())
        calibration = ranks.by_main(lambda: calibration_text.calibration(job, prepared, progress, output.calibration))
        if calibration is not None:
            prepared = dataclasses.replace(prepared, samples=calibration.tokens.shape[0])
            calibration = calibration_text.noted(calibration, job, prepared)
            process_memory.trim()
        what = identity.identity(job, prepared.skeleton.checkpoint, calibration)

        def begin(planned: dict[str, Any]) -> dict[str, Any]:
            return ranks.by_main(lambda: output.begin(what, planned))

        with memory_plan.resumed(prepared.arrangement, begin, job.max_memory) as arrangement:
            prepared = dataclasses.replace(prepared, arrangement=arrangement)
            tokens = calibration.tokens if calibration is not None else None
            loop = BlockLoop(job, prepared, _options(prepared), tokens, output.work, progress)
            records = ranks.by_main(lambda: trained_tensors.intact_blocks(output, len(prepared.skeleton.blocks)))
            has_rest = ranks.by_main(lambda: shards.intact_rest(output) is not None)
            loop.reads_head = None if has_rest else tables.read_head(prepared.plan.tables)
            run = RunState(job, prepared, calibration, block_seconds=loop.seconds)
            yield loop, CheckpointBlocks(run, output, loop.stream, records)


@contextmanager
def _held(job: Job) -> Iterator[Output]:
    """Give the output directory of a job, which the main process holds for all."""
    if not ranks.current().is_main:
        ranks.current().share(None)
        output = Output(job.out, work=job.work)
        if not output.model.is_dir():
            raise OutputError(f"{output.model} cannot be seen by all processes; give an --out that they share")
        yield output
        return
    with Output(job.out, job.overwrite, job.restart, job.work) as output:
        ranks.current().share(None)
        yield output


def predict_seconds(job: Job, prepared: Prepared) -> float:
    """Return the time of the whole loop, from one batch and all linears of the block with the most to write.

    Tables outside of the blocks are taken to cost what as many weights of the blocks do.
    Without what a transform of the whole model searches or learns before.
    """
    batch = min(prepared.arrangement.batch, prepared.samples)
    arrangement = dataclasses.replace(prepared.arrangement, spill=False)
    trial = dataclasses.replace(prepared, samples=batch, arrangement=arrangement)
    tokens = prepare.random_tokens(job, trial) if batch else None
    output = Output(job.out)
    loop = BlockLoop(job, trial, _options(trial), tokens, output.work, silent)
    blocks = TimedBlocks(RunState(job, trial), output, loop.stream)
    seconds = loop.predict_seconds(blocks, -(-prepared.samples // batch) if batch else 0)
    inner, outer = (sum(layer.spec.numel for layer in x) for x in (prepared.plan.layers, prepared.plan.tables))
    return (seconds * (1 + outer / inner) if inner else seconds) + _tuning_seconds(job, prepared, blocks.token_seconds)


def _tuning_seconds(job: Job, prepared: Prepared, token: float) -> float:
    """Return the time of tuning the whole model, 0 without it; token: seconds of one in a block."""
    step, skeleton = job.recipe.tuning("model"), prepared.skeleton
    if step is None or not job.pack or not prepared.plan.layers:
        return 0.0
    head = skeleton.vocab_size * skeleton.config.get_text_config().hidden_size
    head_share = head / sum(layer.spec.numel for layer in prepared.plan.layers)
    count = plugins.load("tune", step.method).positions(step.config, prepared.samples, prepared.seq_len)
    return float(count * token * len(skeleton.blocks) * (1 + head_share))


def _options(prepared: Prepared) -> LinearOptions:
    """Return the one option of each linear."""
    return {layer.spec.name: {"": layer} for layer in prepared.plan.layers}


def _disk_need(job: Job, prepared: Prepared) -> int:
    """Return the bytes that a run writes: the checkpoint, and the stream (both sides if paired) if it spills.

    Once the stream is gone, tuning of the whole model has files of its own.
    """
    skeleton, samples, seq_len = prepared.skeleton, prepared.samples, prepared.seq_len
    hidden = skeleton.config.get_text_config().hidden_size
    sides = 2 if job.is_paired else 1
    stream = sides * samples * seq_len * hidden * skeleton.dtype.itemsize if prepared.arrangement.spill else 0
    tuning = 0
    if (step := job.recipe.tuning("model")) is not None and job.pack:
        trained = sum(map(sizes.stored_floats, prepared.plan.layers))
        disk_sizes = DiskSizes(samples, seq_len, hidden, skeleton.vocab_size, trained)
        tuning = plugins.load("tune", step.method).disk(step.config, disk_sizes)
    return prepared.plan.nbytes + max(stream, tuning)
