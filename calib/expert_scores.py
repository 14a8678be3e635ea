"""Sum up what each expert of a model gives on calibration text, to choose those that it can go without.

The sums are over the tokens t that the router sends to expert j, with the weight g_j(t) that it gives them there;
f_j(t) is what the expert gives. REAP (Lasby et al. 2025, arXiv 2510.13999) scores an expert by the mean of
g_j(t) ||f_j(t)||_2. Sums are float64, so that batches change their rounding alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from compress import process_memory
from compress.calib.expert_routing import experts_of, watch_experts
from compress.model import blockwise
from compress.model.blockwise import BlockArgs, HiddenStates
from compress.model.edits import EditContext
from compress.model.skeleton import Skeleton
from compress.runtime.experts import Experts
from compress.storage.checkpoint import read_header, write_shard

SUMS_FILE = "expert-sums.safetensors"  # a file of a run's folder


class ExpertSums(NamedTuple):
    """Sums of the experts of one module, or of all blocks with a first dimension for these; float64."""

    counts: Tensor  # [experts]: tokens
    weights: Tensor  # [experts]: g
    norms: Tensor  # [experts]: g ||f||_2
    outputs: Tensor  # [experts, hidden]: f

    def block(self, index: int) -> ExpertSums:
        """Return the sums of one of the blocks."""
        return ExpertSums(*(each[index] for each in self))

    def mean(self, sums: Tensor) -> Tensor:
        """Return the mean over each expert's tokens of one of the sums [experts], 0 for an expert without tokens."""
        return sums / self.counts.clamp(min=1)


class _ExpertSum:
    """The running sums of one module of experts."""

    def __init__(self, module: Experts) -> None:
        self.module, self.sums = module, [torch.zeros(len(module), dtype=torch.float64) for _ in range(3)]
        self.outputs = [torch.zeros(0, dtype=torch.float64)] * len(module)
        self.top_k = 0

    def add(self, hidden: Tensor, index: Tensor, weights: Tensor) -> None:
        """Add one routing: hidden [..., hidden], index and weights [tokens, top_k]."""
        hidden, self.top_k = hidden.flatten(0, -2), index.shape[1]
        for number in range(len(self.module)):
            token, position = torch.where(index == number)
            outputs = self.module.compute(number, hidden[token]).float()
            gates = weights[token, position].float()
            figures = torch.ones_like(gates), gates, gates * outputs.norm(dim=-1)
            for total, figure in zip(self.sums, figures, strict=True):
                total[number] += figure.double().sum().cpu()
            mine = outputs.double().sum(0).cpu()
            self.outputs[number] = self.outputs[number] + mine if len(self.outputs[number]) else mine

    def finish(self) -> ExpertSums:
        counts, weights, norms = self.sums
        return ExpertSums(counts, weights, norms, torch.stack(self.outputs))


def measure(
    original: Skeleton, blocks: list[int], samples: int, bench: EditContext, check: Callable[[int], None]
) -> ExpertSums:
    """Return the sums of these blocks, [blocks, ...], each of which has one module of experts.

    They are taken in one pass of the unchanged model over the first samples of the text, and kept in a file of the
    run's folder that a later call reads. check: is told how many experts a token gets, and may raise.
    """
    path = bench.folder / SUMS_FILE
    if not path.is_file():
        sums = list(_pass(original, blocks, samples, bench, check))
        write_shard(path, dict(zip(ExpertSums._fields, map(torch.stack, zip(*sums, strict=True)), strict=True)))
    stored = read_header(path)
    return ExpertSums(*(stored[name].read() for name in ExpertSums._fields))


@torch.no_grad()
def _pass(
    original: Skeleton, blocks: list[int], samples: int, bench: EditContext, check: Callable[[int], None]
) -> Iterator[ExpertSums]:
    """Take the text through the model up to the last of the blocks; yield the sums of each."""
    assert bench.tokens is not None, "the caller asks"
    tokens = bench.tokens[:samples]
    stream = HiddenStates(tokens.shape[0], bench.folder / "stream")
    try:
        bench.say("embedding samples to score experts on")
        calls = blockwise.record_inputs(original, tokens, bench.batch, stream, bench.device)
        for index in range(blocks[-1] + 1):
            bench.say(f"scoring the experts of block {index + 1}")
            block, name = original.load_block(index, bench.device), original.block_prefix(index).rstrip(".")
            sums = (
                {module: _ExpertSum(module) for module in experts_of(block, name).values()} if index in blocks else {}
            )
            with watch_experts({module: total.add for module, total in sums.items()}):
                _advance(block, name, index, calls, stream, bench)
            finished = [(total.top_k, total.finish()) for total in sums.values()]
            original.free()
            del block, sums
            process_memory.trim()
            process_memory.check(bench.max_memory)
            for top_k, each in finished:
                check(top_k)
                yield each
    finally:
        stream.close()
        original.free()


def _advance(
    block: nn.Module, name: str, index: int, calls: blockwise.ModelArgs, stream: HiddenStates, bench: EditContext
) -> None:
    """Take the stream through a block."""
    for start in range(0, stream.samples, bench.batch):
        hidden = stream.fetch(start, min(bench.batch, stream.samples - start), bench.device)
        call: BlockArgs = calls.at(index, start, len(hidden))
        states, beside = blockwise.run_block_fully(block, call, hidden, name)
        stream.write(start, states)
        calls.keep(index, start, call, beside)
