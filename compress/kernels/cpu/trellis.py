"""Multiply with the `trellis` format on a CPU, for the codes that sum the bytes of a product (mul1, 1mad).

    y[m, r] = row_scale[r] scale / divisor * sum over spans u of x_scale[m, u] sum_c (bytes[r, c] - 510) x16[m, c]

Sixteen rows of a column are whole words, in which the windows of all columns lie at the same bits. With parts of a bit,
some sixteens begin in the middle of a word: there is code for each of the two or four places. A vector of words of 32
columns is shifted to the states of a row, whose products mod 2^32 are three products of 16 bits. Their bytes are summed
and kept in the nearest cache (tiled_sums.py). 510 is taken off in the end, times the sum of the activations.
A weight takes a quarter of an instruction, in vectors of 512 bits, however many rows of activations there are, and one
32nd for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.formats import trellis as trellis_format
from compress.formats.trellis import BYTE_SUM_CENTRE, BYTE_SUMS, PARTS, Params, step_bits
from compress.kernels import llvm
from compress.kernels.contract import Decoder, Shape
from compress.kernels.cpu import emitter, small_matmul
from compress.kernels.cpu.emitter import LANES, PRODUCT
from compress.kernels.cpu.small_matmul import Factors, Product, ProductSizes
from compress.kernels.cpu.tiled_sums import CHUNK, ROWS, SPACE, TiledSums

TOGETHER = 64  # rows of activations in one call: their sums stay in a processor's cache
SPAN = 512  # columns that share the scale of an activation: their sums stay below 2^31


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> Product | None:
    """Return the product with a weight whose code sums the bytes of a product."""
    return _TrellisProduct(tensors, params, shape) if emitter.worthwhile(shape) and params.code in BYTE_SUMS else None


class _TrellisProduct(Product):
    def __init__(self, tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> None:
        rows, spans = trellis_format.padded_rows(params, shape[0]), -(-shape[1] // SPAN)
        layout = ProductSizes(shape[1], shape[0], spans * SPAN, rows, SPAN, SPAN, SPACE + 1)
        sizes = {"columns": shape[1], "spans": spans, "rows": rows, "tile_blocks": params.tile_rows // ROWS}
        by_row = tensors["row_scales"].data_ptr() if params.row_scales else 0
        factors = Factors(tensors["scale"].data_ptr(), by_row, BYTE_SUMS[params.code][2])
        super().__init__(tensors, params, shape, layout, {"words": tensors["words"].data_ptr()}, sizes, factors)

    def kernel(self, tokens: int) -> llvm.Function:
        factor, addend, _ = BYTE_SUMS[self.params.code]
        return llvm.function(_TrellisSums, self.params.bits, self.params.state_bits, factor, addend)

    def most_rows(self, dtype: torch.dtype) -> int:
        """Any number, but where products of bfloat16 are faster than those of int16."""
        is_slower = dtype == torch.float16 or emitter.widens(dtype)
        return emitter.EVERY if is_slower else super().most_rows(dtype)

    def together(self, tokens: int) -> int:
        return min(tokens, TOGETHER)

    def decoder(self, dtype: torch.dtype) -> Decoder:
        params = self.params
        settings = (params.bits, params.state_bits, *BYTE_SUMS[params.code], params.row_scales, dtype)
        values = {**self.stored, **self.sizes, **self.factors.by_name}
        return small_matmul.in_rows(llvm.function(_TrellisRows, *settings), values, self.shape[1])


class _Trellis(emitter.Writer):
    """Turns words into the bytes that are summed, for both functions."""

    words: Any
    columns: Any
    tile_blocks: Any

    def __init__(
        self,
        name: str,
        pointers: str,
        integers: str,
        bits: float,
        state_bits: int,
        hash: tuple[int, int],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(name, pointers, integers, dtype)
        self.parts, self.state_bits = int(PARTS * bits), state_bits
        self.starts = [i * ROWS * self.parts // PARTS % 16 for i in range(len(step_bits(bits)))]
        self.factor, self.addend = hash
        self.int32 = self.vector(self.word, LANES)

    def _lines(self, block: Any) -> list[Any]:
        """Offsets of the lines of words of sixteen rows, the one before them first: the stream is circular."""
        b, line = self.b, self._first_line(block)
        in_tile = b.urem(block, self.tile_blocks)
        wrapped = b.add(line, b.sub(self._first_line(self.tile_blocks), self.i64(1)))
        before = b.select(b.icmp_signed("==", in_tile, self.i64(0)), wrapped, b.sub(line, self.i64(1)))
        lines = [before, *(b.add(line, self.i64(i)) for i in range(self.count_lines(max(self.starts))))]
        return [b.mul(each, self.columns) for each in lines]

    def _first_line(self, block: Any) -> Any:
        """The line in which the bits of sixteen rows begin."""
        return self.b.udiv(self.b.mul(block, self.i64(self.parts)), self.i64(PARTS))

    def count_lines(self, skipped: int) -> int:
        """The lines that hold bits of sixteen rows, with the bits of the first line that are not theirs."""
        return -(-(skipped + self.end(ROWS - 1)) // 16)

    def by_start(self, block: Any, write: Callable[[int], None]) -> None:
        """Write write(bits of the first line that are not those of the sixteen rows) for all that `block` can be."""
        self._by_number(self.b.urem(block, self.i64(len(self.starts))), 0, write)

    def _by_number(self, number: Any, first: int, write: Callable[[int], None]) -> None:
        """Write what `by_start` does for a number among `starts` that is `first` at least."""
        if first + 1 == len(self.starts):
            write(self.starts[first])
            return
        with self.b.if_else(self.b.icmp_signed("==", number, self.i64(first))) as (here, later):
            with here:
                write(self.starts[first])
            with later:
                self._by_number(number, first + 1, write)

    def _windows(self, words: dict[int, Any], lines: list[Any], end: int, column: Any, rest: Any) -> Any:
        """States whose last bit is number `end` from the first line on, in a vector of columns.

        `words` keeps the lines that were read.
        """
        line = (end - 1) // 16
        for needed in (line, line + 1):
            if needed not in words:
                words[needed] = self._line(self.b.add(lines[needed], column), rest)
        return self._states(words[line], words[line + 1], 16 * (line + 1) - end)

    def end(self, row: int) -> int:
        """Where the bits of a row of sixteen end, counted from the first bit of the sixteen."""
        return (row + 1) * self.parts // PARTS

    def _line(self, offset: Any, rest: Any) -> Any:
        return self.load_some(self.words, offset, self.short, CHUNK, rest)

    def _states(self, before: Any, words: Any, shift: int) -> Any:
        """The windows that end `shift` bits before the end of `words`, int16."""
        b, places = self.b, self._shorts(shift)
        if shift + self.state_bits <= 16:
            window = b.lshr(words, places)
        else:
            window = self.intrinsic(f"llvm.fshr.v{CHUNK}i16", words.type, before, words, places)
        return window if shift + self.state_bits == 16 else b.and_(window, self._shorts((1 << self.state_bits) - 1))

    def _byte_sums(self, states: Any) -> Any:
        """The sums of the four bytes, int16."""
        low, high = self._hash(states)
        return self.b.add(self._both_bytes(low), self._both_bytes(high))

    def _hash(self, states: Any) -> tuple[Any, Any]:
        """The low and the high halves of states * factor + addend mod 2^32, int16."""
        b = self.b
        low = b.mul(states, self._shorts(self.factor))
        high = b.add(self._high_half(states, self.factor & 0xFFFF), b.mul(states, self._shorts(self.factor >> 16)))
        if not self.addend:
            return low, high
        low = b.add(low, self._shorts(self.addend))
        carry = b.zext(b.icmp_unsigned("<", low, self._shorts(self.addend)), low.type)
        return low, b.add(b.add(high, self._shorts(self.addend >> 16)), carry)

    def _high_half(self, values: Any, factor: int) -> Any:
        """The high halves of values * factor; one instruction, which LLVM finds."""
        b, wide = self.b, self.vector(self.word, CHUNK)
        product = b.mul(b.zext(values, wide), self.constant(self.word, CHUNK, factor))
        return b.trunc(b.lshr(product, self.constant(self.word, CHUNK, 16)), values.type)

    def _both_bytes(self, values: Any) -> Any:
        return self.byte_pairs(self.b.bitcast(values, self.int32))

    def _shorts(self, value: int) -> Any:
        return self.constant(self.short, CHUNK, value & 0xFFFF)


class _TrellisSums(_Trellis, TiledSums):
    """Sums rows of the weight times any number of rows of activations; `tile_blocks`: sixteens of rows of a tile."""

    span = SPAN

    def __init__(self, bits: float, state_bits: int, factor: int, addend: int) -> None:
        integers = "first last columns spans rows tile_blocks tokens"
        super().__init__("product", f"words {PRODUCT}", integers, bits, state_bits, (factor, addend))
        self.words, self.x16, self.x_scales, self.x_sums, self.out, self.space = self.pointers
        first, last, self.columns, self.spans, self.rows, self.tile_blocks, self.tokens = self.integers
        with self.loop(self.tokens) as m:
            sums = self.scaled_sums(self.x_scales, self.x_sums, m, self.spans)
            self.store(self.b.fmul(self.float(BYTE_SUM_CENTRE), sums), self.space, self.further(m))
        self.write(first, last, SPAN)

    def start_block(self, block: Any) -> None:
        self.block, self.lines = block, self._lines(block)

    def add_columns(self) -> None:
        b = self.b
        with self.loop(self.spans) as u:
            start = b.mul(u, self.i64(SPAN))
            width = self.smaller(b.sub(self.columns, start), self.i64(SPAN))
            decode = partial(self._chunk, start)
            self.by_start(self.block, lambda skipped: self.in_chunks(width, CHUNK, partial(decode, skipped)))
            count = b.udiv(b.add(width, self.i64(CHUNK - 1)), self.i64(CHUNK))
            self.add_span(u, self.i64(0), self.i64(0), count)

    def _chunk(self, start: Any, skipped: int, first: Any, rest: Any) -> None:
        """Decode a vector of columns, of `rest` ones only if it is given; skipped: bits of the first line."""
        b, words = self.b, dict[int, Any]()
        column = b.add(start, first)
        if rest is None:
            next_block = b.mul(self.columns, self.i64(self.count_lines(skipped)))
            for line in self.lines[1 : self.count_lines(skipped) + 1]:
                self.prefetch(self.words, b.add(b.add(line, column), next_block), self.short)
        for row in range(ROWS):
            sums = self._byte_sums(self._windows(words, self.lines, skipped + self.end(row), column, rest))
            self.store(sums, self.decoded, b.add(first, self.i64(row * SPAN)))

    def scale(self, u: Any, row: Any, token: Any) -> Any:
        return self.load(self.x_scales, self.b.add(self.b.mul(self.spans, token), u), self.float)

    def surplus(self, token: Any) -> Any:
        return self.splat(self.load(self.space, self.further(token), self.float), LANES)


class _TrellisRows(_Trellis):
    """Writes rows of the weight."""

    def __init__(
        self, bits: float, state_bits: int, factor: int, addend: int, divisor: float, by_row: bool, dtype: torch.dtype
    ) -> None:
        integers = "first last start stop columns tile_blocks"
        super().__init__("decode", "words scale row_scales out", integers, bits, state_bits, (factor, addend), dtype)
        self.words, scale, self.row_scales, self.out = self.pointers
        first, last, self.start, self.stop, self.columns, self.tile_blocks = self.integers
        self.by_row, self.high, self.low = by_row, *two_floats(1 / divisor)
        self.scale = self.splat(self.load(scale, self.i64(0), self.float), CHUNK)
        with self.loop(last, first) as block:
            decode = partial(self._chunk, block, self._lines(block))
            self.by_start(block, lambda skipped: self.in_chunks(self.columns, CHUNK, partial(decode, skipped)))
        self.b.ret_void()

    def _chunk(self, block: Any, lines: list[Any], skipped: int, column: Any, rest: Any) -> None:
        b = self.b
        lines = lines[: self.count_lines(skipped) + 1]
        words = {i: self._line(b.add(line, column), rest) for i, line in enumerate(lines)}
        for i in range(ROWS):
            row = b.add(b.mul(block, self.i64(ROWS)), self.i64(i))
            with b.if_then(b.icmp_signed("<", row, self.stop)):
                sums = self._byte_sums(self._windows(words, lines, skipped + self.end(i), column, rest))
                place = b.add(b.mul(b.sub(row, self.start), self.columns), column)
                self.store_some(self.rounded(self._values(sums, row)), self.out, place, rest)

    def _values(self, sums: Any, row: Any) -> Any:
        """Weights, float32."""
        b, kind = self.b, self.vector(self.float, CHUNK)
        centred = b.sitofp(b.sub(sums, self._shorts(BYTE_SUM_CENTRE)), kind)
        low = b.fmul(centred, self.constant(self.float, CHUNK, self.low))
        value = self.intrinsic(f"llvm.fma.v{CHUNK}f32", kind, centred, self.constant(self.float, CHUNK, self.high), low)
        value = b.fmul(value, self.scale)
        if not self.by_row:
            return value
        return b.fmul(value, self.splat(self.load_floats(self.row_scales, row, torch.float16), CHUNK))


def two_floats(value: float) -> tuple[float, float]:
    """Float32 numbers whose sum is the value to 48 bits. n * (1 / divisor) with them, in a fused multiply-add, is n /
    divisor to the bit for all sums of four bytes, as the tests say."""
    high = torch.tensor(value, dtype=torch.float64, device="cpu").float().item()
    return high, torch.tensor(value - high, dtype=torch.float64, device="cpu").float().item()
