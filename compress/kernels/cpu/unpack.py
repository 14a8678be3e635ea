"""Take codes out of planar words (numerics/packing.py) in registers: pieces for the kernels that read such words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from compress.formats.int import PLANES
from compress.kernels.cpu.emitter import LANES, Emitter
from compress.numerics.packing import FIELDS, WORDS

# Words are asked for so many ahead, because rows of a weight are short runs of memory for a processor that looks ahead
# by itself. Weights not in its cache, one row of activations: 650 -> 460 us at 4 bits, 4096 x 4096; 205 -> 125 us at
# 2816 x 1024.
AHEAD = 4096


SHORTS = 32  # int16 of a register of 512 bits


def words(bits: int) -> str:
    """Return the arguments that are planes of words of the `int` format."""
    return " ".join(f"words{width}" for width in PLANES[bits])


def lanes(tile_words: int) -> int:
    """Codes of a vector, int16."""
    return min(2 * LANES, tile_words)


class Planar:
    """Reads codes [rows, columns] from the planes of a row-major matrix of words."""

    def __init__(
        self,
        emitter: Emitter,
        planes: Sequence[Any],
        widths: Sequence[int],
        tile_words: int,
        in_row: Any,
        rows: int = 0,
    ):
        """planes: pointers to words of these widths, high bits first; in_row: columns of a stored row, a value.

        rows: of those that are read together, see `words_ahead`.
        """
        self.rows = rows
        self.e, self.planes, self.widths = emitter, planes, widths
        self.tile_words, self.in_row = tile_words, in_row
        self.fields = max(FIELDS[w] for w in widths)  # blocks of tile_words codes in a tile
        self.lanes = lanes(tile_words)

    def codes(self, tile: Any, row: Any, block: int, first: int) -> Any:
        """`lanes` codes of a row as int16: those from `first` on of a block of a tile."""
        b, whole = self.e.b, None
        for plane, width in enumerate(self.widths):
            part = self._field(plane, self.word_places(tile, row, plane), block, first)
            shift = self.e.constant(self.e.short, self.lanes, width)
            whole = part if whole is None else b.or_(b.shl(whole, shift), part)
        return whole

    def word_places(self, tile: Any, row: Any, plane: int) -> list[Any]:
        """Return where the words of a tile begin, for each of the words that belong together."""
        e, b, width = self.e, self.e.b, self.widths[plane]
        size = self.tile_words * (self.fields // FIELDS[width])  # words of this plane in a tile of the widest
        in_row = b.udiv(self.in_row, e.i64(FIELDS[width]))
        first = b.add(b.mul(row, b.mul(in_row, e.i64(WORDS[width]))), b.mul(tile, e.i64(size)))
        return [b.add(first, b.mul(in_row, e.i64(i))) for i in range(WORDS[width])]

    def _field(self, plane: int, words: list[Any], block: int, first: int) -> Any:
        e, b, width = self.e, self.e.b, self.widths[plane]
        field = block % FIELDS[width]
        skip = e.i64(block // FIELDS[width] * self.tile_words + first)

        def word(index: int) -> Any:
            value = e.load(self.planes[plane], b.add(words[index], skip), e.short, self.lanes)
            if field == 0:
                ahead = words_ahead(e, self.in_row, width, self.rows)
                e.prefetch(self.planes[plane], b.add(b.add(words[index], skip), ahead), e.short)
            return value

        return field_codes(e, width, field, word)


class NarrowTiles:
    """Reads codes of the tiles of `columns` columns that lie behind the whole tiles of a row of planar words.

    Such a tile has columns / FIELDS words of a plane. They are copied to all lanes, each of which moves its own field
    down, so that codes come in the order of columns.
    """

    def __init__(
        self,
        emitter: Emitter,
        planes: Sequence[Any],
        widths: Sequence[int],
        columns: int,
        in_row: Any,
        before: Any,
        rows: int = 0,
    ):
        """in_row: columns of a stored row; before: those of its whole tiles; both values. rows: see `words_ahead`."""
        self.rows = rows
        self.e, self.planes, self.widths, self.columns = emitter, planes, widths, columns
        self.in_row, self.before = in_row, before

    def codes(self, tile: Any, row: Any, first: int, lanes: int) -> Any:
        """`lanes` codes of a row as int16, from column `first` of a tile on."""
        b, whole = self.e.b, None
        for plane, width in zip(self.planes, self.widths, strict=True):
            part = self._plane(plane, width, tile, row, range(first, first + lanes))
            shift = self.e.constant(self.e.short, lanes, width)
            whole = part if whole is None else b.or_(b.shl(whole, shift), part)
        return whole

    def _plane(self, plane: Any, width: int, tile: Any, row: Any, columns: range) -> Any:
        return self._fields(plane, width, self.columns // FIELDS[width], tile, row, columns)

    def _fields(self, plane: Any, width: int, count: int, tile: Any, row: Any, columns: range) -> Any:
        """Codes of the columns of a tile of a plane, `count` words."""
        e, b = self.e, self.e.b
        fields = self.e.i64(FIELDS[width])
        in_row = b.udiv(self.in_row, fields)
        start = b.add(b.mul(row, b.mul(in_row, e.i64(WORDS[width]))), b.udiv(self.before, fields))
        start = b.add(start, b.mul(tile, e.i64(count)))
        starts = [b.add(start, b.mul(in_row, e.i64(i))) for i in range(WORDS[width])]
        words = [e.load(plane, each, e.short, count) for each in starts]
        if columns[0] == 0 and len(columns) < count * FIELDS[width]:  # the first vector of several
            for each in starts:
                e.prefetch(plane, b.add(each, words_ahead(e, self.in_row, width, self.rows)), e.short)
        places = [divmod(column, count) for column in columns]  # field, word
        mask = e.constant(e.short, len(columns), (1 << width) - 1)
        if width != 3:
            all_words = e.shuffled(words[0], words[0], [j for _, j in places])
            return b.and_(b.lshr(all_words, self._constants([field * width for field, _ in places])), mask)
        pair = e.shuffled(words[0], words[1], list(range(2 * count)))
        third = e.shuffled(words[2], words[2], [i % count for i in range(2 * count)])
        at = [min(field // 5, 2) * count + j for field, j in places]  # of the five fields of each of three words
        codes = b.and_(b.lshr(e.shuffled(pair, third, at), self._constants([f % 5 * 3 for f, _ in places])), mask)
        spare = field_codes(e, 3, 15, lambda i: words[i])
        spare = e.shuffled(spare, spare, [j for _, j in places])
        is_spare = e.ir.Constant(e.vector(e.ir.IntType(1), len(columns)), [field == 15 for field, _ in places])
        return b.select(is_spare, spare, codes)

    def _constants(self, values: list[int]) -> Any:
        return self.e.ir.Constant(self.e.vector(self.e.short, len(values)), values)


class ShortTiles(NarrowTiles):
    """Reads codes of whole tiles of so few words that a vector takes several fields of each."""

    def __init__(
        self, emitter: Emitter, planes: Sequence[Any], widths: Sequence[int], tile_words: int, in_row: Any, rows: int
    ):
        super().__init__(
            emitter, planes, widths, tile_words * max(FIELDS[w] for w in widths), in_row, emitter.i64(0), rows
        )
        self.tile_words = tile_words

    def _plane(self, plane: Any, width: int, tile: Any, row: Any, columns: range) -> Any:
        b, size = self.e.b, self.tile_words * FIELDS[width]  # columns of a tile of this plane
        skipped, first = divmod(columns[0], size)
        own = b.add(b.mul(tile, self.e.i64(self.columns // size)), self.e.i64(skipped))
        return self._fields(plane, width, self.tile_words, own, row, range(first, first + len(columns)))


def words_ahead(e: Emitter, in_row: Any, width: int, rows: int) -> Any:
    """Return how many words of a plane ahead are asked for: with `rows` that are read together, the next such rows."""
    if not rows:
        return e.i64(AHEAD)
    return e.b.mul(e.b.udiv(in_row, e.i64(FIELDS[width])), e.i64(rows * WORDS[width]))


def field_codes(emitter: Emitter, width: int, field: int, word: Callable[[int], Any]) -> Any:
    """Return the codes of a field of words of this width; word(i) reads the i-th of the words that belong together."""
    b = emitter.b

    def bits(index: int, shift: int, mask: int) -> Any:
        value = word(index)
        lanes = value.type.count
        moved = b.lshr(value, emitter.constant(emitter.short, lanes, shift)) if shift else value
        return b.and_(moved, emitter.constant(emitter.short, lanes, mask))

    if width != 3:
        return bits(0, field * width, (1 << width) - 1)
    if field < 15:
        return bits(field // 5, field % 5 * 3, 7)
    spare = [bits(i, 15 - i, 1 << i) for i in range(3)]  # bit 15 of word i is bit i of the sixteenth code
    return b.or_(b.or_(spare[0], spare[1]), spare[2])


def vector_lanes(tile_words: int, span: int) -> int:
    """Return the codes of a vector: those of several fields, where a tile has few words and they share their scales."""
    return SHORTS if span % SHORTS == 0 else lanes(tile_words)


def whole_tiles(
    e: Emitter, planes: Sequence[Any], bits: int, tile_words: int, in_row: Any, vector: int, rows: int = 0
) -> Callable[[Any, Any, int], Any]:
    """Return the function of (tile, row, column of the tile) that reads `vector` codes of whole tiles."""
    if vector > tile_words:
        short = ShortTiles(e, planes, PLANES[bits], tile_words, in_row, rows)
        return lambda tile, row, column: short.codes(tile, row, column, vector)
    planar = Planar(e, planes, PLANES[bits], tile_words, in_row, rows)
    return lambda tile, row, column: planar.codes(tile, row, *divmod(column, tile_words))
