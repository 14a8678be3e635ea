"""Cut a block's calibration batches into what each step trains on, and what is held out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from compress.model.block_calls import BlockArgs, leaves

MOST_HELD = 2  # batches that are held out, at most: they stay in memory
SAME = 1e-3  # share that what a block gives for some samples differs by from what it gives for them among others

Batch = tuple[Tensor, BlockArgs, Tensor]  # hidden states, other arguments, and what the block should give for them
Batches = Callable[[], Iterable[Batch]]
Run = Callable[[Tensor, BlockArgs], Tensor]


class Portions:
    """The batches of a block."""

    def __init__(self, batches: Batches, count: int, held_out: int, tokens: int | None, run: Run) -> None:
        """batches: `count` at every call. held_out: one in so many. tokens: of a step, about; None: a batch.

        run: gives what the block gives.
        """
        self.batches, self.count, self.tokens, self.run = batches, count, tokens, run
        self.every = max(held_out, -(-count // MOST_HELD))
        self._held: list[Batch] | None = None
        self._can_cut: bool | None = None

    def held(self) -> list[Batch]:
        """Return the batches that are held out; a single one is trained on, too."""
        if self._held is None:
            self._held = [batch for number, batch in enumerate(self.batches()) if number % self.every == 0]
        return self._held

    def others(self) -> Iterator[Batch]:
        """Yield the batches that are not held out, in order; a single one is both."""
        for number, batch in enumerate(self.batches()):
            if self.count == 1 or number % self.every:
                yield batch

    def endless(self) -> Iterator[Batch]:
        """Yield what each step trains on: the batches that are not held out, cut, and again."""
        while True:
            for batch in self.others():
                yield from self._cut(batch)

    def _cut(self, batch: Batch) -> Iterator[Batch]:
        samples, length = batch[0].shape[0], batch[0].shape[1]
        size = samples if self.tokens is None else max(1, self.tokens // length)
        if size >= samples or not self._cuttable(batch):
            yield batch
            return
        for start in range(0, samples, size):
            yield part(batch, slice(start, start + size))

    @torch.no_grad()
    def _cuttable(self, batch: Batch) -> bool:
        """Return whether the block gives for one sample alone what it gives for it among others; tried once."""
        if self._can_cut is None:
            try:
                hidden, call, _ = part(batch, slice(0, 1))
                alone, among = self.run(hidden, call), self.run(*batch[:2])[:1]
                self._can_cut = bool((alone - among).square().sum() <= SAME**2 * among.square().sum())
            except (IndexError, RuntimeError, ValueError):
                self._can_cut = False
        return self._can_cut


def part(batch: Batch, samples: slice) -> Batch:
    """Return some samples of a batch, with the arguments that have an entry for each."""
    hidden, call, target = batch
    own = {p: t[samples] for p, t in leaves(call.tree) if isinstance(t, Tensor) and t.shape[:1] == hidden.shape[:1]}
    return hidden[samples], call.changed(own), target[samples]
