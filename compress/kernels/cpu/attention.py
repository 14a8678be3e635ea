"""Attend with a few queries to stored keys and values of float32, bfloat16 or float16, in float32 arithmetic.

Two compiled functions. `Attend` takes PART positions of a key/value head at a time, for all queries that share the
head: scores, their largest, powers and sums, and the sum of the values go to a record of each query and part. `Combine`
makes outputs of the records. A part of keys and values stays in the processor's cache while all queries meet it, so
that memory is read once; the same numbers come out whatever the number of threads.

What changes between tokens is read through two small tables of int64, STATE and CACHE, so that a call can be prepared
once and made many times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.kernels import llvm
from compress.kernels.cpu.attention_tables import BLOCK, PART, SHARES, HeadSizes, Tables, table
from compress.kernels.cpu.dots import ROWS, STORED, register_lanes, stored_rows
from compress.kernels.cpu.emitter import float32

MOST = 16  # new tokens of a sequence
THREAD = 1 << 17  # numbers read that are worth waking a thread
LOG2E = 1 / math.log(2)
INFINITY = float("inf")


class Manner(NamedTuple):
    """How queries look at keys."""

    scale: float  # of scores, products of queries and keys
    softcap: float = 0.0  # c: scores are c tanh(score / c); 0: they are left
    window: int = 0  # positions that a query sees, with its own; 0: all before it
    starts: Tensor | None = None  # int64 [batch], the first position that is seen
    sinks: Tensor | None = None  # float32 [query heads], scores of a key without a value


def supports(heads: HeadSizes, stored: torch.dtype, query: torch.dtype) -> bool:
    """Return whether such heads are attended to here."""
    sizes = heads.width % 16 == 0 and heads.value_width % 16 == 0 and heads.queries % heads.stored == 0
    return sizes and stored in STORED and query in STORED and llvm.available()


def space_size(heads: HeadSizes, batch: int, new: int, tokens: int) -> int:
    """Return the float32 of memory that both functions work in, for so many keys of a sequence at most."""
    return batch * heads.queries * new * -(-tokens // PART) * heads.record


def functions(heads: HeadSizes, stored: torch.dtype, query: torch.dtype, out: torch.dtype) -> tuple[Any, Any]:
    """Return the compiled functions, to be called one after the other for ranges that cover range(SHARES):

    attend(state, cache, q, space, first, last, q_batch, q_head, q_token): the queries lie at q, so many elements apart;
    combine(state, cache, space, out, first, last): out [batch, new, heads, value width].
    """
    return llvm.function(Attend, heads, stored, query), llvm.function(Combine, heads, stored, out)


def attend(q: Tensor, keys: Tensor, values: Tensor, how: Manner) -> Tensor:
    """Return what queries make of values: q [B, H, n, width], keys [B, h, m, width] -> [B, n, H, value width].

    The n queries are the last of the m positions, and see what is before them. One that sees nothing gives zeros. The
    last axis of q, keys and values is contiguous.
    """
    batch, queries, new, width = q.shape
    heads = HeadSizes(queries, keys.shape[1], width, values.shape[3], how.scale, how.softcap)
    tokens = keys.shape[2]
    attending, combining = functions(heads, keys.dtype, q.dtype, q.dtype)
    state = table((tokens, new, batch, _address(how.starts)))
    layer = (keys.data_ptr(), values.data_ptr(), *keys.stride()[:3], *values.stride()[:3], how.window)
    cache = table((*layer, _address(how.sinks)))
    out = q.new_empty(batch, new, queries, heads.value_width)
    space = torch.empty(space_size(heads, batch, new, tokens), dtype=torch.float32, device="cpu")
    places = state.data_ptr(), cache.data_ptr()
    q_place, space_place, out_place, strides = q.data_ptr(), space.data_ptr(), out.data_ptr(), q.stride()[:3]

    def work(first: int, last: int) -> None:
        attending(*places, q_place, space_place, first, last, *strides)

    read = batch * keys.shape[1] * tokens * (width + heads.value_width)
    llvm.parallel(work, SHARES, max(1, SHARES * THREAD // max(1, read)))
    combining(*places, space_place, out_place, 0, SHARES)
    return out


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class Attend(Tables):
    """Writes the records of heads and parts."""

    def __init__(self, heads: HeadSizes, stored: torch.dtype, query: torch.dtype) -> None:
        super().__init__("attend", "q space", "q_batch q_head q_token", heads, stored, torch.float32)
        self.query, (self.q, self.space), self.q_steps = query, self.pointers[2:], self.integers[2:]
        self.turned, self.scores = self.array(ROWS * heads.width), self.array(ROWS * PART)
        b = self.b
        self.keys, self.values = self.address(self.cache["keys"]), self.address(self.cache["values"])
        units = b.mul(b.mul(self.state["batch"], self.i64(heads.stored)), self.parts)
        first, last = self.share(units)
        with self.loop(last, first) as self.unit:
            part, index = b.urem(self.unit, self.parts), b.udiv(self.unit, self.parts)
            self.sequence, self.head = b.udiv(index, self.i64(heads.stored)), b.urem(index, self.i64(heads.stored))
            self._bounds(part)
            self._all_tiles()
        self.b.ret_void()

    def _bounds(self, part: Any) -> None:
        """Find the positions of a part that are not before the start of the sequence."""
        b, starts = self.b, self.state["starts"]
        begin = b.add(self.base, b.mul(part, self.i64(PART)))
        self.stop = self.smaller(b.add(begin, self.i64(PART)), self.state["tokens"])
        start = self.variable(self.index)
        b.store(begin, start)
        with b.if_then(self.is_set(starts)):
            own = self.load(self.address(starts), self.sequence, self.index)
            b.store(self.smaller(self.larger(begin, own), self.stop), start)
        self.start = b.load(start)
        self.count = b.sub(self.stop, self.start)

    def _all_tiles(self) -> None:
        """Write the records of all queries of the head and part."""
        b = self.b
        whole, rest = b.udiv(self.rows, self.i64(ROWS)), b.urem(self.rows, self.i64(ROWS))
        with self.loop(whole) as tile:
            self._tile(b.mul(tile, self.i64(ROWS)), ROWS)
        for rows in range(1, ROWS):
            with b.if_then(b.icmp_signed("==", rest, self.i64(rows))):
                self._tile(b.mul(whole, self.i64(ROWS)), rows)

    def _tile(self, first: Any, rows: int) -> None:
        """Write the records of some queries."""
        for r in range(rows):
            self._take_query(self.b.add(first, self.i64(r)), r)
        self._score(rows)
        with self.loop(self.i64(rows)) as r:
            self._soften(r, self.b.add(first, r))
        places = [self.record_place(self.unit, self.b.add(first, self.i64(r))) for r in range(rows)]
        columns = self._columns(rows)
        for r in range(rows):
            with self.loop(self.i64(self.heads.value_width // self.lanes)) as i:
                self.store(self.zeros(), self.space, self.b.add(places[r], self.b.mul(i, self.i64(self.lanes))))
        blocks = self.b.udiv(self.b.add(self.count, self.i64(BLOCK - 1)), self.i64(BLOCK))
        with self.loop(blocks) as block:
            self._mix_block(self.b.mul(block, self.i64(BLOCK)), columns, places)

    def _mix_block(self, first: Any, columns: int, records: Sequence[Any]) -> None:
        """Add values of a block, times their powers, to the records, some columns at a time."""
        with self.loop(self.i64(self.heads.value_width // columns)) as chunk:
            self._mix(first, self.b.mul(chunk, self.i64(columns)), columns, records)

    def _take_query(self, row: Any, r: int) -> None:
        """Write a query as float32, times what scores are multiplied with, in the order of stored chunks."""
        b, heads, new = self.b, self.heads, self.state["new"]
        head = b.add(b.mul(self.head, self.i64(heads.group)), b.udiv(row, new))
        steps = zip((self.sequence, head, b.urem(row, new)), self.q_steps, strict=True)
        place: Any = self.i64(0)
        for index, step in steps:
            place = b.add(place, b.mul(index, step))
        factor = 2 * LOG2E * heads.scale / heads.softcap if heads.softcap else LOG2E * heads.scale
        scale = self.constant(self.float, self.lanes, float32(factor))
        with self.loop(self.i64(heads.width // self.chunk)) as chunk:
            start = b.mul(chunk, self.i64(self.chunk))
            halves = [
                self.load_floats(self.q, b.add(b.add(place, start), self.i64(at)), self.query, self.lanes)
                for at in (0, self.lanes)
            ]
            for half, values in enumerate(self.arrange(*halves)):
                at = b.add(start, self.i64(r * heads.width + half * self.lanes))
                self.store(b.fmul(values, scale), self.turned, at)

    def _score(self, rows: int) -> None:
        """Write the scores of some queries for all positions of the part, and of a few after them."""
        b, width, together = self.b, self.heads.width, stored_rows(rows)
        sums = [[self.variable(self.floating) for _ in range(together)] for _ in range(rows)]
        groups = b.udiv(b.add(self.count, self.i64(together - 1)), self.i64(together))
        key = b.add(b.mul(self.sequence, self.cache["key_batch"]), b.mul(self.head, self.cache["key_head"]))
        last = b.sub(self.stop, self.i64(1))
        with self.loop(groups) as group:
            inside = b.mul(group, self.i64(together))
            places = []
            for j in range(together):
                position = self.smaller(b.add(b.add(self.start, inside), self.i64(j)), last)
                places.append(b.add(key, b.mul(position, self.cache["key_token"])))
            for row in sums:
                for total in row:
                    b.store(self.zeros(), total)
            with self.loop(self.i64(width // self.chunk)) as chunk:
                column = b.mul(chunk, self.i64(self.chunk))
                chunks = [self.read_chunk(self.keys, b.add(place, column)) for place in places]
                at = [b.add(column, self.i64(r * width)) for r in range(rows)]
                self.add_products(chunks, self.turned, at, sums)
            for r, row in enumerate(sums):
                total = self.totals([b.load(each) for each in row])
                self.store(total, self.scores, b.add(inside, self.i64(r * PART)))

    def _soften(self, r: Any, row: Any) -> None:
        """Turn the scores of a query into powers below 1; their largest and the sum go to the record."""
        b, lanes = self.b, self.lanes
        position = b.add(self.old, b.urem(row, self.state["new"]))  # of the query
        end = self.smaller(b.sub(b.add(position, self.i64(1)), self.start), self.count)
        begin = b.add(b.sub(b.sub(position, self.cache["window"]), self.start), self.i64(1))
        begin = b.select(self.is_set(self.cache["window"]), begin, self.i64(0))
        most, total = self.variable(self.floating), self.variable(self.floating)
        least = self.constant(self.float, lanes, -INFINITY)
        b.store(least, most)
        b.store(self.zeros(), total)
        vectors = b.udiv(b.add(self.count, self.i64(lanes - 1)), self.i64(lanes))
        places = self.ir.Constant(self.vector(self.word, lanes), list(range(lanes)))
        with self.loop(vectors) as i:
            inside = b.mul(i, self.i64(lanes))
            at = b.add(b.mul(r, self.i64(PART)), inside)
            values = self._cap(self.load(self.scores, at, self.float, lanes))
            low, high = (self.splat(b.trunc(b.sub(bound, inside), self.word), lanes) for bound in (begin, end))
            seen = b.and_(b.icmp_signed(">=", places, low), b.icmp_signed("<", places, high))
            values = b.select(seen, values, least)
            self.store(values, self.scores, at)
            b.store(self.intrinsic(f"llvm.maxnum.v{lanes}f32", self.floating, b.load(most), values), most)
        largest = self.largest(b.load(most))
        empty = b.fcmp_ordered("==", largest, self.float(-INFINITY))
        anchor = self.splat(b.select(empty, self.float(0.0), largest), lanes)
        with self.loop(vectors) as i:
            at = b.add(b.mul(r, self.i64(PART)), b.mul(i, self.i64(lanes)))
            power = self.power_of_two(b.fsub(self.load(self.scores, at, self.float, lanes), anchor))
            self.store(power, self.scores, at)
            b.store(b.fadd(b.load(total), power), total)
        record = b.add(self.record_place(self.unit, row), self.i64(self.heads.value_width))
        self.store(largest, self.space, record)
        self.store(self.total(b.load(total)), self.space, b.add(record, self.i64(1)))

    def _cap(self, values: Any) -> Any:
        """Return scores as powers of 2: c tanh(score / c), of 2 score / c / ln 2, where there is a softcap c."""
        cap = self.heads.softcap
        if not cap:
            return values
        b = self.b
        one, two, limit = (self.constant(self.float, self.lanes, value) for value in (1.0, 2.0, 126.0))
        bounded = b.select(b.fcmp_ordered(">", values, limit), limit, values)
        tanh = b.fsub(one, b.fdiv(two, b.fadd(self.power_of_two(bounded), one)))
        return b.fmul(tanh, self.constant(self.float, self.lanes, float32(cap * LOG2E)))

    def _columns(self, rows: int) -> int:
        """Return how many columns of values are summed at a time: a divisor of the width."""
        registers = (12 if self.lanes == 8 and register_lanes() == 8 else 16) // rows
        most = max(1, min(registers, 8) // 2)
        chunks = self.heads.value_width // self.chunk
        return self.chunk * next(count for count in range(most, 0, -1) if chunks % count == 0)

    def _mix(self, first: Any, column: Any, columns: int, records: Sequence[Any]) -> None:
        """Add values of a block, times their powers, to some columns of the records."""
        b, chunks = self.b, columns // self.chunk
        value = b.add(b.mul(self.sequence, self.cache["value_batch"]), b.mul(self.head, self.cache["value_head"]))
        value = b.add(value, column)
        held = [[self.variable(self.floating) for _ in range(2 * chunks)] for _ in records]
        places = [
            [b.add(b.add(record, column), self.i64(i * self.lanes)) for i in range(2 * chunks)] for record in records
        ]
        for row, row_places in zip(held, places, strict=True):
            for total, place in zip(row, row_places, strict=True):
                b.store(self.load(self.space, place, self.float, self.lanes), total)
        with self.loop(self.smaller(b.add(first, self.i64(BLOCK)), self.count), first) as inside:
            place = b.add(value, b.mul(b.add(self.start, inside), self.cache["value_token"]))
            vectors: list[Any] = []
            for i in range(chunks):
                vectors += self.read_chunk(self.values, b.add(place, self.i64(i * self.chunk)))
            for r, row in enumerate(held):
                weight = self.load(self.scores, b.add(inside, self.i64(r * PART)), self.float)
                for vector, total in zip(vectors, row, strict=True):
                    b.store(self.multiply_add(self.splat(weight, self.lanes), vector, b.load(total)), total)
        for row, row_places in zip(held, places, strict=True):
            for total, place in zip(row, row_places, strict=True):
                self.store(b.load(total), self.space, place)


class Combine(Tables):
    """Writes outputs from the records of all parts of a query."""

    def __init__(self, heads: HeadSizes, stored: torch.dtype, written: torch.dtype) -> None:
        super().__init__("combine", "space out", "", heads, stored, written)
        self.space, out = self.pointers[2:]
        b, new = self.b, self.state["new"]
        self.most, self.sum = self.variable(self.float), self.variable(self.float)
        total = b.mul(b.mul(self.state["batch"], self.i64(heads.queries)), new)
        first, last = self.share(total)
        with self.loop(last, first) as index:
            token, other = b.urem(index, new), b.udiv(index, new)
            sequence, head = b.udiv(other, self.i64(heads.queries)), b.urem(other, self.i64(heads.queries))
            key_head, inside = b.udiv(head, self.i64(heads.group)), b.urem(head, self.i64(heads.group))
            unit = b.mul(b.add(b.mul(sequence, self.i64(heads.stored)), key_head), self.parts)
            row = b.add(b.mul(b.add(b.mul(sequence, new), token), self.i64(heads.queries)), head)
            self._combine((unit, b.add(b.mul(inside, new), token)), head, out, row)
        b.ret_void()

    def _combine(self, place: tuple[Any, Any], head: Any, out: Any, row: Any) -> None:
        """Write a row of the outputs; place: the first unit of the query, and its number in the unit."""
        self.first = self.record_place(*place)
        self.step = self.b.mul(self.rows, self.i64(self.heads.record))  # from a part's record to that of the next part
        self._weigh(head)
        with self.loop(self.i64(self.heads.value_width // self.chunk)) as chunk:
            column = self.b.mul(chunk, self.i64(self.chunk))
            self._write(out, self.b.mul(row, self.i64(self.heads.value_width)), column)

    def _fact(self, part: Any, which: int) -> tuple[Any, Any]:
        """Return the place of a number behind the sums of a record, and the number."""
        place = self.b.add(self.first, self.b.mul(part, self.step))
        place = self.b.add(place, self.i64(self.heads.value_width + which))
        return place, self.load(self.space, place, self.float)

    def _weigh(self, head: Any) -> None:
        """Write the weight of each record: what is common to its powers, over the sum of all powers."""
        b, sinks = self.b, self.cache["sinks"]
        b.store(self.float(-INFINITY), self.most)
        b.store(self.float(0.0), self.sum)
        with self.loop(self.parts) as part:
            largest = self._fact(part, 0)[1]
            b.store(self.intrinsic("llvm.maxnum.f32", self.float, b.load(self.most), largest), self.most)
        with b.if_then(self.is_set(sinks)):
            sink = b.fmul(self.load(self.address(sinks), head, self.float), self.float(float32(LOG2E)))
            b.store(self.intrinsic("llvm.maxnum.f32", self.float, b.load(self.most), sink), self.most)
            b.store(self._power(b.fsub(sink, b.load(self.most))), self.sum)
        with self.loop(self.parts) as part:
            weight = self._power(b.fsub(self._fact(part, 0)[1], b.load(self.most)))
            self.store(weight, self.space, self._fact(part, 2)[0])
            b.store(b.fadd(b.load(self.sum), b.fmul(weight, self._fact(part, 1)[1])), self.sum)

    def _power(self, x: Any) -> Any:
        """Return 2^x of a number; 0 of infinity minus infinity, which a query has that sees nothing."""
        b = self.b
        power = b.extract_element(self.power_of_two(self.splat(x, self.lanes)), self.word(0))
        nothing = b.fcmp_ordered("==", b.load(self.most), self.float(-INFINITY))
        return b.select(nothing, self.float(0.0), power)

    def _write(self, out: Any, row: Any, column: Any) -> None:
        b = self.b
        sums = [self.variable(self.floating) for _ in range(2)]
        for each in sums:
            b.store(self.zeros(), each)
        with self.loop(self.parts) as part:
            weight = self.splat(self._fact(part, 2)[1], self.lanes)
            place = b.add(b.add(self.first, b.mul(part, self.step)), column)
            for i, each in enumerate(sums):
                values = self.load(self.space, b.add(place, self.i64(i * self.lanes)), self.float, self.lanes)
                b.store(self.multiply_add(weight, values, b.load(each)), each)
        total = b.load(self.sum)
        nothing = b.fcmp_ordered("==", total, self.float(0.0))
        inverse = self.splat(b.fdiv(self.float(1.0), b.select(nothing, self.float(1.0), total)), self.lanes)
        for i, values in enumerate(self.natural(*(b.load(each) for each in sums))):
            at = b.add(b.add(row, column), self.i64(i * self.lanes))
            self.store(self.rounded(b.fmul(values, inverse)), out, at)
