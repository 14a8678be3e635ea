"""What allocators choose from: every linear at every option, packed in a database, and what each would damage.

One pass over the model, block by block, behind the full-precision prefix, so that nothing measured depends on what will
be chosen: statistics are collected once for all options, each linear is quantized with each, stored, and its damage
taken: ||W - Q||^2, and tr((W - Q) H (W - Q)^T) with H the mean over all calibration tokens (over at most MEASURED_ROWS
rows, scaled). Transforms decide by the first option's schemes, for all of them. What only whole forward passes can tell
is in compress/allocate/sensitivity.py. A killed run goes on after the last finished block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress import formats, plugins, process_memory
from compress.allocate import prepare_options
from compress.allocate.expert_options import ExpertLevels
from compress.allocate.variants import Database
from compress.calib import fisher
from compress.calib.data import Calibration
from compress.errors import NotMeasuredError
from compress.lowrank import correct
from compress.model import edits
from compress.model.blockwise import QUANTIZED, Leg
from compress.progress import Meter, Progress
from compress.quant import incoherence
from compress.run import calibration_stream, memory_plan, quantize_linear, report
from compress.types import Fisher, LayerPlan, PackedWeight


def levels(opened: prepare_options.Options, database: Database, calibration: Calibration, progress: Progress) -> None:
    """Fill the database, from the first block that is not in it."""
    prepared = opened.prepared
    if database.finished() == len(prepared.skeleton.blocks):
        return
    if not opened.asked.measures:
        raise NotMeasuredError(f"{database.folder} is not complete")
    threads = torch.get_num_threads()
    first = database.first({**dataclasses.asdict(prepared.arrangement), "threads": threads})
    torch.set_num_threads(first.pop("threads"))  # the first run's, so that sums are taken in the same order
    prepared = dataclasses.replace(prepared, arrangement=memory_plan.Arrangement(**first))
    memory_plan.check_prediction(prepared.arrangement, opened.asked.max_memory)
    opened = dataclasses.replace(opened, prepared=prepared)
    meter = Meter(progress, len(prepared.skeleton.blocks))
    file = database.folder / "stream" if prepared.arrangement.spill else None
    stream = calibration_stream.Flow(opened.asked, prepared, calibration.tokens, meter, file)
    stream.every = True
    run = _Levels(opened, database, stream, meter)
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    try:
        if (edits := prepared.skeleton.edits) is not None:
            edits.choose(workbench(opened, database, calibration.tokens, meter.say))
        run.gradients(calibration.tokens, file)
        stream.embed()
        for index in range(len(prepared.skeleton.blocks)):
            run.block(index, index < database.finished())
    finally:
        torch.set_grad_enabled(before)
        torch.set_num_threads(threads)
        stream.stream.close()


def workbench(
    opened: prepare_options.Options, database: Database, tokens: Tensor | None, say: Callable[[str], None]
) -> edits.Workbench:
    """For a transform of the whole model to decide with; what it decides stays in the folder."""
    plan, batch = opened.prepared.plan, opened.prepared.arrangement.batch
    device, limit = torch.device(opened.asked.device), opened.asked.max_memory
    return edits.Workbench(device, tokens, plan, batch, database.folder, limit, say)


class _Levels:
    """The loop over the blocks."""

    def __init__(
        self, opened: prepare_options.Options, database: Database, stream: calibration_stream.Flow, meter: Meter
    ) -> None:
        self.opened, self.database, self.flow, self.meter = opened, database, stream, meter
        self.asked, self.skeleton = opened.asked, opened.prepared.skeleton
        self.device = torch.device(opened.asked.device)
        scopes = {plugins.load("transform", step.method).SCOPE for step in self.asked.recipe.transform}
        self.is_edited = "block" in scopes
        self.experts = ExpertLevels(opened, database)
        self.fisher: dict[str, Fisher] = {}  # of linears with an option that is measured by the loss's gradients

    def gradients(self, tokens: Tensor, file: Path | None) -> None:
        """Take those of the loss, where an option wants to know of them."""
        levels = [layer for found in self.opened.levels.values() for layer in found.values()]
        if names := {layer.spec.name for layer in levels if memory_plan.needs_gradients(layer)}:
            self.meter.say("taking the loss's gradients")
            with torch.enable_grad():
                self.fisher = fisher.weights(self.skeleton, tokens, names, file, self.device)

    def block(self, index: int, is_done: bool) -> None:
        """Quantize, store and measure one block at all levels, and go on to the next."""
        layers = [x for found in self.opened.levels.values() for x in found.values() if x.spec.block == index]
        self.meter.begin(index, 2 * self.flow.batch_count() + len(layers))
        block = self.skeleton.load_block(index, self.device)
        self.flow.transform(index, block)
        if not is_done:
            if self.is_edited:
                state = {name: p.detach().to("cpu") for name, p in block.named_parameters()}
                self.database.add_state(index, state)
            packed, measured = self._levels(index, block, layers)
            self.meter.say("measuring experts")
            measured |= self.experts.measure(index, block, partial(self.flow.batches, index), packed)
            self.experts.keep(index, measured, self.flow.stream.samples * self.opened.prepared.seq_len)
            self.database.add(index, packed, measured)
        if index + 1 < len(self.skeleton.blocks):
            self.flow.forward(index, block, "propagating", Leg(QUANTIZED, QUANTIZED))
        self.skeleton.free()
        process_memory.check(self.asked.max_memory)
        self.meter.end()

    def _levels(
        self, index: int, block: nn.Module, layers: list[LayerPlan]
    ) -> tuple[dict[str, PackedWeight], dict[str, Any]]:
        """ "<linear>@<level>" -> weight; linear -> what was measured of it, by level."""
        weights, _ = self.flow.importance(index, block)
        scales = self.flow.in_scales(index, block, layers)
        readers, passes = memory_plan.readers(layers, every=True), self.flow.passes(layers)
        packed: dict[str, PackedWeight] = {}
        measured: dict[str, Any] = {}
        for number, keys in enumerate(passes):
            wanted = {key: readers[key] for key in keys}
            sums = self.flow.collect(index, block, wanted, number + 1 == len(passes), weights)
            for key in keys:
                given = self.flow.given(sums.pop(key), key, readers[key])
                for name in dict.fromkeys(layer.spec.name for layer in readers[key]):
                    weight = self.skeleton.linear(block, name).weight.detach()
                    measured[name] = {"tokens": given.stats.count if given.stats else 0}
                    for level, layer in self.opened.levels[name].items():
                        self.meter.say(f"quantizing {name}, option {level}")
                        result = self._one(layer, weight, given, scales.get(name))
                        packed[f"{name}@{level}"] = result
                        damage = self._damage(weight, result, given)
                        measured[name][level] = {"nbytes": result.nbytes, **damage}
                        self.meter.step()
        return packed, measured

    def _one(
        self, layer: LayerPlan, weight: Tensor, given: quantize_linear.Given, in_scale: Tensor | None
    ) -> PackedWeight:
        """One linear at one level, as the pipeline would quantize it."""
        needs = layer.scheme.config is not None and (
            plugins.load("quant", layer.scheme.method).NEEDS or correct.needs_statistics(layer.scheme.lowrank)
        )
        if not layer.stored.has_in_scale:
            in_scale = None
        if not needs:
            given = quantize_linear.Given()
        elif layer.stored.ops and given.stats is not None:  # options may differ in what is around them
            rotated = incoherence.rotated_stats(given.stats, layer, self.asked.seed)
            given = dataclasses.replace(given, rotated=rotated)
        weighed = self.fisher.get(layer.spec.name) if memory_plan.needs_gradients(layer) else None
        packed, _ = quantize_linear.linear(
            layer, weight, given, quantize_linear.Own(in_scale, weighed), self.asked.seed
        )
        process_memory.check(self.asked.max_memory)
        return packed

    def _damage(self, weight: Tensor, packed: PackedWeight, given: quantize_linear.Given) -> dict[str, float]:
        """Of one level of a weight [out, in]: absolute and relative errors."""
        original = weight.float()
        residual = original - formats.decode(packed, original.dtype)
        norm = original.square().sum(dtype=torch.float64).item()
        lost = residual.square().sum(dtype=torch.float64).item()
        found = {"weight": lost, "relative": lost / norm if norm > 0 else 0.0}
        if given.stats is not None and given.stats.count:
            step = -(-original.shape[0] // report.MEASURED_ROWS)
            rows = slice(None, None, step)
            scale = original.shape[0] / original[rows].shape[0]
            hessian, tokens = given.stats.hessian, self.flow.stream.samples * self.opened.prepared.seq_len
            whole = report.quadratic(original[rows], hessian)
            error = report.quadratic(residual[rows], hessian)
            found |= {"hessian": error * scale / tokens, "output": error / whole if whole > 0 else 0.0}
        else:
            found |= {"hessian": 0.0, "output": 0.0}  # an expert that no token reached: nothing is known of it
        return found


def linears(opened: prepare_options.Options, database: Database) -> Iterator[tuple[str, dict[str, Any]]]:
    """What was measured of every linear."""
    for index in range(len(opened.prepared.skeleton.blocks)):
        yield from database.measured(index).items()
