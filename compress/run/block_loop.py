"""Walk a model block by block: load, transform, calibrate, quantize each linear, hand the block over, propagate, free.

One loop serves a run, in which every linear has one option and goes on quantized, and the measuring of an allocation,
in which it has several and the original goes on. It knows no method and no model by name. Memory holds one block, the
statistics of one pass over it and the stream of hidden states (which spills to disk past the budget). What becomes of a
block is up to a `BlockConsumer`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from compress import process_memory, ranks
from compress.calib import fisher
from compress.errors import NumericalError
from compress.model.blockwise import QUANTIZED, BlockPass
from compress.model.edits import EditContext
from compress.progress import Meter, Progress
from compress.ranks import Ranks
from compress.run import activation_scales, quantize_linear, sizes, tables
from compress.run.calibration_stream import CalibrationStream
from compress.run.divided_block import DividedBlock
from compress.run.job import Job, Prepared
from compress.run.quantize_linear import NO_STATISTICS, LinearTask
from compress.types import Fisher, LayerPlan, Quantized

LinearOptions = Mapping[str, Mapping[str, LayerPlan]]  # linear -> option -> how it is stored at that option


class BlockConsumer(Protocol):
    """Take the blocks of a loop: write a checkpoint, or store and measure options."""

    finished: int  # blocks that a former run has done

    def start(self, notes: list[str]) -> None:
        """Take what a transform of the whole model says; called once, before the first block."""

    def begin(self, index: int, block: nn.Module) -> None:
        """Look at a transformed block whose linears are about to be quantized."""

    def weights(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return what is quantized next: the block's own weights [out, in] of linears that read one input, or others.

        All before them have been added.
        """

    def add(self, task: LinearTask, result: Quantized, seconds: float) -> None:
        """Take one linear at one option."""

    def finish(self, index: int, block: nn.Module, notes: list[str]) -> None:
        """Store the block, and make its weights those that go on.

        Each of its linears was added, in one of the processes of the run.
        """

    def restore(self, index: int, block: nn.Module) -> nn.Module:
        """Return a finished block with the weights that go on; `block` is the original."""


class BlockLoop:
    """The loop over the blocks of a prepared model.

    tokens [samples, seq_len]; None: no calibration text. folder: for hidden states and gradients that spill to disk,
    and for what a transform of the whole model keeps. every: statistics are taken for all linears, whether their
    methods need them or not.
    """

    def __init__(
        self,
        job: Job,
        prepared: Prepared,
        options: LinearOptions,
        tokens: Tensor | None,
        folder: Path,
        progress: Progress,
        every: bool = False,
    ) -> None:
        self.job, self.prepared, self.options, self.folder = job, prepared, options, folder
        self.skeleton, self.device = prepared.skeleton, torch.device(job.device)
        self.meter = Meter(progress, len(self.skeleton.blocks))
        self.stream = CalibrationStream(job, prepared, tokens, self.meter, self._spilled("stream"), every)
        self.layers: list[list[LayerPlan]] = [[] for _ in self.skeleton.blocks]
        for linear in options.values():
            for layer in linear.values():
                self.layers[layer.spec.block].append(layer)
        self.fisher: dict[str, Fisher] = {}  # of linears that are measured by the loss's gradients
        self.seconds: list[float] = []  # of each block computed in this run
        self.reads_head: LayerPlan | None = None  # the output head, where statistics of what it reads are taken
        self.head = NO_STATISTICS

    def run(self, consumer: BlockConsumer) -> None:
        """Pass all blocks to the consumer; those that it has finished are only replayed."""
        notes = self._choose()
        count, last = len(self.skeleton.blocks), self._last_read()
        if consumer.finished < count:
            self._gradients()
        self.stream.embed(last >= 0 or self.reads_head is not None)
        process_memory.trim()
        process_memory.check(self.job.max_memory)
        with torch.no_grad():
            consumer.start(notes)
            try:
                for index in range(count):
                    self._block(index, consumer, index >= last)
                if self.reads_head is not None:
                    self.head = tables.statistics(self.stream, self.reads_head)
            finally:
                self.stream.states.close()

    def _last_read(self) -> int:
        """Return the last block that needs calibration text: nothing behind it is packed, changed or pruned."""
        if self.stream.transforms or self.job.recipe.pruning is not None:
            return len(self.skeleton.blocks) - 1
        return max((index for index, layers in enumerate(self.layers) if layers), default=-1)

    def predict_seconds(self, consumer: BlockConsumer, batches: int) -> float:
        """Return the seconds of all blocks if each takes as long as the largest, with `batches` batches, not one."""
        sizes = [sum(layer.nbytes for layer in layers) for layers in self.layers]
        self.stream.embed()
        self.stream.part()
        with torch.no_grad():
            self._block(sizes.index(max(sizes)), consumer, is_last=False)
        return len(sizes) * (self.seconds[0] + (batches - 1) * self.stream.seconds)

    def _choose(self) -> list[str]:
        """Let the transform of the whole model, if there is one, decide what it will do; return what it says."""
        if (edits := self.skeleton.edits) is None:
            return []
        plan, batch, limit = self.prepared.plan, self.prepared.arrangement.batch, self.job.max_memory
        bench = EditContext(self.device, self.stream.tokens, plan, batch, self.folder, limit, self.meter.say)
        with self.stream.ranks.main_first():  # which keeps what it has searched for in a file
            return [*plan.messages, *edits.choose(bench)]

    def _gradients(self) -> None:
        """Take the loss's gradients by a forward and a backward pass of the whole model, if a linear needs them."""
        every = self.job.pack and sizes.tuning_needs_gradients(self.job.recipe)
        names = {x.spec.name for layers in self.layers for x in layers if every or sizes.needs_gradients(x)}
        if names and self.stream.tokens is not None:
            self.meter.say("taking the loss's gradients")
            file = self._spilled("gradients")
            tokens = self.stream.tokens
            self.fisher = ranks.by_main(lambda: fisher.weights(self.skeleton, tokens, names, file, self.device))

    def _spilled(self, name: str) -> Path | None:
        """Return the file that holds what does not fit into memory."""
        rank = ranks.current().rank
        return self.folder / (f"{name}.{rank}" if rank else name) if self.prepared.arrangement.spill else None

    def _block(self, index: int, consumer: BlockConsumer, is_last: bool) -> None:
        started, is_new = time.monotonic(), index >= consumer.finished
        layers, stream = self.layers[index], self.stream
        process_memory.check(self.job.max_memory, self.prepared.arrangement.block_nbytes)
        self.meter.begin(index, self._steps(layers, is_new))
        block = self.skeleton.load_block(index, self.device)
        has_statistics = bool(stream.passes(layers))  # as they are collected, the full-precision side goes on
        if stream.paired and not is_last and not (has_statistics and is_new):
            if has_statistics:  # it was the transformed block that it went through
                stream.transform(index, block)
            stream.forward_full(index, block)
        if not is_new:
            block = consumer.restore(index, block)
        else:
            notes = stream.transform(index, block)
            consumer.begin(index, block)
            self._check_finite(layers, block)
            is_tuned = self.job.recipe.tuning("block") is not None  # no process has its own linears
            divided = DividedBlock(Ranks() if is_tuned else stream.ranks, layers, self.job.seed)
            weights, note = stream.importance(index, block, layers, divided.routed) if layers else (None, None)
            for task in self._tasks(index, block, weights, divided, consumer):
                begun = time.monotonic()
                self.meter.say(f"quantizing {task.layer.spec.name}" + (task.option and f", option {task.option}"))
                if divided.is_whole(task.layer.spec.name):
                    result = quantize_linear.quantize(task, self.job.seed)
                    consumer.add(task, result, time.monotonic() - begun)
                    del result
                else:
                    divided.quantize_tiles(task)
                process_memory.check(self.job.max_memory)
                self.meter.step()
                del task  # and with it statistics, before the next ones are made
            for task, result, seconds in divided.join(self.options):
                consumer.add(task, result, seconds)
            consumer.finish(index, block, [*notes, *([note] if note else [])])
        stream.parted = stream.parted or (stream.paired and not is_last)
        if not is_last or self.reads_head is not None:
            stream.forward(index, block, "propagating", BlockPass(QUANTIZED, QUANTIZED))
        self.skeleton.free()
        process_memory.trim()
        process_memory.check(self.job.max_memory)
        self.meter.end()
        if is_new:
            self.seconds.append(time.monotonic() - started)

    def _tasks(
        self, index: int, block: nn.Module, weights: Tensor | None, divided: DividedBlock, consumer: BlockConsumer
    ) -> Iterator[LinearTask]:
        """Yield this process's linears of a block at each of their options; weights: of the calibration tokens."""
        layers, stream = self.layers[index], self.stream
        scales = activation_scales.calibrate(stream, index, block, layers, self.job.seed)
        for statistics, names in stream.statistics(index, block, layers, weights, divided):
            own = {name: self.skeleton.linear(block, name).weight.detach() for name in names}
            for name, weight in consumer.weights(own).items():
                for option, layer in self.options[name].items():
                    in_scale = scales.get(name) if sizes.needs_in_scale(layer) else None
                    yield LinearTask(layer, option, weight, statistics, self.fisher.get(name), in_scale)
            del statistics

    def _steps(self, layers: list[LayerPlan], is_new: bool) -> int:
        """Return the steps of the meter for a block: its batches in every pass, and its linears."""
        passes = len(self.stream.passes(layers)) if is_new else 0
        scaling = is_new and any(map(sizes.needs_in_scale, layers))
        runs = 1 + max(passes, int(self.stream.paired)) + int(scaling)
        return len(self.stream.slices) * runs + (len(layers) if is_new else 0)

    def _check_finite(self, layers: list[LayerPlan], block: nn.Module) -> None:
        """Raise NumericalError for a weight that no method can quantize."""
        for name in dict.fromkeys(layer.spec.name for layer in layers):
            if not torch.isfinite(self.skeleton.linear(block, name).weight).all():
                raise NumericalError(f"the weight of {name} has NaN or infinite values; repair the checkpoint")
