"""Sum the statistics of experts where they are needed: their tokens go to the process that quantizes them.

Every process runs some batches through a block. What an expert reads of a batch is one product of its Hessian; here it
is handed to the expert's owner, which makes the product. So each process holds the Hessians of its own experts only,
and the sums are the same to the bit as those of one process (calib/stats.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compress.calib.stats import HessianSum, Scales
from compress.ranks import Ranks


class _Read(NamedTuple):
    """What an expert has read of a batch."""

    inputs: Tensor  # [tokens, columns]
    weights: Tensor | None  # [tokens] float32
    chunk: int


class RoutedSum:
    """The running sum of x x^T for what an expert reads, which is held by the process `owner`."""

    def __init__(self, columns: int, device: torch.device, owner: int, rank: int) -> None:
        self.owner = owner
        self.total = HessianSum(columns, device) if owner == rank else None
        self.grid = Scales(columns, device) if self.total is None else self.total.total.grid
        self.waiting: list[_Read] = []

    def add(self, inputs: Tensor, chunk: int, weights: Tensor | None = None) -> None:
        """Keep inputs [..., columns] for the owner; weights: as of `HessianSum.add`."""
        rows = inputs.reshape(-1, inputs.shape[-1])
        if not len(rows):
            return
        read = _Read(rows.clone(), None if weights is None else weights.reshape(-1).clone(), chunk)
        self.waiting.append(read)
        if not self.grid.found:
            first = HessianSum.scaled(rows[:chunk], None if read.weights is None else read.weights[:chunk, None])
            self.grid.decide(first, first)

    def grids(self) -> dict[str, Scales]:
        """Return the grids of its sums by what they are of."""
        return {"total": self.grid}


def exchange(sums: Mapping[str, RoutedSum], ranks: Ranks) -> None:
    """Hand what has been read to its owners, which add it up; called by all processes alike."""
    outgoing: list[list[tuple[str, _Read]]] = [[] for _ in range(ranks.size)]
    for key, total in sums.items():
        outgoing[total.owner] += [(key, read) for read in total.waiting]
        total.waiting = []
    tensors = [[t for _, read in reads for t in _tensors(read)] for reads in outgoing]
    told = ranks.gather([[(key, read.chunk, read.weights is not None) for key, read in reads] for reads in outgoing])
    for facts, received in zip(told, ranks.exchange(tensors), strict=True):
        parts = iter(received)
        for key, chunk, is_weighted in facts[ranks.rank]:
            owned = sums[key].total
            assert owned is not None, "it is its owner's"
            owned.add(next(parts), chunk, next(parts) if is_weighted else None)


def _tensors(read: _Read) -> Sequence[Tensor]:
    return [read.inputs] if read.weights is None else [read.inputs, read.weights]
