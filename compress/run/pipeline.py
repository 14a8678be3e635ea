"""Open a run: prepare the job, hold its output directory, go on as the interrupted run did."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from compress import process_memory, ranks
from compress.errors import OutputError
from compress.progress import Progress
from compress.run import calibration_text, memory_plan, outside_shards, predict, prepare, shards
from compress.run.checkpoint_blocks import CheckpointBlocks
from compress.run.job import Job, Prepared, RunState, identity
from compress.run.loop import BlockLoop
from compress.storage.workdir import Output, check_space, writing


@contextmanager
def open_run(
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
    with _hold_output(job) as output, writing(output.work):
        if processes.is_main:
            check_space(output.work, predict.disk_nbytes(job, prepared) - output.written())
            if output.is_copied:
                check_space(output.out, prepared.plan.nbytes - output.copied())
        calibration = ranks.by_main(lambda: calibration_text.calibration(job, prepared, progress, output.calibration))
        if calibration is not None:
            prepared = dataclasses.replace(prepared, samples=calibration.tokens.shape[0])
            calibration = calibration_text.add_notes(calibration, job, prepared)
            process_memory.trim()
        what = identity(job, prepared.skeleton.checkpoint, calibration)

        def begin(planned: dict[str, Any]) -> dict[str, Any]:
            return ranks.by_main(lambda: output.begin(what, planned))

        with memory_plan.keep_arrangement(prepared.arrangement, begin, job.max_memory) as arrangement:
            prepared = dataclasses.replace(prepared, arrangement=arrangement)
            samples = calibration.samples if calibration is not None else None
            loop = BlockLoop(job, prepared, predict.one_option_each(prepared), samples, output.work, progress)
            loop.meter.before, loop.meter.expected = predict.predict_by_counts(job, prepared) or (0.0, 0.0)
            records = ranks.by_main(lambda: shards.intact_blocks(output, len(prepared.skeleton.blocks)))
            loop.reads_head = ranks.by_main(lambda: outside_shards.head_to_read(output, prepared.plan))
            loop.reads_drafts = outside_shards.drafts_to_read(prepared.plan)
            run = RunState(job, prepared, calibration, block_seconds=loop.seconds)
            yield loop, CheckpointBlocks(run, output, loop.stream, records)


def check_output(job: Job) -> None:
    """Raise OutputError now for an output directory that would be refused after hours of work."""
    with Output(job.out, job.overwrite, work=job.work):
        pass


@contextmanager
def _hold_output(job: Job) -> Iterator[Output]:
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
