"""Choose how many channels each of many parts keeps, by greedy search within one budget."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from torch import Tensor


def grid(width: int, unit: int) -> list[int]:
    """Return the ranks that a part of so many channels may have, ascending: multiples of `unit`, and all channels."""
    return [*range(unit, width, unit), width]


def greedy(damages: Sequence[Tensor], grids: Sequence[list[int]], budget: int) -> list[int]:
    """Return a rank for each part, with a sum of at most `budget` where the least ranks allow it.

    damages: for each part, its damage at each rank of its grid. From the largest ranks on, the step down whose damage
    by channel is least is taken; ties go to the first part.
    """
    curves = [curve.tolist() for curve in damages]
    places = [len(ranks) - 1 for ranks in grids]
    total = sum(ranks[-1] for ranks in grids)
    heap: list[tuple[float, int]] = []

    def push(part: int) -> None:
        at = places[part]
        if at:
            size = grids[part][at] - grids[part][at - 1]
            heapq.heappush(heap, ((curves[part][at - 1] - curves[part][at]) / size, part))

    for part in range(len(grids)):
        push(part)
    while total > budget and heap:
        _, part = heapq.heappop(heap)
        total -= grids[part][places[part]] - grids[part][places[part] - 1]
        places[part] -= 1
        push(part)
    return [ranks[at] for ranks, at in zip(grids, places, strict=True)]
