"""Quantize a large weight some rows at a time, in tiles that processes can share out.

Once the Hessian's factor is known, rows of a weight do not hear of each other. What they have in common (the order of
columns, the scale of a tensor) is decided on the whole weight. Tiles depend on nothing but the weight's shape: they are
the same in one process, which makes all of them, and in several.

A method that can do so has two functions beside `quantize`: `spans(config, shape)`, the rows of each tile, and
`tiles(weight, stats, config, seed)`, a `RowTiles`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from compress.types import Quantized

ROWS = 4096  # of a tile: the column loop and the trellis search take 5 to 30% more a row with half as many
WIDE = 1 << 25  # weights above which a tile has half the rows, so that eight processes find as much to do


class RowTiles(Protocol):
    """A weight that is quantized by tiles."""

    def make(self, spans: Sequence[slice]) -> list[Any]:
        """Return these tiles, each of which another process can be given; afterwards only `join` may be called."""

    def join(self, parts: Sequence[Any]) -> Quantized:
        """Return the weight, from all tiles in order."""


def spans(shape: tuple[int, int], unit: int = 1) -> list[slice]:
    """Return the tiles of a weight [out, in]; each but the last has a multiple of `unit` rows."""
    rows = ROWS if ROWS * shape[1] <= WIDE else ROWS // 2
    step = max(1, rows // unit) * unit
    return [slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


def largest(spans: Sequence[slice]) -> int:
    """Return the rows of the largest tile."""
    return spans[0].stop


def whole(tiles: RowTiles, spans: Sequence[slice]) -> Quantized:
    """Return the weight that is made of all its tiles here."""
    return tiles.join(tiles.make(spans))
