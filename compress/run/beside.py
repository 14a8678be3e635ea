"""Quantize what a plan has beside the text model, one linear at a time, into shards of its own.

It happens once all blocks are done (compress/run/outside_plan.py says what it is). It needs no data and takes little
time, so that a run that goes on does it anew.
"""

from __future__ import annotations

import dataclasses
import time

import torch

from compress import process_memory
from compress.progress import Progress
from compress.run import memory_plan, quantize_linear, report, sizes
from compress.run.job import RunState
from compress.run.quantize_linear import InputStatistics, LinearTask
from compress.storage.checkpoint import write_shard
from compress.storage.workdir import Output
from compress.types import LayerPlan, Stats

SHARD = "model-beside-{:05}.safetensors"


@torch.no_grad()
def write(output: Output, run: RunState, progress: Progress) -> None:
    """Quantize what the plan has beside the text model, write its shards, and add to the run what has become of it."""
    skeleton, plan = run.prepared.skeleton, run.prepared.plan
    tensors, nbytes, shards = dict[str, torch.Tensor](), 0, 0
    for number, layer in enumerate(plan.tower_layers):
        name, started = layer.spec.name, time.monotonic()
        progress(f"quantizing {name}", number, len(plan.tower_layers))
        weight = skeleton.load_beside(name, torch.device(run.job.device)).get_parameter("weight").detach()
        quantize_linear.check_finite(name, weight)
        task = LinearTask(layer, "", weight, _statistics(layer, run), None, None)
        result = quantize_linear.quantize(task, run.job.seed)
        row = report.measure(layer, weight, result.weight, None, result.notes)
        row = report.checked(row, run.job.allow_partial)
        run.layers.append(dataclasses.replace(row, seconds=round(time.monotonic() - started, 4)))
        tensors |= {f"{name}.{key}": tensor.cpu() for key, tensor in result.weight.tensors.items()}
        nbytes += layer.nbytes
        skeleton.free()
        process_memory.check(run.job.max_memory)
        if nbytes >= memory_plan.TOWER_SHARD_NBYTES or layer is plan.tower_layers[-1]:
            shard = SHARD.format(shards)
            run.hashes[shard] = write_shard(output.model / shard, tensors)
            tensors, nbytes, shards = {}, 0, shards + 1


def _statistics(layer: LayerPlan, run: RunState) -> InputStatistics:
    """Return statistics of no token at all, for a method that asks for them."""
    if not sizes.needs_statistics(layer):
        return quantize_linear.NO_STATISTICS
    columns = layer.spec.shape[1]
    return InputStatistics(Stats(torch.zeros(columns, columns, device=run.job.device), 0), seed=run.job.seed)
