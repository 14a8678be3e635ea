"""Carry the calibration text through the blocks and collect what each block is quantized with.

Hidden states go from block to block behind the prefix with quantized weights (that inputs are quantized at run time,
too, plays no part in calibration). With target correction those of the full-precision model go beside them. The
statistics of a block's inputs are weighted by the tokens' importance where the recipe asks for it (RSQ).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress import process_memory, ranks
from compress.calib import routed_sums, token_importance
from compress.calib import stats as calib_stats
from compress.calib.routed_sums import RoutedSum
from compress.calib.stats import HessianSum
from compress.calib.weighed_pass import WEIGHED, WeighedPass
from compress.model import blockwise
from compress.model.blockwise import FULL, QUANTIZED, BlockPass, Samples
from compress.progress import Meter
from compress.run import sizes
from compress.run.importance_matrix import MatrixStatistics
from compress.run.job import Job, Prepared
from compress.run.quantize_linear import NO_STATISTICS, InputStatistics, finish_statistics
from compress.transform.in_blocks import BlockTransforms
from compress.types import LayerPlan


class CalibrationStream:
    """The hidden states of the calibration text in front of one block.

    `tokens` [samples, seq_len], or pairs; None: there is no text. `file`: where hidden states are kept that do not fit
    into memory. `every`: statistics are collected of all inputs, not only of those that a method needs.
    """

    def __init__(
        self,
        job: Job,
        prepared: Prepared,
        tokens: Samples | None,
        meter: Meter,
        file: Path | None = None,
        every: bool = False,
    ) -> None:
        self.job, self.prepared, self.given, self.meter, self.every = job, prepared, tokens, meter, every
        self.tokens = tokens if tokens is None or isinstance(tokens, Tensor) else tokens.decoder
        self.skeleton, self.device = prepared.skeleton, torch.device(job.device)
        self.paired = job.is_paired and tokens is not None
        self.matrix = None if job.imatrix is None else MatrixStatistics(job.imatrix, prepared.skeleton)
        self.states = blockwise.HiddenStates(prepared.samples, file, 2 if self.paired else 1)
        size, samples = prepared.arrangement.batch, prepared.samples if tokens is not None else 0
        self.slices = [slice(start, min(start + size, samples)) for start in range(0, samples, size)]  # batches
        self.ranks = ranks.current()
        self.own = self.slices[self.ranks.part(len(self.slices))]  # the batches that go through blocks in this process
        self.parted = False  # the full-precision side is filled; before, it equals the quantized one
        self.calls: blockwise.ModelArgs  # set by embed, if there is a text
        self.seconds = 0.0  # spent in forward passes
        self.attentions: dict[type[nn.Module], int] = {}  # how often blocks of a class call theirs
        self.weighs_before = False  # tokens of the last block could not be weighed in the pass that uses the weights
        self.weighed: dict[str, HessianSum | None] = {}  # sums of the first pass, made with the weights in it
        self.transforms = BlockTransforms(prepared.skeleton, job.recipe.transform)

    def embed(self, is_read: bool = True) -> None:
        """Fill the stream with what reaches the first block, unless nothing will read it."""
        if self.skeleton.edits is not None:
            self.skeleton.edits.begin(self.device)
        if self.given is not None and is_read:
            self.meter.say("embedding the calibration text")
            batch = self.prepared.arrangement.batch
            self.calls = blockwise.record_inputs(self.skeleton, self.given, batch, self.states, self.device)

    def part(self) -> None:
        """Fill the full-precision side with a copy of the quantized one."""
        if self.paired:
            self.calls.split()
            self.parted = True

    def batches(
        self, index: int, slices: Sequence[slice] | None = None
    ) -> Iterator[tuple[Tensor, blockwise.BlockArgs]]:
        """Yield what reaches a block behind the quantized prefix, in these batches, all by default."""
        for samples in self.slices if slices is None else slices:
            hidden = self.calls.states(index).fetch(samples.start, samples.stop - samples.start, self.device)
            yield hidden, self.calls.at(index, samples.start, hidden.shape[0])

    def matched(self, index: int, block: nn.Module) -> Iterator[tuple[Tensor, blockwise.BlockArgs, Tensor]]:
        """Yield what reaches a block behind the quantized prefix, and what the full-precision model gives behind it.

        block: with its original weights. The statistics of the block have been collected.
        """
        name = self.skeleton.block_prefix(index).rstrip(".")
        has_gone_on = index + 1 < len(self.skeleton.blocks)  # the full-precision side is behind the block
        for samples, (hidden, call) in zip(self.slices, self.batches(index), strict=True):
            full, full_call = hidden, call
            if self.parted:
                full = self.calls.states(index).fetch(samples.start, hidden.shape[0], self.device, FULL)
                full_call = self.calls.at(index, samples.start, full.shape[0], FULL)
            is_output = self.parted and has_gone_on
            yield hidden, call, full if is_output else blockwise.run_block(block, full_call, full, name)

    @process_memory.reusing()
    def forward(
        self,
        index: int,
        block: nn.Module,
        what: str,
        *legs: BlockPass,
        agree: Callable[[], None] = lambda: None,
        behind: Callable[[], None] | None = None,
    ) -> None:
        """Run the block over the whole stream, batch by batch, each batch along all `legs`; nothing without a text.

        The processes of a run share out the batches and hand each other what the block gives. agree: called behind the
        first batch of the main process, and before that of the others. behind: called by all processes alike behind
        each batch, as often as the one with the most batches has one.
        """
        if self.tokens is None:
            return
        self.meter.say(what)
        started = time.monotonic()
        if not self.ranks.is_main:
            agree()
        for samples in self.own:
            self._forward_batch(index, block, samples, legs)
            if samples.start == 0:
                agree()
            process_memory.check(self.job.max_memory)
            if behind is not None:
                behind()
            for _ in range(self.ranks.size):  # the others do as much meanwhile
                self.meter.step()
        if behind is not None:
            for _ in range(max(len(self.slices[part]) for part in self.ranks.parts(len(self.slices))) - len(self.own)):
                behind()
        for side in {leg.target for leg in legs if leg.target is not None}:
            self._exchange(index, block, side, legs)
        self.seconds += time.monotonic() - started

    def _forward_batch(self, index: int, block: nn.Module, samples: slice, legs: Iterable[BlockPass]) -> None:
        name, states = self.skeleton.block_prefix(index).rstrip("."), self.calls.states(index)
        for leg in legs:
            hidden = states.fetch(samples.start, samples.stop - samples.start, self.device, leg.source)
            call = self.calls.at(index, samples.start, hidden.shape[0], leg.source)
            with suppress(calib_stats.InputsSeenError), leg.watch(samples):
                out, beside = blockwise.run_block_fully(block, call, hidden, name)
                if leg.target is not None:
                    states.write(samples.start, out, leg.target)
                    self.calls.keep(index, samples.start, call, beside, leg.target)

    def _exchange(self, index: int, block: nn.Module, side: int, legs: Iterable[BlockPass]) -> None:
        """Give all processes what the block has left, on one side of the stream, for the batches of each."""
        if self.ranks.size == 1:
            return
        if not self.own:  # what a block leaves beside hidden states is known once it has run
            written = [leg._replace(watch=lambda _: nullcontext()) for leg in legs if leg.target == side]
            self._forward_batch(index, block, self.slices[0], written)
        for store in self.calls.stores(index):
            for source, part in enumerate(self.ranks.parts(len(self.slices))):
                for samples in self.slices[part]:
                    states = store.read(samples.start, samples.stop - samples.start, side).contiguous()
                    self.ranks.spread(states, source)
                    if source != self.ranks.rank:
                        store.write(samples.start, states, side)

    def forward_full(self, index: int, block: nn.Module) -> None:
        """Take the full-precision side of the stream through a block with its original weights."""
        self.forward(index, block, "propagating", BlockPass(FULL if self.parted else QUANTIZED, FULL))

    def passes(self, layers: list[LayerPlan]) -> list[list[str]]:
        """Return the shared inputs of a block whose statistics are collected, those of each pass together."""
        if self.matrix is not None:
            return []
        hessians = sizes.hessian_nbytes(layers, self.paired, self.every)
        return sizes.split_passes(hessians, self.prepared.arrangement.statistics_nbytes)

    @process_memory.reusing()
    def importance(
        self, index: int, block: nn.Module, layers: list[LayerPlan], routed: Mapping[str, int]
    ) -> tuple[Tensor | None, str | None]:
        """Return the weights of the tokens [samples, seq_len] in this block, None if all count alike; and a note.

        By attention they are found in the first pass over the block, whose sums are kept for `statistics`. routed: as
        of `_collect`.
        """
        settings = self.job.recipe.calibration
        if self.tokens is None or settings.importance == "none" or self.skeleton.second is not None:
            return None, None
        by_attention = settings.importance in (token_importance.AUTO_SCORE, "attention")
        if by_attention and not (self.paired or self.weighs_before):
            weights = self._weigh(index, block, layers, routed)
            if weights is not None:
                return weights, None
        self.meter.say("weighing tokens")
        is_shared = len(self.slices) >= self.ranks.size > 1
        own = self.own if is_shared else self.slices
        name, batches = self.skeleton.block_prefix(index).rstrip("."), partial(self.batches, index, own)
        minimum = settings.importance_min
        weights, note = token_importance.weights(settings.importance, block, name, batches, self.tokens, minimum)
        self.weighs_before = note is not None  # which the next block is likely to need, too
        return weights, note

    def _weigh(self, index: int, block: nn.Module, layers: list[LayerPlan], routed: Mapping[str, int]) -> Tensor | None:
        """Collect the statistics of the first pass, and return the weights; None where they have to be known before.

        That is so where a block does not call its attention as often as the last of its class, where that cannot be
        seen, and where the weights of all tokens have to be evened out.
        """
        passes, calls = self.passes(layers), self.attentions.get(type(block), 1)
        if not passes or not calls:
            return None
        name, minimum = self.skeleton.block_prefix(index).rstrip("."), self.job.recipe.calibration.importance_min
        weighed, readers = WeighedPass(block, name, calls, minimum), sizes.readers(layers, self.every)
        of_pass = {key: readers[key] for key in passes[0]}
        sums = self._collect(index, block, of_pass, len(passes) == 1, routed, weighed=weighed)
        seen = self.ranks.gather((weighed.calls, weighed.failed, weighed.scores))
        self.attentions[type(block)] = max(calls for calls, *_ in seen)
        if any(failed for _, failed, _ in seen):
            return None
        scores = torch.cat([part for *_, parts in seen for part in parts])
        weights, note = token_importance.of_scores(scores, block, minimum)
        if note is not None:
            return None
        self.weighed = sums
        return weights

    def statistics(
        self,
        index: int,
        block: nn.Module,
        layers: list[LayerPlan],
        weights: Tensor | None,
        own: Collection[str],
        routed: Mapping[str, int],
    ) -> Iterator[tuple[InputStatistics, list[str]]]:
        """Yield the statistics of each shared input with this process's linears that read it.

        weights: of the tokens. own: this process's linears. routed: as of `_collect`. Last come the linears that need
        none. In the last pass over the block, whose weights are still the original ones, the full-precision side of the
        stream goes on.
        """
        readers, passes = sizes.readers(layers, self.every), self.passes(layers)
        if self.matrix is not None:
            yield from self.matrix.of(layer for layer in layers if layer.spec.name in own)
        settings, tokens = self.job.recipe.calibration, self.states.samples * self.prepared.seq_len
        for number, keys in enumerate(passes):
            sums, self.weighed = self.weighed, {}
            if not sums:
                of_pass = {key: readers[key] for key in keys}
                sums = self._collect(index, block, of_pass, number + 1 == len(passes), routed, weights)
            for key in keys:
                alpha = settings.target_correction if self._has_drift(readers[key]) else None
                names = dict.fromkeys(layer.spec.name for layer in readers[key] if layer.spec.name in own)
                total = sums.pop(key)
                if names and total is not None:
                    yield finish_statistics(total, key, alpha, tokens, self.job.seed), list(names)
        reading = {layer.spec.name for users in readers.values() for layer in users}
        others = dict.fromkeys(x.spec.name for x in layers if x.spec.name in own and x.spec.name not in reading)
        yield NO_STATISTICS, list(others)

    def _collect(
        self,
        index: int,
        block: nn.Module,
        readers: dict[str, list[LayerPlan]],
        last: bool,
        routed: Mapping[str, int],
        weights: Tensor | None = None,
        weighed: WeighedPass | None = None,
    ) -> dict[str, HessianSum | None]:
        """Collect the statistics of these shared inputs in one pass of the stream through the block.

        routed: input of an expert -> the process that alone holds its statistics; the others have None. weighed: finds
        the weights in this pass.
        """
        linears = {key: self.skeleton.linear(block, key) for key in readers}
        sums = {
            key: HessianSum(linear.in_features, self.device, self._has_drift(readers[key]))
            for key, linear in linears.items()
            if key not in routed
        }
        elsewhere = {
            key: RoutedSum(linear.in_features, self.device, routed[key], self.ranks.rank)
            for key, linear in linears.items()
            if key in routed
        }
        experts = {key: self.skeleton.expert(block, key) for key, users in readers.items() if users[0].spec.is_expert}
        both: dict[str, calib_stats.Summed] = {**sums, **elsewhere}
        every = {key: both[key] for key in readers}
        chunk, seq_len = calib_stats.chunk_tokens(self.prepared.seq_len), self.prepared.seq_len
        needed = self.job.recipe.calibration.importance != token_importance.AUTO_SCORE

        def collect(of_batch: Tensor | None, into: Mapping[str, Any] = every) -> AbstractContextManager[None]:
            return calib_stats.collect(linears, into, chunk, of_batch, experts, pass_end, needed)

        def watch(samples: slice) -> AbstractContextManager[None]:
            if weighed is not None:
                shape = samples.stop - samples.start, seq_len
                return weighed.watch(shape, self.device, every, pass_end, collect)
            return collect(None if weights is None else weights[samples].to(self.device))

        target = FULL if self.paired and last and index + 1 < len(self.skeleton.blocks) else None
        collected = None if self.parted else target  # where the output of the collecting pass goes
        pass_end = (
            calib_stats.PassEnd([*every, WEIGHED] if weighed is not None else every) if collected is None else None
        )
        legs = [BlockPass(QUANTIZED, collected, watch)]
        if self.parted and (target is not None or any(total.drift is not None for total in sums.values())):
            legs.insert(0, BlockPass(FULL, target, lambda _: calib_stats.expect(linears, sums)))
        behind = partial(routed_sums.exchange, elsewhere, self.ranks) if elsewhere else None
        agree = partial(calib_stats.agree, every, self.ranks)
        self.forward(index, block, "calibrating", *legs, agree=agree, behind=behind)
        calib_stats.join(sums, self.ranks)
        return {**sums, **{key: total.total for key, total in elsewhere.items()}}

    def _has_drift(self, layers: list[LayerPlan]) -> bool:
        """Return whether the drift of an input is summed, whose tokens must be the same in both streams."""
        is_corrected = self.job.recipe.calibration.target_correction > 0
        return self.parted and is_corrected and not layers[0].spec.is_expert

    def transform(self, index: int, block: nn.Module) -> list[str]:
        """Apply the recipe's transforms of blocks, in place; return what the report should say of them."""
        if not self.transforms.steps:
            return []
        self.meter.say("transforming")
        notes = self.transforms.apply(index, block, partial(self.batches, index), self.prepared.plan)
        process_memory.check(self.job.max_memory)
        return notes
