"""Run whole tasks: quantize a checkpoint, plan that, load the result. The command line calls these and prints."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from compress.progress import Progress, silent

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from transformers import PreTrainedModel

    from compress.allocate.forecast import Unmeasured
    from compress.export.model_free import RoundedCheckpoint
    from compress.run.job import Job, Prepared


def quantize(
    job: Job,
    progress: Progress = silent,
    on_plan: Callable[[Prepared], None] | None = None,
    exported: Path | None = None,
) -> dict[str, Any]:
    """Allocate bits if the recipe leaves them open, run the job to its end, return the report.

    `on_plan` sees what was decided before the work starts. exported: where the result is also written, in the format
    that the recipe names; "exported" of the report tells of it. What the recipe accepts is judged at the end,
    "acceptance" of the report. Raises CompressError; what is finished stays on disk for the next run. In processes that
    torchrun has started, all of them take part, and all return the report.
    """
    from compress import process_memory, ranks
    from compress.allocate import decide
    from compress.evaluate import acceptance
    from compress.export import for_runs
    from compress.numerics.linalg import full_float32
    from compress.run import pipeline, write

    started, asked = time.monotonic(), job
    acceptance.check(job)
    process_memory.reset_peak()

    def check_and_show(prepared: Prepared) -> None:
        _check_export(job, prepared)
        if on_plan is not None:
            on_plan(prepared)

    with full_float32(), ranks.joined(job.device) as processes:
        if processes.is_main:
            for_runs.check_place(job, exported)
        if decide.is_open(job):
            if processes.is_main:
                pipeline.check_output(job)
            job = for_runs.fit_target(job, lambda each: decide.decide(each, progress))
        with pipeline.open_run(job, progress, check_and_show) as (loop, blocks):
            loop.run(blocks)

            report = ranks.by_main(
                lambda: write.finish(blocks.output, blocks.run, loop.head, loop.drafts, started, progress)
            )
            report = ranks.by_main(lambda: acceptance.judge(asked, report, progress))
        if exported is not None:
            report["exported"] = ranks.by_main(lambda: for_runs.export_result(job, exported, progress))
        return report


def quantize_model_free(job: Job, dry_run: bool = False, progress: Progress = silent) -> RoundedCheckpoint:
    """Round a checkpoint tensor by tensor without the class of its model, into another tool's format; say what came.

    dry_run: only say what would be written. Raises CompressError; nothing is left behind if it fails.
    """
    from compress.export import model_free

    return model_free.quantize(job, dry_run, progress)


def merge(
    directory: Path, job: Job, progress: Progress = silent, on_plan: Callable[[Prepared], None] | None = None
) -> dict[str, Any]:
    """Merge the job's adapter into a packed checkpoint, and quantize the sum by the job's recipe; return the report.

    The checkpoint is decoded beside `job.out` while this runs, which takes the disk of the plain model; `job.model` is
    not read. Every weight is rounded again, also those that the adapter does not touch. Raises CompressError; a run
    that was interrupted goes on when it is started again.
    """
    import dataclasses

    from compress.export import for_runs
    from compress.run import pipeline

    assert job.adapter is not None
    with for_runs.DecodedCheckpoint(directory, job.out) as original:
        pipeline.check_output(job)
        for_runs.check_merge(directory, job.adapter)
        model = str(original.write(progress))
        return quantize(dataclasses.replace(job, model=model), progress, on_plan)


def plan(job: Job, progress: Progress = silent) -> tuple[Job, Prepared, float] | Unmeasured:
    """Return the job with its bits allocated, what it would do and the seconds it would take.

    They are counted, or where that does not tell, from timing one block.

    Nothing is measured: a recipe whose allocation needs that gives what is known without.
    """
    from compress.allocate import forecast
    from compress.export import for_runs
    from compress.run import predict

    decided = for_runs.fit_target(job, lambda each: forecast.forecast(each, progress))
    if isinstance(decided, forecast.Unmeasured):
        return decided
    return decided, *predict.prepare_and_time(decided, progress, lambda prepared: _check_export(decided, prepared))


def _check_export(job: Job, prepared: Prepared) -> None:
    """Raise ExportError for a plan whose result the target that the recipe names could not hold."""
    if job.recipe.export is not None:
        from compress.export import for_runs

        for_runs.check_plan(prepared, job.recipe.export)


def load(
    directory: str | os.PathLike[str],
    dtype: torch.dtype | str = "auto",
    device_map: str | dict[str, Any] | None = None,
    verify: bool = False,
) -> PreTrainedModel:
    """Load the model in `directory` (or of a hub id), packed or plain, in eval mode, by the class it is of.

    dtype: a torch type, or "auto", "float32", "float16" or "bfloat16". device_map: that of from_pretrained. verify:
    compare the hash of every file with the manifest that `quantize` wrote, as COMPRESS_VERIFY=1 does for
    from_pretrained. Raises CheckpointError for weights that are missing, and for files that are damaged or not those
    that were written.
    """
    from compress.run import source

    return source.load_model(os.fspath(directory), dtype, device_map, verify)
