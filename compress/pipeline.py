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
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compress import assemble, asymmetric, formats, incoherence, job, memory, plugins, propagate, report, verify
from compress.calib import stats as calib_stats
from compress.calib.data import Calibration
from compress.checkpoint import read_header, sha256, write_shard
from compress.errors import CheckpointError, NumericalError
from compress.formats import dense
from compress.job import Job, Prepared
from compress.memory import Arrangement
from compress.output import Output, check_space, writing
from compress.progress import Meter, Progress, silent
from compress.propagate import FULL, QUANTIZED, Leg
from compress.types import LayerPlan, LayerReport, PackedWeight, Quantized, Stats


def quantize(
    asked: Job, progress: Progress = silent, on_plan: Callable[[Prepared], None] | None = None
) -> dict[str, Any]:
    """Run a job to its end and return the report; `on_plan` sees what was decided before the work starts.

    Raises CompressError; what is finished stays on disk for the next run.
    """
    started = time.monotonic()
    memory.reset_peak()
    if asked.max_memory is not None:
        memory.return_freed_memory()
    prepared = job.prepare(asked)
    if on_plan is not None:
        on_plan(prepared)
    with Output(asked.out, asked.overwrite, asked.restart) as output, writing(output.work):
        check_space(output.work, _disk_need(prepared, _paired(asked)) - output.written())
        calibration = job.calibration(asked, prepared, progress, output.calibration)
        if calibration is not None:
            prepared = dataclasses.replace(prepared, samples=calibration.tokens.shape[0])
            calibration = _noted(calibration, asked, prepared)
            memory.trim()
        arrangement = {**dataclasses.asdict(prepared.arrangement), "threads": torch.get_num_threads()}
        arrangement = output.begin(job.identity(asked, prepared.skeleton.checkpoint, calibration), arrangement)
        threads = arrangement.pop("threads")  # the first run's, so that sums are taken in the same order
        prepared = dataclasses.replace(prepared, arrangement=Arrangement(**arrangement))
        memory.check_prediction(prepared.arrangement, asked.max_memory)
        run = _Run(asked, prepared, output, calibration.tokens if calibration is not None else None, progress)
        with _threads(threads):
            run.blocks()
            facts = report.Facts(asked, prepared, calibration, run.reports, run.seconds, run.replayed)
            return assemble.finish(output, facts, run.probes, started, progress)


def _paired(asked: Job) -> bool:
    """Whether the stream of the full-precision model is carried beside that of the quantized prefix."""
    return asked.recipe.calibration.asymmetric > 0


def _noted(calibration: Calibration, asked: Job, prepared: Prepared) -> Calibration:
    """With what is done otherwise than asked for."""
    notes = list(calibration.notes)
    if (wanted := asked.recipe.calibration.seq_len) > prepared.seq_len:
        notes.append(
            f"Samples have {prepared.seq_len} tokens instead of {wanted}: the model knows no longer positions."
        )
    if _paired(asked) and any(layer.spec.is_expert for layer in prepared.plan.layers):
        notes.append(
            "Experts are calibrated on their own inputs alone: full-precision routing sends them other tokens."
        )
    return dataclasses.replace(calibration, notes=tuple(notes))


def predict_seconds(asked: Job, prepared: Prepared) -> float:
    """Time of the whole loop, from one batch and all linears of one real block (the one with the most to write)."""
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


@dataclass(frozen=True)
class _Input:
    """What the readers of one shared input are given."""

    stats: Stats | None = None
    rotated: Stats | None = None  # the statistics in the rotated basis of those layers that have one
    correction: Tensor | None = None  # [in, in], of asymmetric calibration
    notes: tuple[str, ...] = ()


class _Run:
    """The state of the loop."""

    def __init__(
        self, asked: Job, prepared: Prepared, output: Output, tokens: Tensor | None, progress: Progress
    ) -> None:
        self.asked, self.prepared, self.output = asked, prepared, output
        self.skeleton = prepared.skeleton
        self.meter = Meter(progress, len(self.skeleton.blocks))
        self.device = torch.device(asked.device)
        self.tokens = tokens  # calibration samples [samples, seq_len]
        self.reports: list[LayerReport] = []
        self.probes: list[str] = []  # hash of each quantized block's output on the probe tokens
        self.seconds: list[float] = []  # of each block computed in this run
        self.replayed = 0  # blocks taken over from an interrupted run
        file = output.work / "stream" if prepared.arrangement.spill else None
        self.paired = _paired(asked) and tokens is not None
        self.stream = propagate.Stream(prepared.samples, file, 2 if self.paired else 1)
        self.parted = False  # the full-precision side of the stream is filled; before, it equals the quantized one
        self.calls: propagate.Calls = []
        self.forward_seconds = 0.0

    def blocks(self) -> None:
        """All blocks, those of an interrupted run replayed."""
        records = self._intact(self.output.finished_blocks())
        self.replayed = len(records)
        self._embed()
        probe = verify.Probe(self.skeleton, self.device)
        try:
            for index in range(len(self.skeleton.blocks)):
                self._block(index, records[index] if index < len(records) else None, probe)
        finally:
            self.stream.close()

    def _intact(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The finished blocks up to the first whose shard is not the file that was recorded; the rest is done again."""
        for index, record in enumerate(records):
            path = self.output.model / record["file"]
            if not path.is_file() or sha256(path) != record["sha256"]:
                self.output.forget_from(index)
                return records[:index]
        return records

    @torch.no_grad()
    def trial_seconds(self, batches: int) -> float:
        """Seconds for all blocks if each takes as long as the largest, with `batches` batches instead of one."""
        layers_of = [
            [x for x in self.prepared.plan.layers if x.spec.block == i] for i in range(len(self.skeleton.blocks))
        ]
        index = max(range(len(layers_of)), key=lambda i: sum(layer.nbytes for layer in layers_of[i]))
        self._embed()
        if self.paired:
            self.stream.write(0, self.stream.read(0, self.stream.samples), FULL)
            self.parted = True
        started = time.monotonic()
        block = self.skeleton.load_block(index, self.device)
        self._quantize(index, block, layers_of[index])
        if self.tokens is not None:
            self._forward(index, block, "propagating", Leg(QUANTIZED))
        seconds = time.monotonic() - started
        self.skeleton.free()
        return len(layers_of) * (seconds + (batches - 1) * self.forward_seconds)

    def _embed(self) -> None:
        """Fill the stream with what reaches the first block."""
        if self.tokens is not None:
            self.meter.say("embedding the calibration text")
            batch = self.prepared.arrangement.batch
            self.calls = propagate.record(self.skeleton, self.tokens, batch, self.stream, self.device)

    @torch.no_grad()
    def _block(self, index: int, record: dict[str, Any] | None, probe: verify.Probe) -> None:
        started = time.monotonic()
        layers = [layer for layer in self.prepared.plan.layers if layer.spec.block == index]
        self.meter.begin(index, self._steps(layers, record is not None))
        block = self.skeleton.load_block(index, self.device)
        if record is None:
            packed, reports = self._quantize(index, block, layers)
            record = {**self._write(index, packed), "layers": [dataclasses.asdict(row) for row in reports]}
            fresh = True
        else:
            packed, reports = self._restore(record, layers)
            fresh = False
        last = index + 1 == len(self.skeleton.blocks)
        if self.paired and not last:
            if not (fresh and memory.readers(layers)):  # else done while statistics were collected
                self._forward(index, block, "propagating", Leg(FULL if self.parted else QUANTIZED, FULL))
            self.parted = True
        for layer in layers:
            weight = self._linear(block, layer.spec.name).weight
            weight.copy_(formats.decode(packed.pop(layer.spec.name), weight.dtype))
        self.probes.append(probe.advance(index, block))
        if fresh:
            self.output.finish_block(index, {**record, "probe": self.probes[-1]})
        elif record["probe"] != self.probes[-1]:
            raise CheckpointError(
                f"block {index} in {self.output.work} does not give its result any more; use --restart"
            )
        self.reports += reports
        if self.tokens is not None and not last:
            self._forward(index, block, "propagating", Leg(QUANTIZED, QUANTIZED))
        self.skeleton.free()
        memory.check(self.asked.max_memory)
        self.meter.end()
        if fresh:
            self.seconds.append(time.monotonic() - started)

    def _steps(self, layers: list[LayerPlan], replay: bool) -> int:
        """Steps of the meter for a block: its batches in every pass, and its linears."""
        batches = -(-self.stream.samples // self.prepared.arrangement.batch) if self.tokens is not None else 0
        passes = 0 if replay else len(self._passes(layers))
        return batches * (1 + max(passes, int(self.paired))) + (0 if replay else len(layers))

    def _passes(self, layers: list[LayerPlan]) -> list[list[str]]:
        """The shared inputs of a block whose statistics are collected, those of each pass together."""
        return memory.split(memory.statistics(layers, self.paired), self.prepared.arrangement.statistics_nbytes)

    def _linear(self, block: nn.Module, name: str) -> nn.Linear:
        """The linear of this full name in a loaded block."""
        relative = name.removeprefix(self.skeleton.blocks_name + ".").partition(".")[2]
        linear = block.get_submodule(relative)
        assert isinstance(linear, nn.Linear)
        return linear

    def _quantize(
        self, index: int, block: nn.Module, layers: list[LayerPlan]
    ) -> tuple[dict[str, PackedWeight], list[LayerReport]]:
        """Quantize all linears of a block on its full-precision outputs; the block itself stays unchanged."""
        for layer in layers:
            if not torch.isfinite(self._linear(block, layer.spec.name).weight).all():
                raise NumericalError(
                    f"the weight of {layer.spec.name} has NaN or infinite values; repair the checkpoint, or ignore it"
                )
        packed: dict[str, PackedWeight] = {}
        reports: dict[str, LayerReport] = {}

        def add(layer: LayerPlan, given: _Input) -> None:
            name = layer.spec.name
            weight = self._linear(block, name).weight.detach()
            packed[name], reports[name] = self._layer(layer, weight, given)

        readers, passes = memory.readers(layers), self._passes(layers)
        for number, keys in enumerate(passes):
            sums = self._collect(index, block, {key: readers[key] for key in keys}, number + 1 == len(passes))
            for key in keys:
                given = self._input(sums.pop(key), key, readers[key])
                for layer in readers[key]:
                    add(layer, given)
                del given
        for layer in layers:
            if layer.spec.name not in packed:
                add(layer, _Input())
        return packed, [reports[layer.spec.name] for layer in layers]

    def _collect(
        self, index: int, block: nn.Module, readers: dict[str, list[LayerPlan]], last: bool
    ) -> dict[str, calib_stats.HessianSum]:
        """Statistics of these shared inputs, in one pass of the stream through the block.

        In the `last` pass over the block, whose weights are still the original ones, the full-precision side of the
        stream goes on.
        """
        linears = {key: self._linear(block, key) for key in readers}
        sums = {
            key: calib_stats.HessianSum(linear.in_features, self.device, self._has_drift(readers[key]))
            for key, linear in linears.items()
        }
        target = FULL if self.paired and last and index + 1 < len(self.skeleton.blocks) else None
        collecting = Leg(QUANTIZED, None, partial(calib_stats.collect, linears, sums, self.prepared.seq_len))
        legs = [collecting if self.parted else collecting._replace(target=target)]
        if self.parted and (target is not None or any(total.drift is not None for total in sums.values())):
            legs.insert(0, Leg(FULL, target, partial(calib_stats.expect, linears, sums)))
        self._forward(index, block, "calibrating", *legs)
        return sums

    def _has_drift(self, layers: list[LayerPlan]) -> bool:
        """Whether the tokens of a shared input with these readers are the same in both streams, which have parted."""
        return self.parted and not layers[0].spec.is_expert

    def _input(self, total: calib_stats.HessianSum, key: str, layers: list[LayerPlan]) -> _Input:
        """What is made of the statistics of one shared input, once for all its readers."""
        stats, note = calib_stats.shrink(total.finish(key))
        correction, more = None, None
        if self._has_drift(layers):
            tokens, alpha = self.stream.samples * self.prepared.seq_len, self.asked.recipe.calibration.asymmetric
            correction, more = asymmetric.correction(stats, alpha, tokens)
        around = next((layer for layer in layers if layer.ops), None)
        rotated = incoherence.rotated_stats(stats, around, self.asked.seed) if around is not None else None
        return _Input(Stats(stats.hessian, stats.count), rotated, correction, tuple(filter(None, (note, more))))

    def _layer(self, layer: LayerPlan, weight: Tensor, given: _Input) -> tuple[PackedWeight, LayerReport]:
        """Quantize and measure one weight [out, in]."""
        name, notes = layer.spec.name, given.notes
        self.meter.say(f"quantizing {name}")
        started = time.monotonic()
        if layer.scheme.config is None:
            packed = PackedWeight(layer.format, layer.params, dense.pack(weight, layer.params), layer.spec.shape)
        else:
            target = weight if given.correction is None else asymmetric.target(weight, given.correction)
            result = self._rounded(layer, target, given.rotated if layer.ops else given.stats)
            del target
            packed, notes = result.weight, (*notes, *result.notes)
        assert packed.nbytes == layer.nbytes, f"{name}: {packed.nbytes} bytes stored, {layer.nbytes} planned"
        row = report.measure(layer, weight, packed, given.stats, notes)
        memory.check(self.asked.max_memory)
        self.meter.step()
        return packed, dataclasses.replace(row, seconds=round(time.monotonic() - started, 4))

    def _rounded(self, layer: LayerPlan, weight: Tensor, stats: Stats | None) -> Quantized:
        """What the layer's method makes of a weight [out, in], in the rotated basis if the layer has one."""
        name, seed = layer.spec.name, self.asked.seed
        given = incoherence.rotated_weight(weight, layer, seed) if layer.ops else weight
        method = plugins.load("quant", layer.scheme.method)
        try:
            result = method.quantize(given, stats, layer.scheme.config, incoherence.derived_seed(seed, "method", name))
        except NumericalError as error:
            raise NumericalError(f"{name}: {error}; more calibration text or a larger damp may help") from error
        if not layer.ops:
            return result
        return Quantized(incoherence.wrapped(result.weight, layer, seed), (*incoherence.notes(layer), *result.notes))

    def _forward(self, index: int, block: nn.Module, what: str, *legs: Leg) -> None:
        """Run the block over the whole stream, batch by batch, each batch along all `legs`."""
        self.meter.say(what)
        started = time.monotonic()
        name, size = self.skeleton.block_prefix(index).rstrip("."), self.prepared.arrangement.batch
        for start in range(0, self.stream.samples, size):
            for leg in legs:
                hidden = self.stream.read(start, min(size, self.stream.samples - start), leg.source).to(self.device)
                with leg.watch():
                    out = propagate.run_block(block, self.calls[index][hidden.shape[0]], hidden, name)
                if leg.target is not None:
                    self.stream.write(start, out, leg.target)
            memory.check(self.asked.max_memory)
            self.meter.step()
        self.forward_seconds += time.monotonic() - started

    def _write(self, index: int, packed: dict[str, PackedWeight]) -> dict[str, Any]:
        """Write a block's shard: packed tensors, and what is copied from the source; returns its file and hash."""
        self.meter.say("writing")
        kept = self.prepared.plan.kept_nbytes
        contents = dict(assemble.copied(self.skeleton, kept, index))
        tensors = {f"{name}.{key}": tensor for name, w in packed.items() for key, tensor in w.tensors.items()}
        file = assemble.shard_name(index, len(self.skeleton.blocks))
        return {"file": file, "sha256": write_shard(self.output.model / file, {**contents, **tensors})}

    def _restore(
        self, record: dict[str, Any], layers: list[LayerPlan]
    ) -> tuple[dict[str, PackedWeight], list[LayerReport]]:
        """A finished block's packed weights from its shard."""
        on_disk = read_header(self.output.model / record["file"])
        reports = [report.row(values) for values in record["layers"]]
        packed = {}
        for layer, row in zip(layers, reports, strict=True):
            form = assemble.stored(row)
            names = formats.specs(form.format, form.params, row.shape, form.ops)
            tensors = {key: on_disk[f"{row.name}.{key}"].read() for key in names}
            packed[layer.spec.name] = PackedWeight(form.format, form.params, tensors, row.shape, form.ops)
        return packed, reports
