"""Narrow the blocks of a model one after the other on calibration text, each into a file of its own.

Two streams of hidden states go through the blocks, in float32: that of the original model, and that behind the narrower
blocks, in which inputs are measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from compress import process_memory
from compress.errors import UnsupportedModelError
from compress.model import blockwise
from compress.model.block_calls import BlockArgs
from compress.model.blockwise import FULL, QUANTIZED, HiddenStates, ModelArgs
from compress.model.edits import EditContext
from compress.model.skeleton import Skeleton
from compress.papers.transform import channel_choice, gap_healing, reshaping
from compress.papers.transform.channel_choice import Score
from compress.papers.transform.gap_healing import Fit, Moments

TOLERANCE = 1e-3  # [fraction] by which a narrower block may differ from one with channels at zero


class Cut(NamedTuple):
    """A parameter of a block that becomes shorter in one dimension."""

    name: str  # path in the block
    dim: int
    size: int  # entries of a unit (a neuron; a key/value head, or all query heads that read it)
    units: int
    stays: int  # units

    def of(self, parameter: Tensor, units: Tensor) -> Tensor:
        """Return the entries of these units."""
        entries = (units[:, None] * self.size + torch.arange(self.size, device=units.device)).flatten()
        return parameter.index_select(self.dim, entries)


class PrunedPart(NamedTuple):
    """What is cut together: the projection [out, in] behind, and what makes its inputs."""

    behind: Cut
    before: list[Cut]


class How(NamedTuple):
    """The rules of a pass; prune_width.py."""

    score: Score
    update: str


class WidthPass:
    """One pass through the original and the narrower model."""

    def __init__(
        self,
        models: tuple[Skeleton, Skeleton],
        parts: Sequence[Sequence[PrunedPart]],
        how: How,
        bench: EditContext,
        files: Sequence[Path],
    ) -> None:
        (self.original, self.narrower), self.parts = models, parts
        self.how, self.bench, self.files = how, bench, files

    @torch.no_grad()
    def run(self, tokens: Tensor) -> None:
        """Write the files that are missing, on tokens [samples, seq_len] int64."""
        bench = self.bench
        ends = [blockwise.computing_in(each, torch.float32) for each in (self.original, self.narrower)]
        try:
            with reshaping.both_streams(self.original, tokens, bench, "narrow blocks on") as (calls, stream):
                for index in range(len(self.original.blocks)):
                    bench.say(f"narrowing block {index + 1}")
                    self._through(index, calls, stream)
                    process_memory.check(bench.max_memory)
        finally:
            for end in ends:
                end()

    def _through(self, index: int, calls: ModelArgs, stream: HiddenStates) -> None:
        bench, path, prefix = self.bench, self.files[index], self.original.block_prefix(index)
        blockwise.propagate(self.original, index, calls, stream, bench.batch, bench.device, (FULL, FULL))
        is_new = not path.is_file()
        full = self.original.load_block(index, bench.device) if is_new else None
        if full is not None:
            cut, errors = dict[str, Tensor](), (0.0, 0.0)
            for part in reversed(self.parts[index]):  # attention, then the MLP behind it
                errors = self._narrow(full, part, cut, _Streams(index, calls, stream))
        block = self.narrower.load_block(index, bench.device)
        if full is not None:
            self._compare(full, block, cut, _Streams(index, calls, stream))
            reshaping.write_parameters(path, self.narrower, prefix, cut, errors)
        for name, stored in reshaping.read_parameters(path).items():
            block.get_parameter(name).copy_(stored.read())
        for start, hidden, call in self._batches(_Streams(index, calls, stream)):
            stream.write(start, blockwise.run_block(block, call, hidden, prefix.rstrip(".")), QUANTIZED)
        self.narrower.free()
        self.original.free()

    def _batches(self, streams: _Streams) -> Iterator[tuple[int, Tensor, BlockArgs]]:
        stream = streams.stream
        for start in range(0, stream.samples, self.bench.batch):
            count = min(self.bench.batch, stream.samples - start)
            hidden = stream.fetch(start, count, self.bench.device, QUANTIZED)
            yield start, hidden, streams.calls[streams.number][count]

    def _narrow(
        self, block: nn.Module, part: PrunedPart, cut: dict[str, Tensor], streams: _Streams
    ) -> tuple[float, float]:
        """Put what stays of a part into `cut`, zeros for the rest into the block; return held-out errors."""
        linear = block.get_submodule(part.behind.name.removesuffix(".weight"))
        weight = linear.get_parameter("weight")
        is_attention = part.behind.size > 1
        to_original = self.how.update == "original" and not is_attention
        seen, held = self._moments(block, linear, to_original, streams)
        matrix, size = weight.double(), part.behind.size
        count = part.behind.units - part.behind.stays
        kept = channel_choice.choose_channels(matrix, seen.inputs, size, count, self.how.score)
        stays = torch.zeros(matrix.shape[1], dtype=torch.bool, device=matrix.device)
        stays[kept] = True
        result = Fit(None, 0.0, 0.0)
        if self.how.update != "none":
            result = gap_healing.fit(without(seen, matrix, stays), without(held, matrix, stays))
        refitted = matrix[:, kept] if result.change is None else matrix[:, kept] + result.change
        weight.zero_()
        weight[:, kept] = refitted.to(weight.dtype)
        units = kept[::size] // size
        for each in part.before:
            cut[each.name] = each.of(block.get_parameter(each.name), units)
        cut[part.behind.name] = refitted
        return result.before, result.after

    def _moments(
        self, block: nn.Module, linear: nn.Module, to_original: bool, streams: _Streams
    ) -> tuple[Moments, Moments]:
        """Return moments of a projection's inputs on seen and held-out samples; e is what is missing behind the block.

        to_original: e is zero otherwise, and where the projection is not the last step on its way into the states.
        """
        index, stream, inputs = streams.number, streams.stream, list[Tensor]()
        name, shape = self.original.block_prefix(index).rstrip("."), linear.get_parameter("weight").shape
        parts = [Moments.of(shape, self.bench.device) for _ in range(2)]
        held = stream.samples - max(1, stream.samples // gap_healing.HELD_OUT)
        if to_original:
            _, hidden, call = next(self._batches(streams))
            to_original = linear is _find_last(block, call, hidden, name)
        with blockwise.attached([linear.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))]):
            for start, hidden, call in self._batches(streams):
                states = blockwise.run_block(block, call, hidden, name)
                targets = stream.fetch(start, len(hidden), self.bench.device, FULL)
                for row, (a, x, z) in enumerate(zip(inputs.pop(), states, targets, strict=True), start):
                    parts[row >= held].add(a, x if to_original else z, z)
        return parts[0], parts[1]

    def _compare(self, full: nn.Module, block: nn.Module, cut: dict[str, Tensor], streams: _Streams) -> None:
        """Raise UnsupportedModelError unless the narrower block is the full one with these channels at zero."""
        _, hidden, call = next(self._batches(streams))
        name = self.original.block_prefix(streams.number).rstrip(".")
        for key, tensor in cut.items():
            block.get_parameter(key).copy_(tensor)
        outputs = [blockwise.run_block(each, call, hidden, name) for each in (full, block)]
        if (outputs[0] - outputs[1]).norm() > TOLERANCE * outputs[0].norm():
            raise UnsupportedModelError(
                f"prune_width: {name} does not compute the same with channels cut as with them at zero; remove "
                "prune_width from the recipe's transform"
            )


def _find_last(block: nn.Module, call: BlockArgs, hidden: Tensor, name: str) -> nn.Module | None:
    path = gap_healing.find_last_projection(block, call, hidden, name)
    return None if path is None else block.get_submodule(path)


class _Streams(NamedTuple):
    """A block, and what goes through it."""

    number: int  # of the block
    calls: ModelArgs
    stream: HiddenStates  # sides: QUANTIZED behind narrower blocks, FULL behind the original ones


def without(moments: Moments, weight: Tensor, stays: Tensor) -> Moments:
    """Return the moments of a projection [out, in] float64 whose channels but these (bool [in]) are removed.

    What they gave is then missing, too.
    """
    gone, hessian = weight[:, ~stays], moments.inputs
    lost = gone @ hessian[~stays]
    squares = moments.squares + 2 * (gone * moments.cross[:, ~stays]).sum() + (lost[:, ~stays] * gone).sum()
    cross = moments.cross[:, stays] + lost[:, stays]
    return Moments(hessian[stays][:, stays], cross, float(squares), moments.states)
