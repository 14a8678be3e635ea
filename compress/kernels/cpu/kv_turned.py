"""Turn keys of tokens by their positions and multiply them with queries, or write them, on CPUs with AVX-512.

A key of a head is mean + norm x, turned by the position of its token. A subclass makes x from stored codes: of BLOCK
tokens of a head, two times 16 channels that turn together at a time. Then come the mean, the turn, and the products
with the queries of the head, or the keys are written out. All of it stays in the first caches; nothing but codes and
norms comes from memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.kernels import llvm
from compress.kernels.contract import BLOCK, MixedCodes, Rotary
from compress.kernels.cpu.emitter import LANES, Writer
from compress.kernels.cpu.kv_basis import KeyTransform, tile_config
from compress.kernels.cpu.kv_mixed import Unpacker

LINE = 64
LINE_NUMBERS = 32  # numbers of 16 bits of a line
GROUP = 8  # queries that are in registers together
AT_ONCE = 16  # products of a query and a token that are in registers together


class TurnedSizes(NamedTuple):
    """width: of a head; rotary: of its channels that turn, the first ones; turns: the type of cos and sin."""

    width: int
    rotary: int
    turns: torch.dtype

    @property
    def half(self) -> int:
        return self.rotary // 2


class ChannelPlace(NamedTuple):
    """Two times 16 channels: their number as a pair and the first channel of each."""

    pair: Any
    low: Any
    high: Any


def run(kernel: Any, ends: tuple[Tensor, Tensor, int], coded: MixedCodes, made: KeyTransform, turns: Rotary) -> None:
    """ends: q, out and the bytes between tokens of out."""
    q, out, move = ends
    heads, tokens, width = coded.norms.shape[1], coded.norms.shape[2], made.mean.shape[1]
    count = q.shape[2] if q is not out else 0
    row, turn_step = coded.codes.stride(2), turns.cos.stride(1)
    fixed = tuple(t.data_ptr() for t in (made.back, made.firsts, made.mean, made.scales))
    strides = row, coded.norms.stride(1), turn_step, out.stride(1), out.stride(2), made.pitch, made.second
    config = tile_config()

    def work(first: int, last: int) -> None:
        turned = torch.empty(BLOCK, max(turns.width, 1), dtype=torch.float32, device="cpu")
        a = torch.zeros(BLOCK, made.pitch, dtype=torch.float32, device="cpu")
        c = torch.empty(BLOCK, width, dtype=torch.float32, device="cpu")
        sums = torch.empty(count * BLOCK * LANES, dtype=torch.float32, device="cpu")
        space = tuple(t.data_ptr() for t in (turned, a, c, sums, config))
        start = first * BLOCK
        for index in range(q.shape[0]):
            codes, norms, at_q, at_out = (t[index].data_ptr() for t in (coded.codes, coded.norms, q, out))
            angles = (
                (x[index % len(x)].data_ptr() + start * turn_step * x.element_size()) for x in (turns.cos, turns.sin)
            )
            places = codes + start * row, coded.starts.data_ptr(), coded.bounds.data_ptr(), norms + start
            kernel(*places, *fixed, *angles, at_q, at_out + start * move, *space, last - first, heads, *strides)

    llvm.parallel(work, tokens // BLOCK, -(-(1 << 17) // (BLOCK * heads * width)))


class Turned(Writer, Unpacker, ABC):
    """void turned(codes, starts, bounds, norms, back, firsts, mean, scales, cos, sin, q, out, turns, a, c, sums,
    config, blocks, heads, bytes of a token, norms between heads, numbers of cos and sin between tokens, of out between
    heads and between rows, numbers of a row of a, steps with a second number).

    q [h, M, width], out [h, M, tokens], or with M = 0 out [h, tokens, width]. layout: what `prepare` is given.
    """

    is_by_head = False  # all tokens of a head before those of the next one: where what a head reads fills a cache

    def __init__(self, sizes: TurnedSizes, layout: Any, count: int, dtype: torch.dtype) -> None:
        super().__init__("turned", 17, 9, dtype)
        self.sizes, self.count = sizes, count
        self.prepare(layout)
        self.norm, self.back, self.firsts, self.mean, self.factors, self.cos, self.sin = self.pointers[3:10]
        self.q, self.out, self.turns, self.a, self.c, self.sums, self.config = self.pointers[10:]
        blocks, heads, self.row, self.norm_step, self.turn_step, self.out_head, self.out_row = self.integers[:7]
        self.pitch, self.second = self.integers[7:]
        scales = self.variable(self.ir.ArrayType(self.float, BLOCK))  # norms of a block
        scales.align = LINE  # so that the stack is, and each register that is put there lies in one line of memory
        self.scales = self.b.inttoptr(self.b.ptrtoint(scales, self.index), self.pointer)
        self.begin()
        if self.is_by_head:
            with self.loop(heads) as head, self.loop(blocks) as block:
                token = self.b.mul(block, self.i64(BLOCK))
                self._turn(token)
                self._block(head, token, heads)
        else:
            with self.loop(blocks) as block:
                token = self.b.mul(block, self.i64(BLOCK))
                self._turn(token)
                with self.loop(heads) as head:
                    self._block(head, token, heads)
        self.end()
        self.b.ret_void()

    def _block(self, head: Any, token: Any, heads: Any) -> None:
        self.head = head
        fields = self.load(self.firsts, self.b.add(heads, head), self.index)
        self.unpack(head, token)
        self._multiply(head, token, fields)
        for m in range(self.count):
            self._total(head, token, m)

    @abstractmethod
    def prepare(self, layout: Any) -> None:
        """Before anything is written."""

    @abstractmethod
    def unpack(self, head: Any, token: Any) -> None:
        """Write what `multiply` reads of a block of tokens of a head to a, and its norms to scales."""

    @abstractmethod
    def multiply(self, first: Any, fields: Any, place: ChannelPlace) -> None:
        """c [2, BLOCK, 16] of a pair: what is in a, times the part of `back` that begins at `first`; fields: the second
        number of `firsts` of the head."""

    def begin(self) -> None:
        """Before the first product."""

    def end(self) -> None:
        """After the last."""

    def read_norms(self, head: Any, token: Any) -> None:
        """Write the norms of a block to scales."""
        next_norms = self.b.add(self.b.mul(head, self.norm_step), self.b.add(token, self.i64(BLOCK)))
        self.prefetch(self.norm, next_norms, self.byte)
        for start in range(0, BLOCK, LANES):
            at = self.b.add(self.b.mul(head, self.norm_step), self.b.add(token, self.i64(start)))
            self.store(self.norms(self.norm, at), self.scales, self.i64(start))

    def _turn(self, token: Any) -> None:
        """Write cos and sin of a block's tokens, half a row of each, as float32; prefetch what the next one reads."""
        b, sizes = self.b, self.sizes
        self.ask_for(b.add(token, self.i64(BLOCK)))
        with self.loop(self.i64(BLOCK)) as inside:
            first, own = b.mul(b.add(token, inside), self.turn_step), b.mul(inside, self.i64(sizes.rotary))
            for channel in range(0, sizes.half, LANES):
                for side, pointer in enumerate((self.cos, self.sin)):
                    if channel % LINE_NUMBERS == 0:
                        at = b.add(b.add(first, b.mul(self.turn_step, self.i64(BLOCK))), self.i64(channel))
                        self.prefetch(pointer, at, self.short if sizes.turns.itemsize == 2 else self.float)
                    factors = self.load_floats(pointer, b.add(first, self.i64(channel)), sizes.turns, LANES)
                    self.store(factors, self.turns, b.add(own, self.i64(side * sizes.half + channel)))

    def _multiply(self, head: Any, token: Any, fields: Any) -> None:
        """Keys of a block before the mean and the turn, in c [pairs, 2, BLOCK, 16], and what is made of them."""
        b, first = self.b, self.load(self.firsts, head, self.index)
        turning = self.sizes.half // LANES
        for count, is_turned in ((turning, True), (self.pairs - turning, False)):
            with self.loop(self.i64(count)) as index:
                place = self._place(index, is_turned)
                self.multiply(first, fields, place)
                if not self.count:
                    self._write(head, token, place, is_turned)
        for start in range(0, self.count, GROUP):
            rows = range(start, min(start + GROUP, self.count))
            together = next(n for n in (8, 4, 2) if n * len(rows) <= AT_ONCE)
            with self.loop(self.i64(BLOCK // together)) as part:
                self._add(head, b.mul(part, self.i64(together)), together, rows)

    @property
    def pairs(self) -> int:
        return self.sizes.width // (2 * LANES)

    def _place(self, index: Any, is_turned: bool) -> ChannelPlace:
        b, sizes = self.b, self.sizes
        if is_turned:
            low = b.mul(index, self.i64(LANES))
            return ChannelPlace(index, low, b.add(low, self.i64(sizes.half)))
        low = b.add(b.mul(index, self.i64(2 * LANES)), self.i64(sizes.rotary))
        return ChannelPlace(b.add(index, self.i64(sizes.half // LANES)), low, b.add(low, self.i64(LANES)))

    def cell(self, place: ChannelPlace, side: int, inside: Any) -> Any:
        """Where sixteen channels of a token are in c."""
        row = self.b.add(self.b.mul(place.pair, self.i64(2 * BLOCK)), self.b.add(inside, self.i64(side * BLOCK)))
        return self.b.mul(row, self.i64(LANES))

    def _means(self, head: Any, place: ChannelPlace) -> list[Any]:
        first = self.b.mul(head, self.i64(self.sizes.width))
        return [self.load(self.mean, self.b.add(first, x), self.float, LANES) for x in (place.low, place.high)]

    def _keys(self, inside: Any, means: list[Any], place: ChannelPlace, is_turned: bool) -> list[Any]:
        """Two times 16 channels of a token."""
        b, scale = self.b, self.splat(self.load(self.scales, inside, self.float), LANES)
        x, y = (
            self.multiply_add(self.load(self.c, self.cell(place, side, inside), self.float, LANES), scale, own)
            for side, own in enumerate(means)
        )
        if not is_turned:
            return [x, y]
        at = b.add(b.mul(inside, self.i64(self.sizes.rotary)), place.low)
        cos, sin = (
            self.load(self.turns, b.add(at, self.i64(side)), self.float, LANES) for side in (0, self.sizes.half)
        )
        return [
            self.multiply_add(x, cos, b.fneg(b.fmul(y, sin))),
            self.multiply_add(y, cos, b.fmul(x, sin)),
        ]

    def _add(self, head: Any, inside: Any, together: int, rows: range) -> None:
        """Writes the products of some tokens with some queries, lane by lane."""
        b, turning = self.b, self.sizes.half // LANES
        tokens = [b.add(inside, self.i64(i)) for i in range(together)]
        held = [[self.variable(self.vector(self.float, LANES)) for _ in rows] for _ in tokens]
        for x in (x for own in held for x in own):
            b.store(self.floats(0.0), x)
        for count, is_turned in ((turning, True), (self.pairs - turning, False)):
            with self.loop(self.i64(count)) as index:
                place = self._place(index, is_turned)
                means = self._means(head, place)
                keys = [self._keys(token, means, place, is_turned) for token in tokens]
                for i, m in enumerate(rows):
                    first = b.mul(b.add(b.mul(head, self.i64(self.count)), self.i64(m)), self.i64(self.sizes.width))
                    for side, channel in enumerate((place.low, place.high)):
                        query = self.load(self.q, b.add(first, channel), self.float, LANES)
                        for key, own in zip(keys, held, strict=True):
                            b.store(self.multiply_add(query, key[side], b.load(own[i])), own[i])
        for token, own in zip(tokens, held, strict=True):
            for m, x in zip(rows, own, strict=True):
                cell = b.mul(b.add(token, self.i64(m * BLOCK)), self.i64(LANES))
                self.store(b.load(x), self.sums, cell)

    def _write(self, head: Any, token: Any, place: ChannelPlace, is_turned: bool) -> None:
        """Writes two times 16 channels of a block of tokens."""
        b, means = self.b, self._means(head, place)
        with self.loop(self.i64(BLOCK)) as inside:
            row = b.add(b.mul(head, self.out_head), b.mul(b.add(token, inside), self.out_row))
            for channel, key in zip(place[1:], self._keys(inside, means, place, is_turned), strict=True):
                self.store(self.rounded(key), self.out, b.add(row, channel))

    def _total(self, head: Any, token: Any, m: int) -> None:
        b = self.b
        row = b.add(b.mul(head, self.out_head), b.mul(self.out_row, self.i64(m)))
        for start in range(0, BLOCK, LANES):
            place = b.add(row, b.add(token, self.i64(start)))
            self.store(self._totals(m * BLOCK + start, LANES), self.out, place)

    def _totals(self, first: int, count: int) -> Any:
        """The sums of `count` vectors of sums, neighbours added up: in the end a lane for a vector."""
        if count == 1:
            return self.load(self.sums, self.i64(first * LANES), self.float, LANES)
        x, y = (self._totals(start, count // 2) for start in (first, first + count // 2))
        even, odd = (self.shuffled(x, y, list(range(side, 2 * LANES, 2))) for side in (0, 1))
        return self.b.fadd(even, odd)
