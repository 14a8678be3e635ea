"""Read values whose bits differ between channels (kv/codecs/packed.py), on CPUs with AVX-512.

A piece of 16 channels of a token is spread over the lanes of a register, each lane moves its own field down, and a
permutation turns the codes into levels, three to ten instructions for 1 to 7 bits. The sum over tokens

    mixed[m, c] = sum_t (p[m, t] norm[t]) level[code[t, c]]

stays in registers for BLOCK tokens of a piece. Everything is float32. Keys: compress/kernels/cpu/kv_prerope.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compress.kernels import llvm
from compress.kernels.contract import BLOCK, MOST_MIXED_BITS, NORM_STEPS, PLANES, LevelTables, MixedCodes
from compress.kernels.cpu import emitter
from compress.kernels.cpu.emitter import LANES
from compress.kernels.cpu.kv_affine import THREAD, addresses

UNROLLED = 8  # tokens
LINE_BITS = 6  # bits of a byte's place in a line of memory
FRACTIONS = 23  # bits of the fraction of a float32


def supports(width: int) -> bool:
    """Return whether heads of this width are read here, which any are."""
    return llvm.available() and {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= llvm.features()


def mix(p: Tensor, coded: MixedCodes, tables: LevelTables) -> Tensor:
    """p [B, h, m, n] float32, n a multiple of BLOCK -> sums [B, h, m, 16 most] float32, lane by lane of the pieces of
    a head; lanes without a channel hold anything finite.
    """
    p = p if p.stride(3) == 1 else p.contiguous()
    batch, heads, count, tokens = p.shape
    out = torch.zeros(batch, heads, count, LANES * coded.most, dtype=torch.float32, device="cpu")
    kernel = llvm.function(_MixedMix, count, tables)
    stored = addresses((coded.codes, coded.codes))
    given = addresses((coded.norms, p, out))
    fixed = coded.starts.data_ptr(), coded.bounds.data_ptr()
    row, steps = coded.codes.stride(2), (coded.norms.stride(1), p.stride(1), p.stride(2), out.stride(1), out.stride(2))

    def work(first: int, last: int) -> None:
        space = torch.empty(BLOCK * count, dtype=torch.float32, device="cpu")
        for index in range(first // heads, -(-last // heads)):
            begin, end = max(first - index * heads, 0), min(last - index * heads, heads)
            places = stored[index][0], *fixed, *given[index * heads], space.data_ptr()
            kernel(*places, tokens // BLOCK, begin, end, row, *steps)

    llvm.parallel(work, batch * heads, -(-THREAD // (max(tokens, 1) * LANES * max(coded.most, 1))))
    return out


class Unpacker(emitter.Emitter):
    """Reads pieces; the first three pointers are codes, starts and bounds."""

    tables: Sequence[Sequence[int]]  # 32-bit words by bits
    row: Any  # bytes of a token

    @property
    def codes(self) -> Any:
        return self.pointers[0]

    def integer(self, pointer: Any, offset: Any) -> Any:
        """An int32 as 64 bits."""
        return self.b.sext(self.load(pointer, offset, self.word), self.index)

    def piece_bound(self, head: Any, place: int) -> Any:
        at = self.b.add(self.b.mul(head, self.i64(MOST_MIXED_BITS + 1)), self.i64(place))
        return self.integer(self.pointers[2], at)

    def planes(self, piece: Any, bits: int) -> dict[int, Any]:
        """Where the planes of a piece begin in a row, by width."""
        first = self.b.mul(piece, self.i64(len(PLANES) + 1))
        starts = [self.b.add(first, self.i64(column)) for column in range(len(PLANES))]
        return {w: self.integer(self.pointers[1], at) for w, at in zip(PLANES, starts, strict=True) if bits & w}

    def column(self, piece: Any) -> Any:
        """Fields of the head before a piece."""
        at = self.b.mul(piece, self.i64(len(PLANES) + 1))
        return self.integer(self.pointers[1], self.b.add(at, self.i64(len(PLANES))))

    def ask_for(self, token: Any) -> None:
        """Ask for the rows of a block of tokens, which is read later; what is past the end does no harm."""
        b = self.b
        first, end = (b.lshr(b.mul(at, self.row), self.i64(LINE_BITS)) for at in (token, b.add(token, self.i64(BLOCK))))
        with self.loop(b.add(end, self.i64(1)), first) as line:
            self.prefetch(self.codes, b.shl(line, self.i64(LINE_BITS)), self.byte)

    def levels(self, token: Any, planes: Mapping[int, Any], bits: int) -> Any:
        """The table's words for sixteen channels of a token, int32."""
        return self.look_up(self._index(self.b.mul(token, self.row), planes, bits), self.tables[bits])

    def norms(self, pointer: Any, offset: Any) -> Any:
        """Sixteen norms as floats."""
        b, words = self.b, self.vector(self.word, LANES)
        code = b.zext(self.load(pointer, offset, self.byte, LANES), words)
        table = [emitter.float32(2 ** (i / NORM_STEPS)) for i in range(NORM_STEPS)]
        fraction = self.permute(self.ir.Constant(self.vector(self.float, LANES), table), code)
        octave = b.sub(
            b.lshr(code, self.constant(self.word, LANES, 4)), self.constant(self.word, LANES, 128 // NORM_STEPS)
        )
        whole = b.add(b.bitcast(fraction, words), b.shl(octave, self.constant(self.word, LANES, FRACTIONS)))
        is_zero = b.icmp_unsigned("==", code, self.constant(self.word, LANES, 0))
        return b.select(is_zero, self.floats(0.0), b.bitcast(whole, self.vector(self.float, LANES)))

    def permute(self, table: Any, index: Any) -> Any:
        """Elements by the lowest four bits of the indices."""
        kind = "sf" if table.type.element == self.float else "si"
        return self.intrinsic(f"llvm.x86.avx512.permvar.{kind}.512", table.type, table, index)

    def _index(self, row: Any, planes: Mapping[int, Any], bits: int) -> Any:
        """Codes, in the lowest bits of each lane; anything above them."""
        b, code, low = self.b, None, bits
        for width, start in planes.items():
            low -= width
            shifts = [width * lane % 32 - low for lane in range(LANES)]
            spread = self._spread_lanes(b.add(row, start), width)
            moves = self.ir.Constant(spread.type, [shift % 32 for shift in shifts])
            if low:
                moved = self.intrinsic(f"llvm.fshr.v{LANES}i32", spread.type, spread, spread, moves)
            else:
                moved = b.lshr(spread, moves)
            if code is not None:
                above = self.constant(self.word, LANES, -1 << (low + width))
                below = self.constant(self.word, LANES, (1 << (low + width)) - 1)
                moved = b.or_(b.and_(code, above), b.and_(moved, below))
            code = moved
        return code

    def _spread_lanes(self, offset: Any, width: int) -> Any:
        """The number with sixteen fields in all lanes; of one of 64 bits each lane has the half with its field."""
        b, kind = self.b, self.word if width > 1 else self.short
        low = b.load(self.at(self.codes, offset, self.byte), typ=kind, align=1)
        if width < 4:
            return self.splat(low if width == 2 else b.zext(low, self.word), LANES)
        high = b.load(self.at(self.codes, b.add(offset, self.i64(4)), self.byte), typ=kind, align=1)
        return self.shuffled(self.splat(low, LANES), self.splat(high, LANES), [*range(8), *range(24, 32)])

    def look_up(self, index: Any, table: Sequence[int]) -> Any:
        """Words of a table, whose length is a power of 2, by the lowest bits of the indices."""
        b, kind = self.b, self.vector(self.word, LANES)
        if len(table) <= LANES:
            return self.permute(self.ir.Constant(kind, [table[i % len(table)] for i in range(LANES)]), index)
        halves = []
        for first in range(0, len(table), 2 * LANES):
            low, high = (self.ir.Constant(kind, table[at : at + LANES]) for at in (first, first + LANES))
            halves.append(self.intrinsic("llvm.x86.avx512.vpermi2var.d.512", kind, low, index, high))
        bit = 5
        while len(halves) > 1:
            masked = b.and_(index, self.constant(self.word, LANES, 1 << bit))
            is_set = b.icmp_unsigned("!=", masked, self.constant(self.word, LANES, 0))
            halves = [b.select(is_set, y, x) for x, y in zip(halves[::2], halves[1::2], strict=True)]
            bit += 1
        return halves[0]


def words(tables: LevelTables) -> list[list[int]]:
    """The levels as the words of float32."""
    return [torch.tensor(table, dtype=torch.float32).view(torch.int32).tolist() for table in tables]


class _MixedMix(Unpacker):
    """void mix(codes, starts, bounds, norms, p, out, space, blocks, first head, last head, bytes of a token, steps): of
    norms between heads, of p between heads and rows, of out between heads and rows. p [h, M, tokens], out [h, M, lanes]
    is added to."""

    def __init__(self, count: int, tables: LevelTables) -> None:
        super().__init__("mix", 7, 9)
        self.count, self.tables = count, words(tables)
        *_, self.norm, self.p, self.out, self.space = self.pointers
        blocks, first, last, self.row, *self.steps = self.integers
        self.held = [self.variable(self.vector(self.float, LANES)) for _ in range(count)]
        with self.loop(blocks) as block:
            token = self.b.mul(block, self.i64(BLOCK))
            self.ask_for(self.b.add(token, self.i64(BLOCK)))
            with self.loop(last, first) as head:
                self._weights(head, token)
                begin = self.piece_bound(head, 0)
                for place in range(MOST_MIXED_BITS):
                    with self.loop(self.piece_bound(head, place + 1), self.piece_bound(head, place)) as piece:
                        self._piece(head, token, piece, self.b.sub(piece, begin), MOST_MIXED_BITS - place)
        self.b.ret_void()

    def _weights(self, head: Any, token: Any) -> None:
        """Writes p times norm for the tokens of a block."""
        b = self.b
        self.prefetch(self.norm, b.add(b.mul(head, self.steps[0]), b.add(token, self.i64(BLOCK))), self.byte)
        for start in range(0, BLOCK, LANES):
            here = b.add(token, self.i64(start))
            norms = self.norms(self.norm, b.add(b.mul(head, self.steps[0]), here))
            for m in range(self.count):
                at = b.add(b.add(b.mul(head, self.steps[1]), b.mul(self.steps[2], self.i64(m))), here)
                product = b.fmul(self.load(self.p, at, self.float, LANES), norms)
                self.store(product, self.space, self.i64(m * BLOCK + start))

    def _piece(self, head: Any, token: Any, piece: Any, place: Any, bits: int) -> None:
        b, planes = self.b, self.planes(piece, bits)
        for held in self.held:
            b.store(self.floats(0.0), held)
        with self.loop(self.i64(BLOCK // UNROLLED)) as part:
            for i in range(UNROLLED):
                inside = b.add(b.mul(part, self.i64(UNROLLED)), self.i64(i))
                floats = self.levels(b.add(token, inside), planes, bits)
                level = b.bitcast(floats, self.vector(self.float, LANES))
                for m, held in enumerate(self.held):
                    weight = self.load(self.space, b.add(inside, self.i64(m * BLOCK)), self.float)
                    b.store(self.multiply_add(self.splat(weight, LANES), level, b.load(held)), held)
        first = b.add(b.mul(head, self.steps[3]), b.mul(place, self.i64(LANES)))
        for m, held in enumerate(self.held):
            at = b.add(first, b.mul(self.steps[4], self.i64(m)))
            self.store(b.fadd(self.load(self.out, at, self.float, LANES), b.load(held)), self.out, at)
