"""Quantize what lies outside of the decoder blocks: the table of embeddings, the output head, or one table for both.

It happens once all blocks are done. The Hessian of a head is that of the hidden states which the last block gives,
behind everything that the model does to them before its head. Large tables are quantized some rows at a time.

A tied table that stays one in a rotated model (`table_sizes.is_turned`) is quantized as it was, in the original basis.
What the head multiplies it with is what it reads, turned back by the operations that are stored around it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from compress import formats, process_memory
from compress.calib import stats as calib_stats
from compress.errors import NumericalError
from compress.formats import transforms
from compress.model import lm_head
from compress.model.skeleton import Skeleton
from compress.run import memory_plan, quantize_linear, report, table_sizes
from compress.run.calibration_stream import CalibrationStream
from compress.run.job import RunState
from compress.run.quantize_linear import NO_STATISTICS, InputStatistics, LinearTask, finish_statistics
from compress.types import NO_TRANSFORMS, LayerPlan, LayerReport, PackedWeight, Plan, Quantized


class PackedTables(NamedTuple):
    """The packed tables of a model by the names of their modules, and what is to be said of them."""

    packed: Mapping[str, PackedWeight]
    rows: list[LayerReport]


def needs_statistics(plan: Plan) -> bool:
    """Return whether a head is quantized by the hidden states that reach it."""
    return any(map(memory_plan.needs_statistics, plan.tables))


@torch.no_grad()
def statistics(stream: CalibrationStream, plan: Plan) -> InputStatistics:
    """Return the statistics of what the output head reads, the stream being behind the last block."""
    skeleton = stream.skeleton
    head = skeleton.model.get_output_embeddings()
    assert isinstance(head, nn.Linear), "the plan has found a head"
    total = calib_stats.HessianSum(head.in_features, stream.device)
    table = next(table for table in plan.tables if memory_plan.needs_statistics(table))
    ops = table.stored.ops if table_sizes.is_turned(table) else NO_TRANSFORMS
    around = _around(skeleton, table, stream.device)
    stream.meter.say("calibrating the output head")
    skeleton.load_rest(stream.device)
    try:
        for samples in stream.slices:
            hidden = stream.states.read(samples.start, samples.stop - samples.start).to(stream.device)
            read = lm_head.inputs(skeleton, head, hidden)
            total.add(transforms.apply_input(read, ops, around), stream.prepared.seq_len)
            process_memory.check(stream.job.max_memory)
    finally:
        skeleton.free()
    tokens = stream.states.samples * stream.prepared.seq_len
    return finish_statistics(total, table.spec.name, None, tokens, stream.job.seed)


@torch.no_grad()
def quantize(run: RunState, head: InputStatistics, device: torch.device, say: Callable[[str], None]) -> PackedTables:
    """Quantize the tables of a plan; head: the statistics of the input of the output head."""
    plan, skeleton = run.prepared.plan, run.prepared.skeleton
    packed, rows = dict[str, PackedWeight](), list[LayerReport]()
    if not plan.tables:
        return PackedTables(packed, rows)
    with _loaded(skeleton, device, any(map(table_sizes.is_turned, plan.tables))):
        for layer in plan.tables:
            say(f"quantizing {layer.spec.name}")
            started = time.monotonic()
            weight = skeleton.model.get_submodule(layer.spec.name).get_parameter("weight").detach()
            if not all(torch.isfinite(part).all() for part in weight.split(lm_head.HEAD_ROWS)):
                raise NumericalError(f"the weight of {layer.spec.name} has NaN or infinite values; repair or ignore it")
            given = head if memory_plan.needs_statistics(layer) else NO_STATISTICS
            result, row = _quantize(layer, weight, given, _around(skeleton, layer, device), run.job.seed)
            packed[layer.spec.name] = result
            rows.append(dataclasses.replace(row, seconds=round(time.monotonic() - started, 4)))
            process_memory.check(run.job.max_memory)
    return PackedTables(packed, rows)


def _around(skeleton: Skeleton, table: LayerPlan, device: torch.device) -> Mapping[str, Tensor]:
    """Return the tensors of what the edits of a model leave to run time around a table, {} for nothing."""
    if not table_sizes.is_turned(table):
        return {}
    assert skeleton.edits is not None, "they have untied the head"
    return {name: tensor.to(device) for name, tensor in skeleton.edits.table_tensors().items()}


@contextmanager
def _loaded(skeleton: Skeleton, device: torch.device, is_turned: bool) -> Iterator[None]:
    """Load all outside of the blocks, as transforms have left it; `is_turned`: all but the head, as it was."""
    try:
        if is_turned:
            with lm_head.edited_by(skeleton, None):
                skeleton.load_rest(device)
        else:
            lm_head.load(skeleton, device)
        yield
    finally:
        skeleton.free()


def _quantize(
    layer: LayerPlan, weight: Tensor, given: InputStatistics, around: Mapping[str, Tensor], seed: int
) -> tuple[PackedWeight, LayerReport]:
    """Quantize and measure one table [tokens, hidden], some rows at a time; around: tensors that are stored beside.

    All at once where the scales of some rows need another type than those of others.
    """
    for rows in dict.fromkeys((table_sizes.chunk_rows(layer), layer.spec.shape[0])):
        chunks = [_chunk(layer, part, given, seed) for part in weight.split(rows)]
        if len({chunk.result.weight.stored for chunk in chunks}) == 1:
            break
    tensors = formats.join_rows([chunk.result.weight for chunk in chunks])
    stored = dataclasses.replace(chunks[0].result.weight.stored, ops=layer.stored.ops)
    packed = PackedWeight(stored, {**tensors, **around}, layer.spec.shape)
    assert packed.nbytes == layer.nbytes, f"{layer.spec.name}: {packed.nbytes} bytes stored, {layer.nbytes} planned"
    notes = tuple(dict.fromkeys(note for chunk in chunks for note in chunk.result.notes))
    return packed, report.row(layer, packed, _mean(chunks), given.stats, notes)


class _Chunk(NamedTuple):
    """Some rows of a table, quantized."""

    result: Quantized
    errors: report.WeightErrors
    norm: float  # ||W||^2 of the original rows


def _chunk(layer: LayerPlan, rows: Tensor, given: InputStatistics, seed: int) -> _Chunk:
    part = table_sizes.chunk(layer, rows.shape[0])
    result = quantize_linear.quantize(LinearTask(part, "", rows, given, None, None), seed)
    norm = rows.float().square().sum(dtype=torch.float64).item()
    return _Chunk(result, report.errors(rows, result.weight, given.stats), norm)


def _mean(chunks: list[_Chunk]) -> report.WeightErrors:
    """Return the errors of a table: sums over its chunks, and the mean of what is relative, weighed by their norms."""
    norm = sum(chunk.norm for chunk in chunks) or 1.0
    relative = sum(chunk.errors.relative * chunk.norm for chunk in chunks) / norm
    outputs = [chunk.errors.output * chunk.norm for chunk in chunks if chunk.errors.output is not None]
    return report.WeightErrors(
        sum(chunk.errors.weight for chunk in chunks),
        relative,
        sum(chunk.errors.hessian or 0.0 for chunk in chunks) if outputs else None,
        sum(outputs) / norm if outputs else None,
    )
