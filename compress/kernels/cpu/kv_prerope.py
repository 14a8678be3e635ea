"""Read keys stored before the rotary embedding, as codes of a linear transform, on CPUs with AVX-512.

A key of a head is mean + norm back level(code), turned by the position of its token. BLOCK tokens of a head at a time:
codes become levels (compress/kernels/cpu/kv_mixed.py); then, for two times 16 channels that turn together, a
product with `back`, the mean, the turn, and the products with the queries of the head, or the keys are written out. All
of it stays in the first caches; nothing but codes and norms comes from memory.

The product is one of matrices in AMX tiles, of int16 numbers, or float32: see compress/kernels/cpu/kv_basis.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.kernels import llvm
from compress.kernels.cpu import kv_mixed
from compress.kernels.cpu.emitter import LANES
from compress.kernels.cpu.kv_basis import PAIR, STEP, TILE, Transform, tile_config, transform
from compress.kernels.cpu.kv_mixed import Unpacker
from compress.kernels.cpu.row_decoder import Writer
from compress.kernels.kv_contract import BLOCK, MOST_MIXED_BITS, LevelTables, MixedCodes, Rotary

__all__ = ["scores", "supports", "transform", "write"]

LINE = 64
GROUP = 8  # queries that are in registers together
AT_ONCE = 16  # products of a query and a token that are in registers together
TOGETHER = 8  # tokens of a product that are in registers together


class _Sizes(NamedTuple):
    """width: of a head; rotary: of its channels that turn, the first ones; turns: the type of cos and sin."""

    width: int
    rotary: int
    turns: torch.dtype

    @property
    def half(self) -> int:
        return self.rotary // 2


class Place(NamedTuple):
    """Two times 16 channels: their number as a pair and the first channel of each."""

    pair: Any
    low: Any
    high: Any


def supports(width: int) -> bool:
    """Return whether keys of this width are read here, where half of the channels that turn fill registers, too."""
    return width % (2 * LANES) == 0 and kv_mixed.supports(width)


def scores(q: Tensor, coded: MixedCodes, made: Transform, tables: LevelTables, turns: Rotary, out: Tensor) -> None:
    """q [B, h, m, width] float32; out [B, h, m, n] float32, its last axis contiguous, n a multiple of BLOCK."""
    q = q.contiguous()
    sizes = _Sizes(q.shape[3], turns.width, turns.cos.dtype)
    _run(_function(sizes, tables, q.shape[2], torch.float32, made), (q, out, 4), coded, made, turns)


def write(coded: MixedCodes, made: Transform, tables: LevelTables, turns: Rotary, out: Tensor) -> None:
    """out [B, h, n, width] of float32, float16 or bfloat16, its last axis contiguous, n a multiple of BLOCK."""
    sizes = _Sizes(out.shape[3], turns.width, turns.cos.dtype)
    kernel = _function(sizes, tables, 0, out.dtype, made)
    _run(kernel, (out, out, out.element_size() * out.stride(2)), coded, made, turns)


def _run(kernel: Any, ends: tuple[Tensor, Tensor, int], coded: MixedCodes, made: Transform, turns: Rotary) -> None:
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


def _function(
    sizes: _Sizes, tables: LevelTables, count: int, dtype: torch.dtype, made: Transform
) -> Callable[..., None]:
    kind = {torch.bfloat16: _Tiles, torch.int16: _Integers, torch.float32: _Plain}[made.back.dtype]
    return llvm.function(kind, sizes, tables, count, dtype)


class _Turned(Writer, Unpacker, ABC):
    """void turned(codes, starts, bounds, norms, back, firsts, mean, scales, cos, sin, q, out, turns, a, c, sums, config,
    blocks, heads, bytes of a token, norms between heads, numbers of cos and sin between tokens, of out between heads
    and between rows, numbers of a row of a, steps with a second number).

    q [h, M, width], out [h, M, tokens], or with M = 0 out [h, tokens, width].
    """

    def __init__(self, sizes: _Sizes, tables: LevelTables, count: int, dtype: torch.dtype) -> None:
        super().__init__("turned", 17, 9, dtype)
        self.sizes, self.count, self.tables = sizes, count, self.entries(tables)
        self.norm, self.back, self.firsts, self.mean, self.factors, self.cos, self.sin = self.pointers[3:10]
        self.q, self.out, self.turns, self.a, self.c, self.sums, self.config = self.pointers[10:]
        blocks, heads, self.row, self.norm_step, self.turn_step, self.out_head, self.out_row = self.integers[:7]
        self.pitch, self.second = self.integers[7:]
        scales = self.variable(self.ir.ArrayType(self.float, BLOCK))  # norms of a block
        scales.align = LINE  # so that the stack is, and each register that is put there lies in one line of memory
        self.scales = self.b.inttoptr(self.b.ptrtoint(scales, self.index), self.pointer)
        self.begin()
        with self.loop(blocks) as block:
            token = self.b.mul(block, self.i64(BLOCK))
            self._turn(token)
            with self.loop(heads) as head:
                self.head = head
                self._unpack(head, token)
                self._multiply(head, token, self.load(self.firsts, self.b.add(heads, head), self.index))
                for m in range(count):
                    self._total(head, token, m)
        self.end()
        self.b.ret_void()

    @abstractmethod
    def entries(self, tables: LevelTables) -> list[list[int]]:
        """Return the words by bits that codes are looked up in."""

    @abstractmethod
    def keep(self, words: Any, offset: Any) -> None:
        """Store sixteen levels in a."""

    @abstractmethod
    def multiply(self, first: Any, fields: Any, place: Place) -> None:
        """c [2, BLOCK, 16] of a pair = a times the `back` that begins at `first`, over `fields` columns of a."""

    def sums_of(self, steps: Any, place: Place, zero: Any, step: Any, add: Any, end: Any) -> None:
        """c of a pair, TOGETHER tokens at a time in registers: add(left, right, sum) for all steps, then end(sum, side).

        step(k) returns the two registers of `back` and a function that loads the number of a row of a.
        """
        b = self.b
        held = [[self.variable(zero.type) for _ in range(2)] for _ in range(TOGETHER)]
        with self.loop(self.i64(BLOCK // TOGETHER)) as part:
            for x in (x for own in held for x in own):
                b.store(zero, x)
            rows = [b.add(b.mul(part, self.i64(TOGETHER)), self.i64(t)) for t in range(TOGETHER)]
            with self.loop(steps) as k:
                right, left_of = step(k)
                for row, own in zip(rows, held, strict=True):
                    left = self.splat(left_of(row), LANES)
                    for x, y in zip(own, right, strict=True):
                        b.store(add(left, y, b.load(x)), x)
            for row, own in zip(rows, held, strict=True):
                for side, x in enumerate(own):
                    self.store(end(b.load(x), side), self.c, self.cell(place, side, row))

    def begin(self) -> None:
        """Before the first product."""

    def end(self) -> None:
        """After the last."""

    def _turn(self, token: Any) -> None:
        """Writes cos and sin of a block's tokens, half a row of each, as float32."""
        b, sizes = self.b, self.sizes
        with self.loop(self.i64(BLOCK)) as inside:
            first, own = b.mul(b.add(token, inside), self.turn_step), b.mul(inside, self.i64(sizes.rotary))
            for channel in range(0, sizes.half, LANES):
                for side, pointer in enumerate((self.cos, self.sin)):
                    found = self.load_floats(pointer, b.add(first, self.i64(channel)), sizes.turns, LANES)
                    self.store(found, self.turns, b.add(own, self.i64(side * sizes.half + channel)))

    def _unpack(self, head: Any, token: Any) -> None:
        b = self.b
        for start in range(0, BLOCK, LANES):
            at = b.add(b.mul(head, self.norm_step), b.add(token, self.i64(start)))
            self.store(self.norms(self.norm, at), self.scales, self.i64(start))
        for place in range(MOST_MIXED_BITS):
            with self.loop(self.bound(head, place + 1), self.bound(head, place)) as piece:
                planes, column = self.planes(piece, MOST_MIXED_BITS - place), self.column(piece)
                with self.loop(self.i64(BLOCK // kv_mixed.UNROLLED)) as part:
                    for i in range(kv_mixed.UNROLLED):
                        inside = b.add(b.mul(part, self.i64(kv_mixed.UNROLLED)), self.i64(i))
                        found = self.levels(b.add(token, inside), planes, MOST_MIXED_BITS - place)
                        self.keep(found, b.add(b.mul(inside, self.pitch), column))

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

    def _place(self, index: Any, is_turned: bool) -> Place:
        b, sizes = self.b, self.sizes
        if is_turned:
            low = b.mul(index, self.i64(LANES))
            return Place(index, low, b.add(low, self.i64(sizes.half)))
        low = b.add(b.mul(index, self.i64(2 * LANES)), self.i64(sizes.rotary))
        return Place(b.add(index, self.i64(sizes.half // LANES)), low, b.add(low, self.i64(LANES)))

    def cell(self, place: Place, side: int, inside: Any) -> Any:
        """Where sixteen channels of a token are in c."""
        row = self.b.add(self.b.mul(place.pair, self.i64(2 * BLOCK)), self.b.add(inside, self.i64(side * BLOCK)))
        return self.b.mul(row, self.i64(LANES))

    def _means(self, head: Any, place: Place) -> list[Any]:
        first = self.b.mul(head, self.i64(self.sizes.width))
        return [self.load(self.mean, self.b.add(first, x), self.float, LANES) for x in (place.low, place.high)]

    def _keys(self, inside: Any, means: list[Any], place: Place, is_turned: bool) -> list[Any]:
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

    def _write(self, head: Any, token: Any, place: Place, is_turned: bool) -> None:
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


class _Tiles(_Turned):
    """Levels as bfloat16; a is [BLOCK, pitch] of them, in the first half of its memory."""

    def entries(self, tables: LevelTables) -> list[list[int]]:
        return [[(word >> 16) & 0xFFFF for word in table] for table in kv_mixed.words(tables)]

    def keep(self, words: Any, offset: Any) -> None:
        self.store(self.b.trunc(words, self.vector(self.short, LANES)), self.a, offset)

    def begin(self) -> None:
        self._tile("ldtilecfg", self.config)

    def end(self) -> None:
        self._tile("tilerelease")

    def multiply(self, first: Any, fields: Any, place: Place) -> None:
        b = self.b
        most = b.lshr(self.pitch, self.i64(5))
        steps = b.lshr(b.add(fields, self.i64(STEP - 1)), self.i64(5))
        first = b.add(first, b.mul(b.mul(place.pair, b.add(most, self.second)), self.i64(PAIR)))
        for tile in range(4):
            self._tile("tilezero", self.byte(tile))
        with self.loop(steps) as step:
            self._step(step, b.add(first, b.mul(step, self.i64(PAIR))))
        with self.loop(self.second) as step:
            self._step(step, b.add(first, b.mul(b.add(most, step), self.i64(PAIR))))
        for tile in range(4):
            at = self.cell(place, tile % 2, self.i64(tile // 2 * LANES))
            self._tile("tilestored64", self.byte(tile), self.at(self.c, at, self.float), self.i64(4 * LANES))

    def _step(self, step: Any, at: Any) -> None:
        """Two tiles of 16 tokens times two of 16 channels, whose numbers begin at `at`."""
        b = self.b
        left, stride = b.mul(step, self.i64(STEP)), b.mul(self.pitch, self.i64(2))
        for i, offset in enumerate((left, b.add(left, b.mul(self.pitch, self.i64(LANES))))):
            self._tile("tileloadd64", self.byte(4 + i), self.at(self.a, offset, self.short), stride)
            here = self.at(self.back, b.add(at, self.i64(i * TILE)), self.short)
            self._tile("tileloadd64", self.byte(6 + i), here, self.i64(LINE))
        for tile in range(4):
            self._tile("tdpbf16ps", *(self.byte(x) for x in (tile, 4 + tile // 2, 6 + tile % 2)))

    def _tile(self, name: str, *values: Any) -> None:
        self.intrinsic(f"llvm.x86.{name}", self.ir.VoidType(), *values)


class _Plain(_Turned):
    """Levels as float32."""

    def entries(self, tables: LevelTables) -> list[list[int]]:
        return kv_mixed.words(tables)

    def keep(self, words: Any, offset: Any) -> None:
        self.store(words, self.a, offset)

    def multiply(self, first: Any, fields: Any, place: Place) -> None:
        def step(k: Any) -> tuple[list[Any], Any]:
            at = self.b.add(first, self.b.mul(k, self.i64(self.sizes.width)))
            right = [self.load(self.back, self.b.add(at, x), self.float, LANES) for x in place[1:]]
            return right, lambda row: self.load(self.a, self.b.add(self.b.mul(row, self.pitch), k), self.float)

        zero = self.floats(0.0)
        self.sums_of(fields, place, zero, step, self.multiply_add, lambda x, side: x)


class _Integers(_Turned):
    """Levels as int16, two of them and two numbers of `back` multiplied and added up at a time; a is [BLOCK, pitch]."""

    def entries(self, tables: LevelTables) -> list[list[int]]:
        return [[round(level) for level in table] for table in tables]

    def keep(self, words: Any, offset: Any) -> None:
        self.store(self.b.trunc(words, self.vector(self.short, LANES)), self.a, offset)

    def multiply(self, first: Any, fields: Any, place: Place) -> None:
        b, half = self.b, self.b.lshr(self.pitch, self.i64(1))
        first = b.add(first, b.mul(b.mul(place.pair, half), self.i64(4 * LANES)))

        def step(k: Any) -> tuple[list[Any], Any]:
            at = b.add(first, b.mul(k, self.i64(4 * LANES)))
            right = [self.load(self.back, b.add(at, self.i64(i * 2 * LANES)), self.short, 2 * LANES) for i in range(2)]
            return right, lambda row: self.load(self.a, b.add(b.mul(row, half), k), self.word)

        def add(left: Any, right: Any, held: Any) -> Any:
            return b.add(held, self.pair_sums(b.bitcast(left, right.type), right))

        first_of_head = b.mul(self.head, self.i64(self.sizes.width))
        factors = [self.load(self.factors, b.add(first_of_head, x), self.float, LANES) for x in place[1:]]

        def scaled(x: Any, side: int) -> Any:
            return b.fmul(b.sitofp(x, factors[side].type), factors[side])

        steps = b.lshr(b.add(fields, self.i64(1)), self.i64(1))
        self.sums_of(steps, place, self.constant(self.word, LANES, 0), step, add, scaled)
