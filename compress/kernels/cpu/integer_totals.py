"""Sum the elements of several vectors of integers up at once, into one vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compress.kernels.cpu.emitter import Emitter


def integer_totals(emitter: Emitter, vectors: Sequence[Any], parts: int = 1) -> Any:
    """Return the sums of the elements of 2^n vectors of integers, as a vector; of `parts` of each four elements."""
    b, vectors, size = emitter.b, list(vectors), vectors[0].type.count
    halves = [half for half in (1, 2, 4, 8, 16) if half < size and (half >= 4 or half * parts < 4)]
    count = len(vectors)
    # Each step adds neighbouring blocks of elements. As long as there are two vectors, the first blocks become sums
    # of one and the second blocks those of the other, so that one vector holds both.
    owners = [[i] * size for i in range(count)]
    for half in halves[: count.bit_length() - 1]:
        is_first = [place // half % 2 == 0 for place in range(size)]
        pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
        vectors = [b.add(_blend(emitter, *pair, is_first), _swap_blocks(emitter, *pair, half)) for pair in pairs]
        owners = [
            [x if own else y for own, x, y in zip(is_first, *pair, strict=True)]
            for pair in zip(owners[::2], owners[1::2], strict=True)
        ]
    (total,), (owner,) = vectors, owners
    lanes = list(range(size))  # of `total`, as places of elements of the beginning
    for half in reversed(halves[count.bit_length() - 1 :]):
        kept = [i for i, lane in enumerate(lanes) if lane // half % 2 == 0]
        gone = [lanes.index(lanes[i] + half) for i in kept]
        total = b.add(emitter.shuffled(total, total, kept), emitter.shuffled(total, total, gone))
        lanes = [lanes[i] for i in kept]
    order = sorted(range(len(lanes)), key=lambda i: (owner[lanes[i]], lanes[i] & 3 if parts > 1 else 0))
    return total if order == list(range(len(lanes))) else emitter.shuffled(total, total, order)


def _blend(emitter: Emitter, a: Any, b: Any, of_first: Sequence[bool]) -> Any:
    """Return the elements of a where `of_first`, those of b elsewhere."""
    return emitter.shuffled(a, b, [i if first else len(of_first) + i for i, first in enumerate(of_first)])


def _swap_blocks(emitter: Emitter, a: Any, b: Any, half: int) -> Any:
    """Return the second blocks of a before the first ones of b: what `_blend` of first blocks leaves."""
    size = a.type.count
    others = _blend(emitter, a, b, [place // half % 2 == 1 for place in range(size)])
    return emitter.shuffled(others, others, [place ^ half for place in range(size)])
