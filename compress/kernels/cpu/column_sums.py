"""Write the compiled functions that sum products with kept columns, and that decode some outputs of all columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from compress.formats.columns import TILE
from compress.kernels.cpu.byte_products import ByteProducts
from compress.kernels.cpu.dots import Dots
from compress.kernels.cpu.emitter import LANES
from compress.kernels.cpu.kept_inputs import QUAD

TOGETHER = 8  # columns that are read beside each other, each along a chunk of outputs
CHUNK = 2048  # outputs whose sums stay in the nearest cache while all columns pass by
CODE_VECTOR = 64  # bytes of a vector of codes
LOCALITY = 2  # cache that prefetched codes are brought to


def tile_outputs(bits: int, integers: bool) -> int:
    """Return the outputs whose sums stay in registers."""
    return CODE_VECTOR * 8 // bits if integers else 64


class _Codes(Dots):
    """Reads sixteen bytes of a column as vectors of sixteen outputs."""

    def __init__(self, name: str, pointers: str, integers: str, bits: int, stored: str, written: torch.dtype) -> None:
        super().__init__(name, pointers, integers, getattr(torch, stored), written, LANES)
        self.bits, self.fields = bits, 8 // bits if bits < 16 else 0

    def read_fields(self, pointer: Any, offset: Any, left: Any = None) -> list[Any]:
        """Load the codes of a tile of the format as float32 vectors; `left`: bytes of the column from there on."""
        b, words = self.b, self.vector(self.word, LANES)
        octets = b.zext(self.load_some(pointer, offset, self.byte, TILE, left), words)
        mask = self.constant(self.word, LANES, 2**self.bits - 1)
        fields = []
        for field in range(self.fields):
            moved = b.lshr(octets, self.constant(self.word, LANES, field * self.bits)) if field else octets
            fields.append(b.sitofp(moved if field == self.fields - 1 else b.and_(moved, mask), self.floating))
        return fields

    def read_values(self, offset: Any, left: Any) -> list[Any]:
        """Load outputs of a column in the order of `arrange`, or the codes of as many."""
        stored = self.named["stored"]
        if self.bits == 16:
            return list(self.read_chunk(stored, offset, left))
        return self.read_fields(stored, offset, left)

    def read_scales(self, group: Any, output: Any, stride: Any, left: Any = None) -> Any:
        """Load the scales of sixteen outputs; stride: bytes of a column, left: outputs of it from there on."""
        b = self.b
        row = b.mul(group, b.mul(stride, self.i64(self.fields)))
        return self.load_floats(self.named["scales"], b.add(row, output), self.stored, LANES, left)


class ColumnSums(_Codes):
    """Writes the products of kept inputs with tiles of outputs, from tile `first` to `last`.

    stored: values, or codes with scales and zeros; stride: elements of a column. columns to starts: what KeptInputs
    writes. totals float32 [tokens, padded]: memory for the sums, space [tokens, sides, padded] for those of a span. out
    [tokens, outputs].
    """

    def __init__(self, bits: int, stored: str, symmetric: bool, integers: bool, written: torch.dtype) -> None:
        pointers = "stored scales zeros columns values low high x_scales sums starts totals space out"
        sizes = "first last tokens room spans pieces stride outputs padded"
        super().__init__("column_sums", pointers, sizes, bits, stored, written)
        self.symmetric, self.by_bytes = symmetric, integers
        self.tile = tile_outputs(bits, integers)
        self.count = self.tile // LANES
        self.elements = self.tile if bits == 16 else self.tile // self.fields  # of a column in a tile
        named, b = self.named, self.b
        chunk = self.i64(max(1, CHUNK // self.tile))
        self.tokens = named["tokens"]
        tiles = b.sub(named["last"], named["first"])
        with self.loop(b.udiv(b.add(tiles, b.sub(chunk, self.i64(1))), chunk)) as number:
            self.first = b.add(named["first"], b.mul(number, chunk))
            self.last = self.smaller(b.add(self.first, chunk), named["last"])
            self._clear(named["totals"], 1)
            with self.loop(named["spans"]) as span:
                start = self.load(named["starts"], span, self.index)
                stop = self.load(named["starts"], b.add(span, self.i64(1)), self.index)
                with b.if_then(b.icmp_signed("<", start, stop)):
                    self._span(span, start, stop)
            with self.loop(self.tokens) as token:
                self._each_tile(lambda tile, left: self._write(tile, token, left))
        b.ret_void()

    def _span(self, span: Any, start: Any, stop: Any) -> None:
        b, eight = self.b, self.i64(TOGETHER)
        if self.bits < 16:
            self._clear(self.named["space"], 1 + self.by_bytes)
        whole = b.udiv(b.sub(stop, start), eight)
        with self.loop(whole) as i:
            self._block(b.add(start, b.mul(i, eight)), TOGETHER)
        rest = b.add(start, b.mul(whole, eight))
        size = QUAD if self.by_bytes else 1
        with self.loop(b.udiv(b.sub(stop, rest), self.i64(size))) as i:
            self._block(b.add(rest, b.mul(i, self.i64(size))), size)
        if self.bits < 16:
            with self.loop(self.tokens) as token:
                self._each_tile(lambda tile, left: self._add_totals(tile, span, token, left))

    def _each_tile(self, write: Callable[[Any, Any], None]) -> None:
        """Write write(tile, None) for whole tiles, then write(tile, elements of a column that are left)."""
        b = self.b
        whole = self.smaller(b.udiv(self.named["stride"], self.i64(self.elements)), self.last)
        with self.loop(whole, self.first) as tile:
            write(tile, None)
        with b.if_then(b.icmp_signed("<", whole, self.last)):
            write(whole, b.sub(self.named["stride"], b.mul(whole, self.i64(self.elements))))

    def _place(self, tile: Any, token: Any, sides: int = 1) -> Any:
        """Where the sums of a tile are in totals, or in space with so many sides."""
        b = self.b
        line = b.mul(b.mul(token, self.i64(sides)), self.named["padded"])
        return b.add(line, b.mul(tile, self.i64(self.tile)))

    def _clear(self, memory: Any, sides: int) -> None:
        b = self.b
        with self.loop(self.tokens) as token, self.loop(self.last, self.first) as tile:
            place = self._place(tile, token, sides)
            for side in range(sides):
                here = b.add(place, b.mul(self.named["padded"], self.i64(side)))
                for i in range(self.count):
                    self.store(self.floats(0.0), memory, b.add(here, self.i64(i * LANES)))

    def _block(self, i: Any, count: int) -> None:
        """Add the products of `count` columns from the i-th on, for all rows of activations."""
        b, named = self.b, self.named
        places, ahead = ([self._column(b.add(i, self.i64(first + k))) for k in range(count)] for first in (0, count))
        with self.loop(self.tokens) as token:
            line = b.add(b.mul(token, named["room"]), i)
            x = self._bytes(line, count) if self.by_bytes else self._values(line, count)
            add = self._add_bytes if self.by_bytes else self._add_values

            def add_tile(tile: Any, left: Any) -> None:
                offset = b.mul(tile, self.i64(self.elements))
                for place in ahead:
                    self._prefetch(b.add(place, offset))
                add([b.add(place, offset) for place in places], x, tile, token, left)

            self._each_tile(add_tile)

    def _column(self, i: Any) -> Any:
        """Where a kept column begins."""
        column = self.b.sext(self.load(self.named["columns"], i, self.word), self.index)
        return self.b.mul(column, self.named["stride"])

    def _prefetch(self, offset: Any) -> None:
        """Ask for a tile of a column that is read when this block of columns is done: L2 holds as much."""
        kind, size = (self.element(), self.stored.itemsize) if self.bits == 16 else (self.byte, 1)
        for at in range(0, self.elements * size, 64):
            here = self.at(self.named["stored"], self.b.add(offset, self.i64(at // size)), kind)
            self.intrinsic(
                "llvm.prefetch.p0", self.ir.VoidType(), here, self.word(0), self.word(LOCALITY), self.word(1)
            )

    def _values(self, line: Any, count: int) -> list[Any]:
        places = [self.b.add(line, self.i64(k)) for k in range(count)]
        return [self.splat(self.load(self.named["values"], place, self.float), LANES) for place in places]

    def _bytes(self, line: Any, count: int) -> list[Any]:
        """Return the low and the high bytes of each four columns, in all lanes."""
        b, octets = self.b, self.vector(self.byte, CODE_VECTOR)
        first = b.udiv(line, self.i64(QUAD))  # in words of four bytes
        return [
            b.bitcast(self.splat(self.load(self.named[part], b.add(first, self.i64(k)), self.word), LANES), octets)
            for k in range(count // QUAD)
            for part in ("low", "high")
        ]

    def _add_values(self, places: list[Any], x: list[Any], tile: Any, token: Any, left: Any) -> None:
        b, memory = self.b, self.named["totals" if self.bits == 16 else "space"]
        here = self._place(tile, token)
        at = [b.add(here, self.i64(i * LANES)) for i in range(self.count)]
        sums = [self.load(memory, each, self.float, LANES) for each in at]
        step = 2 * LANES if self.bits == 16 else TILE
        for place, factor in zip(places, x, strict=True):
            vectors = []
            for first in range(0, self.elements, step):
                rest = None if left is None else b.sub(left, self.i64(first))
                vectors += self.read_values(b.add(place, self.i64(first)), rest)
            sums = [self.multiply_add(vector, factor, total) for vector, total in zip(vectors, sums, strict=True)]
        for each, total in zip(at, sums, strict=True):
            self.store(total, memory, each)

    def _add_bytes(self, places: list[Any], x: list[Any], tile: Any, token: Any, left: Any) -> None:
        b, named, largest = self.b, self.named, 2**self.bits - 1
        here = self._place(tile, token, 2)
        cells = [(field, q, side) for field in range(self.fields) for q in range(QUAD) for side in range(2)]
        at = {
            cell: b.add(
                here, b.add(b.mul(named["padded"], self.i64(cell[2])), self.i64((cell[0] * QUAD + cell[1]) * LANES))
            )
            for cell in cells
        }
        sums = {cell: ByteProducts(self, CODE_VECTOR, largest) for cell in cells}
        for cell, products in sums.items():
            products.whole = self.load(named["space"], at[cell], self.word, LANES)
        for k in range(0, len(places), QUAD):
            columns = [
                self.load_some(named["stored"], place, self.byte, CODE_VECTOR, left) for place in places[k : k + QUAD]
            ]
            for q, octets in enumerate(self._interleave(columns)):
                for field in range(self.fields):
                    codes = self._field(octets, field)
                    for side in range(2):
                        sums[field, q, side].add(codes, x[2 * (k // QUAD) + side])
        for cell, products in sums.items():
            self.store(products.total(), named["space"], at[cell])

    def _interleave(self, columns: list[Any]) -> list[Any]:
        """Return the bytes of four columns beside each other, for a quarter of each sixteen bytes."""
        pairs = [self._zip(columns[0], columns[1], 1), self._zip(columns[2], columns[3], 1)]
        return [part for half in range(2) for part in self._zip(pairs[0][half], pairs[1][half], 2)]

    def _zip(self, a: Any, b: Any, size: int) -> list[Any]:
        """Return the low and the high halves of each sixteen bytes of a and b, `size` bytes of each in turn."""
        count = a.type.count
        halves = []
        for half in range(2):
            order = [
                lane + half * 8 + unit * size + inside + side
                for lane in range(0, count, 16)
                for unit in range(8 // size)
                for side in (0, count)
                for inside in range(size)
            ]
            halves.append(self.shuffled(a, b, order))
        return halves

    def _field(self, octets: Any, field: int) -> Any:
        if self.fields == 1:
            return octets
        b, kind = self.b, octets.type
        if field:
            shorts = self.vector(self.short, kind.count // 2)
            moved = b.lshr(b.bitcast(octets, shorts), self.constant(self.short, kind.count // 2, field * self.bits))
            octets = b.bitcast(moved, kind)
        return b.and_(octets, self.constant(self.byte, kind.count, 2**self.bits - 1))

    def _sums(self, tile: Any, token: Any) -> list[Any]:
        """Return the sums of a span in the order of outputs, float32."""
        b, space = self.b, self.named["space"]
        here = self._place(tile, token, 1 + self.by_bytes)
        at = [b.add(here, self.i64(i * LANES)) for i in range(self.count)]
        if not self.by_bytes:
            return [self.load(space, each, self.float, LANES) for each in at]
        eight, totals = self.constant(self.word, LANES, 8), []
        for each in at:
            high = self.load(space, b.add(each, self.named["padded"]), self.word, LANES)
            totals.append(b.add(self.load(space, each, self.word, LANES), b.shl(high, eight)))
        ordered = []
        for lane in range(QUAD):
            order = [4 * lane + i + side for side in (0, LANES) for i in range(4)]
            for field in range(self.fields):
                parts = totals[field * QUAD : (field + 1) * QUAD]
                halves = [self.shuffled(parts[0], parts[1], order), self.shuffled(parts[2], parts[3], order)]
                together = self.shuffled(halves[0], halves[1], range(LANES))
                ordered.append(b.sitofp(together, self.floating))
        return ordered

    def _add_totals(self, tile: Any, span: Any, token: Any, left: Any) -> None:
        """Add the sums of a span, times its scales."""
        b, named = self.b, self.named
        place = self._place(tile, token)
        cell = b.add(b.mul(token, named["spans"]), span)
        x_scale = self.splat(self.load(named["x_scales"], cell, self.float), LANES) if self.by_bytes else None
        taken = self.splat(self.load(named["sums"], cell, self.float), LANES)
        group = b.udiv(span, named["pieces"])
        zeros = [] if self.symmetric else self._zeros(group, tile, left)
        for i, vector in enumerate(self._sums(tile, token)):
            here = b.add(place, self.i64(i * LANES))
            zero = self.floats(2.0 ** (self.bits - 1)) if self.symmetric else zeros[i]
            vector = b.fsub(vector, b.fmul(zero, taken))
            vector = vector if x_scale is None else b.fmul(vector, x_scale)
            output = b.add(b.mul(tile, self.i64(self.tile)), self.i64(i * LANES))
            rest = None if left is None else b.sub(b.mul(left, self.i64(self.fields)), self.i64(i * LANES))
            scale = self.read_scales(group, output, named["stride"], rest)
            total = self.load(named["totals"], here, self.float, LANES)
            self.store(self.multiply_add(vector, scale, total), named["totals"], here)

    def _zeros(self, group: Any, tile: Any, left: Any) -> list[Any]:
        b, named, zeros = self.b, self.named, list[Any]()
        start = b.add(b.mul(group, named["stride"]), b.mul(tile, self.i64(self.elements)))
        for first in range(0, self.elements, TILE):
            rest = None if left is None else b.sub(left, self.i64(first))
            zeros += self.read_fields(named["zeros"], b.add(start, self.i64(first)), rest)
        return zeros

    def _write(self, tile: Any, token: Any, left: Any) -> None:
        b, named = self.b, self.named
        place = self._place(tile, token)
        output = b.mul(tile, self.i64(self.tile))
        line = b.add(b.mul(token, named["outputs"]), output)
        for first in range(0, self.tile, 2 * LANES):
            halves = [
                self.load(named["totals"], b.add(place, self.i64(first + side)), self.float, LANES)
                for side in (0, LANES)
            ]
            for side, values in zip((0, LANES), self.natural(*halves) if self.bits == 16 else halves, strict=True):
                count = None
                if left is not None or self.bits < 16:  # codes are padded, outputs are not
                    count = b.sub(b.sub(named["outputs"], output), self.i64(first + side))
                self.store_some(self.rounded(values), named["out"], b.add(line, self.i64(first + side)), count)


class ColumnPanel(_Codes):
    """Writes columns start to stop of the weights of `width` outputs from `first` on: out [.., width]."""

    def __init__(self, bits: int, stored: str, symmetric: bool, written: torch.dtype) -> None:
        sizes = "start stop first width group stride"
        super().__init__("column_panel", "stored scales zeros out", sizes, bits, stored, written)
        self.symmetric = symmetric
        b, named = self.b, self.named
        size = TILE * self.fields
        with self.loop(named["stop"], named["start"]) as column:
            group = b.udiv(column, named["group"])
            line = b.mul(column, named["width"])
            self.in_chunks(named["width"], size, lambda first, rest: self._chunk(column, group, line, first, rest))
        b.ret_void()

    def _chunk(self, column: Any, group: Any, line: Any, first: Any, rest: Any) -> None:
        b, named = self.b, self.named
        output = b.add(named["first"], first)
        inside = b.udiv(output, self.i64(self.fields))
        codes = self.read_fields(named["stored"], b.add(b.mul(column, named["stride"]), inside))
        middle = [self.floats(2.0 ** (self.bits - 1))] * self.fields
        zeros = (
            middle if self.symmetric else self.read_fields(named["zeros"], b.add(b.mul(group, named["stride"]), inside))
        )
        for i, (code, zero) in enumerate(zip(codes, zeros, strict=True)):
            scale = self.read_scales(group, b.add(output, self.i64(i * LANES)), named["stride"])
            weights = self.rounded(b.fmul(b.fsub(code, zero), scale))
            left = None if rest is None else b.sub(rest, self.i64(i * LANES))
            self.store_some(weights, named["out"], b.add(line, b.add(first, self.i64(i * LANES))), left)
