"""Take tokens of packed pages apart in registers, and put them together: pieces of compiled functions.

A vector of codes is so many bytes of each plane, a shift and a mask. Up to 4 bits are turned into numbers by a
permutation of a table in registers, where the processor has one; the table is multiplied with what belongs to the token
first, so that nothing is left to do for a channel. Other codes are converted, other levels are read one by one.

Uniform codes that are written are those of compress/kv/pages.py to the bit: a least and a largest number, two roundings
to float16, a division and a rounding. Levels differ in the order of the sums of their norms only.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch

from compress.kernels import llvm
from compress.kernels.cpu.dots import STORED, Dots, register_lanes
from compress.kernels.cpu.emitter import float32
from compress.kernels.paged import PageLayout, TokenCodes

HALF_MOST = 65504.0  # the largest float16
LEAST_DIVISOR = 1e-12  # compress/kv/pages.py has the same
KINDS = ("key", "value")
EIGHT = 8  # lanes of the smallest register that is used


@cache
def lanes_for(layout: PageLayout) -> int:
    """Return the float32 of a vector that planes, groups and widths are whole ones of; 0: there is no such vector."""
    for lanes in (16, EIGHT):
        if lanes <= register_lanes() and all(
            codes.width % (2 * lanes) == 0
            and codes.group % lanes == 0
            and all(codes.width * bits // 8 % lanes == 0 for bits in codes.planes)
            for codes in (layout.keys, layout.values)
        ):
            return lanes
    return 0


class Side(NamedTuple):
    """Keys or values: how they are coded, their places in a page, in bytes, and where their levels lie."""

    codes: TokenCodes
    start: int
    parameters: int
    levels: Any  # pointer
    tables: list[Any]  # registers with all levels, if they fit

    def planes(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield of each plane its bits, the place of its bits in a code, its first byte and its bytes."""
        shift = start = 0
        for bits in self.codes.planes:
            size = self.codes.width * bits // 8
            yield bits, shift, start, size
            shift, start = shift + bits, start + size


class Token(NamedTuple):
    """A token of a side: where its codes are, and for each group tables, or a scale and a least value."""

    place: Any
    factors: list[list[Any]]
    words: dict[int, Any]  # bytes that are in registers already, by their place


class PageEmitter(Dots):
    """Reads and writes tokens of pages; `pages` is a pointer."""

    pages: Any

    def side(self, layout: PageLayout, which: int, levels: Any) -> Side:
        """Return the keys (0) or the values (1), with what a function has in registers from its beginning."""
        codes = (layout.keys, layout.values)[which]
        start = layout.tokens * (layout.keys.code_bytes + layout.keys.parameter_bytes) * which
        return Side(codes, start, start + layout.tokens * codes.code_bytes, levels, self._tables(codes, levels))

    def _tables(self, codes: TokenCodes, levels: Any) -> list[Any]:
        size, lanes = 1 << codes.bits, self.lanes
        registers = max(1, size // lanes)
        fits = registers == 1 if lanes > EIGHT or not codes.levels else registers <= 2  # which a selection joins
        if not fits or "avx2" not in llvm.features():
            return []
        if not codes.levels:
            return [self.ir.Constant(self.floating, [float(i % size) for i in range(lanes)])]
        if registers == 2:
            return [self.load(levels, self.i64(i * lanes), self.float, lanes) for i in range(2)]
        table = self.load(levels, self.i64(0), self.float, size)
        return [self.shuffled(table, table, [i % size for i in range(lanes)])]

    def code_place(self, side: Side, page: Any, inside: Any) -> Any:
        """Return the byte where the codes of the token `inside` a page begin, which begins at a byte."""
        codes = self.b.mul(inside, self.i64(side.codes.code_bytes))
        return self.b.add(page, self.b.add(codes, self.i64(side.start)))

    def parameter_place(self, side: Side, page: Any, inside: Any) -> Any:
        """Return where its parameters begin."""
        parameters = self.b.mul(inside, self.i64(side.codes.parameter_bytes))
        return self.b.add(page, self.b.add(parameters, self.i64(side.parameters)))

    def take_token(self, side: Side, page: Any, inside: Any) -> Token:
        """Read what belongs to a token."""
        codes = side.codes
        place, at = self.code_place(side, page, inside), self.parameter_place(side, page, inside)
        groups = codes.width // codes.group
        factors = []
        for group in range(groups):
            places = [group] if codes.levels else [group, groups + group]
            parts = [self.splat(self._half(self.b.add(at, self.i64(2 * i))), self.lanes) for i in places]
            factors.append([self._scale(table, parts) for table in side.tables] or parts)
        return Token(place, factors, {})

    def _half(self, offset: Any) -> Any:
        """Return the float16 at a byte, which may be an odd one, as float32."""
        here = self.at(self.pages, offset, self.byte)
        return self.b.fpext(self.b.load(here, typ=self.half, align=1), self.float)

    def _scale(self, numbers: Any, parts: list[Any]) -> Any:
        """Return scale x + least, or norm x."""
        return self.b.fmul(numbers, parts[0]) if len(parts) == 1 else self.multiply_add(numbers, *parts)

    def numbers(self, side: Side, token: Token, channel: int) -> Any:
        """Return a vector of the channels of a token from `channel` on."""
        codes, parts = self._codes(side, token, channel), token.factors[channel // side.codes.group]
        if side.tables:
            return self._permute(parts, codes)
        if side.codes.levels:
            return self._scale(self._levels(side, codes), parts)
        return self._scale(self.b.sitofp(codes, self.floating), parts)

    def _codes(self, side: Side, token: Token, channel: int) -> Any:
        """Return codes int32; of one plane and with tables, other bits above them: tables repeat themselves."""
        b, whole = self.b, None
        for bits, shift, start, size in side.planes():
            field, inside = divmod(channel, size)
            at = start + inside
            if at not in token.words:
                octets = self.load(self.pages, b.add(token.place, self.i64(at)), self.byte, self.lanes)
                token.words[at] = b.zext(octets, self.vector(self.word, self.lanes))
            part = token.words[at]
            if field:
                part = b.lshr(part, self.constant(self.word, self.lanes, field * bits))
            repeats = side.tables and len(side.codes.planes) == 1
            if not repeats and (field + 1) * bits < 8:
                part = b.and_(part, self.constant(self.word, self.lanes, (1 << bits) - 1))
            part = b.shl(part, self.constant(self.word, self.lanes, shift)) if shift else part
            whole = part if whole is None else b.or_(whole, part)
        return whole

    def _permute(self, tables: list[Any], codes: Any) -> Any:
        b, lanes = self.b, self.lanes
        name = "llvm.x86.avx512.permvar.sf.512" if lanes > EIGHT else "llvm.x86.avx2.permps"
        looked = [self.intrinsic(name, table.type, table, codes) for table in tables]
        if len(looked) == 1:
            return looked[0]
        top = b.shl(codes, self.constant(self.word, lanes, 28))  # bit 3 becomes the sign
        return b.select(b.icmp_signed("<", top, self.constant(self.word, lanes, 0)), looked[1], looked[0])

    def _levels(self, side: Side, codes: Any) -> Any:
        result = self.floating(self.ir.Undefined)
        for i in range(self.lanes):
            at = self.b.zext(self.b.extract_element(codes, self.word(i)), self.index)
            result = self.b.insert_element(result, self.load(side.levels, at, self.float), self.word(i))
        return result


class DecodePages(PageEmitter):
    """Writes tokens [tokens, width] float32 of a KV head, keys and values, from pages that a table lists.

    The KV head is where `pages` points to; block_step is the bytes from a page to the next.
    """

    def __init__(self, layout: PageLayout) -> None:
        pointers = "pages table key_levels value_levels keys values"
        kinds = torch.float32, torch.float32
        super().__init__("decode_pages", pointers, "first last block_step", *kinds, lanes_for(layout))
        b, named, self.pages = self.b, self.named, self.pointers[0]
        sides = [self.side(layout, i, named[f"{kind}_levels"]) for i, kind in enumerate(("key", "value"))]
        size = self.i64(layout.tokens)
        with self.loop(named["last"], named["first"]) as token:
            block = b.sext(self.load(named["table"], b.udiv(token, size), self.word), self.index)
            page = b.mul(block, named["block_step"])
            for side, out in zip(sides, (named["keys"], named["values"]), strict=True):
                own = self.take_token(side, page, b.urem(token, size))
                row = b.mul(b.sub(token, named["first"]), self.i64(side.codes.width))
                for channel in range(0, side.codes.width, self.lanes):
                    self.store(self.numbers(side, own, channel), out, b.add(row, self.i64(channel)))
        b.ret_void()


class EncodePages(PageEmitter):
    """Writes tokens of keys and values [tokens, heads, width], heads contiguous, to slots of pages.

    Steps of pages are bytes, those of keys and values elements from a token to the next. Edges of 2^bits levels are
    float32 [2^bits - 1].
    """

    def __init__(self, layout: PageLayout, heads: int, dtype: torch.dtype) -> None:
        pointers = "pages slots keys values key_levels value_levels key_edges value_edges"
        steps = "block_step head_step key_step value_step"
        assert dtype in STORED
        kinds = torch.float32, torch.float32
        Dots.__init__(self, "encode_pages", pointers, f"first last {steps}", *kinds, lanes_for(layout))
        b, named, self.pages = self.b, self.named, self.pointers[0]
        self.words, size = self.vector(self.word, self.lanes), self.i64(layout.tokens)
        sides = [self.side(layout, which, named[f"{kind}_levels"]) for which, kind in enumerate(KINDS)]
        self.edges = {id(side): named[f"{kind}_edges"] for side, kind in zip(sides, KINDS, strict=True)}
        most = max(side.codes.width for side in sides) // self.lanes
        self.codes = [self.variable(self.words) for _ in range(most)]
        self.values = [self.variable(self.floating) for _ in range(most)]
        with self.loop(named["last"], named["first"]) as token:
            slot = self.load(named["slots"], token, self.index)
            with b.if_then(b.icmp_signed(">=", slot, self.i64(0))), self.loop(self.i64(heads)) as head:
                page = b.add(b.mul(b.udiv(slot, size), named["block_step"]), b.mul(head, named["head_step"]))
                for side, kind in zip(sides, KINDS, strict=True):
                    row = b.add(b.mul(token, named[f"{kind}_step"]), b.mul(head, self.i64(side.codes.width)))
                    places = [b.add(row, self.i64(c)) for c in range(0, side.codes.width, self.lanes)]
                    x = [self.load_floats(named[f"{kind}s"], at, dtype, self.lanes) for at in places]
                    factors = self._by_levels(side, x) if side.codes.levels else self._uniform(side, x)
                    self._put(side, page, b.urem(slot, size), factors)
        b.ret_void()

    def _uniform(self, side: Side, x: list[Any]) -> list[Any]:
        """Find the codes; return scales and least values of the groups, float16."""
        b, codes = self.b, side.codes
        per, most = codes.group // self.lanes, float((1 << codes.bits) - 1)
        scales, leasts = [], []
        for group in range(codes.width // codes.group):
            own = x[group * per : (group + 1) * per]
            low, high = (self._extreme(kind, own) for kind in ("min", "max"))
            least = self._half_of(self._clamp(low, -HALF_MOST))
            base = b.fpext(least, self.float)
            scale = self._half_of(self._clamp(b.fdiv(b.fsub(high, base), self.float(most)), 0.0))
            step = b.fpext(scale, self.float)
            divisor = b.select(b.fcmp_ordered(">", step, self.float(0.0)), step, self.float(1.0))
            for i, value in enumerate(own):
                number = b.fdiv(b.fsub(value, self.splat(base, self.lanes)), self.splat(divisor, self.lanes))
                number = self.intrinsic(f"llvm.rint.v{self.lanes}f32", self.floating, number)
                limits = (self.constant(self.float, self.lanes, limit) for limit in (0.0, most))
                for name, limit in zip(("max", "min"), limits, strict=True):
                    number = self.intrinsic(f"llvm.{name}num.v{self.lanes}f32", self.floating, number, limit)
                b.store(b.fptosi(number, self.words), self.codes[group * per + i])
            scales.append(scale)
            leasts.append(least)
        return [*scales, *leasts]

    def _by_levels(self, side: Side, x: list[Any]) -> list[Any]:
        """Find the codes; return the norm, float16."""
        b, count = self.b, len(x)
        squares = self.zeros()
        for value in x:
            squares = self.multiply_add(value, value, squares)
        mean = b.fdiv(self.total(squares), self.float(float(side.codes.width)))
        size = self._positive(self.intrinsic("llvm.sqrt.f32", self.float, mean))
        self._find_levels(side, x, size)
        above = below = self.zeros()
        for value, held in zip(x, self.values[:count], strict=True):
            level = b.load(held)
            above, below = self.multiply_add(value, level, above), self.multiply_add(level, level, below)
        norm = self._half_of(self._clamp(b.fdiv(self.total(above), self.total(below)), 0.0))
        self._find_levels(side, x, self._positive(b.fpext(norm, self.float)))
        return [norm]

    def _find_levels(self, side: Side, x: list[Any], size: Any) -> None:
        """Find the codes of x over its size and their levels: the number of edges that are below."""
        b, lanes = self.b, self.lanes
        divided = [b.fdiv(value, self.splat(size, lanes)) for value in x]
        least = self.splat(self.load(side.levels, self.i64(0), self.float), lanes)
        for code, value in zip(self.codes[: len(x)], self.values, strict=False):
            b.store(self.constant(self.word, lanes, 0), code)
            b.store(least, value)
        with self.loop(self.i64((1 << side.codes.bits) - 1)) as i:
            edge = self.splat(self.load(self.edges[id(side)], i, self.float), lanes)
            level = self.splat(self.load(side.levels, b.add(i, self.i64(1)), self.float), lanes)
            for number, code, value in zip(divided, self.codes, self.values, strict=False):
                is_above = b.fcmp_ordered(">", number, edge)
                b.store(b.add(b.load(code), b.zext(is_above, self.words)), code)
                b.store(b.select(is_above, level, b.load(value)), value)

    def _put(self, side: Side, page: Any, inside: Any, factors: list[Any]) -> None:
        """Store codes and parameters of a token."""
        b = self.b
        codes, place = [b.load(code) for code in self.codes], self.code_place(side, page, inside)
        for bits, shift, start, size in side.planes():
            for first in range(0, size, self.lanes):
                octets = None
                for field in range(8 // bits):
                    part = codes[(field * size + first) // self.lanes]
                    part = b.lshr(part, self.constant(self.word, self.lanes, shift)) if shift else part
                    part = b.and_(part, self.constant(self.word, self.lanes, (1 << bits) - 1))
                    part = b.shl(part, self.constant(self.word, self.lanes, field * bits)) if field else part
                    octets = part if octets is None else b.or_(octets, part)
                octets = b.trunc(octets, self.vector(self.byte, self.lanes))
                self.store(octets, self.pages, b.add(place, self.i64(start + first)))
        at = self.parameter_place(side, page, inside)
        for i, factor in enumerate(factors):
            b.store(factor, self.at(self.pages, b.add(at, self.i64(2 * i)), self.byte), align=1)

    def _extreme(self, kind: str, vectors: list[Any]) -> Any:
        """Return the least or the largest element of vectors."""
        most = vectors[0]
        for vector in vectors[1:]:
            most = self.intrinsic(f"llvm.{kind}num.v{self.lanes}f32", self.floating, most, vector)
        return self.intrinsic(f"llvm.vector.reduce.f{kind}.v{self.lanes}f32", self.float, most)

    def _clamp(self, value: Any, least: float) -> Any:
        """Return a number between `least` and the largest float16."""
        for name, limit in (("max", least), ("min", HALF_MOST)):
            value = self.intrinsic(f"llvm.{name}num.f32", self.float, value, self.float(limit))
        return value

    def _half_of(self, value: Any) -> Any:
        return self.b.fptrunc(value, self.half)

    def _positive(self, value: Any) -> Any:
        least = self.float(float32(LEAST_DIVISOR))
        return self.intrinsic("llvm.maxnum.f32", self.float, value, least)
