"""Attend to packed pages on a CPU, as compress/kernels/cpu/attention.py does to plain keys and values.

Two compiled functions, of which the first turns codes into float32 in registers. A unit of its work is a part of PART
positions of a KV head of a request, for all queries that share the head: the same numbers come out whatever the number
of threads and of requests. Requests with many queries take the plain way (compress/kernels/paged.py), with tokens
decoded by a compiled function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import gcd
from typing import Any

import torch
from torch import Tensor

from compress.kernels import llvm, paged
from compress.kernels.cpu import attention
from compress.kernels.cpu.attention import MOST, THREAD
from compress.kernels.cpu.attention_tables import BLOCK, PART, HeadSizes, Tables, table
from compress.kernels.cpu.dots import ROWS, STORED, Dots, stored_rows
from compress.kernels.cpu.paged_codes import DecodePages, EncodePages, PageEmitter, lanes_for
from compress.kernels.paged import LevelPair, PageLayout, Requests, SeenSpan

LEAST_TOKENS = 8  # pages have multiples of so many, which are read beside each other
# Facts of a request: its first row of q, its queries and tokens, the first position that is seen, rounded down, its
# parts, the address of its blocks; units and records of the requests before it.
FACTS = "row new tokens base parts blocks units records".split()  # noqa: SIM905
LINE = 64  # bytes of memory that are read together
LEVELS = "key_levels value_levels"  # pointers


def supports(q: Tensor, pages: Tensor, layout: PageLayout) -> bool:
    """Return whether pages of this layout are read here for such queries."""
    is_read = layout.tokens % LEAST_TOKENS == 0 and q.dtype in STORED and q.shape[1] % pages.shape[1] == 0
    return is_read and _are_runs(pages, layout) and llvm.available() and lanes_for(layout) > 0


def writes(keys: Tensor, values: Tensor, pages: Tensor, layout: PageLayout) -> bool:
    """Return whether pages of this layout are written here."""
    is_read = keys.dtype == values.dtype and keys.dtype in STORED
    return is_read and _are_runs(pages, layout) and llvm.available() and lanes_for(layout) > 0


def _are_runs(pages: Tensor, layout: PageLayout) -> bool:
    return pages.stride(3) == 1 and pages.stride(2) == layout.token_bytes


def attend(
    q: Tensor, pages: Tensor, requests: Requests, layout: PageLayout, tables: LevelPair, window: int | None
) -> Tensor:
    """Return what `attend` of compress/kernels/paged.py does."""
    q = q if q.stride(2) == 1 else q.contiguous()
    requests = Requests(*(x.int().contiguous() for x in requests))
    heads = HeadSizes(q.shape[1], pages.shape[1], layout.keys.width, layout.values.width, 1.0)
    out = torch.zeros(*q.shape[:2], heads.value_width, dtype=torch.float32, device="cpu")
    held = [x if x is None else x.float().contiguous() for x in tables]
    levels = tuple(0 if x is None else x.data_ptr() for x in held)
    facts: list[int] = []
    units = records = 0
    for index, (row, count, length) in enumerate(paged.spans(requests)):
        span, rows = SeenSpan(length, layout.tokens, window), slice(row, row + count)
        blocks = requests.block_table[index].data_ptr()
        if count > MOST:
            read = _reader(pages, blocks, layout, levels)
            paged.attend_in_tiles(q[rows], heads.stored, read, span, out[rows])
        elif count:
            base = span.first(count)
            parts = -(-(length - base) // PART)
            facts += [row, count, length, base, parts, blocks, units, records]
            units, records = units + parts * heads.stored, records + parts * heads.queries * count
    if units:
        space = torch.empty(records * heads.record, dtype=torch.float32, device="cpu")
        given = table(facts)
        fixed = given.data_ptr(), pages.data_ptr(), *levels, q.data_ptr(), space.data_ptr()
        behind = len(given) // len(FACTS), window or 0, *q.stride()[:2], *pages.stride()[:2]
        attending = llvm.function(AttendPages, heads, layout, q.dtype)
        numbers = PART * (heads.width + heads.value_width)
        llvm.parallel(lambda first, last: attending(*fixed, first, last, *behind), units, -(-THREAD // numbers))
        combining = llvm.function(CombinePages, heads, layout)
        places = given.data_ptr(), space.data_ptr(), out.data_ptr()
        per = -(-THREAD * heads.queries // (records * heads.record))
        llvm.parallel(lambda first, last: combining(*places, first, last, behind[0]), heads.queries, per)
    return out


def write(keys: Tensor, values: Tensor, pages: Tensor, slots: Tensor, layout: PageLayout, tables: LevelPair) -> None:
    """Do what `write` of compress/kernels/paged.py does."""
    states = [x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous() for x in (keys, values)]
    slots = slots.long().contiguous()
    levels = [x if x is None else x.float().contiguous() for x in tables]
    edges = [x if x is None else (x[1:] + x[:-1]) / 2 for x in levels]
    places = tuple(0 if x is None else x.data_ptr() for x in (pages, slots, *states, *levels, *edges))
    encode = llvm.function(EncodePages, layout, keys.shape[1], keys.dtype)
    steps = *pages.stride()[:2], *(x.stride(0) for x in states)
    numbers = keys.shape[1] * (keys.shape[2] + values.shape[2])
    llvm.parallel(lambda first, last: encode(*places, first, last, *steps), len(slots), -(-THREAD // numbers))


def _reader(pages: Tensor, blocks: int, layout: PageLayout, levels: tuple[int, ...]) -> paged.Read:
    """Return the compiled reader of a request."""
    function = llvm.function(DecodePages, layout)

    def read(head: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        widths = layout.keys.width, layout.values.width
        keys, values = (torch.empty(end - first, width, dtype=torch.float32, device="cpu") for width in widths)
        place = pages.data_ptr() + head * pages.stride(1)
        function(place, blocks, *levels, keys.data_ptr(), values.data_ptr(), first, end, pages.stride(0))
        return keys, values

    return read


class _RequestTables(Tables):
    """Takes what `Tables` reads from STATE and CACHE from the facts of one request after the other."""

    def __init__(self, name: str, pointers: str, integers: str, heads: HeadSizes, layout: PageLayout) -> None:
        kinds = torch.float32, torch.float32
        Dots.__init__(self, name, f"facts {pointers}", f"first last requests{integers}", *kinds, lanes_for(layout))
        self.heads = heads

    @contextmanager
    def each_request(self) -> Iterator[None]:
        """for each request: its facts are in `state`."""
        with self.loop(self.named["requests"]) as request:
            first = self.b.mul(request, self.i64(len(FACTS)))
            places = {name: self.b.add(first, self.i64(i)) for i, name in enumerate(FACTS)}
            self.state = {name: self.load(self.named["facts"], at, self.index) for name, at in places.items()}
            self.old = self.b.sub(self.state["tokens"], self.state["new"])
            self.base, self.parts = self.state["base"], self.state["parts"]
            self.rows = self.b.mul(self.state["new"], self.i64(self.heads.group))
            yield

    def record_place(self, unit: Any, row: Any) -> Any:
        record = self.b.add(self.state["records"], self.b.add(self.b.mul(unit, self.rows), row))
        return self.b.mul(record, self.i64(self.heads.record))


class AttendPages(_RequestTables, PageEmitter, attention.Attend):
    """Writes the records of a range of units; block_step and head_step are bytes from a page to the next."""

    def __init__(self, heads: HeadSizes, layout: PageLayout, query: torch.dtype) -> None:
        steps = " window q_token q_head block_step head_step"
        super().__init__("attend_pages", f"pages {LEVELS} q space", steps, heads, layout)
        named, b = self.named, self.b
        self.query, self.layout = query, layout
        self.pages, self.q, self.space = (named[name] for name in ("pages", "q", "space"))
        self.q_steps, self.cache = [named["q_token"], named["q_head"], named["q_token"]], {"window": named["window"]}
        self.turned, self.scores = self.array(ROWS * heads.width), self.array(ROWS * PART)
        self.keys, self.values = (self.side(layout, i, named[name]) for i, name in enumerate(LEVELS.split()))
        with self.each_request():
            units = b.mul(self.parts, self.i64(heads.stored))
            first = self.positive(b.sub(named["first"], self.state["units"]))
            with self.loop(self.smaller(b.sub(named["last"], self.state["units"]), units), first) as self.unit:
                part, self.head = b.urem(self.unit, self.parts), b.udiv(self.unit, self.parts)
                self.sequence = self.state["row"]
                self.start = b.add(self.base, b.mul(part, self.i64(PART)))
                self.count = self.smaller(b.sub(self.state["tokens"], self.start), self.i64(PART))
                self._all_tiles()
        b.ret_void()

    def _page(self, inside: Any) -> tuple[Any, Any]:
        """Return the byte where the page of a position of the part begins, and the place in the page."""
        b, size = self.b, self.i64(self.layout.tokens)
        position = b.add(self.start, inside)
        blocks = self.address(self.state["blocks"])
        block = b.sext(self.load(blocks, b.udiv(position, size), self.word), self.index)
        head = b.mul(self.head, self.named["head_step"])
        return b.add(b.mul(block, self.named["block_step"]), head), b.urem(position, size)

    def _score(self, rows: int) -> None:
        """Write the scores of some queries for all positions of the part, and of a few after them."""
        b, width, together = self.b, self.heads.width, stored_rows(rows)
        groups = b.udiv(b.add(self.count, self.i64(together - 1)), self.i64(together))
        with self.loop(groups) as group:
            inside = b.mul(group, self.i64(together))
            page, place = self._page(inside)
            self._ask_for_values(page, place, together)
            sums: list[list[Any]] = [[self.zeros()] * together for _ in range(rows)]
            for j in range(together):
                token = self.take_token(self.keys, page, b.add(place, self.i64(j)))
                for channel in range(0, width, self.lanes):
                    x = self.numbers(self.keys, token, channel)
                    for r, row in enumerate(sums):
                        q = self.load(self.turned, self.i64(r * width + channel), self.float, self.lanes)
                        row[j] = self.multiply_add(q, x, row[j])
            for r, row in enumerate(sums):
                self.store(self.totals(row), self.scores, b.add(inside, self.i64(r * PART)))

    def _ask_for_values(self, page: Any, inside: Any, count: int) -> None:
        """Ask for the codes of values that are read when all scores of the part are there."""
        first = self.code_place(self.values, page, inside)
        for line in range(0, count * self.values.codes.code_bytes, LINE):
            self.prefetch(self.pages, self.b.add(first, self.i64(line)), self.byte)

    def _mix_block(self, first: Any, columns: int, records: Sequence[Any]) -> None:
        """Add values of a block, times their powers, to the records, some columns at a time."""
        for column in range(0, self.heads.value_width, columns):
            self._mix(first, range(column, column + columns, self.lanes), columns, records)

    def _mix(self, first: Any, column: Any, columns: int, records: Sequence[Any]) -> None:
        """Do this for the vectors that begin at these columns."""
        b, run = self.b, gcd(self.layout.tokens, BLOCK)  # tokens that lie in one page
        held = [[self.variable(self.floating) for _ in column] for _ in records]
        places = [[b.add(record, self.i64(c)) for c in column] for record in records]
        for row, row_places in zip(held, places, strict=True):
            for total, place in zip(row, row_places, strict=True):
                b.store(self.load(self.space, place, self.float, self.lanes), total)
        stop = self.smaller(b.add(first, self.i64(BLOCK)), self.count)
        with self.loop(b.udiv(b.add(b.sub(stop, first), self.i64(run - 1)), self.i64(run))) as i:
            begin = b.add(first, b.mul(i, self.i64(run)))
            page, inside = self._page(begin)
            with self.loop(self.smaller(b.sub(stop, begin), self.i64(run))) as j:
                token = self.take_token(self.values, page, b.add(inside, j))
                vectors = [self.numbers(self.values, token, c) for c in column]
                for r, row in enumerate(held):
                    weight = self.load(self.scores, b.add(b.add(begin, j), self.i64(r * PART)), self.float)
                    for vector, total in zip(vectors, row, strict=True):
                        b.store(self.multiply_add(self.splat(weight, self.lanes), vector, b.load(total)), total)
        for row, row_places in zip(held, places, strict=True):
            for total, place in zip(row, row_places, strict=True):
                self.store(b.load(total), self.space, place)


class CombinePages(_RequestTables, attention.Combine):
    """Writes the outputs of a range of query heads, of all requests."""

    def __init__(self, heads: HeadSizes, layout: PageLayout) -> None:
        super().__init__("combine_pages", "space out", "", heads, layout)
        self.space, out = self.pointers[1:]
        b, self.cache = self.b, {"sinks": self.i64(0)}
        self.most, self.sum = self.variable(self.float), self.variable(self.float)
        with self.each_request(), self.loop(self.named["last"], self.named["first"]) as head:
            group = self.i64(heads.group)
            unit, inside = b.mul(b.udiv(head, group), self.parts), b.urem(head, group)
            with self.loop(self.state["new"]) as token:
                row = b.add(self.state["row"], token)
                place = b.add(b.mul(row, self.i64(heads.queries)), head)
                self._combine((unit, b.add(b.mul(inside, self.state["new"]), token)), head, out, place)
        b.ret_void()
