"""Walk a model block by block: load, transform, calibrate, quantize each linear, hand the block over, propagate, free.

One loop serves a run, in which every linear has one option and goes on quantized, and the measuring of an allocation,
in which it has several and the original goes on. It knows no method and no model by name. Memory holds one block, the
statistics of one pass over it and the stream of hidden states (which spills to disk past the budget). What becomes of a
block is up to a `BlockConsumer`.

The processes of a run share the linears of a block (`DividedBlock`); a large one is divided by tiles of rows. Experts
that read the same input go to one process, which alone holds their statistics. Portions are dealt by cost, the same in
all processes. Those who hold tiles of a linear hand them to the process that has the first ones when all are made: it
joins them, and measures the errors of the whole.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from compress import process_memory, ranks
from compress.calib.gradient_store import GradientStore
from compress.model.blockwise import QUANTIZED, BlockPass, Samples
from compress.model.edits import EditContext
from compress.progress import Meter, Progress, note
from compress.ranks import Portion, Ranks
from compress.run import loss_gradients, quantize_linear, sizes, tables
from compress.run.calibration_stream import CalibrationStream
from compress.run.job import Job, Prepared
from compress.run.linear_inputs import BlockInputs
from compress.run.quantize_linear import NO_STATISTICS, InputStatistics, LargestWeights, LinearTask, Tiles
from compress.types import Fisher, LayerPlan, Quantized

LinearOptions = Mapping[str, Mapping[str, LayerPlan]]  # linear -> option -> how it is stored at that option


class BlockConsumer(Protocol):
    """Take the blocks of a loop: write a checkpoint, or store and measure options."""

    finished: int  # blocks that a former run has done

    def start(self, notes: dict[str, list[str]]) -> None:
        """Take what a part of the recipe says of the whole model, by its name; called once, before the first block."""

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

    tokens [samples, seq_len], or pairs; None: no calibration text. folder: for hidden states and gradients that spill
    to disk, and for what a transform of the whole model keeps. every: statistics are taken for all linears, whether
    their methods need them or not.
    """

    def __init__(
        self,
        job: Job,
        prepared: Prepared,
        options: LinearOptions,
        tokens: Samples | None,
        folder: Path,
        progress: Progress,
        every: bool = False,
    ) -> None:
        self.job, self.prepared, self.options, self.folder = job, prepared, options, folder
        self.skeleton, self.device = prepared.skeleton, torch.device(job.device)
        self.meter = Meter(progress, len(self.skeleton.blocks))
        self.stream = CalibrationStream(job, prepared, tokens, self.meter, self._spill_file("stream"), every)
        self.layers: list[list[LayerPlan]] = [[] for _ in self.skeleton.blocks]
        for linear in options.values():
            for layer in linear.values():
                self.layers[layer.spec.block].append(layer)
        self.fisher: dict[str, Fisher] = {}  # of linears that are measured by the loss's gradients
        # those at the outputs of linears, where any are needed
        self.gradients: GradientStore | loss_gradients.TimedGradients | None = None
        self.seconds: list[float] = []  # of each block computed in this run
        self.reads_head: LayerPlan | None = None  # the output head, where statistics of what it reads are taken
        self.head = NO_STATISTICS
        self.reads_drafts: list[LayerPlan] = []  # the linears of draft heads of which this is asked for, too
        self.drafts: dict[str, InputStatistics] = {}  # by input key
        self.quantize: Callable[[LinearTask, int], Quantized] = quantize_linear.quantize

    def run(self, consumer: BlockConsumer) -> None:
        """Pass all blocks to the consumer; those that it has finished are only replayed."""
        notes = {"transform": chosen} if (chosen := self._choose_edits()) else {}
        count, last = len(self.skeleton.blocks), self._last_read()
        self._take_gradients(consumer.finished < count)
        if self.gradients is not None and self.gradients.failure is not None:
            notes["two_sided"] = [loss_gradients.describe(self.gradients.failure)]
            note(*notes["two_sided"])
        elif self.prepared.plan.one_sided:
            notes["two_sided"] = [self.prepared.plan.one_sided]
        self.stream.embed(last >= 0 or self._is_end_read)
        process_memory.trim()
        process_memory.check(self.job.max_memory)
        with torch.no_grad():
            consumer.start(notes)
            try:
                for index in range(count):
                    for task in self._walk_block(index, consumer, index >= last):
                        begun = time.monotonic()
                        result = self.quantize(task, self.job.seed)
                        consumer.add(task, result, time.monotonic() - begun)
                        del task, result  # and with them statistics, before the next ones are made
                if self.reads_head is not None:
                    matrix = self.stream.matrix
                    known = None if matrix is None else matrix.of_head(self.reads_head.spec.shape[1])
                    self.head = known or tables.statistics(self.stream, self.reads_head)
                self.drafts = tables.draft_statistics(self.stream, self.reads_drafts)
            finally:
                self.stream.states.close()

    @property
    def _is_end_read(self) -> bool:
        """Whether the states behind the last block are needed."""
        return self.reads_head is not None or bool(self.reads_drafts)

    def _last_read(self) -> int:
        """Return the last block that needs calibration text: nothing behind it is packed, changed or pruned."""
        if self.stream.transforms.steps or self.job.recipe.pruning is not None:
            return len(self.skeleton.blocks) - 1
        return max((index for index, layers in enumerate(self.layers) if layers), default=-1)

    def predict_seconds(self, consumer: BlockConsumer, batches: int) -> float:
        """Return the seconds of all blocks if each takes as long as the largest, with `batches` batches, not one."""
        packed_nbytes = [sum(layer.nbytes for layer in layers) for layers in self.layers]
        self.gradients = loss_gradients.TimedGradients(self.skeleton)
        self.stream.embed()
        self.stream.part()
        with torch.no_grad():
            for task in self._walk_block(packed_nbytes.index(max(packed_nbytes)), consumer, is_last=False):
                consumer.add(task, quantize_linear.quantize(task, self.job.seed), 0.0)
                del task
        return len(packed_nbytes) * (self.seconds[0] + (batches - 1) * self.stream.seconds)

    def _choose_edits(self) -> list[str]:
        """Let the transform of the whole model, if there is one, decide what it will do; return what it says."""
        if (edits := self.skeleton.edits) is None:
            return []
        plan, batch, limit = self.prepared.plan, self.prepared.arrangement.batch, self.job.max_memory
        bench = EditContext(self.device, self.stream.tokens, plan, batch, self.folder, limit, self.meter.say)
        with self.stream.ranks.main_first():  # which keeps what it has searched for in a file
            return [*plan.messages, *edits.choose(bench)]

    def _take_gradients(self, are_used: bool) -> None:
        """Take the loss's gradients by a forward and a backward pass of the whole model, if a linear needs them.

        Those at outputs may have been kept by an earlier run. are_used: False where all blocks are finished.
        """
        every = self.job.pack and sizes.tuning_needs_gradients(self.job.recipe)
        names = {x.spec.name for layers in self.layers for x in layers if every or sizes.needs_gradients(x)}
        file, tokens = self._spill_file("gradients"), self.stream.tokens
        if names and tokens is not None and are_used:
            self.meter.say("taking the loss's gradients")
            self.fisher = loss_gradients.fisher_weights(self.skeleton, tokens, names, file, self.device)
        if tokens is not None and any(map(sizes.needs_output_gradients, itertools.chain(*self.layers))):
            if are_used:
                self.gradients = loss_gradients.output_gradients(self.job, self.skeleton, tokens, file, self.meter.say)
            else:
                self.gradients = loss_gradients.known_gradients(self.job, self.skeleton, tokens)

    def _spill_file(self, name: str) -> Path | None:
        """Return the file that holds what does not fit into memory."""
        rank = ranks.current().rank
        return self.folder / (f"{name}.{rank}" if rank else name) if self.prepared.arrangement.spill else None

    def _walk_block(self, index: int, consumer: BlockConsumer, is_last: bool) -> Iterator[LinearTask]:
        """Take a block through the loop; yield each of this process's linears, which the caller quantizes and adds."""
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
            for name in dict.fromkeys(layer.spec.name for layer in layers):
                quantize_linear.check_finite(name, self.skeleton.linear(block, name).weight)
            yield from self._tasks(index, block, consumer, notes)
            consumer.finish(index, block, notes)
        stream.parted = stream.parted or (stream.paired and not is_last)
        if not is_last or self._is_end_read:
            stream.forward(index, block, "propagating", BlockPass(QUANTIZED, QUANTIZED))
        self.skeleton.free()
        process_memory.trim()
        process_memory.check(self.job.max_memory)
        self.meter.end()
        if is_new:
            self.seconds.append(time.monotonic() - started)

    def _tasks(self, index: int, block: nn.Module, consumer: BlockConsumer, notes: list[str]) -> Iterator[LinearTask]:
        """Yield this process's whole linears of a block at each option; add those that it has some tiles of.

        notes: of the block, to which a note on the weights of the tokens is added.
        """
        layers, stream = self.layers[index], self.stream
        is_tuned = self.job.recipe.tuning("block") is not None  # no process has its own linears
        divided = DividedBlock(Ranks() if is_tuned else stream.ranks, layers, self.job.seed)
        token_weights, note = stream.importance(index, block, layers, divided.routed) if layers else (None, None)
        inputs = BlockInputs(stream, self.skeleton, index, block, self.job.seed)
        scales, sparse = inputs.scales(layers), inputs.sparse(layers)
        largest = LargestWeights(layers, lambda name: self.skeleton.linear(block, name).weight.detach(), self.job.seed)
        output_gradients = loss_gradients.reader(self.gradients, index, layers, self.device)
        for statistics, names in stream.statistics(index, block, layers, token_weights, divided.own, divided.routed):
            own = {name: self.skeleton.linear(block, name).weight.detach() for name in names}
            weights = consumer.weights(own)
            for name, weight in weights.items():
                for option, layer in self.options[name].items():
                    self.meter.say(f"quantizing {name}" + (option and f", option {option}"))
                    in_scale = scales.get(name) if sizes.needs_in_scale(layer) else None
                    known = weight, statistics, self.fisher.get(name), in_scale
                    behind = output_gradients(layer), largest.of(layer, weights), sparse.get(name)
                    if divided.is_whole(name):
                        yield LinearTask(layer, option, *known, *behind)
                    else:
                        divided.quantize_tiles(LinearTask(layer, option, *known, *behind))
                    del known, behind
                    process_memory.check(self.job.max_memory)
                    self.meter.step()
            del statistics, weights  # before the next ones are made
        for task, result, seconds in divided.join(self.options, output_gradients):
            consumer.add(task, result, seconds)
        notes += [note] if note else []

    def _steps(self, layers: list[LayerPlan], is_new: bool) -> int:
        """Return the steps of the meter for a block: its batches in every pass, and its linears."""
        passes = len(self.stream.passes(layers)) if is_new else 0
        of_inputs = (sizes.needs_in_scale, sizes.needs_thresholds)
        scaling = sum(is_new and any(map(needs, layers)) for needs in of_inputs)
        runs = 1 + max(passes, int(self.stream.paired)) + scaling
        return len(self.stream.slices) * runs + (len(layers) if is_new else 0)


class _PartialLinear(NamedTuple):
    """A linear at one option, of which this process has made some tiles."""

    task: LinearTask
    tiles: Tiles


class DividedBlock:
    """The linears of a block, at each of their options, and who quantizes what of them."""

    def __init__(self, ranks: Ranks, layers: Sequence[LayerPlan], seed: int) -> None:
        self.ranks, self.seed = ranks, seed
        groups = {layer.spec.name: _group(layer, ranks) for layer in layers}
        costs = dict.fromkeys(groups.values(), 0.0)
        self.pieces = dict[str, int]()
        for layer in layers:
            group = groups[layer.spec.name]
            costs[group] += layer.spec.numel
            self.pieces[group] = min(self.pieces.get(group, layer.spec.shape[0]), _pieces(layer, ranks))
        dealt = ranks.divide(costs, self.pieces)
        self.portions = {name: dealt[group] for name, group in groups.items()}
        self.routed = {  # input of an expert -> process that holds its statistics
            layer.spec.input_key: self.portions[layer.spec.name][0].rank
            for layer in layers
            if layer.spec.is_expert and ranks.size > 1
        }
        self.own = {name for name, portions in self.portions.items() if any(p.rank == ranks.rank for p in portions)}
        self.waiting: dict[tuple[str, str], _PartialLinear] = {}

    def is_whole(self, name: str) -> bool:
        """Whether one process quantizes all of a linear."""
        return len(self.portions[name]) == 1

    def quantize_tiles(self, task: LinearTask) -> None:
        """Quantize what this process has of a divided linear of `own`, and keep it until all is joined."""
        name = task.layer.spec.name
        numbers = next(self._numbers(task.layer, p) for p in self.portions[name] if p.rank == self.ranks.rank)
        tiles = quantize_linear.quantize_tiles(task, numbers, self.seed)
        task.statistics.rotated.clear()  # it waits for the others
        self.waiting[name, task.option] = _PartialLinear(task._replace(output_gradients=None), tiles)

    def join(
        self,
        options: Mapping[str, Mapping[str, LayerPlan]],
        output_gradients: loss_gradients.Reader,
    ) -> Iterator[tuple[LinearTask, Quantized, float]]:
        """Yield the divided linears whose first tiles this process has, and the seconds of all who made them.

        options: linear -> option -> how it is stored at that option. output_gradients: reads those of a linear anew.
        """
        for name, portions in self.portions.items():
            for option in options[name] if len(portions) > 1 else ():
                linear = self.waiting.pop((name, option), None)
                if linear is None:
                    continue
                if portions[0].rank == self.ranks.rank:
                    known = linear.task._replace(output_gradients=output_gradients(linear.task.layer))
                    linear = linear._replace(task=known)
                if (result := self._join_tiles(linear, portions)) is not None:
                    yield linear.task, *result

    def _join_tiles(self, linear: _PartialLinear, portions: list[Portion]) -> tuple[Quantized, float] | None:
        """Hand tiles to the process that has the first ones; return there the whole linear, and the seconds it took."""
        (first, _), *others = portions
        parts, seconds = list(linear.tiles.parts), linear.tiles.seconds
        for portion in others:
            if self.ranks.rank in (first, portion.rank):
                handed = self.ranks.hand((linear.tiles.parts, linear.tiles.seconds), portion.rank, first)
                parts, seconds = parts + handed[0], seconds + handed[1]
        if self.ranks.rank != first:
            return None
        return quantize_linear.join_tiles(linear.task, linear.tiles, parts), seconds

    def _numbers(self, layer: LayerPlan, portion: Portion) -> slice:
        """Return the tiles of a portion; at another option a linear may have a few tiles more than pieces."""
        count, pieces = len(sizes.spans(layer)), self.pieces[layer.spec.name]
        return slice(*(-(-count * i // pieces) for i in (portion.pieces.start, portion.pieces.stop)))


def _group(layer: LayerPlan, ranks: Ranks) -> str:
    """Return the name under which a linear is dealt."""
    return f"input of {layer.spec.input_key}" if layer.spec.is_expert and ranks.size > 1 else layer.spec.name


def _pieces(layer: LayerPlan, ranks: Ranks) -> int:
    return len(sizes.spans(layer)) if ranks.size > 1 else 1
