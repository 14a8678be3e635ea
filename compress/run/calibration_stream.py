"""Carry the calibration text through the blocks and collect what each block is quantized with.

Hidden states go from block to block behind the prefix with quantized weights (that inputs are quantized at run time,
too, plays no part in calibration). With target correction those of the full-precision model go beside them. The
statistics of a block's inputs are weighted by the tokens' importance where the recipe asks for it (RSQ).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from compress import plugins, process_memory
from compress.calib import stats as calib_stats
from compress.calib import token_importance
from compress.model import blockwise, graph
from compress.model.blockwise import FULL, QUANTIZED, BlockPass
from compress.progress import Meter
from compress.run import memory_plan
from compress.run.job import Job, Prepared
from compress.run.quantize_linear import NO_STATISTICS, InputStatistics, finish_statistics
from compress.types import LayerPlan


class CalibrationStream:
    """The hidden states of the calibration text in front of one block.

    `tokens` [samples, seq_len]; None: there is no text. `file`: where hidden states are kept that do not fit into
    memory. `every`: statistics are collected of all inputs, not only of those that a method needs.
    """

    def __init__(
        self,
        job: Job,
        prepared: Prepared,
        tokens: Tensor | None,
        meter: Meter,
        file: Path | None = None,
        every: bool = False,
    ) -> None:
        self.job, self.prepared, self.tokens, self.meter, self.every = job, prepared, tokens, meter, every
        self.skeleton, self.device = prepared.skeleton, torch.device(job.device)
        self.paired = job.is_paired and tokens is not None
        self.states = blockwise.HiddenStates(prepared.samples, file, 2 if self.paired else 1)
        size, samples = prepared.arrangement.batch, prepared.samples if tokens is not None else 0
        self.slices = [slice(start, min(start + size, samples)) for start in range(0, samples, size)]  # batches
        self.parted = False  # the full-precision side is filled; before, it equals the quantized one
        self.calls: blockwise.ModelArgs  # set by embed, if there is a text
        self.seconds = 0.0  # spent in forward passes
        steps = job.recipe.transform
        self.transforms = [step for step in steps if plugins.load("transform", step.method).SCOPE == "block"]
        self.graph: graph.Graph | None = None  # traced when a transform of blocks needs it

    def embed(self) -> None:
        """Fill the stream with what reaches the first block."""
        if self.skeleton.edits is not None:
            self.skeleton.edits.begin(self.device)
        if self.tokens is not None:
            self.meter.say("embedding the calibration text")
            batch = self.prepared.arrangement.batch
            self.calls = blockwise.record_inputs(self.skeleton, self.tokens, batch, self.states, self.device)

    def part(self) -> None:
        """Fill the full-precision side with a copy of the quantized one."""
        if self.paired:
            self.states.write(0, self.states.read(0, self.states.samples), FULL)
            self.calls.split()
            self.parted = True

    def batches(self, index: int) -> Iterator[tuple[Tensor, blockwise.BlockArgs]]:
        """Yield what reaches a block behind the quantized prefix."""
        for samples in self.slices:
            hidden = self.states.read(samples.start, samples.stop - samples.start).to(self.device)
            yield hidden, self.calls.at(index, samples.start, hidden.shape[0])

    def forward(self, index: int, block: nn.Module, what: str, *legs: BlockPass) -> None:
        """Run the block over the whole stream, batch by batch, each batch along all `legs`; nothing without a text."""
        if self.tokens is None:
            return
        self.meter.say(what)
        started = time.monotonic()
        name = self.skeleton.block_prefix(index).rstrip(".")
        for samples in self.slices:
            for leg in legs:
                hidden = self.states.read(samples.start, samples.stop - samples.start, leg.source).to(self.device)
                call = self.calls.at(index, samples.start, hidden.shape[0], leg.source)
                with suppress(blockwise.InputsSeenError), leg.watch(samples):
                    out, beside = blockwise.run_block_fully(block, call, hidden, name)
                    if leg.target is not None:
                        self.states.write(samples.start, out, leg.target)
                        self.calls.keep(index, samples.start, call, beside, leg.target)
            process_memory.check(self.job.max_memory)
            self.meter.step()
        self.seconds += time.monotonic() - started

    def forward_full(self, index: int, block: nn.Module) -> None:
        """Take the full-precision side of the stream through a block with its original weights."""
        self.forward(index, block, "propagating", BlockPass(FULL if self.parted else QUANTIZED, FULL))

    def passes(self, layers: list[LayerPlan]) -> list[list[str]]:
        """Return the shared inputs of a block whose statistics are collected, those of each pass together."""
        sizes = memory_plan.statistics(layers, self.paired, self.every)
        return memory_plan.split(sizes, self.prepared.arrangement.statistics_nbytes)

    def importance(self, index: int, block: nn.Module) -> tuple[Tensor | None, str | None]:
        """Return the weights of the tokens [samples, seq_len] in this block, None if all count alike; and a note."""
        settings = self.job.recipe.calibration
        if self.tokens is None or settings.importance == "none":
            return None, None
        self.meter.say("weighing tokens")
        name, batches = self.skeleton.block_prefix(index).rstrip("."), partial(self.batches, index)
        return token_importance.weights(settings.importance, block, name, batches, self.tokens, settings.importance_min)

    def statistics(
        self, index: int, block: nn.Module, layers: list[LayerPlan], weights: Tensor | None
    ) -> Iterator[tuple[InputStatistics, list[str]]]:
        """Yield the statistics of each shared input with the linears that read it; weights: of the tokens.

        Last come the linears that need none. In the last pass over the block, whose weights are still the original
        ones, the full-precision side of the stream goes on.
        """
        readers, passes = memory_plan.readers(layers, self.every), self.passes(layers)
        settings, tokens = self.job.recipe.calibration, self.states.samples * self.prepared.seq_len
        for number, keys in enumerate(passes):
            sums = self._collect(index, block, {key: readers[key] for key in keys}, number + 1 == len(passes), weights)
            for key in keys:
                alpha = settings.target_correction if self._has_drift(readers[key]) else None
                names = dict.fromkeys(layer.spec.name for layer in readers[key])
                yield finish_statistics(sums.pop(key), key, alpha, tokens, self.job.seed), list(names)
        reading = {layer.spec.name for users in readers.values() for layer in users}
        yield NO_STATISTICS, list(dict.fromkeys(x.spec.name for x in layers if x.spec.name not in reading))

    def _collect(
        self, index: int, block: nn.Module, readers: dict[str, list[LayerPlan]], last: bool, weights: Tensor | None
    ) -> dict[str, calib_stats.HessianSum]:
        """Collect the statistics of these shared inputs in one pass of the stream through the block."""
        linears = {key: self.skeleton.linear(block, key) for key in readers}
        sums = {
            key: calib_stats.HessianSum(linear.in_features, self.device, self._has_drift(readers[key]))
            for key, linear in linears.items()
        }
        experts = {key: self.skeleton.expert(block, key) for key, users in readers.items() if users[0].spec.is_expert}

        def watch(samples: slice) -> AbstractContextManager[None]:
            of_batch = None if weights is None else weights[samples].to(self.device)
            needed = self.job.recipe.calibration.importance != token_importance.AUTO
            return calib_stats.collect(linears, sums, self.prepared.seq_len, of_batch, experts, pass_end, needed)

        target = FULL if self.paired and last and index + 1 < len(self.skeleton.blocks) else None
        collected = None if self.parted else target  # where the output of the collecting pass goes
        pass_end = calib_stats.PassEnd(sums) if collected is None else None
        legs = [BlockPass(QUANTIZED, collected, watch)]
        if self.parted and (target is not None or any(total.drift is not None for total in sums.values())):
            legs.insert(0, BlockPass(FULL, target, lambda _: calib_stats.expect(linears, sums)))
        self.forward(index, block, "calibrating", *legs)
        return sums

    def _has_drift(self, layers: list[LayerPlan]) -> bool:
        """Return whether the tokens of an input with these readers are the same in both streams, which have parted."""
        return self.parted and not layers[0].spec.is_expert

    def transform(self, index: int, block: nn.Module) -> list[str]:
        """Apply the recipe's transforms of blocks, in place; return what the report should say of them."""
        if not self.transforms:
            return []
        self.meter.say("transforming")
        name, batches = self.skeleton.block_prefix(index), partial(self.batches, index)
        if self.graph is None:
            self.graph = graph.trace(self.skeleton)
        sites = graph.sites(self.graph.blocks[index], block, batches, name)
        rotated = {layer.spec.name for layer in self.prepared.plan.layers if layer.stored.ops}
        schemes = {
            key.removeprefix(name): dataclasses.replace(scheme, incoherence=True) if key in rotated else scheme
            for key, scheme in self.prepared.plan.schemes.items()
            if key.startswith(name)
        }
        notes: list[str] = []
        for step in self.transforms:
            notes += plugins.load("transform", step.method).apply(block, sites, batches, step.config, schemes)
        process_memory.check(self.job.max_memory)
        return notes
