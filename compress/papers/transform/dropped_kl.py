"""Measure the divergence of a model without some of its decoder blocks, for many sets of them at a time.

Blocks are loaded one at a time. Sets that have the same blocks up to one share its hidden states, which are computed
once; a dropped block costs nothing. Samples go through together as far as their states fit into STATES_NBYTES. A result
depends on the set and its samples alone: each sample is run by itself, in float32, and sums are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from compress import process_memory
from compress.calib import reference_logprobs
from compress.model import blockwise, lm_head
from compress.model.blockwise import HiddenStates
from compress.model.edits import EditContext
from compress.model.skeleton import Skeleton
from compress.numerics import kl
from compress.storage.checkpoint import Checkpoint

Dropped = frozenset[int]  # numbers of blocks
STATES_NBYTES = 1 << 30


class DroppedKL:
    """An evaluator of sets of dropped blocks on tokens [samples, seq_len] int64, with files in `folder`."""

    def __init__(self, checkpoint: Checkpoint, tokens: Tensor, bench: EditContext, folder: Path) -> None:
        self.skeleton, self.tokens, self.bench = Skeleton(checkpoint), tokens, bench
        self.samples, self.seq_len = tokens.shape
        self.block_tokens = 0  # computed so far: tokens through one block each
        self.end = blockwise.computing_in(self.skeleton, torch.float32)
        self.embedded = HiddenStates(self.samples, folder / "embedded")
        self.reference = reference_logprobs.load(self.skeleton, tokens, folder, device=bench.device, say=bench.say)
        self.calls = blockwise.record_inputs(self.skeleton, tokens, 1, self.embedded, bench.device)

    def close(self) -> None:
        """Free memory, and remove the file of hidden states."""
        self.end()
        self.embedded.close()

    def divergence(self, sets: Sequence[Dropped], samples: Sequence[int]) -> list[float]:
        """Return KL(original || without these blocks) of each set, the mean over these samples, nats a token."""
        return [math.fsum(row) / len(row) for row in self.per_sample(sets, samples).tolist()]

    @torch.no_grad()
    def per_sample(self, sets: Sequence[Dropped], samples: Sequence[int]) -> Tensor:
        """Return the same of each sample, float64 [sets, samples]."""
        distinct = list(dict.fromkeys(sets))
        nbytes = self.seq_len * self.skeleton.config.get_text_config().hidden_size * 4
        window = max(1, STATES_NBYTES // (nbytes * len(distinct)))
        parts = [self._window(distinct, samples[start : start + window]) for start in range(0, len(samples), window)]
        kls = dict(zip(distinct, torch.cat(parts, 1), strict=True))
        return torch.stack([kls[each] for each in sets])

    def _window(self, sets: Sequence[Dropped], samples: Sequence[int]) -> Tensor:
        start = [self.embedded.read(sample, 1).to(self.bench.device) for sample in samples]
        states: dict[Dropped, list[Tensor]] = {frozenset(): start}  # dropped so far -> hidden states of each sample
        for index in range(len(self.skeleton.blocks)):
            sides = {(each & frozenset(range(index)), index in each) for each in sets}
            skipped = {before | {index}: states[before] for before, is_dropped in sides if is_dropped}
            run = [before for before, is_dropped in sides if not is_dropped]
            states = skipped | {before: states[before] for before in run}
            if run:
                block, name = self.skeleton.load_block(index, self.bench.device), self.skeleton.block_prefix(index)
                for before in run:
                    call = self.calls[index][1]
                    states[before] = [blockwise.run_block(block, call, hidden, name) for hidden in states[before]]
                self.skeleton.free()
            self.block_tokens += len(run) * len(samples) * self.seq_len
            process_memory.check(self.bench.max_memory)
        with lm_head.logits_of(self.skeleton, self.bench.device) as logits:
            rows = [self._compare(states[each], samples, logits) for each in sets]
        return torch.tensor(rows, dtype=torch.float64)

    def _compare(
        self, states: Sequence[Tensor], samples: Sequence[int], logits: Callable[[Tensor], Tensor]
    ) -> list[float]:
        parts = kl.slices(self.seq_len, self.skeleton.vocab_size)
        values = []
        for sample, hidden in zip(samples, states, strict=True):
            row = self.reference.row(sample, self.bench.device)
            sums = [reference_logprobs.divergence(row, part, logits(hidden[:, part])) for part in parts]
            values.append(math.fsum(sums) / self.seq_len)
        return values
