"""Take tokens of packed pages apart in registers, and put them together: pieces of compiled functions.

A vector of codes is so many bytes of each plane, a shift and a mask. Up to 4 bits are turned into numbers by a
permutation of a table in registers, where the processor has one; the table is multiplied with what belongs to the token
first, so that nothing is left to do for a channel. Other codes are converted, other levels are read one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch

from compress.kernels import llvm
from compress.kernels.cpu.dots import Dots, register_lanes
from compress.kernels.paged import PageLayout, TokenCodes

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
