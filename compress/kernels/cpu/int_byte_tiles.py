"""Multiply the `int` format with one to many rows of activations in tiles of bytes: codes of 2, 4 and 8 bits with VNNI.

As in int_tiles.py, sixteen rows of the weight are turned, so that each lane sums for its own row and no sums across a
vector are needed. A lane of 32 bits holds four neighbouring columns as bytes: the low bytes of eight words are put
before their high bytes, and a shift and a mask take the fields of all of them apart. An activation is two bytes, 256
high + low (byte_products.py); four neighbours of one plane are copied to all lanes, which costs no instruction where
memory is an operand of the product. What is decoded is paid once for all rows of activations, and a row of activations
adds two products of bytes for 64 codes. The sums of a span are exact, and are added in the order of spans, as those of
int.py and int_tiles.py, to the bit.
"""

from __future__ import annotations

from functools import reduce
from itertools import chain, product
from typing import Any

from compress.formats.int import NARROW
from compress.kernels import llvm
from compress.kernels.cpu.byte_products import LARGEST_BYTE, ByteProducts
from compress.kernels.cpu.int_tiles import BLOCK_ROWS, IntTiles
from compress.kernels.cpu.unpack import SHORTS, words_ahead

BYTE = 8  # bits
QUAD = 4  # columns of a lane
EIGHT = 8  # words whose bytes are put apart together: a register of 128 bits
LINE = 32  # words of a line of the cache
SPLIT = 32  # activations that become bytes together
PLANES_OF_INPUTS = 2
CHAINS = 16  # sums of products that are not waited for, where products are added to sums by one instruction


def find_least_rows(bits: int, span: int) -> int:
    """Return the rows of activations from which this kernel is the fastest; 0 where there is none of it.

    Measured with one thread of a Xeon with VNNI, 4096 x 4096 out of memory. With AVX2 alone it took 0.87 and 1.14 of
    the time of the other kernels at four rows of 2 and 4 bits, and 0.81 and 0.98 at eight: it is left to VNNI.
    """
    return 3 if span % SHORTS == 0 and bits in (2, 4, BYTE) and has_byte_sums() else 0


def has_byte_sums() -> bool:
    """Return whether one instruction adds products of bytes to sums of 32 bits."""
    return {"avx512vnni", "avx512vl", "avx512bw"} <= llvm.features()


def count_floats(columns: int) -> int:
    """Return the float32 of memory that a thread needs for one row of activations."""
    return 2 * BLOCK_ROWS + columns * PLANES_OF_INPUTS // 4


class IntByteTiles(IntTiles):
    """Sums rows of the weight times any number of rows of activations, which lie in spans: [spans, tokens, span]."""

    def _allocate(self) -> None:
        self.turned = self._memory(self.columns // QUAD)  # [quads of columns, rows], codes
        self.by_row = self._memory(NARROW // QUAD)  # [rows, quads of columns], of a tile of the tail

    def _begin(self) -> None:
        """Write the bytes of all activations: [quads of columns, rows of activations, low and high, QUAD]."""
        b = self.b
        self.bytes = self.at(self.space, b.mul(self.tokens, self.i64(2 * BLOCK_ROWS)), self.float)
        self.step = b.mul(self.tokens, self.i64(PLANES_OF_INPUTS * QUAD))  # bytes of a quad of columns
        with self.loop(self.spans) as u, self.loop(self.tokens) as m:
            given = b.mul(b.add(b.mul(u, self.tokens), m), self.i64(self.span))
            with self.loop(self.i64(self.span // SPLIT)) as i:
                first = b.mul(i, self.i64(SPLIT))
                x = self.load(self.x16, b.add(given, first), self.short, SPLIT)
                self._split(x, b.add(b.mul(u, self.i64(self.span)), first), m)

    def _split(self, x: Any, column: Any, m: Any) -> None:
        b, octets = self.b, self.vector(self.byte, SPLIT)
        eight, rounding = (self.constant(self.short, SPLIT, value) for value in (BYTE, LARGEST_BYTE))
        low, high = b.trunc(x, octets), b.trunc(b.ashr(b.add(x, rounding), eight), octets)
        both = self.shuffled(
            low, high, [first + side + i for first in range(0, SPLIT, QUAD) for side in (0, SPLIT) for i in range(QUAD)]
        )
        pairs = b.bitcast(both, self.vector(self.index, SPLIT // QUAD))
        place = b.add(b.mul(b.udiv(column, self.i64(QUAD)), self.step), b.mul(m, self.i64(PLANES_OF_INPUTS * QUAD)))
        for i in range(SPLIT // QUAD):
            here = self.at(self.bytes, b.add(place, b.mul(self.step, self.i64(i))), self.byte)
            b.store(b.extract_element(pairs, self.word(i)), here, align=QUAD)

    def _decode_tile(self, tile: Any) -> None:
        plane = self.planar.planes[0]
        lines = [self.planar.word_places(tile, self._row(r), 0)[0] for r in range(BLOCK_ROWS)]
        ahead = words_ahead(self, self.planar.in_row, self.bits, BLOCK_ROWS)
        for line, first in product(lines, range(0, self.planar.tile_words, LINE)):
            self.prefetch(plane, self.b.add(line, self.b.add(ahead, self.i64(first))), self.short)
        self._turn(plane, lines, self.planar.tile_words // 2, self._put_codes, self._apart)

    def _apart(self, row: Any) -> Any:
        """The low bytes of each eight words before their high bytes."""
        size = 4 * row.type.count
        octets = self.b.bitcast(row, self.vector(self.byte, size))
        lanes = range(0, size, 2 * EIGHT)
        order = [at + i + side for at in lanes for side in (0, 1) for i in range(0, 2 * EIGHT, 2)]
        return self.b.bitcast(self.shuffled(octets, octets, order), row.type)

    def _put_codes(self, first: Any, j: int, turned: Any) -> None:
        """Write the codes in four bytes of sixteen rows, number `j` behind the even number `first` of a tile."""
        b, (eight, quad) = self.b, divmod(j, 4)
        whole = b.bitcast(turned, self.vector(self.short, 2 * BLOCK_ROWS))
        mask = self.constant(self.byte, QUAD * BLOCK_ROWS, 2**self.bits - 1)
        for i in range(BYTE // self.bits):
            field = i + quad // 2 * (BYTE // self.bits)  # high bytes hold the second half of the fields
            moved = b.lshr(whole, self.constant(self.short, 2 * BLOCK_ROWS, i * self.bits)) if i else whole
            codes = b.bitcast(moved, mask.type)
            codes = codes if self.bits == BYTE else b.and_(codes, mask)
            place = (field * self.planar.tile_words + EIGHT * eight) // QUAD + quad % 2
            self._store_quad(codes, b.add(b.udiv(first, self.i64(2)), self.i64(place)))

    def _store_quad(self, codes: Any, place: Any) -> None:
        self.store(codes, self.turned, self.b.mul(place, self.i64(QUAD * BLOCK_ROWS)))

    def _decode_narrow(self, tile: Any) -> None:
        b = self.b
        with self.loop(self.i64(BLOCK_ROWS)) as row:
            codes = self.narrow.codes(tile, b.add(self.first_row, row), 0, NARROW)
            self.store(b.trunc(codes, self.vector(self.byte, NARROW)), self.by_row, b.mul(row, self.i64(NARROW)))

        def put(first: Any, j: int, turned: Any) -> None:
            self._store_quad(b.bitcast(turned, self.vector(self.byte, QUAD * BLOCK_ROWS)), b.add(first, self.i64(j)))

        self._turn(self.by_row, [self.i64(r * NARROW // 2) for r in range(BLOCK_ROWS)], NARROW // QUAD, put)

    def _sum(self, u: Any, m: Any, column: Any, inside: Any, count: int, tokens: int) -> list[Any]:
        """Return the int32 sums of sixteen rows over `count` columns, for each row of activations."""
        b = self.b
        quad = b.udiv(b.add(b.mul(u, self.i64(self.span)), inside), self.i64(QUAD))
        inputs = b.add(b.mul(quad, self.step), b.mul(m, self.i64(PLANES_OF_INPUTS * QUAD)))
        sums = self._sum_bytes(b.mul(column, self.i64(BLOCK_ROWS)), inputs, count // QUAD, tokens)
        eight = self.constant(self.word, BLOCK_ROWS, BYTE)
        return [b.add(low, b.shl(high, eight)) for low, high in sums]

    def _sum_bytes(self, weights: Any, inputs: Any, quads: int, tokens: int) -> list[list[Any]]:
        """Return [rows of activations][low, high] int32 sums of sixteen rows of the weight."""
        b, int32, cells = self.b, self.vector(self.word, BLOCK_ROWS), PLANES_OF_INPUTS * tokens
        chains = max(1, min(CHAINS // cells, quads))
        unrolled = min(quads, max(2, chains))
        totals = [[self.variable(int32) for _ in range(chains)] for _ in range(cells)]
        for variable in chain.from_iterable(totals):
            b.store(self.constant(self.word, BLOCK_ROWS, 0), variable)
        with self.loop(self.i64(quads // unrolled)) as i:
            first = b.mul(i, self.i64(unrolled))
            sums = [[ByteProducts(self, QUAD * BLOCK_ROWS, 2**self.bits - 1) for _ in cell] for cell in totals]
            pairs = list(zip(chain.from_iterable(sums), chain.from_iterable(totals), strict=True))
            for each, variable in pairs:
                each.whole = b.load(variable)
            for j in range(unrolled):
                place = b.add(first, self.i64(j))
                at = b.add(weights, b.mul(place, self.i64(QUAD * BLOCK_ROWS)))
                codes = self.load(self.turned, at, self.byte, QUAD * BLOCK_ROWS)
                line = b.add(inputs, b.mul(place, self.step))
                for number, cell in enumerate(sums):
                    x = self.at(self.bytes, b.add(line, self.i64(number * QUAD)), self.byte)
                    copied = self.splat(b.load(x, typ=self.word, align=QUAD), BLOCK_ROWS)
                    cell[j % chains].add(codes, b.bitcast(copied, codes.type))
            for each, variable in pairs:
                b.store(each.total(), variable)
        flat = [reduce(b.add, map(b.load, variables)) for variables in totals]
        return [flat[at : at + PLANES_OF_INPUTS] for at in range(0, cells, PLANES_OF_INPUTS)]
