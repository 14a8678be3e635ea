"""Choose codes of mixed bits and pack them, on CPUs with AVX-512: compress/kv/codecs/pca.py.

Sixteen components of a piece are in a register. The code of each is the number of edges between levels that it lies
above, found by halving: in each step a permutation looks up an edge for every lane. `fit` does that for vectors divided
by their root mean square, and returns for each token and head the norm by which the levels come nearest; `pack` does it
for the norms as they are stored, and writes the planes of the codes (compress/kv/codecs/packed.py). A division, a
comparison and an edge are those of plain code, so that codes are the same; only the sums of a norm are added up in
another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.kernels import llvm
from compress.kernels.contract import MOST_MIXED_BITS, PLANES, LevelTables
from compress.kernels.cpu import kv_mixed
from compress.kernels.cpu.emitter import LANES
from compress.kernels.cpu.kv_mixed import Unpacker, words

LEAST = 1e-12  # norm that is divided by
THREAD = 1 << 17  # components that are worth waking a thread

supports = kv_mixed.supports


class Lanes(NamedTuple):
    """Where components lie in rows of F = 16 times the pieces of a head: those of a piece in 16 lanes, then zeros."""

    starts: Tensor  # int32 [pieces, 4], as of MixedCodes
    bounds: Tensor  # int32 [h, MOST_MIXED_BITS + 1], likewise
    counts: Tensor  # int32 [pieces]: components of each
    weights: Tensor  # float32 [h, F]: what an error of a component counts, 0 where there is none
    active: Tensor  # float32 [h]: components of a head that have codes, or 1


def fit(y: Tensor, lanes: Lanes, tables: LevelTables) -> Tensor:
    """y [B, h, n, F] float32, contiguous -> norms [B, h, n, 1] float32, not finite where there is nothing to fit."""
    batch, heads, tokens, width = y.shape
    norms = torch.empty(batch, heads, tokens, 1, dtype=torch.float32, device="cpu")
    kernel = llvm.function(_Fit, tables)
    fixed = lanes.bounds.data_ptr(), lanes.weights.data_ptr(), lanes.active.data_ptr()

    def work(first: int, last: int) -> None:
        for index in range(batch):
            places = y[index, 0, first:].data_ptr(), norms[index, 0, first:].data_ptr()
            kernel(*fixed, *places, last - first, heads, width, tokens)

    llvm.parallel(work, tokens, -(-THREAD // max(1, batch * heads * width)))
    return norms


def pack(y: Tensor, norms: Tensor, lanes: Lanes, tables: LevelTables, nbytes: int) -> Tensor:
    """y as for `fit`, norms [B, h, n, 1] float32, contiguous -> rows of codes uint8 [B, n, nbytes]."""
    batch, heads, tokens, width = y.shape
    rows = torch.zeros(batch, tokens, nbytes, dtype=torch.uint8, device="cpu")
    kernel = llvm.function(_Pack, tables)
    fixed = lanes.starts.data_ptr(), lanes.bounds.data_ptr(), lanes.counts.data_ptr()

    def work(first: int, last: int) -> None:
        for index in range(batch):
            places = (x.data_ptr() for x in (y[index, 0, first:], norms[index, 0, first:], rows[index, first:]))
            kernel(*fixed, *places, last - first, heads, width, tokens, nbytes)

    llvm.parallel(work, tokens, -(-THREAD // max(1, batch * heads * width)))
    return rows


class _MixedCoder(Unpacker):
    """Finds codes; `bounds`, y and norms are pointers, the first four integers tokens, heads, F, tokens of a head."""

    def __init__(self, name: str, pointers: int, integers: int, tables: LevelTables) -> None:
        super().__init__(name, pointers, integers)
        self.tables = words(tables)
        self.edges = [_edges(table) for table in tables]
        self.tokens, self.heads, self.width, self.head_tokens = self.integers[:4]

    def cell(self, head: Any, token: Any) -> Any:
        """Where a token of a head is among the norms."""
        return self.b.add(self.b.mul(head, self.head_tokens), token)

    def piece_lanes(self, head: Any, piece: Any) -> Any:
        """Where a piece begins among the lanes of its head."""
        return self.b.mul(self.b.sub(piece, self._piece_bound(head, 0)), self.i64(LANES))

    def nearest(self, x: Any, bits: int) -> Any:
        """Codes int32 of sixteen components, which are divided by their norm."""
        b, edges = self.b, self.edges[bits]
        code = self.constant(self.word, LANES, 0)
        for step in (1 << s for s in reversed(range(bits))):
            if 2 * step == 1 << bits:
                edge = self.constant(self.word, LANES, edges[step - 1])
            else:
                edge = self.look_up(b.add(code, self.constant(self.word, LANES, step - 1)), edges)
            is_above = b.fcmp_ordered(">", x, b.bitcast(edge, x.type))
            code = b.select(is_above, b.add(code, self.constant(self.word, LANES, step)), code)
        return code

    def divide(self, x: Any, norm: Any) -> Any:
        b, least = self.b, self.ir.Constant(self.float, torch.tensor(LEAST).item())
        return b.fdiv(x, self.splat(b.select(b.fcmp_ordered(">", norm, least), norm, least), LANES))

    def _piece_bound(self, head: Any, place: int) -> Any:
        at = self.b.add(self.b.mul(head, self.i64(MOST_MIXED_BITS + 1)), self.i64(place))
        return self.integer(self.bounds, at)

    bounds: Any


class _Fit(_MixedCoder):
    """void fit(bounds, weights, active, y, norms, tokens, heads, F, tokens of a head)."""

    def __init__(self, tables: LevelTables) -> None:
        super().__init__("fit", 5, 4, tables)
        self.bounds, self.weights, self.active, self.y, self.norm = self.pointers
        self.sums = [self.variable(self.vector(self.float, LANES)) for _ in range(2)]
        b = self.b
        with self.loop(self.heads) as head, self.loop(self.tokens) as token:
            cell = self.cell(head, token)
            first = b.mul(cell, self.width)
            size = self._size(head, first)
            for held in self.sums:
                b.store(self.floats(0.0), held)
            for place in range(MOST_MIXED_BITS):
                with self.loop(self._piece_bound(head, place + 1), self._piece_bound(head, place)) as piece:
                    self._piece(head, piece, first, size, MOST_MIXED_BITS - place)
            above, below = (self.total(b.load(held)) for held in self.sums)
            self.store(b.fdiv(above, below), self.norm, cell)
        b.ret_void()

    def _size(self, head: Any, first: Any) -> Any:
        """The root mean square of the components that have codes."""
        b, held = self.b, self.sums[0]
        b.store(self.floats(0.0), held)
        with self.loop(b.udiv(self.width, self.i64(LANES))) as part:
            x = self.load(self.y, b.add(first, b.mul(part, self.i64(LANES))), self.float, LANES)
            b.store(self.multiply_add(x, x, b.load(held)), held)
        mean = b.fdiv(self.total(b.load(held)), self.load(self.active, head, self.float))
        return self.intrinsic("llvm.sqrt.f32", self.float, mean)

    def _piece(self, head: Any, piece: Any, first: Any, size: Any, bits: int) -> None:
        b, lane = self.b, self.piece_lanes(head, piece)
        x = self.load(self.y, b.add(first, lane), self.float, LANES)
        weight = self.load(self.weights, b.add(b.mul(head, self.width), lane), self.float, LANES)
        code = self.nearest(self.divide(x, size), bits)
        level = b.bitcast(self.look_up(code, self.tables[bits]), x.type)
        heavy = b.fmul(level, weight)
        for held, other in zip(self.sums, (x, level), strict=True):
            b.store(self.multiply_add(heavy, other, b.load(held)), held)


class _Pack(_MixedCoder):
    """void pack(starts, bounds, counts, y, norms, rows, tokens, heads, F, tokens of a head, bytes of a row)."""

    def __init__(self, tables: LevelTables) -> None:
        super().__init__("pack", 6, 5, tables)
        self.starts, self.bounds, self.counts, self.y, self.norm, self.rows = self.pointers
        b = self.b
        with self.loop(self.heads) as head, self.loop(self.tokens) as token:
            cell = self.cell(head, token)
            first, norm = b.mul(cell, self.width), self.load(self.norm, cell, self.float)
            row = b.mul(token, self.integers[4])
            for place in range(MOST_MIXED_BITS):
                bits = MOST_MIXED_BITS - place
                with self.loop(self._piece_bound(head, place + 1), self._piece_bound(head, place)) as piece:
                    x = self.load(self.y, b.add(first, self.piece_lanes(head, piece)), self.float, LANES)
                    self._write(row, piece, self.nearest(self.divide(x, norm), bits), bits)
        b.ret_void()

    def _write(self, row: Any, piece: Any, code: Any, bits: int) -> None:
        """Stores the planes of a piece: all of it, or the half of one that has eight fields."""
        b, count = self.b, self.load(self.counts, piece, self.word)
        numbers = self.ir.Constant(code.type, list(range(LANES)))
        is_one = b.icmp_signed("<", numbers, self.splat(count, LANES))
        code = b.select(is_one, code, self.constant(self.word, LANES, 0))
        is_whole, low = b.icmp_signed(">", count, self.word(LANES // 2)), bits
        for column, width in enumerate(PLANES):
            if bits & width:
                low -= width
                field = b.lshr(code, self.constant(self.word, LANES, low))
                field = b.and_(field, self.constant(self.word, LANES, (1 << width) - 1))
                at = b.add(b.mul(piece, self.i64(len(PLANES) + 1)), self.i64(column))
                self._store(self._join_fields(field, width), b.add(row, self.integer(self.starts, at)), is_whole)

    def _join_fields(self, field: Any, width: int) -> list[Any]:
        """Fields of all lanes side by side, as two numbers."""
        b, half = self.b, LANES // 2
        if width == 1:
            bits = b.bitcast(b.icmp_unsigned("!=", field, self.constant(self.word, LANES, 0)), self.short)
            return [b.trunc(bits, self.byte), b.trunc(b.lshr(bits, self.short(half)), self.byte)]
        shifts = [width * (lane % half) for lane in range(LANES)]
        moved, kind = b.shl(field, self.ir.Constant(field.type, shifts)), {2: self.short, 4: self.word}[width]
        halves = [self.shuffled(moved, moved, list(range(i, i + half))) for i in (0, half)]
        joined = [self.intrinsic(f"llvm.vector.reduce.or.v{half}i32", self.word, x) for x in halves]
        return joined if width == 4 else [b.trunc(x, kind) for x in joined]

    def _store(self, numbers: Sequence[Any], place: Any, is_whole: Any) -> None:
        b, (low, high) = self.b, numbers
        here = self.at(self.rows, place, self.byte)
        b.store(low, here, align=1)
        with b.if_then(is_whole):
            b.store(high, self.at(here, self.i64(1), low.type), align=1)


def _edges(table: Sequence[float]) -> list[int]:
    """The edges between levels as words of float32, with one more that nothing is above."""
    levels = torch.tensor(table, dtype=torch.float32, device="cpu")
    edges = torch.cat(((levels[1:] + levels[:-1]) / 2, torch.full((1,), float("inf"))))
    return edges.view(torch.int32).tolist()
