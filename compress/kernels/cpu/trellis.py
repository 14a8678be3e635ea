"""Multiply with the `trellis` format on a CPU, for the codes that sum the bytes of a product (mul1, 1mad).

    y[m, r] = row_scale[r] scale / divisor * sum over spans u of x_scale[m, u] sum_c (bytes[r, c] - 510) x16[m, c]

Sixteen rows at a time: the windows of all columns of a row lie at the same bits of their words, so that one shift of
whole vectors of words gives their states, one multiplication the words whose bytes are summed, pairwise and then with
the activation twice. 510 is taken off the sums, times the sum of the activations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.formats import trellis as trellis_format
from compress.formats.trellis import BYTE_SUMS, CENTRE, Params
from compress.kernels import llvm
from compress.kernels.contract import Decoder, Shape
from compress.kernels.cpu import emitter, row_decoder
from compress.kernels.cpu.emitter import LANES
from compress.kernels.cpu.small_matmul import Factors, Layout, Product, SpanSums

ROWS = trellis_format.ROW_MULTIPLE
SPAN = 512  # columns that share the scale of an activation: their sums stay below 2^31
CHUNK = 2 * LANES  # columns of one vector of words


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> Product | None:
    """Return the product with a weight whose code sums the bytes of a product."""
    return _Product(tensors, params, shape) if emitter.worthwhile(shape) and params.code in BYTE_SUMS else None


class _Product(Product):
    def __init__(self, tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> None:
        rows, spans = trellis_format.padded_rows(params, shape[0]), -(-shape[1] // SPAN)
        layout = Layout(shape[1], shape[0], spans * SPAN, rows, SPAN, CHUNK, 0)
        sizes = (shape[1], spans, rows, params.tile_rows // ROWS)
        by_row = tensors["row_scales"].data_ptr() if params.row_scales else 0
        factors = Factors(tensors["scale"].data_ptr(), by_row, BYTE_SUMS[params.code][2])
        super().__init__(tensors, params, shape, layout, [tensors["words"].data_ptr()], sizes, factors)

    def kernel(self, tokens: int) -> Callable[..., None]:
        factor, addend, _ = BYTE_SUMS[self.params.code]
        return llvm.function(_Sums, self.params.bits, self.params.state_bits, factor, addend, tokens)

    def decoder(self, dtype: torch.dtype) -> Decoder:
        params = self.params
        settings = (params.bits, params.state_bits, *BYTE_SUMS[params.code], params.row_scales, dtype)
        stored = (*self.stored, *self.factors.addresses)
        sizes = (self.shape[1], params.tile_rows // ROWS)
        return row_decoder.in_rows(llvm.function(_Decode, *settings), stored, sizes, self.shape[1])


class _Trellis(row_decoder.Writer):
    """Turns words into the bytes that are summed, for both functions."""

    words: Any
    columns: Any
    tile_blocks: Any

    def __init__(
        self,
        name: str,
        pointers: int,
        integers: int,
        bits: int,
        state_bits: int,
        hash: tuple[int, int],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(name, pointers, integers, dtype)
        self.bits, self.mask = bits, (1 << state_bits) - 1
        self.factor, self.addend = hash
        self.kind, self.int32 = self.vector(self.float, LANES), self.vector(self.word, LANES)

    def _lines(self, block: Any) -> list[Any]:
        """Offsets of the lines of words of sixteen rows, the one before them first: the stream is circular."""
        b = self.b
        line = b.mul(block, self.i64(self.bits))
        in_tile = b.urem(block, self.tile_blocks)
        wrapped = b.add(line, b.sub(b.mul(self.tile_blocks, self.i64(self.bits)), self.i64(1)))
        before = b.select(b.icmp_signed("==", in_tile, self.i64(0)), wrapped, b.sub(line, self.i64(1)))
        lines = [before, *(b.add(line, self.i64(i)) for i in range(self.bits))]
        return [b.mul(each, self.columns) for each in lines]

    def _windows(self, words: dict[int, Any], lines: list[Any], row: int, column: Any, rest: Any) -> Any:
        """States of a row of sixteen in a vector of columns; `words` keeps the lines that were read."""
        end = (row + 1) * self.bits  # of the row's bits, in the stream from the first row of sixteen on
        line = (end - 1) // 16
        for needed in (line, line + 1):
            if needed not in words:
                words[needed] = self._line(self.b.add(lines[needed], column), rest)
        return self._states(words[line], words[line + 1], 16 * (line + 1) - end)

    def _line(self, offset: Any, rest: Any) -> Any:
        return self.load_some(self.words, offset, self.short, CHUNK, rest)

    def _states(self, before: Any, words: Any, shift: int) -> Any:
        """The windows that end `shift` bits before the end of `words`, int16."""
        b, kind = self.b, self.vector(self.short, CHUNK)
        places = self.constant(self.short, CHUNK, shift)
        window = self.intrinsic(f"llvm.fshr.v{CHUNK}i16", kind, before, words, places) if shift else words
        return window if self.mask == 0xFFFF else b.and_(window, self.constant(self.short, CHUNK, self.mask))

    def _byte_sums(self, states: Any) -> tuple[Any, Any]:
        """For even and odd columns two int16 that add up to the sum of the four bytes."""
        b = self.b
        wide, low = b.bitcast(states, self.int32), self.constant(self.word, LANES, 0xFFFF)
        sums = []
        for part in (b.and_(wide, low), b.lshr(wide, self.constant(self.word, LANES, 16))):
            product = b.mul(part, self.constant(self.word, LANES, self.factor))
            if self.addend:
                product = b.add(product, self.constant(self.word, LANES, self.addend))
            sums.append(self.byte_pairs(product))
        return sums[0], sums[1]


class _Sums(_Trellis, SpanSums):
    """void product(words, x16, x_scales, x_sums, out, space, first, last, columns, spans, rows, blocks of a tile)."""

    def __init__(self, bits: int, state_bits: int, factor: int, addend: int, tokens: int) -> None:
        super().__init__("product", 6, 6, bits, state_bits, (factor, addend))
        self.words, self.x16, self.x_scales, self.x_sums, self.out, _ = self.pointers
        first, last, self.columns, self.spans, self.rows, self.tile_blocks = self.integers
        self.allocate(ROWS // tokens, tokens, bias=CENTRE)  # rows whose sums fit the registers
        with self.loop(last, first) as block:
            lines = self._lines(block)
            for row in range(0, ROWS, self.together):
                start = self.b.add(self.b.mul(block, self.i64(ROWS)), self.i64(row))
                self.sum_rows(start, partial(self._add_span, lines, row))
        self.b.ret_void()

    def _add_span(self, lines: list[Any], row: int, u: Any) -> None:
        b = self.b
        start = b.mul(u, self.i64(SPAN))
        width = self.smaller(b.sub(self.columns, start), self.i64(SPAN))
        self.in_chunks(width, CHUNK, lambda first, rest: self._chunk(b.add(start, first), rest, lines, row))

    def _chunk(self, column: Any, rest: Any, lines: list[Any], row: int) -> None:
        """Add the products of a vector of columns, of `rest` ones only if it is given."""
        b = self.b
        words: dict[int, Any] = {}
        inputs = [self._inputs(column, m) for m in range(self.tokens)]
        for i in range(self.together):
            states = self._windows(words, lines, row + i, column, rest)
            for sums, part in zip(self._byte_sums(states), (0, 1), strict=True):
                for m in range(self.tokens):
                    total = b.add(b.load(self.partial[i, m, 0]), self.pair_sums(sums, inputs[m][part]))
                    b.store(total, self.partial[i, m, 0])

    def _inputs(self, column: Any, m: int) -> tuple[Any, Any]:
        """Each even, and each odd, activation twice, as int16."""
        b, both = self.b, self.vector(self.short, CHUNK)
        offset = b.add(b.mul(column, self.i64(self.tokens)), self.i64(m * CHUNK))
        x = b.bitcast(self.load(self.x16, offset, self.short, CHUNK), self.int32)
        half, low = self.constant(self.word, LANES, 16), self.constant(self.word, LANES, 0xFFFF)
        even = b.or_(b.and_(x, low), b.shl(x, half))
        odd = b.or_(b.lshr(x, half), b.and_(x, self.constant(self.word, LANES, -0x10000)))
        return b.bitcast(even, both), b.bitcast(odd, both)


class _Decode(_Trellis):
    """void decode(words, scale, row scales, out, first, last, start, stop, columns, blocks of a tile)."""

    def __init__(
        self, bits: int, state_bits: int, factor: int, addend: int, divisor: float, by_row: bool, dtype: torch.dtype
    ) -> None:
        super().__init__("decode", 4, 6, bits, state_bits, (factor, addend), dtype)
        self.words, scale, self.row_scales, self.out = self.pointers
        first, last, self.start, self.stop, self.columns, self.tile_blocks = self.integers
        self.by_row, self.high, self.low = by_row, *two_floats(1 / divisor)
        self.scale = self.splat(self.load(scale, self.i64(0), self.float), LANES)
        with self.loop(last, first) as block:
            self.in_chunks(self.columns, CHUNK, partial(self._chunk, block, self._lines(block)))
        self.b.ret_void()

    def _chunk(self, block: Any, lines: list[Any], column: Any, rest: Any) -> None:
        b = self.b
        words = {i: self._line(b.add(line, column), rest) for i, line in enumerate(lines)}
        for i in range(ROWS):
            row = b.add(b.mul(block, self.i64(ROWS)), self.i64(i))
            with b.if_then(b.icmp_signed("<", row, self.stop)):
                parts = [
                    self._values(sums, row) for sums in self._byte_sums(self._windows(words, lines, i, column, rest))
                ]
                values = self.rounded(self.shuffled(parts[0], parts[1], [j // 2 + j % 2 * LANES for j in range(CHUNK)]))
                place = b.add(b.mul(b.sub(row, self.start), self.columns), column)
                self.store_some(values, self.out, place, rest)

    def _values(self, sums: Any, row: Any) -> Any:
        """Weights of every other column, float32."""
        b = self.b
        total = self.pair_sums(sums, self.constant(self.short, CHUNK, 1))
        centred = b.sitofp(b.sub(total, self.constant(self.word, LANES, CENTRE)), self.kind)
        low = b.fmul(centred, self.floats(self.low))
        value = self.intrinsic(f"llvm.fma.v{LANES}f32", self.kind, centred, self.floats(self.high), low)
        value = b.fmul(value, self.scale)
        if not self.by_row:
            return value
        return b.fmul(value, self.splat(self.load_floats(self.row_scales, row, torch.float16), LANES))


def two_floats(value: float) -> tuple[float, float]:
    """Float32 numbers whose sum is the value to 48 bits. n * (1 / divisor) with them, in a fused multiply-add, is n /
    divisor to the bit for all sums of four bytes, as the tests say."""
    high = torch.tensor(value, dtype=torch.float64, device="cpu").float().item()
    return high, torch.tensor(value - high, dtype=torch.float64, device="cpu").float().item()
