"""Make the rotary rows of positions to come, as the model itself will."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from compress.errors import CompressError


class Pass(Protocol):
    """What hooks tell of a forward pass."""

    turns: tuple[Tensor, Tensor] | None
    positions: Tensor | None
    makers: list[nn.Module]


def coming_rows(call: Pass, row: int, count: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin [count, rotary width] of the next positions of one sequence.

    CompressError where no module of the model makes the rows of this pass from their positions alone.
    """
    cos, sin = call.turns if call.turns is not None else (None, None)
    assert cos is not None and sin is not None, "asked where there is a rotary embedding"
    positions = call.positions
    if positions is not None:
        for maker in call.makers:
            source = copy.deepcopy(maker)  # some change with the positions they are asked for
            if _same(_made(source, cos, positions), (cos, sin)):
                last = positions[min(row, len(positions) - 1), -1]
                coming = last + 1 + torch.arange(count, device=positions.device)
                found = _made(source, cos, coming[None])
                return found[0][0], found[1][0]
    raise CompressError(
        "kv_cache.evict: the rotary embedding of this model is not made from positions alone, which expected attention "
        "needs; choose another method, such as snapkv"
    )


@torch.no_grad()
def _made(source: Any, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = source(like, positions)
    return cos, sin


def _same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(a.shape[1:] == b.shape[1:] and bool((a == b).all()) for a, b in zip(found, expected, strict=True))
