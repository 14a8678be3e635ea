"""Complete a checkpoint whose blocks are written: the rest, towers, config.json, cache, self-check, records."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import torch

from compress import process_memory
from compress.progress import Progress
from compress.run import cache_calibration, companion_files, outside_shards, records, report, trained_tensors, verify
from compress.run.job import RunState
from compress.run.quantize_linear import InputStatistics
from compress.storage.workdir import Output


def finish(
    output: Output,
    run: RunState,
    head: InputStatistics,
    drafts: Mapping[str, InputStatistics],
    started: float,
    progress: Progress,
) -> dict[str, Any]:
    """Complete the checkpoint in output.model, check it, put it in place; return the report.

    head: statistics of what the output head reads. drafts: of what draft heads read, by input key.
    started: time.monotonic() when the job began.
    """
    skeleton, job, directory, device = run.prepared.skeleton, run.job, output.model, torch.device(run.job.device)
    outside_shards.write_rest(output, run, head, progress)
    outside_shards.write_beside(output, run, drafts, progress)
    run.prepared = dataclasses.replace(run.prepared, plan=report.with_sizes(run.prepared.plan, run.layers))
    progress("writing the configuration", len(skeleton.blocks), len(skeleton.blocks))
    companion_files.write_index(directory)
    companion_files.copy_files(skeleton.checkpoint.directory, directory)
    companion_files.write_config(directory, run)
    probes = trained_tensors.train(output, run, progress)
    cache, cache_facts = cache_calibration.build(output, run, progress)
    if cache is not None:
        companion_files.write_config(directory, run, cache)
    outcome = verify.self_check(directory, run.hashes, probes, device, progress, run.start)
    process_memory.check(job.max_memory)
    result = {**report.build(run, time.monotonic() - started, outcome), "kv_cache": cache_facts}
    records.write(directory, run, result)
    output.publish()
    return result
