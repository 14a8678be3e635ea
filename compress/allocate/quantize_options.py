"""Quantize every linear at every option, store the results, and measure what each would damage.

One pass over the model, block by block, behind the full-precision prefix, so that nothing measured depends on what will
be chosen. Statistics are collected once for all options. The damage of an option Q of a weight W is the increase of a
loss: ||W - Q||^2, and tr((W - Q) H (W - Q)^T) with H the mean over all calibration tokens (run/report.py: over some
rows, scaled). Transforms decide by the first option's schemes, for all of them. What only whole forward passes can tell
is in compress/allocate/sensitivity.py. A killed run goes on after the last finished block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from compress import ranks
from compress.allocate import expert_options
from compress.allocate.prepare_options import Options
from compress.allocate.variants import Database
from compress.errors import NotMeasuredError
from compress.progress import Progress, silent
from compress.run import demands, memory_plan, report, tables
from compress.run.loop import BlockLoop
from compress.run.quantize_linear import LinearTask
from compress.types import PackedWeight, Quantized


def quantize_all(opened: Options, database: Database, tokens: Tensor, progress: Progress) -> bool:
    """Fill the database, from the first block that is not in it; return whether anything was left to do.

    tokens [samples, seq_len] of the calibration text. Tables outside of the blocks come behind the last block, with the
    Hessian of what the original's output head reads.
    """
    layers = opened.table_layers
    finished = ranks.by_main(database.finished)
    if finished >= len(opened.prepared.skeleton.blocks) + bool(layers):
        return False
    if not opened.job.measures:
        raise NotMeasuredError(f"{database.folder} is not complete")
    job, planned = opened.job, opened.prepared.arrangement
    with memory_plan.keep_arrangement(planned, lambda _: dict(database.arrangement), job.max_memory) as arrangement:
        prepared = dataclasses.replace(opened.prepared, arrangement=arrangement)
        opened = dataclasses.replace(opened, prepared=prepared)
        loop = BlockLoop(job, prepared, opened.levels, tokens, database.folder, progress, every=True)
        loop.reads_head = tables.read_head(layers.values())
        loop.run(_MeasuredBlocks(opened, database, loop, finished))
        if layers and loop.stream.ranks.is_main:
            _quantize_tables(opened, database, loop)
    return True


def _quantize_tables(opened: Options, database: Database, loop: BlockLoop) -> None:
    """Store the tables outside of the blocks at all options, as a block behind the last one."""
    layers, skeleton = opened.table_layers, opened.prepared.skeleton
    made = tables.quantize_each(opened.job, skeleton, list(layers.values()), loop.head, loop.meter.say)
    packed, measured = dict[str, PackedWeight](), dict[str, dict[str, Any]]()
    for key, (weight, row) in zip(layers, made, strict=True):
        packed[key] = weight
        errors = {"nbytes": row.nbytes, "relative": row.weight_error, "output": row.output_error or 0.0}
        measured.setdefault(row.name, {"tokens": row.tokens})[key.rpartition("@")[2]] = errors
    database.add(len(skeleton.blocks), packed, measured)


class _MeasuredBlocks:
    """The blocks of a model at all options (`BlockConsumer`); the original goes on."""

    def __init__(self, opened: Options, database: Database, loop: BlockLoop, finished: int) -> None:
        self.opened, self.database, self.stream = opened, database, loop.stream
        self.finished = min(finished, len(opened.prepared.skeleton.blocks))
        self.tokens = loop.stream.states.samples * opened.prepared.seq_len
        self.packed: dict[str, PackedWeight] = {}  # "<linear>@<option>" -> weight, of the present block
        self.measured: dict[str, Any] = {}  # linear -> what was measured of it, by option

    def start(self, notes: dict[str, list[str]]) -> None:
        """Leave what a transform of the whole model says to the run."""

    def begin(self, index: int, block: nn.Module) -> None:
        """Store the block as the transforms have left it."""
        self.packed, self.measured = {}, {}
        if self.stream.transforms.steps and self.stream.ranks.is_main:
            state = {name: p.detach().to("cpu") for name, p in block.named_parameters()}
            self.database.add_state(index, state)

    def weights(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the weights as they are."""
        return own

    def add(self, task: LinearTask, result: Quantized, seconds: float) -> None:
        """Measure a linear at an option, and keep it until its block is done."""
        name, stats = task.layer.spec.name, task.statistics.stats
        self.packed[f"{name}@{task.option}"] = result.weight
        by_option = self.measured.setdefault(name, {"tokens": stats.count if stats is not None else 0})
        measured = report.errors(task.weight, result.weight, stats)
        by_option[task.option] = {
            "nbytes": result.weight.nbytes,
            "weight": measured.weight,
            "relative": measured.relative,
            "hessian": (measured.hessian or 0.0) / self.tokens,  # nothing is known of an expert without tokens
            "output": measured.output or 0.0,
        }

    def finish(self, index: int, block: nn.Module, notes: list[str]) -> None:
        """Measure the block's experts, and store all."""
        for packed, measured in self.stream.ranks.gather((self.packed, self.measured)):
            self.packed.update(packed)
            self.measured.update(measured)
        if self.stream.ranks.is_main:
            self._store(index, block)
        self.packed = {}

    def _store(self, index: int, block: nn.Module) -> None:
        self.stream.meter.say("measuring experts")
        batches = partial(self.stream.batches, index)
        self.measured |= expert_options.measure(self.opened, index, block, batches, self.packed)
        self.database.add(index, self.packed, self.measured)

    def restore(self, index: int, block: nn.Module) -> nn.Module:
        """Transform the block as in the former run."""
        self.stream.transform(index, block)
        return block


# ---------------------------------------------------------------- the time that it takes


class QuantizingTime(NamedTuple):
    """Seconds of all blocks at all options."""

    first: float  # with one batch of calibration text
    batch: float  # that each further batch takes
    samples: int  # of a batch

    def seconds(self, samples: int) -> float:
        """Return the seconds with so much calibration text."""
        return self.first + (-(-samples // self.samples) - 1) * self.batch

    def most_samples(self, seconds: float) -> int:
        """Return the most samples that take at most `seconds`; 0 where a batch takes longer."""
        if seconds < self.first:
            return 0
        return self.samples * (1 + int((seconds - self.first) / max(self.batch, 1e-9)))


def time_quantizing(opened: Options) -> QuantizingTime:
    """Time the largest block at all options, with one batch of random tokens.

    Tables outside of the blocks are taken to cost what as many weights of the blocks do.
    """
    prepared = opened.prepared
    batch = min(prepared.arrangement.batch, prepared.samples)
    arrangement = dataclasses.replace(prepared.arrangement, spill=False)
    trial = dataclasses.replace(prepared, samples=batch, arrangement=arrangement)
    tokens = demands.random_tokens(opened.job, trial)
    folder = opened.job.measurements or opened.job.out
    loop = BlockLoop(opened.job, trial, opened.levels, tokens, folder, silent, every=True)
    inner = sum(layer.spec.numel for options in opened.levels.values() for layer in options.values())
    outer = sum(layer.spec.numel for layer in opened.table_layers.values())
    first = loop.predict_seconds(_TimedBlocks(), 1) * (1 + outer / inner)
    return QuantizingTime(first, len(prepared.skeleton.blocks) * loop.stream.seconds, batch)


class _TimedBlocks:
    """Blocks that are quantized to time it (`BlockConsumer`)."""

    finished = 0

    def start(self, notes: dict[str, list[str]]) -> None:
        """Leave the notes."""

    def begin(self, index: int, block: nn.Module) -> None:
        """Leave the block as it is."""

    def weights(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the weights as they are."""
        return own

    def add(self, task: LinearTask, result: Quantized, seconds: float) -> None:
        """Measure a linear at an option."""
        report.errors(task.weight, result.weight, task.statistics.stats)

    def finish(self, index: int, block: nn.Module, notes: list[str]) -> None:
        """Store nothing."""

    def restore(self, index: int, block: nn.Module) -> nn.Module:
        """Return the block: none was finished before."""
        return block
