"""The calibration text on its way through the blocks, and what is collected from it on the way.

Hidden states go from block to block behind the prefix with quantized weights (that inputs are quantized at run time,
too, plays no part in calibration); in asymmetric calibration those of the full-precision model go beside them. Of every
block they give the statistics that its linears are quantized with, weighted by the tokens' importance where the recipe
asks for it (RSQ), and the scales of activations that are quantized statically.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from compress import plugins, process_memory
from compress.calib import stats as calib_stats
from compress.calib import token_importance as importance
from compress.formats import transforms
from compress.model import blockwise, graph
from compress.model.blockwise import FULL, QUANTIZED, Leg
from compress.progress import Meter
from compress.quant import incoherence, target_correction
from compress.run import memory_plan
from compress.run.job import Job, Prepared
from compress.run.quantize_linear import Given
from compress.runtime import activation_quant
from compress.types import LayerPlan, Stats


def paired(asked: Job) -> bool:
    """Whether the stream of the full-precision model is carried beside that of the quantized prefix."""
    return asked.pack and asked.recipe.calibration.asymmetric > 0


class Flow:
    """The stream of hidden states, and where it is. `tokens` [samples, seq_len]; None: there is no calibration text."""

    def __init__(
        self, asked: Job, prepared: Prepared, tokens: Tensor | None, meter: Meter, file: Path | None = None
    ) -> None:
        self.asked, self.prepared, self.tokens, self.meter = asked, prepared, tokens, meter
        self.skeleton, self.device = prepared.skeleton, torch.device(asked.device)
        self.paired = paired(asked) and tokens is not None
        self.stream = blockwise.Stream(prepared.samples, file, 2 if self.paired else 1)
        self.parted = False  # the full-precision side of the stream is filled; before, it equals the quantized one
        self.calls: blockwise.Calls = []
        self.seconds = 0.0  # spent in forward passes
        self.every = False  # statistics are collected of all inputs, not only of those that a method needs
        self.graph: list[graph.Graph] = []  # traced when a transform of blocks needs it

    def embed(self) -> None:
        """Fill the stream with what reaches the first block."""
        if self.skeleton.edits is not None:
            self.skeleton.edits.begin(self.device)
        if self.tokens is not None:
            self.meter.say("embedding the calibration text")
            batch = self.prepared.arrangement.batch
            self.calls = blockwise.record(self.skeleton, self.tokens, batch, self.stream, self.device)

    def part(self) -> None:
        """As if the streams had parted: both sides are the same."""
        if self.paired:
            self.stream.write(0, self.stream.read(0, self.stream.samples), FULL)
            self.parted = True

    def batches(self, index: int) -> Iterator[tuple[Tensor, blockwise.Call]]:
        """What reaches a block behind the quantized prefix."""
        for where in self._slices() if self.tokens is not None else ():
            hidden = self.stream.read(where.start, where.stop - where.start).to(self.device)
            yield hidden, self.calls[index][hidden.shape[0]]

    def batch_count(self) -> int:
        return len(self._slices()) if self.tokens is not None else 0

    def _slices(self) -> list[slice]:
        size, samples = self.prepared.arrangement.batch, self.stream.samples
        return [slice(start, min(start + size, samples)) for start in range(0, samples, size)]

    def forward(self, index: int, block: nn.Module, what: str, *legs: Leg) -> None:
        """Run the block over the whole stream, batch by batch, each batch along all `legs`; nothing without a text."""
        if self.tokens is None:
            return
        self.meter.say(what)
        started = time.monotonic()
        name = self.skeleton.block_prefix(index).rstrip(".")
        for where in self._slices():
            for leg in legs:
                hidden = self.stream.read(where.start, where.stop - where.start, leg.source).to(self.device)
                with leg.watch(where):
                    out = blockwise.run_block(block, self.calls[index][hidden.shape[0]], hidden, name)
                if leg.target is not None:
                    self.stream.write(where.start, out, leg.target)
            process_memory.check(self.asked.max_memory)
            self.meter.step()
        self.seconds += time.monotonic() - started

    def passes(self, layers: list[LayerPlan]) -> list[list[str]]:
        """The shared inputs of a block whose statistics are collected, those of each pass together."""
        sizes = memory_plan.statistics(layers, self.paired, self.every)
        return memory_plan.split(sizes, self.prepared.arrangement.statistics_nbytes)

    def importance(self, index: int, block: nn.Module) -> tuple[Tensor | None, str | None]:
        """What the tokens count [samples, seq_len] in this block, None if all the same; a note for the report."""
        settings = self.asked.recipe.calibration
        if self.tokens is None or settings.importance == "none":
            return None, None
        self.meter.say("weighing tokens")
        name, given = self.skeleton.block_prefix(index).rstrip("."), partial(self.batches, index)
        return importance.weights(settings.importance, block, name, given, self.tokens, settings.importance_min)

    def collect(
        self, index: int, block: nn.Module, readers: dict[str, list[LayerPlan]], last: bool, weights: Tensor | None
    ) -> dict[str, calib_stats.HessianSum]:
        """Statistics of these shared inputs, in one pass of the stream through the block; weights: of the tokens.

        In the `last` pass over the block, whose weights are still the original ones, the full-precision side of the
        stream goes on.
        """
        linears = {key: self.skeleton.linear(block, key) for key in readers}
        sums = {
            key: calib_stats.HessianSum(linear.in_features, self.device, self._has_drift(readers[key]))
            for key, linear in linears.items()
        }
        experts = {key: self.skeleton.expert(block, key) for key, users in readers.items() if users[0].spec.is_expert}

        def watch(where: slice) -> AbstractContextManager[None]:
            mine = None if weights is None else weights[where].to(self.device)
            return calib_stats.collect(linears, sums, self.prepared.seq_len, mine, experts)

        target = FULL if self.paired and last and index + 1 < len(self.skeleton.blocks) else None
        legs = [Leg(QUANTIZED, None if self.parted else target, watch)]
        if self.parted and (target is not None or any(total.drift is not None for total in sums.values())):
            legs.insert(0, Leg(FULL, target, lambda _: calib_stats.expect(linears, sums)))
        self.forward(index, block, "calibrating", *legs)
        return sums

    def given(self, total: calib_stats.HessianSum, key: str, layers: list[LayerPlan]) -> Given:
        """What is made of the statistics of one shared input, once for all its readers."""
        stats, note = calib_stats.shrink(total.finish(key))
        correction, more = None, None
        if self._has_drift(layers):
            tokens, alpha = self.stream.samples * self.prepared.seq_len, self.asked.recipe.calibration.asymmetric
            correction, more = target_correction.correction(stats, alpha, tokens)
        around = next((layer for layer in layers if layer.stored.ops), None)
        rotated = incoherence.rotated_stats(stats, around, self.asked.seed) if around is not None else None
        return Given(Stats(stats.hessian, stats.count), rotated, correction, tuple(filter(None, (note, more))))

    def _has_drift(self, layers: list[LayerPlan]) -> bool:
        """Whether the tokens of a shared input with these readers are the same in both streams, which have parted."""
        return self.parted and not layers[0].spec.is_expert

    def in_scales(self, index: int, block: nn.Module, layers: list[LayerPlan]) -> dict[str, Tensor]:
        """Linear -> its static scale, float32 [1], for those whose activations have one."""
        settings = {x.spec.name: x.stored.activations for x in layers if x.stored.activations is not None}
        static = {x.spec.name: x for x in layers if x.stored.has_in_scale}
        if not static:
            return {}
        largest = {name: activation_quant.LargestInput() for name in static}

        def add(name: str, inputs: Tensor) -> None:
            layer = static[name]
            largest[name].add(
                transforms.apply_input(inputs, layer.stored.ops, incoherence.drawn(layer, self.asked.seed, inputs))
            )

        hooks = [(self.skeleton.linear(block, name), partial(add, name)) for name in static]
        self.forward(index, block, "calibrating", Leg(QUANTIZED, None, lambda _: calib_stats.hooked(hooks)))
        for name, layer in static.items():
            if largest[name].top is None and layer.spec.is_expert:  # seldom chosen: as the largest of its siblings
                kin = [other for other in static if other.rpartition(".")[2] == name.rpartition(".")[2]]
                for top in [largest[other].top for other in kin if static[other].spec.is_expert]:
                    if top is not None:
                        largest[name].add(top.reshape(1))
        return {name: largest[name].in_scale(settings[name], name) for name in static}

    def transform(self, index: int, block: nn.Module) -> list[str]:
        """Apply the recipe's transforms of blocks, in place; what the report should say of them."""
        steps = [
            step for step in self.asked.recipe.transform if plugins.load("transform", step.method).SCOPE == "block"
        ]
        if not steps:
            return []
        self.meter.say("transforming")
        name, batches = self.skeleton.block_prefix(index), partial(self.batches, index)
        if not self.graph:
            self.graph.append(graph.trace(self.skeleton))
        found = graph.sites(self.graph[0].blocks[index], block, batches, name)
        turned = {x.spec.name for x in self.prepared.plan.layers if x.stored.ops}  # rounded in another basis
        schemes = {
            key.removeprefix(name): dataclasses.replace(scheme, incoherence=True) if key in turned else scheme
            for key, scheme in self.prepared.plan.schemes.items()
            if key.startswith(name)
        }
        notes: list[str] = []
        for step in steps:
            notes += plugins.load("transform", step.method).apply(block, found, batches, step.config, schemes)
        process_memory.check(self.asked.max_memory)
        return notes
