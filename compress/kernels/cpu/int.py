"""The `int` format on a CPU: codes of 2 to 8 bits are taken apart in registers, for a few rows of activations.

    y[m, n] = sum over spans u of scale[u, n] x_scale[m, u] (sum_k code[n, k] x16[m, k] - zero[u, n] sum_k x16[m, k])

A span is what a scale and an activation scale have in common: the blocks of TW columns (one field of the words of a
tile, compress/packing.py) that lie in one group, at most a tile. Sixteen rows of the weight at a time: their scales are
multiplied with those of the activations once, and the zero points are taken off sixteen rows at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from compress import jit
from compress.formats import int as int_format
from compress.formats.int import PLANES, Params
from compress.kernels.cpu import rows
from compress.kernels.cpu.planar import Planar, lanes
from compress.kernels.cpu.rows import LANES
from compress.packing import FIELDS

ROWS = int_format.ROW_MULTIPLE  # of the weight, whose scales are read together
TOGETHER = {1: 1, 2: 4, 4: 4}  # rows that share a load of activations, by the number of tokens


def span_blocks(params: Params) -> int:
    """Blocks of TW columns that are summed before they meet their scales; 0: groups that no block fits in."""
    fields = max(FIELDS[w] for w in PLANES[params.bits])
    if params.group_size == -1:
        return fields
    blocks, rest = divmod(params.group_size, params.tile_words)
    if rest:
        return 0
    if blocks % fields == 0:
        return fields
    return blocks if fields % blocks == 0 else 1


def supports(params: Params, shape: tuple[int, int]) -> bool:
    return rows.worthwhile(shape) and span_blocks(params) > 0


def most_rows(params: Params, shape: tuple[int, int], dtype: torch.dtype) -> int:
    return rows.MOST


def matmul(x: Tensor, tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> Tensor:
    """x [rows, in] of any floating type times the stored weight [out, in] -> float32 [rows, out]."""
    padded_rows, columns = int_format.padded_shape(params, shape)
    span = span_blocks(params) * params.tile_words
    out = torch.empty(x.shape[0], padded_rows, dtype=torch.float32, device="cpu")
    group = columns if params.group_size == -1 else params.group_size
    zeros = tensors["scales" if params.symmetric else "zeros"]
    stored = [t.data_ptr() for t in (*(tensors[f"words{w}"] for w in PLANES[params.bits]), tensors["scales"], zeros)]

    def some(tokens: int, given: list[int]) -> None:
        kernel = _compiled(params.bits, params.tile_words, span, params.symmetric, params.scale_dtype, tokens)

        def work(first: int, last: int) -> None:
            space = torch.empty(tokens * (columns // span) * ROWS, dtype=torch.float32, device="cpu")
            kernel(*stored, *given, space.data_ptr(), first, last, columns // span, padded_rows, group)

        jit.parallel(work, padded_rows // ROWS, rows.blocks_of_a_thread(columns, tokens))

    rows.by_tokens(x, columns, span, lanes(params.tile_words), out, some)
    return out[:, : shape[0]]


@cache
def _compiled(*settings: Any) -> Any:
    return jit.compiled(_Product(*settings))


class _Product(rows.Emitter):
    """void product(words..., scales, zeros, x16, x_scales, x_sums, out, space, first, last, spans, rows, group)."""

    def __init__(self, bits: int, tile_words: int, span: int, symmetric: bool, scale_dtype: str, tokens: int) -> None:
        super().__init__("product", len(PLANES[bits]) + 7, 5)
        self.bits, self.tile_words, self.span, self.tokens = bits, tile_words, span, tokens
        self.symmetric, self.scale_dtype = symmetric, scale_dtype
        self.planes = self.pointers[: len(PLANES[bits])]
        self.scales, self.zeros, self.x16, self.x_scales, self.x_sums, self.out, self.space = self.pointers[-7:]
        first, last, self.spans, self.rows, self.group = self.integers
        self.fields = max(FIELDS[w] for w in PLANES[bits])
        self.floats16 = self.vector(self.float, LANES)
        self.tiles = self.b.udiv(self.spans, self.i64(self.fields * tile_words // span))
        self.planar = Planar(self, self.planes, PLANES[bits], tile_words, self.tiles)
        self.lanes = self.planar.lanes
        sums = self.vector(self.float, self.lanes // 2)
        self.together = TOGETHER[tokens]
        self.sums = [[self.variable(sums) for _ in range(tokens)] for _ in range(self.together)]
        self.shift = [self.variable(self.floats16) for _ in range(tokens)]
        with self.loop(last, first) as block:
            start = self.b.mul(block, self.i64(ROWS))
            self._scales(start)
            with self.loop(self.i64(ROWS // self.together)) as some:
                self._row(start, self.b.mul(some, self.i64(self.together)))
            self._finish(start)
        self.b.ret_void()

    def _scales(self, start: Any) -> None:
        """Products of both scales for sixteen rows and all spans, and what the zero points take off."""
        b = self.b
        for m in range(self.tokens):
            b.store(self.floats(0.0), self.shift[m])
        with self.loop(self.spans) as u:
            group = b.udiv(b.mul(u, self.i64(self.span)), self.group)
            scale = self._scale(b.add(b.mul(group, self.rows), start))
            zero = self._zero(group, start)
            for m in range(self.tokens):
                cell = b.add(b.mul(self.spans, self.i64(m)), u)
                both = b.fmul(scale, self.splat(self.load(self.x_scales, cell, self.float), LANES))
                self.store(both, self.space, b.mul(cell, self.i64(ROWS)))
                total = self.splat(self.load(self.x_sums, cell, self.float), LANES)
                b.store(self.multiply_add(b.fmul(both, zero), total, b.load(self.shift[m])), self.shift[m])

    def _scale(self, offset: Any) -> Any:
        b = self.b
        if self.scale_dtype == "float16":
            return b.fpext(self.load(self.scales, offset, self.half, ROWS), self.floats16)
        words = self.vector(self.word, ROWS)
        high = b.shl(
            b.zext(self.load(self.scales, offset, self.short, ROWS), words), self.constant(self.word, ROWS, 16)
        )
        return b.bitcast(high, self.floats16)

    def _zero(self, group: Any, start: Any) -> Any:
        """Zero points of sixteen rows."""
        b = self.b
        if self.symmetric:
            return self.floats(2 ** (self.bits - 1))
        stream = b.udiv(b.mul(b.add(b.mul(group, self.rows), start), self.i64(self.bits)), self.i64(8))
        return self.bit_fields(self.zeros, stream, self.bits)

    def _row(self, start: Any, row: Any) -> None:
        """The sums of `together` rows of the sixteen, from `row` on."""
        b = self.b
        for variable in (each for sums in self.sums for each in sums):
            b.store(self.constant(self.float, self.lanes // 2, 0.0), variable)
        with self.loop(self.tiles) as tile:
            per_tile = self.fields * self.tile_words // self.span
            for part in range(per_tile):
                self._span(tile, b.add(start, row), part, b.add(b.mul(tile, self.i64(per_tile)), self.i64(part)), row)
        for r, m in product(range(self.together), range(self.tokens)):
            line = b.add(self._line(m, start), self.i64(r))
            self.store(self.total(b.load(self.sums[r][m])), self.out, b.add(line, row))

    def _span(self, tile: Any, number: Any, part: int, u: Any, row: Any) -> None:
        b, blocks = self.b, self.span // self.tile_words
        column = b.mul(tile, self.i64(self.fields * self.tile_words))
        zeros = self.constant(self.word, self.lanes // 2, 0)
        totals = {place: zeros for place in product(range(self.together), range(self.tokens))}
        for block in range(part * blocks, (part + 1) * blocks):
            for first in range(0, self.tile_words, self.lanes):
                place = b.add(column, self.i64(block * self.tile_words + first))
                inputs = [self._input(place, m) for m in range(self.tokens)]
                for r in range(self.together):
                    codes = self.planar.codes(tile, b.add(number, self.i64(r)), block, first)
                    for m, x in enumerate(inputs):
                        totals[r, m] = b.add(totals[r, m], self.pair_sums(codes, x))
        for (r, m), total in totals.items():
            cell = b.mul(b.add(b.mul(self.spans, self.i64(m)), u), self.i64(ROWS))
            scale = self.load(self.space, b.add(cell, b.add(row, self.i64(r))), self.float)
            held = self.sums[r][m]
            sums = b.sitofp(total, held.allocated_type)
            b.store(self.multiply_add(sums, self.splat(scale, self.lanes // 2), b.load(held)), held)

    def _input(self, column: Any, m: int) -> Any:
        offset = self.b.add(self.b.mul(column, self.i64(self.tokens)), self.i64(m * self.lanes))
        return self.load(self.x16, offset, self.short, self.lanes)

    def _finish(self, start: Any) -> None:
        b = self.b
        for m in range(self.tokens):
            line = self._line(m, start)
            self.store(b.fsub(self.load(self.out, line, self.float, ROWS), b.load(self.shift[m])), self.out, line)

    def _line(self, m: int, start: Any) -> Any:
        """Where the outputs of a token and sixteen rows are."""
        return self.b.add(self.b.mul(self.rows, self.i64(m)), start)
