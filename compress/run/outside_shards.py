"""Write the shards of what lies outside of the blocks: everything else of the model, and the packed linears of towers.

Both happen once all blocks are done. Towers need no data and take little time, so that a run that goes on does them
anew; a shard of them is written whenever enough packed weights wait.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import torch

from compress import process_memory
from compress.progress import Progress
from compress.run import quantize_linear, report, shards, sizes, tables, trained_tensors
from compress.run.job import Prepared, RunState
from compress.run.quantize_linear import InputStatistics, LinearTask
from compress.runtime.embedding import LIKE
from compress.storage.checkpoint import EditedTensor, write_shard
from compress.storage.json_text import TEXT
from compress.storage.workdir import Output
from compress.types import LayerPlan, PackedWeight, Plan, Stats

REST_STAGE = "rest"
REST_RECORD = {"files": {str: TEXT}, "layers": report.BLOCK_RECORD["layers"]}
TOWER_SHARD = "model-beside-{:05}.safetensors"


def write_rest(output: Output, run: RunState, head: InputStatistics, progress: Progress) -> None:
    """Write everything outside of the blocks, tables packed as planned; head: statistics of what the head reads."""
    blocks = len(run.prepared.skeleton.blocks)
    record = intact_rest(output)
    if record is None:
        packed = tables.quantize(run, head, lambda text: progress(text, blocks, blocks))
        files = _write_rest_shard(output, run.prepared, torch.device(run.job.device), packed.packed)
        record = {"files": files, "layers": list(map(report.to_dict, packed.rows))}
        output.finish_stage(REST_STAGE, record)
    run.hashes.update(record["files"])
    run.layers += [report.from_dict(row) for row in record["layers"]]


def head_to_read(output: Output, plan: Plan) -> LayerPlan | None:
    """Return the head that is quantized by the hidden states that reach it; None without one, and if that is done."""
    return tables.read_head(plan.tables) if intact_rest(output) is None else None


def drafts_to_read(plan: Plan) -> list[LayerPlan]:
    """Return the linears of draft heads that are quantized by what they read."""
    return tables.read_drafts(plan.draft_layers)


def intact_rest(output: Output) -> dict[str, Any] | None:
    """Return the record of the shard of everything outside the blocks, None if it is not done or not as recorded."""
    record = output.finished_stage(REST_STAGE, REST_RECORD)
    files = record["files"].items() if record is not None else ()
    return record if all(trained_tensors.is_intact(output, *file) for file in files) else None


def _write_rest_shard(
    output: Output, prepared: Prepared, device: torch.device, packed: Mapping[str, PackedWeight]
) -> dict[str, str]:
    """Write the shard of everything outside the blocks, as the transforms have left it, if there is anything.

    packed: tables in the place of their weights. Return file -> sha256.
    """
    contents = _rest_contents(prepared, device)
    for name, weight in packed.items():
        contents.update({f"{name}.{key}": tensor.cpu() for key, tensor in weight.tensors.items()})
    likes = {f"{name}.{LIKE}": torch.empty(0, dtype=prepared.skeleton.dtype) for name in prepared.plan.embedding_tables}
    contents.update(likes)
    if not contents:
        return {}
    blocks = len(prepared.skeleton.blocks)
    file = shards.shard_name(blocks, blocks)
    return {file: write_shard(output.model / file, contents)}


def _rest_contents(prepared: Prepared, device: torch.device) -> shards.Contents:
    """Return what is stored as it is, or as transforms have left it, outside of the blocks."""
    skeleton = prepared.skeleton
    rest: shards.Contents = dict(shards.copied_tensors(skeleton, prepared.plan.kept_nbytes, None))
    if skeleton.edits is None:
        return rest
    head, change = skeleton.model.get_output_embeddings(), skeleton.edits.head()
    names = {id(p): name for name, p in skeleton.model.named_parameters(remove_duplicate=False)}
    for source in skeleton.sources.get(names.get(id(getattr(head, "weight", None)), ""), []):
        if source.name in rest:  # it is not packed
            rest[source.name] = EditedTensor(source, change)
    skeleton.load_rest(device)
    rest.update(
        shards.edited_tensors(
            skeleton, {n: t for n, t in rest.items() if not isinstance(t, EditedTensor)}, skeleton.model
        )
    )
    skeleton.free()
    return rest


@torch.no_grad()
def write_beside(output: Output, run: RunState, statistics: Mapping[str, InputStatistics], progress: Progress) -> None:
    """Quantize the planned linears of towers, skipped blocks and draft heads, write their shards, add rows to the run.

    statistics: those that are known, by input key.
    """
    skeleton, plan = run.prepared.skeleton, run.prepared.plan
    layers, stored_alone = (*plan.tower_layers, *plan.draft_layers), tables.draft_weights(skeleton, plan)
    tensors, nbytes, written = dict[str, torch.Tensor](), 0, 0
    for number, layer in enumerate(layers):
        name, started = layer.spec.name, time.monotonic()
        progress(f"quantizing {name}", number, len(layers))
        if name in stored_alone:
            weight = stored_alone[name].read().to(run.job.device, layer.spec.dtype)
        else:
            weight = skeleton.load_linear(name, torch.device(run.job.device)).get_parameter("weight").detach()
        quantize_linear.check_finite(name, weight)
        given = statistics.get(layer.spec.input_key)
        task = LinearTask(layer, "", weight, given or _no_statistics(layer, run), None, None)
        result = quantize_linear.quantize(task, run.job.seed)
        row = report.measure(layer, weight, result.weight, given.stats if given else None, result.notes)
        row = report.check_row(row, run.job.allow_partial)
        run.layers.append(dataclasses.replace(row, seconds=round(time.monotonic() - started, 4)))
        tensors |= {f"{name}.{key}": tensor.cpu() for key, tensor in result.weight.tensors.items()}
        nbytes += layer.nbytes
        skeleton.free()
        process_memory.check(run.job.max_memory)
        if nbytes >= sizes.TOWER_SHARD_NBYTES or layer is layers[-1]:
            shard = TOWER_SHARD.format(written)
            run.hashes[shard] = write_shard(output.model / shard, tensors)
            tensors, nbytes, written = {}, 0, written + 1


def _no_statistics(layer: LayerPlan, run: RunState) -> InputStatistics:
    """Return statistics of no token at all, for a method that works by statistics."""
    if not sizes.needs_statistics(layer):
        return quantize_linear.NO_STATISTICS
    columns = layer.spec.shape[1]
    return InputStatistics(Stats(torch.zeros(columns, columns, device=run.job.device), 0), seed=run.job.seed)
