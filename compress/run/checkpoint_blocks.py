"""Write the blocks of a checkpoint, or restore them from an interrupted run.

A finished block is on disk, recorded, and never computed again: a resumed run takes the calibration stream through its
stored weights and goes on, with the same bytes as a run that was never interrupted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compress import formats, plugins, ranks
from compress.errors import CheckpointError, NumericalError
from compress.quant import parts
from compress.run import expert_pruning, report, shards, verify
from compress.run.calibration_stream import CalibrationStream
from compress.run.job import RunState
from compress.run.quantize_linear import LinearTask, output_metric
from compress.storage.workdir import Output
from compress.tune import low_rank
from compress.types import LayerReport, PackedWeight, Quantized


class CheckpointBlocks:
    """The blocks of a checkpoint in the making (`BlockConsumer`); records: of the blocks that are done."""

    def __init__(
        self, run: RunState, output: Output, stream: CalibrationStream, records: Sequence[dict[str, Any]] = ()
    ) -> None:
        self.run, self.output, self.stream, self.records = run, output, stream, records
        self.skeleton, self.device = run.prepared.skeleton, torch.device(run.job.device)
        self.ranks = stream.ranks
        self.finished = run.replayed = len(records)
        self.packed: dict[str, PackedWeight] = {}  # of the present block
        self.rows: dict[str, LayerReport] = {}
        self.routing: dict[str, dict[str, Any]] = {}
        self.tuning: Any = None  # of the present block, where the recipe asks for it

    def start(self, notes: dict[str, list[str]]) -> None:
        """Begin the probe, and keep the notes."""
        self.run.notes |= notes
        self.probe = verify.Probe(self.skeleton, self.device)
        self.run.start = self.probe.start() if self.run.prepared.plan.embedding_tables else None

    def begin(self, index: int, block: nn.Module) -> None:
        """Measure what pruning the experts of a block would do, its weights being the original ones."""
        config, tune = self.run.job.recipe.pruning, self.run.job.recipe.tuning("block")
        self.packed, self.rows, self.routing, self.tuning = {}, {}, {}, None
        layers = [layer for layer in self.run.prepared.plan.layers if layer.spec.block == index]
        if tune is not None and layers:
            prefix, matched = self.skeleton.block_prefix(index), partial(self.stream.matched, index, block)
            names = [layer.spec.name.removeprefix(prefix) for layer in layers]
            method = plugins.load("tune", tune.method)
            self.prefix = prefix
            self.tuning = method.BlockTuning(block, names, matched, len(self.stream.slices), tune.config)
        if config is not None and self.run.job.pack:
            self.stream.meter.say("measuring the routing")
            name, batches = self.skeleton.block_prefix(index).rstrip("."), partial(self.stream.batches, index)
            self.routing = expert_pruning.measure(block, name, batches, config)

    def weights(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return weights that are tuned to make up for those before, if the recipe asks for it."""
        if self.tuning is None or not own:
            return own
        self.stream.meter.say("tuning what is left of the block")
        self.tuning.between()
        return {name: self.tuning.weight(name.removeprefix(self.prefix)) for name in own}

    def add(self, task: LinearTask, result: Quantized, seconds: float) -> None:
        """Keep one linear until its block is done, and measure its errors."""
        if self.tuning is not None:
            name = task.layer.spec.name.removeprefix(self.prefix)
            self.tuning.add(name, result.weight)
            if task.fisher is not None:
                self.tuning.fisher[name] = task.fisher
        metric = output_metric(task)
        row = report.measure(task.layer, task.weight, result.weight, task.statistics.stats, result.notes, metric)
        row = report.check_row(row, self.run.job.allow_partial)
        self.packed[row.name] = result.weight
        self.rows[row.name] = dataclasses.replace(row, seconds=round(seconds, 4))

    def finish(self, index: int, block: nn.Module, notes: list[str]) -> None:
        """Write the block's shard, probe it, and record it."""
        for packed, others in self.ranks.gather((self.packed, self.rows)):
            self.packed.update(packed)
            self.rows.update(others)
        notes = [*notes, *self.tune(block), *self.train(index, block)]
        edited = bool(self.run.job.recipe.transform) or self.run.job.recipe.tuning("block") is not None
        written = ranks.by_main(
            lambda: shards.write_block(self.output, self.run.prepared, index, block, self.packed, edited)
        )
        rows = [self.rows[x.spec.name] for x in self.run.prepared.plan.layers if x.spec.block == index]
        packed, self.packed = self.packed, {}
        record = {**written, "layers": list(map(report.to_dict, rows)), "notes": notes, "experts": self.routing}
        record["probe"] = self._pass_on(index, block, packed)
        if len(set(self.ranks.gather(record["probe"]))) > 1:
            raise NumericalError(
                f"the processes do not compute the same in block {index}; run them on machines of one kind, with the "
                "same software"
            )
        if self.ranks.is_main:
            self.output.finish_block(index, record)
        self._add_to_run(index, record, rows)

    def restore(self, index: int, block: nn.Module) -> nn.Module:
        """Return the block that was written. Raises CheckpointError if it does not give what it gave."""
        record = self.records[index]
        block, packed, rows = shards.restore_block(self.output, self.skeleton, index, self.device, record)
        if record["probe"] != self._pass_on(index, block, packed):
            raise CheckpointError(
                f"block {index} in {self.output.work} does not give its result any more; use --restart"
            )
        self._add_to_run(index, record, rows)
        return block

    def _pass_on(self, index: int, block: nn.Module, packed: dict[str, PackedWeight]) -> str:
        """Put the decoded weights into the block, in place; return the hash of its output on the probe tokens.

        The lowest level of nested ones goes on.
        """
        lowest = {name: parts.lowest(weight) for name, weight in packed.items() if weight.format == "nested"}
        for weights in (packed, lowest):
            for name in list(weights):
                weight = self.skeleton.linear(block, name).weight
                weight.copy_(formats.decode(weights.pop(name), weight.dtype))
            if weights is packed:
                self.run.probes.append(self.probe.advance(index, block))
        return self.run.probes[-1]

    def _add_to_run(self, index: int, record: dict[str, Any], rows: list[LayerReport]) -> None:
        self.run.layers += rows
        self.run.hashes[record["file"]] = record["sha256"]
        self.run.experts.update(record["experts"])
        if record["notes"]:
            self.run.notes[self.skeleton.block_prefix(index).rstrip(".")] = record["notes"]

    def tune(self, block: nn.Module) -> list[str]:
        """Train what lies beside the codes of a block, if the recipe asks for it; return what the report should say."""
        if self.tuning is None:
            return []
        self.stream.meter.say("tuning the block")
        packed, vectors, note = self.tuning.finish()
        self.tuning = None
        self.packed = {self.prefix + name: weight for name, weight in packed.items()}
        for name, tensor in vectors.items():
            block.get_parameter(name).copy_(tensor)
        return [note]

    def train(self, index: int, block: nn.Module) -> list[str]:
        """Train the low-rank parts of the block if the recipe asks for it; return what the report should say."""
        prefix = self.skeleton.block_prefix(index)
        layers = [layer for layer in self.run.prepared.plan.layers if layer.spec.block == index]
        settings = {layer.spec.name.removeprefix(prefix): layer.scheme.lowrank for layer in layers}
        inner = {name.removeprefix(prefix): weight for name, weight in self.packed.items()}
        if any(part is not None and part.train_blocks for part in settings.values()):
            self.stream.meter.say("training low-rank parts")
        trained, note = low_rank.train_block(block, inner, settings, partial(self.stream.batches, index))
        self.packed = {prefix + name: weight for name, weight in trained.items()}
        return [note] if note else []
