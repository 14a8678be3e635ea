"""Code keys and values and write them to packed pages on a CPU, in one compiled function.

Uniform codes are those of compress/kv/pages.py to the bit: a least and a largest number, two roundings to float16, a
division and a rounding. Levels differ in the order of the sums of their norms only.
"""

from __future__ import annotations

from typing import Any

import torch

from compress.kernels.cpu.dots import STORED, Dots
from compress.kernels.cpu.emitter import float32
from compress.kernels.cpu.paged_codes import PageEmitter, Side, lanes_for
from compress.kernels.paged import PageLayout

HALF_MOST = 65504.0  # the largest float16
LEAST_SIZE = 1e-12  # root mean square or norm that is divided by, as in compress/kv/pages.py
KINDS = ("key", "value")


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
        least = self.float(float32(LEAST_SIZE))
        return self.intrinsic("llvm.maxnum.f32", self.float, value, least)
