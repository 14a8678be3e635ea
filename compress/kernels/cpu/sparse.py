"""Multiply and decode the `sparse` format on a CPU: what is dropped is neither read nor, in 2:4, multiplied.

2:4, up to a few rows of activations: these become float32 once, columns 4 g + p of many groups g beside each other for
each p. The two kept weights of many groups are two vectors; the codes of the patterns choose among three such vectors
of activations what meets the first of them, and among three what meets the second. So there is one product for each
kept weight, in plain vector instructions of any processor. The mask and the kept weights are read once for four rows
of activations.

Other masks: rows are expanded near, in the caches (compress/kernels/cpu/decoded.py), and multiplied whole: only the
reading of memory is spared. Many rows of activations meet decoded panels, as for all formats.

Not read: codes whose groups divide no 32 kept weights, and blocks of columns other than 1, 2, 4, 8 and 16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from itertools import product as pairs
from typing import Any

import torch
from torch import Tensor

from compress.formats import int as int_format
from compress.formats.sparse import Params
from compress.kernels import llvm
from compress.kernels.calls import CompiledCall
from compress.kernels.contract import Prepared, Shape
from compress.kernels.cpu import emitter, sparse_bytes
from compress.kernels.cpu import int as int_kernel
from compress.kernels.cpu.decoded import DecodedProduct
from compress.kernels.cpu.emitter import LANES, Emitter, Writer
from compress.kernels.cpu.sparse_rows import (
    GROUP,
    MASK_WORD,
    BitmapReader,
    Halves,
    PatternReader,
    register_lanes,
)
from compress.kernels.cpu.unpack import SHORTS

CHUNK = GROUP * LANES  # columns of which whole numbers are arranged
TILE = 4  # rows of activations that meet a chosen pattern together
BLOCK_COLUMNS = (1, 2, 4, 8, 16)


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> Prepared | None:
    """Return the product; None for what is not read, see above."""
    mask_bytes = tensors["mask"].numel()
    if not emitter.worthwhile(shape) or mask_bytes < MASK_WORD or params.block_columns not in BLOCK_COLUMNS:
        return None
    rows, columns = params.kept_shape(shape)
    sizes = {"pitch": params.mask_shape(shape)[1], "mask_bytes": mask_bytes, "kept": columns}
    settings: tuple[Any, ...] = (params, 0, False)
    kept = params.inner_params
    if isinstance(kept, int_format.Params):
        span = int_kernel.span_blocks(kept) * kept.tile_words
        if not span or span % SHORTS:
            return None
        stored_rows, stored_columns = int_format.padded_shape(kept, (rows, columns))
        tiles, tail = kept.split(columns)
        group = kept.group(stored_columns)
        sizes |= {"kept": stored_columns, "rows": stored_rows, "group": group, "tiles": tiles, "tail": tail}
        settings = params, span, tail > 0
    if params.has_patterns:
        near = PatternProduct(tensors, params, shape, settings, sizes)
        is_bytes = isinstance(kept, int_format.Params) and sparse_bytes.reads(kept, columns, settings[1])
        return sparse_bytes.PatternCodes(tensors, params, shape, near, settings[1]) if is_bytes else near
    return BitmapProduct(tensors, params, shape, settings, sizes, space=sizes["kept"] + 4 * LANES)


class BitmapProduct(DecodedProduct):
    """A weight with any mask."""

    reader = BitmapReader


class PatternProduct(DecodedProduct):
    """A 2:4 weight, whose products with dropped columns are never computed."""

    reader = PatternReader

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        params: Params,
        shape: Shape,
        settings: tuple[Any, ...],
        sizes: Mapping[str, int],
    ) -> None:
        super().__init__(tensors, params, shape, settings, sizes)
        self.columns = -(-2 * max(sizes["kept"], self.columns // 2) // CHUNK) * CHUNK

    @property
    def _activations(self) -> tuple[int, int]:
        return self.shape[1], -self.columns  # no other weight arranges them so

    def change(self, x: int, count: int) -> Iterator[CompiledCall]:
        yield CompiledCall(llvm.function(_Arrange), (x, count * self.columns))

    def product(self, dtype: torch.dtype) -> llvm.Function:
        return llvm.function(_MultiplyPatterns, self.settings, dtype)


class _Arrange(Emitter):
    """Puts the columns of groups beside each other, as many as a register of float32 has, in place."""

    def __init__(self) -> None:
        super().__init__("arrange", "x", "count")
        lanes, b = register_lanes(), self.b
        size = GROUP * lanes
        with self.loop(b.udiv(self.named["count"], self.i64(size))) as chunk:
            place = b.mul(chunk, self.i64(size))
            values = self.load(self.named["x"], place, self.float, size)
            order = [group * GROUP + p for p in range(GROUP) for group in range(lanes)]
            self.store(self.shuffled(values, values, order), self.named["x"], place)
        b.ret_void()


class _MultiplyPatterns(Writer):
    """Writes the products of rows of arranged activations [tokens, columns] with rows of the weight."""

    def __init__(self, settings: tuple[Any, ...], dtype: torch.dtype) -> None:
        pointers, integers = PatternReader.arguments(*settings)
        sizes = f"first last outputs columns tokens width {integers}"
        super().__init__("product", f"{pointers} x out space", sizes, dtype)
        b, named = self.b, self.named
        self.reader = PatternReader(self, named, *settings)
        kind = self.vector(self.float, self.reader.lanes)
        together = 2 if self.reader.lanes == LANES else 1  # rows of the weight that share a tile of activations
        self.sums = [[self.variable(kind) for _ in range(2)] for _ in range(together * TILE)]
        tiles = b.udiv(named["tokens"], self.i64(TILE))
        with self.loop(named["last"], named["first"]) as block:
            start = b.mul(block, self.i64(LANES))
            with self.loop(tiles) as tile:
                self._tile(start, b.mul(tile, self.i64(TILE)), TILE)
            with self.loop(named["tokens"], b.mul(tiles, self.i64(TILE))) as token:
                self._tile(start, token, 1)
        b.ret_void()

    def _tile(self, start: Any, token: Any, count: int) -> None:
        """Write the products of sixteen rows of the weight with `count` rows of activations from `token` on."""
        b, named, together = self.b, self.named, 1 if count == 1 else len(self.sums) // TILE
        lines = [b.mul(b.add(token, self.i64(i)), named["columns"]) for i in range(count)]
        cells = list(pairs(range(together), range(count)))
        with self.loop(self.i64(LANES // together)) as some:
            side = b.mul(some, self.i64(together))
            rows = [self.clamped(b.add(start, b.add(side, self.i64(r))), named["outputs"]) for r in range(together)]
            sums = dict(zip(cells, self.sums, strict=False))
            for total in chain(*sums.values()):
                b.store(self.constant(self.float, self.reader.lanes, 0.0), total)
            self.reader.kept.each(rows, partial(self._add, rows, lines, sums))
            for (r, i), totals in sums.items():
                place = b.add(side, self.i64(i * LANES + r))
                self.store(self.total(b.fadd(*map(b.load, totals))), named["space"], place)
        for i in range(count):
            values = self.load(named["space"], self.i64(i * LANES), self.float, LANES)
            place = b.add(b.mul(b.add(token, self.i64(i)), named["width"]), start)
            self.store_some(self.rounded(values), named["out"], place, b.sub(named["outputs"], start))

    def _add(
        self, rows: Sequence[Any], lines: Sequence[Any], sums: Mapping[Any, Any], kept: Any, halves: Sequence[Halves]
    ) -> None:
        """Add the products of some kept weights of rows with rows of activations, which begin at `lines`."""
        b, lanes = self.b, self.reader.lanes
        places = [b.add(line, b.shl(kept, self.i64(1))) for line in lines]
        for r, row in enumerate(rows):
            patterns = self.reader.patterns(row, kept)
            for i, place in enumerate(places):
                columns = [
                    self.load(self.named["x"], b.add(place, self.i64(p * lanes)), self.float, lanes)
                    for p in range(GROUP)
                ]
                for half, x, total in zip(halves[r], self.reader.choose(patterns, columns), sums[r, i], strict=True):
                    b.store(self.multiply_add(half, x, b.load(total)), total)
