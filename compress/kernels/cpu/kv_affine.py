"""Attention of a few queries over packed keys and values: codes are taken apart in registers and meet int16 queries.

Keys have a scale and a minimum for each channel and group of tokens, values for each token and group of channels
(compress/kv/codecs/kivi.py), codes lie in planar words, a row of words for each token (compress/kv/codecs/packed.py):

    scores[m, t] = sum_c (q[m, c] s[g(t), c]) code[t, c] + sum_c q[m, c] min[g(t), c]
    mixed[m, c] = sum_t (p[m, t] s[t, g(c)]) code[t, c] + sum_t p[m, t] min[t, g(c)]

The factors in brackets are rounded to int16 with a scale of their own for each row m and group (keys) or BLOCK tokens
(values), so that their error, 2^-16 of the largest, is below that of bfloat16; sums are exact in int32, then float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.kernels import llvm
from compress.kernels.cpu import emitter
from compress.kernels.cpu.emitter import LANES, LARGEST
from compress.numerics.packing import FIELDS

SHORTS = 2 * LANES  # int16 of a register
BLOCK = 32  # tokens of values that share the scale of their int16 factors
ROWS = (4, 2, 1)  # queries taken at once
MOST_ROWS = 16  # queries up to which this beats unpacking once and a product of matrices
SMALL = 1 << 16  # codes, up to which nothing is gained
UNIT = 4  # fields whose sums are in registers together


class Sizes(NamedTuple):
    """Of packed codes: `bits` of one, `width` channels of a head, `group` tokens or channels of a scale."""

    bits: int
    width: int
    group: int

    @property
    def words(self) -> int:
        """Of a token, in each plane."""
        return self.width // FIELDS[self.bits]

    @property
    def planes(self) -> int:
        return 3 if self.bits == 3 else 1


def supports_keys(sizes: Sizes) -> bool:
    """Whether `scores` can read such keys here: whole registers of channels, groups of whole registers of tokens."""
    return _fits(sizes) and sizes.group % LANES == 0


def supports_values(sizes: Sizes) -> bool:
    """The same for `mix`: groups of whole registers of channels, a power of two of them."""
    if not _fits(sizes) or sizes.width % sizes.group or LANES % (sizes.width // sizes.group):
        return False
    return sizes.group % min(LANES, sizes.words) == 0


def _fits(sizes: Sizes) -> bool:
    if sizes.bits not in FIELDS or sizes.width % (FIELDS[sizes.bits] * 4) or sizes.width % LANES:
        return False
    return sizes.words & (sizes.words - 1) == 0 and llvm.available()


def scores(q: Tensor, planes: Sequence[Tensor], scales: Tensor, minima: Tensor, sizes: Sizes, out: Tensor) -> None:
    """q [B, h, m, width] float32; planes [B, h, n, words] int16; scales, minima [B, h, n / group, width] float16; out
    [B, h, m, n] float32, its last axis contiguous. Rows of planes, scales and minima must be contiguous.
    """
    q = q.contiguous()
    pieces, groups, stride = _pieces(q.shape[2]), scales.shape[2], out.stride(2)
    kernels = [(row, _keys(sizes, tokens)) for row, tokens in pieces]
    stored, queries, outs = addresses((*planes, scales, minima)), addresses((q,)), addresses((out,))

    def work(first: int, last: int) -> None:
        space = torch.empty(sizes.width * 4 * 8, dtype=torch.float32, device="cpu")
        place = space.data_ptr()
        for index in range(first, last):
            for row, kernel in kernels:
                given = queries[index][0] + 4 * row * sizes.width, outs[index][0] + 4 * row * stride
                kernel(*stored[index], *given, place, groups, stride)

    llvm.parallel(work, len(stored), -(-(1 << 19) // (groups * sizes.group * sizes.width)))


def mix(p: Tensor, planes: Sequence[Tensor], scales: Tensor, minima: Tensor, sizes: Sizes) -> Tensor:
    """p [B, h, m, n] float32, n a multiple of BLOCK; planes [B, h, n, words]; scales, minima [B, h, n, width / group]
    -> [B, h, m, width] float32.
    """
    p = p if p.stride(3) == 1 else p.contiguous()
    tokens, stride, groups = p.shape[3], p.stride(2), sizes.width // sizes.group
    out = torch.zeros(*p.shape[:3], sizes.width, dtype=torch.float32, device="cpu")
    sums = torch.zeros(*p.shape[:3], LANES, dtype=torch.float32, device="cpu")
    kernels = [(4 * row, _values(sizes, some)) for row, some in _pieces(p.shape[2])]
    stored, given = addresses((*planes, scales, minima)), addresses((p, out, sums))

    def work(first: int, last: int) -> None:
        space = torch.empty(BLOCK * groups * 4, dtype=torch.int32, device="cpu")
        place = space.data_ptr()
        for index in range(first, last):
            at_p, at_out, at_sums = given[index]
            for row, kernel in kernels:
                rows_at = at_p + row * stride, at_out + row * sizes.width, at_sums + row * LANES
                kernel(*stored[index], *rows_at, place, tokens // BLOCK, stride)

    llvm.parallel(work, len(stored), -(-(1 << 19) // (tokens * sizes.width)))
    offset = sums.unflatten(-1, (-1, groups)).sum(-2)  # B, h, m, group
    return out.unflatten(-1, (groups, -1)).add_(offset[..., None]).flatten(-2)


def addresses(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """For each row of the batch and head, where it begins in each of the tensors [B, h, ...]."""
    batch, heads = tensors[0].shape[:2]
    steps = [(t.data_ptr(), t.stride(0) * t.element_size(), t.stride(1) * t.element_size()) for t in tensors]
    return [tuple(at + b * row + h * head for at, row, head in steps) for b in range(batch) for h in range(heads)]


def _pieces(count: int) -> list[tuple[int, int]]:
    """(first row, rows) that cover range(count)."""
    found, row = [], 0
    while row < count:
        tokens = next(t for t in ROWS if t <= count - row)
        found.append((row, tokens))
        row += tokens
    return found


@cache
def _keys(sizes: Sizes, tokens: int) -> Any:
    return llvm.compiled(_Scores(sizes, tokens))


@cache
def _values(sizes: Sizes, tokens: int) -> Any:
    return llvm.compiled(_Mix(sizes, tokens))


class Packed(emitter.Emitter):
    """What both kernels need."""

    sizes: Sizes
    planes: Sequence[Any]

    def field(self, words: Sequence[Any], field: int) -> Any:
        """Codes of a field, from vectors of words of each plane."""
        bits = self.sizes.bits
        if bits != 3:
            return self._bits(words[0], field * bits, bits, 16)
        if field < 15:
            return self._bits(words[field // 5], field % 5 * 3, 3, 16)
        spare = [self._bits(word, 15, 1, 16) for word in words]
        for i in (1, 2):
            spare[i] = self.b.shl(spare[i], self.constant(self.short, spare[i].type.count, i))
        return self.b.or_(self.b.or_(spare[0], spare[1]), spare[2])

    def _bits(self, words: Any, shift: int, width: int, size: int) -> Any:
        lanes = words.type.count
        moved = self.b.lshr(words, self.constant(self.short, lanes, shift)) if shift else words
        if shift + width == size:
            return moved
        return self.b.and_(moved, self.constant(self.short, lanes, (1 << width) - 1))

    def largest(self, vectors: Sequence[Any]) -> Any:
        """The largest element of float vectors, a scalar."""
        b, found = self.b, list(vectors)
        while len(found) > 1:
            pairs = zip(found[::2], found[1::2], strict=False)
            found = [*(self._more(x, y) for x, y in pairs), *(found[-1:] if len(found) % 2 else [])]
        lanes = found[0].type.count
        while lanes > 1:
            lanes //= 2
            low = self.shuffled(found[0], found[0], list(range(lanes)))
            found = [self._more(low, self.shuffled(found[0], found[0], list(range(lanes, 2 * lanes))))]
        return b.extract_element(found[0], self.word(0))

    def _more(self, x: Any, y: Any) -> Any:
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def factors(self, largest: Any) -> tuple[Any, Any]:
        """(what takes numbers up to `largest` to int16, its inverse); zeros where there is nothing to scale."""
        b = self.b
        usable = b.fcmp_ordered(">", largest, self.float(2.0**-100))
        factor = b.select(usable, b.fdiv(self.float(LARGEST), largest), self.float(0.0))
        return factor, b.fmul(largest, self.float(emitter.float32(1 / LARGEST)))

    def nearest(self, values: Any, factor: Any) -> Any:
        """Float vector times a scalar, to the nearest int32."""
        b, lanes = self.b, values.type.count
        name = f"llvm.rint.v{lanes}f32"
        rounded = self.intrinsic(name, values.type, b.fmul(values, self.splat(factor, lanes)))
        return b.fptosi(rounded, self.vector(self.word, lanes))

    def halves(self, pointer: Any, offset: Any) -> Any:
        """Sixteen float16 as floats."""
        return self.b.fpext(self.load(pointer, offset, self.half, LANES), self.vector(self.float, LANES))

    def product(self, codes: Any, factors: Any, total: Any) -> Any:
        """total plus the sums of products of neighbours."""
        return self.b.add(total, self.pair_sums(codes, factors))


class _Scores(Packed):
    """void scores(words..., scales, minima, q, out, space, groups, stride): q [M, width], rows of out
    `stride` apart."""

    def __init__(self, sizes: Sizes, tokens: int) -> None:
        super().__init__("scores", sizes.planes + 5, 2)
        self.sizes, self.tokens = sizes, tokens
        self.planes = self.pointers[: sizes.planes]
        self.scales, self.minima, self.q, self.out, self.space = self.pointers[sizes.planes :]
        groups, self.stride = self.integers
        self.repeats = max(1, SHORTS // sizes.words)  # tokens of a vector of words
        self.vectors = max(1, sizes.words // SHORTS)  # vectors of a field and a token
        with self.loop(groups) as group:
            scales = [self._factors(group, m) for m in range(tokens)]
            first = self.b.mul(group, self.i64(sizes.group))
            with self.loop(self.i64(sizes.group // LANES)) as part:
                token = self.b.add(first, self.b.mul(part, self.i64(LANES)))
                for m, total in enumerate(self._sums(token, 0, LANES // self.repeats)):
                    values = self.b.sitofp(total, self.vector(self.float, LANES))
                    scale, bias = (self.splat(x, LANES) for x in scales[m])
                    place = self.b.add(self.b.mul(self.stride, self.i64(m)), token)
                    self.store(self.multiply_add(values, scale, bias), self.out, place)
        self.b.ret_void()

    def _factors(self, group: Any, m: int) -> tuple[Any, Any]:
        """Writes the int16 factors of a query for a group; its scale and the sum that the minima give."""
        b, width = self.b, self.sizes.width
        bias, products = self.floats(0.0), []
        for c in range(0, width, LANES):
            place = b.add(b.mul(group, self.i64(width)), self.i64(c))
            q = self.load(self.q, self.i64(m * width + c), self.float, LANES)
            products.append(b.fmul(q, self.halves(self.scales, place)))
            bias = self.multiply_add(q, self.halves(self.minima, place), bias)
        sizes = [self.intrinsic(f"llvm.fabs.v{LANES}f32", x.type, x) for x in products]
        factor, scale = self.factors(self.largest(sizes))
        shorts = [b.trunc(self.nearest(x, factor), self.vector(self.short, LANES)) for x in products]
        words = self.sizes.words
        for i, x in enumerate(shorts):
            if words >= SHORTS:
                self.store(x, self.space, self.i64(m * width + i * LANES))
                continue
            for start in range(0, LANES, min(words, LANES)):  # a field, or half of one, beside itself
                field, inside = divmod(i * LANES + start, words)
                part = self.shuffled(x, x, list(range(start, start + min(words, LANES))))
                for copy in range(self.repeats):
                    at = m * width * self.repeats + field * SHORTS + copy * words + inside
                    self.store(part, self.space, self.i64(at))
        return scale, self.total(bias)

    def _sums(self, token: Any, first: int, count: int) -> list[Any]:
        """For each query the sums of `count` vectors of tokens, neighbours added up: in the end a lane for a token."""
        if count > 1:
            left, right = (self._sums(token, start, count // 2) for start in (first, first + count // 2))
            return [self._neighbours(x, y) for x, y in zip(left, right, strict=True)]
        b, words = self.b, self.sizes.words
        place = b.mul(b.add(token, self.i64(first * self.repeats)), self.i64(words))
        totals = [self.constant(self.word, LANES, 0) for _ in range(self.tokens)]
        for v in range(self.vectors):
            here = b.add(place, self.i64(v * SHORTS))
            loaded = [self.load(plane, here, self.short, SHORTS) for plane in self.planes]
            for field in range(FIELDS[self.sizes.bits]):
                codes = self.field(loaded, field)
                for m in range(self.tokens):
                    row = m * self.sizes.width * self.repeats
                    at = row + (field * self.vectors + v) * SHORTS
                    totals[m] = self.product(codes, self.load(self.space, self.i64(at), self.short, SHORTS), totals[m])
        return totals

    def _neighbours(self, x: Any, y: Any) -> Any:
        even, odd = (self.shuffled(x, y, list(range(start, 2 * LANES, 2))) for start in (0, 1))
        return self.b.add(even, odd)


class _Mix(Packed):
    """void mix(words..., scales, minima, p, out, sums, space, blocks, stride): p [M, tokens], rows `stride` apart; out
    [M, width] and sums [M, 16], the latter of p times minima over (token, group), are added to."""

    def __init__(self, sizes: Sizes, tokens: int) -> None:
        super().__init__("mix", sizes.planes + 6, 2)
        self.sizes, self.tokens, self.groups = sizes, tokens, sizes.width // sizes.group
        self.planes = self.pointers[: sizes.planes]
        self.scales, self.minima, self.p, self.out, self.sums, self.space = self.pointers[sizes.planes :]
        blocks, self.stride = self.integers
        self.lanes = min(LANES, sizes.words)  # channels of a vector
        self.held = [[self.variable(self.vector(self.word, self.lanes)) for _ in range(tokens)] for _ in range(UNIT)]
        with self.loop(blocks) as block:
            token = self.b.mul(block, self.i64(BLOCK))
            scales = [self._factors(token, m) for m in range(tokens)]
            for start in range(0, sizes.words, self.lanes):
                for first in range(0, FIELDS[sizes.bits], UNIT):
                    self._unit(token, start, range(first, min(first + UNIT, FIELDS[sizes.bits])), scales)
        self.b.ret_void()

    def _factors(self, token: Any, m: int) -> Any:
        """Writes the int16 factors of BLOCK tokens, two tokens in a word; their scale."""
        b, groups, per = self.b, self.groups, LANES // self.groups
        held = self.load(self.sums, self.i64(m * LANES), self.float, LANES)
        products = []
        for i in range(BLOCK * groups // LANES):
            place = b.add(b.mul(token, self.i64(groups)), self.i64(i * LANES))
            at = b.add(b.add(b.mul(self.stride, self.i64(m)), token), self.i64(i * per))
            p = self.load(self.p, at, self.float, per)
            p = self.shuffled(p, p, [lane // groups for lane in range(LANES)])
            products.append(b.fmul(p, self.halves(self.scales, place)))
            held = self.multiply_add(p, self.halves(self.minima, place), held)
        self.store(held, self.sums, self.i64(m * LANES))
        factor, scale = self.factors(self.largest(products))
        whole = [self.nearest(x, factor) for x in products]
        lanes = range(2 * LANES)
        for i in range(0, len(whole), 2):
            even, odd = (
                self.shuffled(whole[i], whole[i + 1], [x for x in lanes if x // groups % 2 == side]) for side in (0, 1)
            )
            low = b.and_(even, self.constant(self.word, LANES, 0xFFFF))
            both = b.or_(low, b.shl(odd, self.constant(self.word, LANES, 16)))
            self.store(both, self.space, self.i64(m * BLOCK * groups // 2 + i // 2 * LANES))
        return scale

    def _unit(self, token: Any, start: int, fields: range, scales: Sequence[Any]) -> None:
        """The channels start..start + lanes of some fields, over all tokens of the block."""
        b, lanes, words = self.b, self.lanes, self.sizes.words
        zero = self.constant(self.word, lanes, 0)
        for i in range(len(fields)):
            for m in range(self.tokens):
                b.store(zero, self.held[i][m])
        order = [lane // 2 + lane % 2 * lanes for lane in range(2 * lanes)]
        with self.loop(self.i64(BLOCK // 2)) as pair:
            place = b.add(b.mul(b.add(token, b.mul(pair, self.i64(2))), self.i64(words)), self.i64(start))
            loaded = []
            for plane in self.planes:
                one, two = (self.load(plane, b.add(place, self.i64(x)), self.short, lanes) for x in (0, words))
                loaded.append(self.shuffled(one, two, order))
            for i, field in enumerate(fields):
                codes = self.field(loaded, field)
                group = (field * words + start) // self.sizes.group
                for m in range(self.tokens):
                    at = b.add(b.mul(pair, self.i64(self.groups)), self.i64(m * BLOCK * self.groups // 2 + group))
                    factors = b.bitcast(self.splat(self.load(self.space, at, self.word), lanes), codes.type)
                    b.store(self.product(codes, factors, b.load(self.held[i][m])), self.held[i][m])
        for i, field in enumerate(fields):
            for m in range(self.tokens):
                at = self.i64(m * self.sizes.width + field * words + start)
                values = b.sitofp(b.load(self.held[i][m]), self.vector(self.float, lanes))
                old = self.load(self.out, at, self.float, lanes)
                self.store(self.multiply_add(values, self.splat(scales[m], lanes), old), self.out, at)
