"""Read keys and values that are sums of codebook entries (compress/papers/codecs/commvq.py), on CPUs with AVX-512.

A key of a head is mean + norm sum_i table_i[code_i], turned by the position of its token. The codes of a block of
tokens become offsets of entries; then entries are added up, two times 16 channels of a token at a time, and what
follows is done by compress/kernels/cpu/kv_turned.py. The paper multiplies entries with the query in place of tokens.
For the query heads of a KV head together, sums of entries that all of them read are less work than sums of products.

Values: probabilities are added up for each entry, those of all queries of a head in one register, and one product with
the codebooks gives the output.

Entries are float32 where keys are, else int16 with a scale for each channel, as small as sums of 16 bits allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.kernels import llvm
from compress.kernels.cpu import kv_mixed
from compress.kernels.cpu.emitter import LANES, LARGEST
from compress.kernels.cpu.kv_affine import THREAD
from compress.kernels.cpu.kv_basis import Transform, pair_channels
from compress.kernels.cpu.kv_mixed import Unpacker
from compress.kernels.cpu.kv_turned import Place, Sizes, Turned, run
from compress.kernels.kv_contract import BLOCK, MOST_MIXED_BITS, AdditiveCodes, MixedCodes, Rotary, plane_starts

__all__ = ["mix", "scores", "supports", "transform", "write"]

ENTRY = 2 * LANES  # numbers of an entry that lie side by side
MOST_QUERIES = 16
CACHE = 1 << 19  # bytes of codebooks of all heads up to which they are read for each block of tokens


class _Layout(NamedTuple):
    """Of the codes of a token: `books` of each of `heads`, of `bits` each."""

    bits: int
    heads: int
    books: int
    has_norms: bool
    is_exact: bool

    @property
    def chunks(self) -> int:
        return -(-self.heads * self.books // LANES)


def supports(width: int, bits: int) -> bool:
    """Return whether heads of this width with codes of so many bits are read here."""
    return width % (2 * LANES) == 0 and bits <= MOST_MIXED_BITS and kv_mixed.supports(width)


def transform(tables: Tensor, mean: Tensor, rotary: int, is_exact: bool) -> Transform:
    """tables [h, M, A, width], mean [h, width]; rotary: channels that turn; is_exact: to float32."""
    heads, count, entries, width = tables.shape
    scales = torch.ones_like(mean, dtype=torch.float32)
    if not is_exact:
        scales = (tables.abs().amax(2).sum(1) / (LARGEST - count)).clamp(min=1e-30).float()
        tables = (tables / scales[:, None, None]).round().short()
    rows = tables[..., pair_channels(rotary, width)].unflatten(-1, (-1, ENTRY))  # h, M, A, pair, 32
    rows = rows.permute(0, 3, 1, 2, 4).contiguous()
    heads_at = torch.arange(heads, device="cpu")
    firsts = torch.stack((heads_at * rows[0].numel(), heads_at * count))
    pitch = -(-heads * count // LANES) * LANES
    return Transform(rows, firsts, mean.float().contiguous(), pitch, count * entries, scales.contiguous())


def scores(q: Tensor, coded: AdditiveCodes, made: Transform, turns: Rotary, out: Tensor) -> None:
    """q [B, h, m, width] float32; out [B, h, m, n] float32, its last axis contiguous, n a multiple of BLOCK."""
    _run((q.contiguous(), out, 4), coded, made, turns)


def write(coded: AdditiveCodes, made: Transform, turns: Rotary, out: Tensor) -> None:
    """out [B, h, n, width] of float32, float16 or bfloat16, its last axis contiguous, n a multiple of BLOCK."""
    _run((out, out, out.element_size() * out.stride(2)), coded, made, turns)


def mix(p: Tensor, coded: AdditiveCodes) -> Tensor:
    """p [B, h, m, n] float32, times norms, n a multiple of BLOCK -> its sums for each entry [B, h, m, M, A] float32."""
    batch, heads, rows, tokens = p.shape
    lanes = next(n for n in (4, 8, MOST_QUERIES) if n >= rows)
    shares = p.new_zeros(batch, heads, tokens, lanes)
    shares[..., :rows] = p.mT
    out = torch.zeros(batch, heads, coded.books, 1 << coded.bits, lanes, dtype=torch.float32, device="cpu")
    layout = _layout(coded, True)._replace(has_norms=False)
    kernel, bases = llvm.function(_Mix, layout, lanes), _bases(coded, lanes)

    def work(first: int, last: int) -> None:
        space = torch.empty(BLOCK * layout.chunks * LANES, dtype=torch.int32, device="cpu")
        for index in range(first // heads, -(-last // heads)):
            begin, end = max(first - index * heads, 0), min(last - index * heads, heads)
            places = (t.data_ptr() for t in (coded.codes[index], bases, shares[index], out[index], space))
            kernel(*places, tokens // BLOCK, begin, end, coded.codes.stride(2), tokens * lanes, out.stride(1))

    llvm.parallel(work, batch * heads, -(-THREAD // (max(tokens, 1) * LANES * coded.books)))
    return out[..., :rows].movedim(-1, 2)


def _run(ends: tuple[Tensor, Tensor, int], coded: AdditiveCodes, made: Transform, turns: Rotary) -> None:
    """ends: q, out, the same as q where keys are written, and the bytes between tokens of out."""
    q, out, _ = ends
    sizes, is_written = Sizes(q.shape[3], turns.width, turns.cos.dtype), q is out
    layout = _layout(coded, made.back.dtype == torch.float32)
    kernel = llvm.function(_Sums, sizes, layout, 0 if is_written else q.shape[2], out.dtype)
    bases, norms = _bases(coded, ENTRY), coded.norms
    if norms is None:  # never read
        norms = torch.zeros(1, dtype=torch.uint8, device="cpu").expand(len(coded.codes), 1, coded.codes.shape[2], 1)
    norms = norms.expand(-1, coded.heads, -1, -1)
    run(kernel, ends, MixedCodes(coded.codes, norms, bases, bases, 0), made, turns)


def _layout(coded: AdditiveCodes, is_exact: bool) -> _Layout:
    return _Layout(coded.bits, coded.heads, coded.books, coded.norms is not None, is_exact)


def _bases(coded: AdditiveCodes, size: int) -> Tensor:
    """Return where the entries of each code of a token begin, int32, in numbers; an entry takes `size`."""
    own = torch.arange(coded.books, dtype=torch.int32, device="cpu") * (size << coded.bits)
    return own.repeat(coded.heads + LANES)


class _Offsets(Unpacker):
    """Makes codes to offsets; the second pointer is where the entries of each code begin."""

    layout: _Layout
    size: int  # numbers of an entry

    def offsets(self, token: Any, inside: Any, space: Any, chunks: tuple[Any, Any]) -> None:
        """Write offsets of codes of a token, int32, to the row `inside` of space [BLOCK, 16 chunks].

        chunks: of sixteen codes, the first one and the end.
        """
        b, layout = self.b, self.layout
        row, place = b.mul(token, self.row), b.mul(inside, self.i64(layout.chunks * LANES))
        with self.loop(chunks[1], chunks[0]) as chunk:
            planes = {
                w: b.add(b.mul(chunk, self.i64(2 * w)), self.i64(start))
                for w, start in plane_starts(layout.bits, layout.heads * layout.books)
            }
            code = b.and_(self._index(row, planes, layout.bits), self.constant(self.word, LANES, 2**layout.bits - 1))
            first = b.mul(chunk, self.i64(LANES))
            bases = self.load(self.pointers[1], first, self.word, LANES)
            found = b.add(bases, b.mul(code, self.constant(self.word, LANES, self.size)))
            self.store(found, space, b.add(place, first))


class _Sums(Turned, _Offsets):
    """Sums of entries; a is [BLOCK, 16 chunks] offsets, `second` the entries of a head."""

    def prepare(self, layout: _Layout) -> None:
        tables = layout.heads * layout.books * self.sizes.width * (4 if layout.is_exact else 2) << layout.bits
        self.is_by_head = tables > CACHE
        self.layout, self.size = layout, ENTRY

    def unpack(self, head: Any, token: Any) -> None:
        b = self.b
        first = b.mul(head, self.i64(self.layout.books))
        end = b.add(first, self.i64(self.layout.books + LANES - 1))
        chunks = b.lshr(first, self.i64(4)), b.lshr(end, self.i64(4))
        with self.loop(self.i64(BLOCK)) as inside:
            self.offsets(b.add(token, inside), inside, self.a, chunks)
        if self.layout.has_norms:
            self.read_norms(head, token)
            return
        for start in range(0, BLOCK, LANES):
            self.store(self.floats(1.0), self.scales, self.i64(start))

    def multiply(self, first: Any, fields: Any, place: Place) -> None:
        b, layout = self.b, self.layout
        first = b.add(first, b.mul(b.mul(place.pair, self.second), self.i64(ENTRY)))
        tables = self.at(self.back, first, self.float if layout.is_exact else self.short)
        begin = b.mul(self.head, self.i64(self.sizes.width))
        factors = [self.load(self.factors, b.add(begin, x), self.float, LANES) for x in (place.low, place.high)]
        with self.loop(self.i64(BLOCK)) as inside:
            row = b.add(b.mul(inside, self.i64(layout.chunks * LANES)), fields)
            places = [self.load(self.a, b.add(row, self.i64(i)), self.word) for i in range(layout.books)]
            for side, x in enumerate(self._sums(tables, [b.zext(at, self.index) for at in places])):
                found = x if layout.is_exact else b.fmul(x, factors[side])
                self.store(found, self.c, self.cell(place, side, inside))

    def _sums(self, tables: Any, offsets: Sequence[Any]) -> list[Any]:
        """Two times 16 channels."""
        b = self.b
        if self.layout.is_exact:
            sides = [[b.add(at, self.i64(side * LANES)) for at in offsets] for side in range(2)]
            return [self._added([self.load(tables, at, self.float, LANES) for at in own], b.fadd) for own in sides]
        total = self._added([self.load(tables, at, self.short, ENTRY) for at in offsets], b.add)
        halves = [self.shuffled(total, total, list(range(side * LANES, (side + 1) * LANES))) for side in range(2)]
        return [b.sitofp(b.sext(x, self.vector(self.word, LANES)), self.vector(self.float, LANES)) for x in halves]

    def _added(self, numbers: Sequence[Any], add: Any) -> Any:
        total = numbers[0]
        for number in numbers[1:]:
            total = add(total, number)
        return total


class _Mix(_Offsets):
    """void mix(codes, bases, p, out, space, blocks, first head, last head, bytes of a token, numbers between heads of p
    and of out). p [h, tokens, lanes], out [h, M, A, lanes] is added to."""

    def __init__(self, layout: _Layout, lanes: int) -> None:
        super().__init__("mix", 5, 6)
        self.layout, self.size, b = layout, lanes, self.b
        _, _, p, out, space = self.pointers
        blocks, begin, end, self.row, p_step, out_step = self.integers
        with self.loop(blocks) as block:
            first = b.mul(block, self.i64(BLOCK))
            self.ask_for(b.add(first, self.i64(BLOCK)))
            with self.loop(self.i64(BLOCK)) as inside:
                self.offsets(b.add(first, inside), inside, space, (self.i64(0), self.i64(layout.chunks)))
            with self.loop(end, begin) as head, self.loop(self.i64(BLOCK)) as inside:
                token = b.mul(b.add(first, inside), self.i64(lanes))
                share = self.load(p, b.add(b.mul(head, p_step), token), self.float, lanes)
                row = b.add(b.mul(inside, self.i64(layout.chunks * LANES)), b.mul(head, self.i64(layout.books)))
                own = self.at(out, b.mul(head, out_step), self.float)
                for i in range(layout.books):
                    at = b.zext(self.load(space, b.add(row, self.i64(i)), self.word), self.index)
                    self.store(b.fadd(self.load(own, at, self.float, lanes), share), own, at)
        b.ret_void()
