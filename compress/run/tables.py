"""Quantize what lies outside of the decoder blocks: the table of embeddings, the output head, or one table for both.

It happens once all blocks are done. The Hessian of a head is that of the hidden states which the last block gives,
behind everything that the model does to them before its head. Large tables are quantized some rows at a time.

A tied table that stays one in a rotated model (`sizes.is_turned`) is quantized as it was, in the original basis.
What the head multiplies it with is what it reads, turned back by the operations that are stored around it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from compress import formats, process_memory
from compress.calib import stats as calib_stats
from compress.formats import transforms
from compress.model import draft_heads, lm_head
from compress.model.skeleton import Skeleton
from compress.model.told_linears import Matrix
from compress.run import quantize_linear, report, sizes
from compress.run.calibration_stream import CalibrationStream
from compress.run.job import Job, RunState
from compress.run.quantize_linear import NO_STATISTICS, InputStatistics, LinearTask, finish_statistics
from compress.types import NO_TRANSFORMS, LayerPlan, LayerReport, PackedWeight, Plan, Quantized


class PackedTables(NamedTuple):
    """The packed tables of a model by the names of their modules, and what is to be said of them."""

    packed: Mapping[str, PackedWeight]
    rows: list[LayerReport]


def read_head(layers: Iterable[LayerPlan]) -> LayerPlan | None:
    """Return the head that is quantized by the hidden states that reach it, None without one."""
    return next(filter(sizes.needs_statistics, layers), None)


@torch.no_grad()
def statistics(stream: CalibrationStream, layer: LayerPlan) -> InputStatistics:
    """Return the statistics of what a stored output head multiplies, the stream being behind the last block."""
    skeleton = stream.skeleton
    head = skeleton.model.get_output_embeddings()
    assert isinstance(head, nn.Linear), "the plan has found a head"
    total = calib_stats.HessianSum(head.in_features, stream.device)
    ops = layer.stored.ops if sizes.is_turned(layer) else NO_TRANSFORMS
    around = _around(skeleton, layer, stream.device)
    stream.meter.say("calibrating the output head")
    skeleton.load_rest(stream.device)
    try:
        if not stream.ranks.is_main:
            calib_stats.agree({"": total}, stream.ranks)
        for samples in stream.own:
            hidden = stream.calls.stacks[-1].read(samples.start, samples.stop - samples.start).to(stream.device)
            read = lm_head.inputs(skeleton, head, hidden)
            total.add(transforms.apply_input(read, ops, around), calib_stats.chunk_tokens(stream.prepared.seq_len))
            if samples.start == 0:
                calib_stats.agree({"": total}, stream.ranks)
            process_memory.check(stream.job.max_memory)
    finally:
        skeleton.free()
    calib_stats.join({"": total}, stream.ranks)
    tokens = stream.states.samples * stream.prepared.seq_len
    return finish_statistics(total, layer.spec.name, None, tokens, stream.job.seed)


def read_drafts(layers: Iterable[LayerPlan]) -> list[LayerPlan]:
    """Return the layers of heads that are quantized by statistics of their inputs."""
    return [layer for layer in layers if sizes.needs_statistics(layer) and not layer.spec.is_expert]


@torch.no_grad()
def draft_statistics(stream: CalibrationStream, layers: list[LayerPlan]) -> dict[str, InputStatistics]:
    """Return input key -> statistics of what linears of heads read, the stream being behind the last block.

    Empty where transformers cannot run the heads. layers: those of `read_drafts`.
    """
    skeleton, device = stream.skeleton, stream.device
    head = skeleton.model.get_output_embeddings()
    if not layers or stream.tokens is None or not isinstance(head, nn.Linear):
        return {}
    if draft_heads.can_open(skeleton) is not None:  # the plan has said why
        return {}
    stream.meter.say("calibrating the draft heads")
    try:
        skeleton.load_rest(device)
        heads = draft_heads.load(skeleton, device)
        keys = {layer.spec.input_key: layer.spec.shape[1] for layer in layers}
        linears = draft_heads.linears(heads, keys, skeleton)
        sums = {key: calib_stats.HessianSum(keys[key], device) for key in linears}
        chunk = calib_stats.chunk_tokens(stream.prepared.seq_len)
        if not stream.ranks.is_main:
            calib_stats.agree(sums, stream.ranks)
        for samples in stream.own:
            hidden = stream.calls.stacks[-1].read(samples.start, samples.stop - samples.start).to(device)
            read = lm_head.inputs(skeleton, head, hidden)
            with calib_stats.collect(linears, sums, chunk):
                for _ in draft_heads.run(heads, read, stream.tokens[samples].to(device)):
                    pass
            if samples.start == 0:
                calib_stats.agree(sums, stream.ranks)
            process_memory.check(stream.job.max_memory)
    finally:
        skeleton.free()
    calib_stats.join(sums, stream.ranks)
    tokens = stream.states.samples * stream.prepared.seq_len
    return {key: finish_statistics(total, key, None, tokens, stream.job.seed) for key, total in sums.items()}


def draft_weights(skeleton: Skeleton, plan: Plan) -> Mapping[str, Matrix]:
    """Return where the linears of draft heads are stored, by name."""
    return draft_heads.matrices(skeleton)[0] if plan.draft_layers else {}


def quantize(run: RunState, head: InputStatistics, say: Callable[[str], None]) -> PackedTables:
    """Quantize the tables of a plan; head: the statistics of the input of the output head."""
    made = [
        (packed, report.check_row(row, run.job.allow_partial))
        for packed, row in quantize_each(run.job, run.prepared.skeleton, run.prepared.plan.tables, head, say)
    ]
    return PackedTables({row.name: weight for weight, row in made}, [row for _, row in made])


@torch.no_grad()
def quantize_each(
    job: Job,
    skeleton: Skeleton,
    layers: Sequence[LayerPlan],
    head: InputStatistics,
    say: Callable[[str], None],
) -> Iterator[tuple[PackedWeight, LayerReport]]:
    """Yield each of these layers, which are tables, quantized; one table may be among them in several ways."""
    if not layers:
        return
    device = torch.device(job.device)
    with _load_around_blocks(skeleton, device, any(map(sizes.is_turned, layers))):
        for layer in layers:
            say(f"quantizing {layer.spec.name}")
            started = time.monotonic()
            weight = skeleton.model.get_submodule(layer.spec.name).get_parameter("weight").detach()
            quantize_linear.check_finite(layer.spec.name, weight)
            given = head if sizes.needs_statistics(layer) else NO_STATISTICS
            packed, row = _quantize(layer, weight, given, _around(skeleton, layer, device), job.seed)
            process_memory.check(job.max_memory)
            yield packed, dataclasses.replace(row, seconds=round(time.monotonic() - started, 4))


def _around(skeleton: Skeleton, table: LayerPlan, device: torch.device) -> Mapping[str, Tensor]:
    """Return the tensors of what the edits of a model leave to run time around a table, {} for nothing."""
    if not sizes.is_turned(table):
        return {}
    assert skeleton.edits is not None, "they have untied the head"
    return {name: tensor.to(device) for name, tensor in skeleton.edits.table_tensors().items()}


@contextmanager
def _load_around_blocks(skeleton: Skeleton, device: torch.device, is_turned: bool) -> Iterator[None]:
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
    plain = sizes.plan_rows(layer, layer.spec.shape[0])
    largest = quantize_linear.largest_magnitude(plain, weight, seed) if sizes.needs_largest_weight(layer) else None
    for rows in dict.fromkeys((sizes.chunk_rows(layer), layer.spec.shape[0])):
        chunks = [_chunk(layer, part, given, seed, largest) for part in weight.split(rows)]
        if len({chunk.result.weight.stored for chunk in chunks}) == 1:
            break
    tensors = formats.join_rows([chunk.result.weight for chunk in chunks])
    stored = dataclasses.replace(chunks[0].result.weight.stored, ops=layer.stored.ops)
    packed = PackedWeight(stored, {**tensors, **around}, layer.spec.shape)
    quantize_linear.check_nbytes(layer, packed)
    notes = tuple(dict.fromkeys(note for chunk in chunks for note in chunk.result.notes))
    return packed, report.row(layer, packed, _mean(chunks), given.stats, notes)


class _Chunk(NamedTuple):
    """Some rows of a table, quantized."""

    result: Quantized
    errors: report.WeightErrors
    norm: float  # ||W||^2 of the original rows


def _chunk(layer: LayerPlan, rows: Tensor, given: InputStatistics, seed: int, largest: Tensor | None) -> _Chunk:
    part = sizes.plan_rows(layer, rows.shape[0])
    result = quantize_linear.quantize(LinearTask(part, "", rows, given, None, None, largest_weight=largest), seed)
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
        lost_rows=sum(chunk.errors.lost_rows for chunk in chunks) / max(1, len(chunks)),
    )
