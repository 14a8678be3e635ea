"""The loop: block by block, load, calibrate on what the quantized prefix produces, quantize, write, propagate, free.

This is the only module that sees everything. It knows no method and no model by name. Memory holds one block, the
statistics of one pass over it and the stream of hidden states (which spills to disk past the budget); everything that
is finished is on disk, recorded, and never computed again: a resumed run replays the finished blocks' forward passes
from their stored weights and goes on, with the same bytes as a run that was never interrupted.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from compress import formats, process_memory
from compress.allocate import decide
from compress.calib import fisher
from compress.calib.data import Calibration
from compress.errors import CheckpointError, NumericalError
from compress.model.blockwise import FULL, QUANTIZED, Leg
from compress.model.edits import Workbench
from compress.progress import Meter, Progress, silent
from compress.run import (
    calibration_stream,
    expert_pruning,
    job,
    memory_plan,
    prepare,
    quantize_linear,
    verify,
    write_checkpoint,
)
from compress.run import trained_factors as trained
from compress.run.job import Job, Prepared
from compress.run.memory_plan import Arrangement
from compress.storage.workdir import Output, check_space, writing
from compress.tune import low_rank
from compress.types import Fisher, LayerPlan, LayerReport, PackedWeight


def quantize(
    asked: Job, progress: Progress = silent, on_plan: Callable[[Prepared], None] | None = None
) -> dict[str, Any]:
    """Run a job to its end and return the report; `on_plan` sees what was decided before the work starts.

    Raises CompressError; what is finished stays on disk for the next run.
    """
    started = time.monotonic()
    process_memory.reset_peak()
    if decide.is_open(asked):
        with Output(asked.out, asked.overwrite):
            pass  # what would be refused after hours of measuring is refused before
        asked = decide.decided(asked, progress)
    if asked.max_memory is not None:
        process_memory.return_freed_memory()
    prepared = prepare.prepare(asked)
    if on_plan is not None:
        on_plan(prepared)
    with Output(asked.out, asked.overwrite, asked.restart) as output, writing(output.work):
        check_space(output.work, _disk_need(prepared, calibration_stream.paired(asked)) - output.written())
        calibration = prepare.calibration(asked, prepared, progress, output.calibration)
        if calibration is not None:
            prepared = dataclasses.replace(prepared, samples=calibration.tokens.shape[0])
            calibration = _noted(calibration, asked, prepared)
            process_memory.trim()
        arrangement = {**dataclasses.asdict(prepared.arrangement), "threads": torch.get_num_threads()}
        arrangement = output.begin(prepare.identity(asked, prepared.skeleton.checkpoint, calibration), arrangement)
        threads = arrangement.pop("threads")  # the first run's, so that sums are taken in the same order
        prepared = dataclasses.replace(prepared, arrangement=Arrangement(**arrangement))
        memory_plan.check_prediction(prepared.arrangement, asked.max_memory)
        run = _Run(asked, prepared, output, calibration.tokens if calibration is not None else None, progress)
        with _threads(threads):
            run.blocks()
            facts = job.Facts(
                asked, prepared, calibration, run.reports, run.seconds, run.replayed, run.notes, run.experts
            )
            return write_checkpoint.finish(output, facts, run.probes, started, progress)


def _noted(calibration: Calibration, asked: Job, prepared: Prepared) -> Calibration:
    """With what is done otherwise than asked for."""
    notes = list(calibration.notes)
    if (wanted := asked.recipe.calibration.seq_len) > prepared.seq_len:
        notes.append(
            f"Samples have {prepared.seq_len} tokens instead of {wanted}: the model knows no longer positions."
        )
    if calibration_stream.paired(asked) and any(layer.spec.is_expert for layer in prepared.plan.layers):
        notes.append(
            "Experts are calibrated on their own inputs alone: full-precision routing sends them other tokens."
        )
    return dataclasses.replace(calibration, notes=tuple(notes))


def predict_seconds(asked: Job, prepared: Prepared) -> float:
    """Time of the whole loop, from one batch and all linears of one real block (the one with the most to write).

    Without what a transform of the whole model searches or learns before.
    """
    batch = min(prepared.arrangement.batch, prepared.samples)
    trial = dataclasses.replace(
        prepared, samples=batch, arrangement=dataclasses.replace(prepared.arrangement, spill=False)
    )
    vocabulary = prepared.skeleton.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(asked.seed)
    tokens = torch.randint(vocabulary, (batch, prepared.seq_len), generator=generator) if batch else None
    run = _Run(asked, trial, Output(asked.out), tokens, silent)
    return run.trial_seconds(-(-prepared.samples // batch) if batch else 0)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """This many threads for sums, and the former number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _disk_need(prepared: Prepared, paired: bool) -> int:
    """Bytes that a run writes: the checkpoint, and the stream (both streams if `paired`) if it spills."""
    item = prepared.skeleton.dtype.itemsize
    hidden = prepared.skeleton.config.get_text_config().hidden_size
    stream = prepared.samples * prepared.seq_len * hidden * item if prepared.arrangement.spill else 0
    return prepared.plan.nbytes + stream * (2 if paired else 1)


class _Run:
    """The state of the loop."""

    def __init__(
        self, asked: Job, prepared: Prepared, output: Output, tokens: Tensor | None, progress: Progress
    ) -> None:
        self.asked, self.prepared, self.output = asked, prepared, output
        self.skeleton = prepared.skeleton
        self.meter = Meter(progress, len(self.skeleton.blocks))
        self.device = torch.device(asked.device)
        self.reports: list[LayerReport] = []
        self.notes: dict[str, list[str]] = {}  # block name -> what is to be said of it as a whole
        self.experts: dict[str, dict[str, Any]] = {}  # experts module -> its routing, where experts are pruned
        self.probes: list[str] = []  # hash of each quantized block's output on the probe tokens
        self.seconds: list[float] = []  # of each block computed in this run
        self.replayed = 0  # blocks taken over from an interrupted run
        file = output.work / "stream" if prepared.arrangement.spill else None
        self.flow = calibration_stream.Flow(asked, prepared, tokens, self.meter, file)
        self.fisher: dict[str, Fisher] = {}  # of linears that are measured by the loss's gradients

    def blocks(self) -> None:
        """All blocks, those of an interrupted run replayed."""
        records = self._intact(self.output.finished_blocks())
        self.replayed = len(records)
        self._choose()
        if self.replayed < len(self.skeleton.blocks):
            self._gradients()
        self.flow.embed()
        probe = verify.Probe(self.skeleton, self.device)
        try:
            for index in range(len(self.skeleton.blocks)):
                self._block(index, records[index] if index < len(records) else None, probe)
        finally:
            self.flow.stream.close()

    def _choose(self) -> None:
        """Let the transform of the whole model, if there is one, decide what it will do."""
        if (edits := self.skeleton.edits) is not None:
            plan, batch, limit = self.prepared.plan, self.prepared.arrangement.batch, self.asked.max_memory
            tokens, folder = self.flow.tokens, self.output.work
            bench = Workbench(self.device, tokens, plan, batch, folder, limit, self.meter.say)
            if notes := edits.choose(bench):
                self.notes["transform"] = notes

    def _gradients(self) -> None:
        """A forward and a backward pass of the whole model, if a linear wants to know of the loss's gradients."""
        names = {layer.spec.name for layer in self.prepared.plan.layers if memory_plan.needs_gradients(layer)}
        if names and self.flow.tokens is not None:
            self.meter.say("taking the loss's gradients")
            file = self.output.work / "gradients" if self.prepared.arrangement.spill else None
            self.fisher = fisher.weights(self.skeleton, self.flow.tokens, names, file, self.device)

    def _intact(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The finished blocks up to the first whose shard is not the file that was recorded; the rest is done again."""
        intact = list(takewhile(partial(trained.is_intact, self.output), records))
        if len(intact) < len(self.skeleton.blocks):
            self.output.forget_from(len(intact))
        return intact

    @torch.no_grad()
    def trial_seconds(self, batches: int) -> float:
        """Seconds for all blocks if each takes as long as the largest, with `batches` batches instead of one."""
        layers_of = [
            [x for x in self.prepared.plan.layers if x.spec.block == i] for i in range(len(self.skeleton.blocks))
        ]
        index = max(range(len(layers_of)), key=lambda i: sum(layer.nbytes for layer in layers_of[i]))
        self.flow.embed()
        self.flow.part()
        started = time.monotonic()
        block = self.skeleton.load_block(index, self.device)
        self.flow.transform(index, block)
        self._routing(index, block)
        self._quantize(index, block, layers_of[index])
        self.flow.forward(index, block, "propagating", Leg(QUANTIZED))
        seconds = time.monotonic() - started
        self.skeleton.free()
        return len(layers_of) * (seconds + (batches - 1) * self.flow.seconds)

    @torch.no_grad()
    def _block(self, index: int, record: dict[str, Any] | None, probe: verify.Probe) -> None:
        started = time.monotonic()
        layers = [layer for layer in self.prepared.plan.layers if layer.spec.block == index]
        self.meter.begin(index, self._steps(layers, record is not None))
        block = self.skeleton.load_block(index, self.device)
        last = index + 1 == len(self.skeleton.blocks)
        collects = bool(memory_plan.readers(layers))  # statistics, and on the way the full-precision side goes on
        if self.flow.paired and not last and not (collects and record is None):
            if collects:  # it was the transformed block that it went through
                self.flow.transform(index, block)
            source = FULL if self.flow.parted else QUANTIZED
            self.flow.forward(index, block, "propagating", Leg(source, FULL))
        if record is None:
            notes = self.flow.transform(index, block)
            experts = self._routing(index, block)
            packed, reports, more = self._quantize(index, block, layers)
            edited = bool(self.asked.recipe.transform)
            written = write_checkpoint.write_block(self.output, self.prepared, index, block, packed, edited)
            rows = [dataclasses.asdict(row) for row in reports]
            record = {**written, "layers": rows, "notes": [*notes, *more], "experts": experts}
            fresh = True
        else:
            block, packed, reports = write_checkpoint.restore_block(
                self.output, self.skeleton, index, self.device, record
            )
            fresh = False
        self.flow.parted = self.flow.parted or (self.flow.paired and not last)
        for layer in layers:
            weight = self.skeleton.linear(block, layer.spec.name).weight
            weight.copy_(formats.decode(packed.pop(layer.spec.name), weight.dtype))
        self.probes.append(probe.advance(index, block))
        if fresh:
            self.output.finish_block(index, {**record, "probe": self.probes[-1]})
        elif record["probe"] != self.probes[-1]:
            raise CheckpointError(
                f"block {index} in {self.output.work} does not give its result any more; use --restart"
            )
        self.reports += reports
        self.experts.update(record["experts"])
        if record["notes"]:
            self.notes[self.skeleton.block_prefix(index).rstrip(".")] = record["notes"]
        if not last:
            self.flow.forward(index, block, "propagating", Leg(QUANTIZED, QUANTIZED))
        self.skeleton.free()
        process_memory.check(self.asked.max_memory)
        self.meter.end()
        if fresh:
            self.seconds.append(time.monotonic() - started)

    def _steps(self, layers: list[LayerPlan], replay: bool) -> int:
        """Steps of the meter for a block: its batches in every pass, and its linears."""
        passes = 0 if replay else len(self.flow.passes(layers))
        static = any(x.activations is not None and x.activations.scale == "tensor" for x in layers) and not replay
        runs = 1 + max(passes, int(self.flow.paired)) + int(static)
        return self.flow.batch_count() * runs + (0 if replay else len(layers))

    def _routing(self, index: int, block: nn.Module) -> dict[str, dict[str, Any]]:
        """What pruning the experts of a block would do, its weights being the original ones."""
        config = self.asked.recipe.pruning
        if config is None or not self.asked.pack:
            return {}
        self.meter.say("measuring the routing")
        name = self.skeleton.block_prefix(index).rstrip(".")
        return expert_pruning.measure(block, name, partial(self.flow.batches, index), config)

    def _quantize(
        self, index: int, block: nn.Module, layers: list[LayerPlan]
    ) -> tuple[dict[str, PackedWeight], list[LayerReport], list[str]]:
        """Quantize all linears of a block on its full-precision outputs; the block itself stays unchanged.

        Also returns what is to be said of the block as a whole.
        """
        for layer in layers:
            if not torch.isfinite(self.skeleton.linear(block, layer.spec.name).weight).all():
                raise NumericalError(
                    f"the weight of {layer.spec.name} has NaN or infinite values; repair the checkpoint, or ignore it"
                )
        packed: dict[str, PackedWeight] = {}
        reports: dict[str, LayerReport] = {}

        def add(planned: LayerPlan, given: quantize_linear.Given) -> None:
            name = planned.spec.name
            weight = self.skeleton.linear(block, name).weight.detach()
            self.meter.say(f"quantizing {name}")
            own = quantize_linear.Own(scales.get(name), self.fisher.get(name))
            packed[name], reports[name] = quantize_linear.linear(planned, weight, given, own, self.asked.seed)
            process_memory.check(self.asked.max_memory)
            self.meter.step()

        weights, note = self.flow.importance(index, block)
        scales = self.flow.in_scales(index, block, layers)
        readers, passes = memory_plan.readers(layers), self.flow.passes(layers)
        for number, keys in enumerate(passes):
            wanted = {key: readers[key] for key in keys}
            sums = self.flow.collect(index, block, wanted, number + 1 == len(passes), weights)
            for key in keys:
                given = self.flow.given(sums.pop(key), key, readers[key])
                for layer in readers[key]:
                    add(layer, given)
                del given
        for layer in layers:
            if layer.spec.name not in packed:
                add(layer, quantize_linear.Given())
        notes = [note] if note else []
        return self._trained(index, block, layers, packed, notes), [reports[x.spec.name] for x in layers], notes

    def _trained(
        self, index: int, block: nn.Module, layers: list[LayerPlan], packed: dict[str, PackedWeight], notes: list[str]
    ) -> dict[str, PackedWeight]:
        """The packed weights of a block, their low-rank parts trained if the recipe asks for it; adds to the notes."""
        prefix = self.skeleton.block_prefix(index)
        settings = {layer.spec.name.removeprefix(prefix): layer.scheme.lowrank for layer in layers}
        inner = {name.removeprefix(prefix): weight for name, weight in packed.items()}

        def batches() -> Iterator[low_rank.Batch]:
            return ((hidden, call.args, dict(call.kwargs)) for hidden, call in self.flow.batches(index))

        self.meter.say("training low-rank parts")
        trained, note = low_rank.blocks(block, inner, settings, batches)
        notes += [note] if note else []
        return {prefix + name: weight for name, weight in trained.items()}
