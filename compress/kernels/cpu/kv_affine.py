"""Read min-max integers of keys and values for a few queries: take codes apart in registers, multiply int16 queries.

Keys have a scale and a minimum for each channel and group of tokens, values for each token and group of channels
(compress/kv/codecs/kivi.py), codes lie in planar words, a row of words for each token (compress/kv/codecs/packed.py):

    scores[m, t] = sum_c (q[m, c] s[g(t), c]) code[t, c] + sum_c q[m, c] min[g(t), c]
    mixed[m, c] = sum_t (p[m, t] s[t, g(c)]) code[t, c] + sum_t p[m, t] min[t, g(c)]

A `lower` plane of codes has bits that follow those of the upper one: code = 2^bits upper + lower, with the scale
s / 2^bits and the minimum min - s / 2, so that it is read in the same pass.

The factors in brackets are rounded to int16 with a scale of their own for each row m and group (keys) or BLOCK tokens
(values), so that their error, 2^-16 of the largest, is below that of bfloat16; sums are exact in int32, then float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.kernels import llvm
from compress.kernels.contract import BLOCK, PlanarCodes
from compress.kernels.cpu import emitter
from compress.kernels.cpu.emitter import LANES, LARGEST
from compress.kernels.cpu.unpack import field_codes
from compress.numerics.packing import FIELDS

SHORTS = 2 * LANES  # int16 of a register
ROWS = (4, 2, 1)  # queries taken at once
THREAD = 1 << 19  # codes that are worth waking a thread
UNIT = 4  # fields whose sums are in registers together


def supports(codes: PlanarCodes, by_token: bool) -> bool:
    """Return whether whole registers of channels can be read here, in groups that they fit.

    Keys (`scores`): groups of whole registers of tokens. Values, `by_token` (`mix`): groups of whole registers of
    channels, a power of two of them.
    """
    if codes.bits not in FIELDS or codes.width % (FIELDS[codes.bits] * 4) or codes.width % LANES:
        return False
    if codes.words & (codes.words - 1) or not llvm.available():
        return False
    if not by_token:
        return codes.group % LANES == 0
    whole = codes.width % codes.group == 0 and LANES % (codes.width // codes.group) == 0
    return whole and codes.group % min(LANES, codes.words) == 0


def scores(
    q: Tensor, planes: Sequence[Tensor], scales: Tensor, minima: Tensor, codes: PlanarCodes, out: Tensor
) -> None:
    """Write the products of q [B, h, m, width] float32 with keys to out [B, h, m, n] float32.

    planes [B, h, n, words] int16; scales, minima [B, h, n / group, width] float16. Rows of planes, scales and minima
    and the last axis of out must be contiguous.
    """
    multiply_keys(partial(llvm.function, _AffineScores, codes), q, (*planes, scales, minima), (), out, scales.shape[2])


def multiply_keys(
    kernel: Callable[[int], Callable[..., None]],
    q: Tensor,
    stored: Sequence[Tensor],
    fixed: Sequence[int],
    out: Tensor,
    count: int,
) -> None:
    """Run kernel(rows)(*stored, *fixed, q, out, space, count, stride of out) for all heads and rows of q."""
    q, width, stride = q.contiguous(), q.shape[3], out.stride(2)
    kernels = [(row, kernel(rows)) for row, rows in _row_blocks(q.shape[2])]
    places, ends = addresses(stored), addresses((q, out))

    def work(first: int, last: int) -> None:
        space = torch.empty(width * 4 * 8, dtype=torch.float32, device="cpu")
        for index in range(first, last):
            at_q, at_out = ends[index]
            for row, function in kernels:
                rows_at = at_q + 4 * row * width, at_out + 4 * row * stride
                function(*places[index], *fixed, *rows_at, space.data_ptr(), count, stride)

    llvm.parallel(work, len(places), -(-THREAD // (max(out.shape[3], 1) * width)))


def mix(p: Tensor, planes: Sequence[Tensor], scales: Tensor, minima: Tensor, codes: PlanarCodes) -> Tensor:
    """Return the sums [B, h, m, width] float32 of values with weights p [B, h, m, n] float32, n a multiple of BLOCK.

    planes [B, h, n, words]; scales, minima [B, h, n, width / group].
    """
    groups = codes.width // codes.group
    kernel = partial(llvm.function, _AffineMix, codes)
    out, sums = sum_values(kernel, p, (*planes, scales, minima), codes.width, groups)
    offset = sums.unflatten(-1, (-1, groups)).sum(-2)  # B, h, m, group
    return out.unflatten(-1, (groups, -1)).add_(offset[..., None]).flatten(-2)


def sum_values(
    kernel: Callable[[int], Callable[..., None]], p: Tensor, stored: Sequence[Tensor], width: int, groups: int
) -> tuple[Tensor, Tensor]:
    """Run kernel(rows)(*stored, p, out, sums, space, blocks, stride of p) for all heads and rows of p; out and sums."""
    p = p if p.stride(3) == 1 else p.contiguous()
    tokens, stride = p.shape[3], p.stride(2)
    out = torch.zeros(*p.shape[:3], width, dtype=torch.float32, device="cpu")
    sums = torch.zeros(*p.shape[:3], LANES, dtype=torch.float32, device="cpu")
    kernels = [(4 * row, kernel(rows)) for row, rows in _row_blocks(p.shape[2])]
    places, ends = addresses(stored), addresses((p, out, sums))

    def work(first: int, last: int) -> None:
        space = torch.empty(BLOCK * groups * 4, dtype=torch.int32, device="cpu")
        for index in range(first, last):
            at_p, at_out, at_sums = ends[index]
            for row, function in kernels:
                rows_at = at_p + row * stride, at_out + row * width, at_sums + row * LANES
                function(*places[index], *rows_at, space.data_ptr(), tokens // BLOCK, stride)

    llvm.parallel(work, len(places), -(-THREAD // (max(tokens, 1) * width)))
    return out, sums


def addresses(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """For each row of the batch and head, where it begins in each of the tensors [B, h, ...]."""
    batch, heads = tensors[0].shape[:2]
    steps = [(t.data_ptr(), t.stride(0) * t.element_size(), t.stride(1) * t.element_size()) for t in tensors]
    return [tuple(at + b * row + h * head for at, row, head in steps) for b in range(batch) for h in range(heads)]


def _row_blocks(count: int) -> list[tuple[int, int]]:
    """Return (first row, rows) that cover range(count)."""
    blocks, row = [], 0
    while row < count:
        blocks.append((row, next(rows for rows in ROWS if rows <= count - row)))
        row += blocks[-1][1]
    return blocks


class PackedEmitter(emitter.Emitter):
    """Reads planar codes of a head, and rounds what they are multiplied with to int16."""

    sizes: PlanarCodes
    planes: Sequence[Any]

    def field(self, words: Sequence[Any], field: int) -> Any:
        """Return the codes of a field, from vectors of words of each plane."""
        bits = self.sizes.bits
        if not self.sizes.lower:
            return field_codes(self, bits, field, words.__getitem__)
        upper, lower = (field_codes(self, bits, field, [plane].__getitem__) for plane in words)
        return self.b.or_(self.b.shl(upper, self.constant(self.short, upper.type.count, bits)), lower)

    def line(self, scale: Any, minimum: Any) -> tuple[Any, Any]:
        """Return the scale and the minimum of whole codes, from those that are stored, float vectors."""
        if not self.sizes.lower:
            return scale, minimum
        b, lanes = self.b, scale.type.count
        half = b.fmul(scale, self.splat(self.float(0.5), lanes))
        return b.fmul(scale, self.splat(self.float(2.0**-self.sizes.bits), lanes)), b.fsub(minimum, half)

    def largest(self, vectors: Sequence[Any]) -> Any:
        """Return the largest element of float vectors, a scalar."""
        most, lanes = vectors[0], vectors[0].type.count
        for vector in vectors[1:]:
            most = self.intrinsic(f"llvm.maxnum.v{lanes}f32", most.type, most, vector)
        return self.intrinsic(f"llvm.vector.reduce.fmax.v{lanes}f32", self.float, most)

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


class _AffineScores(PackedEmitter):
    """void scores(words..., scales, minima, q, out, space, groups, stride): q [M, width], rows of out
    `stride` apart."""

    def __init__(self, sizes: PlanarCodes, tokens: int) -> None:
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
            stored = (self.load_floats(pointer, place, torch.float16, LANES) for pointer in (self.scales, self.minima))
            scale, minimum = self.line(*stored)
            products.append(b.fmul(q, scale))
            bias = self.multiply_add(q, minimum, bias)
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
                    totals[m] = b.add(
                        totals[m], self.pair_sums(codes, self.load(self.space, self.i64(at), self.short, SHORTS))
                    )
        return totals

    def _neighbours(self, x: Any, y: Any) -> Any:
        even, odd = (self.shuffled(x, y, list(range(start, 2 * LANES, 2))) for start in (0, 1))
        return self.b.add(even, odd)


class _AffineMix(PackedEmitter):
    """void mix(words..., scales, minima, p, out, sums, space, blocks, stride): p [M, tokens], rows `stride` apart; out
    [M, width] and sums [M, 16], the latter of p times minima over (token, group), are added to."""

    def __init__(self, sizes: PlanarCodes, tokens: int) -> None:
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
            stored = (self.load_floats(pointer, place, torch.float16, LANES) for pointer in (self.scales, self.minima))
            scale, minimum = self.line(*stored)
            products.append(b.fmul(p, scale))
            held = self.multiply_add(p, minimum, held)
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
                    b.store(b.add(b.load(self.held[i][m]), self.pair_sums(codes, factors)), self.held[i][m])
        for i, field in enumerate(fields):
            for m in range(self.tokens):
                at = self.i64(m * self.sizes.width + field * words + start)
                values = b.sitofp(b.load(self.held[i][m]), self.vector(self.float, lanes))
                old = self.load(self.out, at, self.float, lanes)
                self.store(self.multiply_add(values, self.splat(scales[m], lanes), old), self.out, at)
