"""The `trellis` format on a CPU, for the codes that sum the bytes of a product (mul1, 1mad).

    y[m, r] = row_scale[r] scale / divisor * sum over spans u of x_scale[m, u] sum_c (bytes[r, c] - 510) x16[m, c]

Sixteen rows at a time: the windows of all columns of a row lie at the same bits of their words, so that one shift of
whole vectors of words gives their states, one multiplication the words whose bytes are summed, pairwise and then with
the activation twice. 510 is taken off the sums, times the sum of the activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from compress import jit
from compress.formats import trellis as trellis_format
from compress.formats.trellis import BYTE_SUMS, CENTRE, Params
from compress.kernels.cpu import rows
from compress.kernels.cpu.rows import LANES

ROWS = trellis_format.ROW_MULTIPLE
SPAN = 512  # columns that share the scale of an activation: their sums stay below 2^31
CHUNK = 2 * LANES  # columns of one vector of words


def supports(params: Params, shape: tuple[int, int]) -> bool:
    return rows.worthwhile(shape) and params.code in BYTE_SUMS


def most_rows(params: Params, shape: tuple[int, int], dtype: torch.dtype) -> int:
    return rows.MOST


def matmul(x: Tensor, tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> Tensor:
    """x [rows, in] of any floating type times the stored weight [out, in] -> float32 [rows, out]."""
    padded = trellis_format.padded_rows(params, shape[0])
    spans = -(-shape[1] // SPAN)
    factor, addend, divisor = BYTE_SUMS[params.code]
    out = torch.empty(x.shape[0], padded, dtype=torch.float32, device="cpu")

    def product(tokens: int, given: list[int]) -> None:
        kernel = _compiled(params.bits, params.state_bits, factor, addend, tokens)

        def work(first: int, last: int) -> None:
            sizes = (first, last, shape[1], spans, padded, params.tile_rows // ROWS)
            kernel(tensors["words"].data_ptr(), *given, *sizes)

        jit.parallel(work, padded // ROWS, rows.blocks_of_a_thread(shape[1], tokens))

    rows.by_tokens(x, spans * SPAN, SPAN, CHUNK, out, product)
    out = out[:, : shape[0]].mul_(tensors["scale"] / divisor)
    return out.mul_(tensors["row_scales"][: shape[0]].float()) if params.row_scales else out


@cache
def _compiled(*settings: int) -> Any:
    return jit.compiled(_Product(*settings))


class _Product(rows.Emitter):
    """void product(words, x16, x_scales, x_sums, out, first, last, columns, spans, rows, blocks of a tile)."""

    def __init__(self, bits: int, state_bits: int, factor: int, addend: int, tokens: int) -> None:
        super().__init__("product", 5, 6)
        self.bits, self.mask = bits, (1 << state_bits) - 1
        self.factor, self.addend, self.tokens = factor, addend, tokens
        self.words, self.x16, self.x_scales, self.x_sums, self.out = self.pointers
        first, last, self.columns, self.spans, self.rows, self.tile_blocks = self.integers
        self.together = ROWS // tokens  # rows whose sums fit the registers
        self.kind, self.int32 = self.vector(self.float, LANES), self.vector(self.word, LANES)
        self.sums = [[self.variable(self.kind) for _ in range(tokens)] for _ in range(self.together)]
        self.partial = [[self.variable(self.int32) for _ in range(tokens)] for _ in range(self.together)]
        with self.loop(last, first) as block:
            lines = self._lines(block)
            for row in range(0, ROWS, self.together):
                self._rows(block, lines, row)
        self.b.ret_void()

    def _lines(self, block: Any) -> list[Any]:
        """Offsets of the lines of words of sixteen rows, the one before them first: the stream is circular."""
        b = self.b
        line = b.mul(block, self.i64(self.bits))
        in_tile = b.urem(block, self.tile_blocks)
        wrapped = b.add(line, b.sub(b.mul(self.tile_blocks, self.i64(self.bits)), self.i64(1)))
        before = b.select(b.icmp_signed("==", in_tile, self.i64(0)), wrapped, b.sub(line, self.i64(1)))
        lines = [before, *(b.add(line, self.i64(i)) for i in range(self.bits))]
        return [b.mul(each, self.columns) for each in lines]

    def _rows(self, block: Any, lines: list[Any], row: int) -> None:
        b = self.b
        for sums in self.sums:
            for variable in sums:
                b.store(self.floats(0.0), variable)
        with self.loop(self.spans) as u:
            self._span(u, lines, row)
        for m in range(self.tokens):
            taken = self._taken(m)
            for i in range(self.together):
                offset = b.add(b.mul(self.rows, self.i64(m)), b.add(b.mul(block, self.i64(ROWS)), self.i64(row + i)))
                self.store(b.fsub(self.total(b.load(self.sums[i][m])), taken), self.out, offset)

    def _taken(self, m: int) -> Any:
        """510 times the sum of the activations."""
        b, total = self.b, self.variable(self.float)
        b.store(self.float(0.0), total)
        with self.loop(self.spans) as u:
            cell = b.add(b.mul(self.spans, self.i64(m)), u)
            product = b.fmul(self.load(self.x_scales, cell, self.float), self.load(self.x_sums, cell, self.float))
            b.store(b.fadd(b.load(total), product), total)
        return b.fmul(b.load(total), self.float(float(CENTRE)))

    def _span(self, u: Any, lines: list[Any], row: int) -> None:
        b = self.b
        for partial in self.partial:
            for variable in partial:
                b.store(self.constant(self.word, LANES, 0), variable)
        start = b.mul(u, self.i64(SPAN))
        left = b.sub(self.columns, start)
        width = b.select(b.icmp_signed("<", left, self.i64(SPAN)), left, self.i64(SPAN))
        whole = b.udiv(width, self.i64(CHUNK))
        with self.loop(whole) as chunk:
            self._chunk(b.add(start, b.mul(chunk, self.i64(CHUNK))), None, lines, row)
        rest = b.urem(width, self.i64(CHUNK))
        with b.if_then(b.icmp_signed(">", rest, self.i64(0))):
            self._chunk(b.add(start, b.mul(whole, self.i64(CHUNK))), rest, lines, row)
        for m in range(self.tokens):
            scale = self.load(self.x_scales, b.add(b.mul(self.spans, self.i64(m)), u), self.float)
            factor = self.splat(scale, LANES)
            for i in range(self.together):
                partial = b.sitofp(b.load(self.partial[i][m]), self.kind)
                b.store(self.multiply_add(partial, factor, b.load(self.sums[i][m])), self.sums[i][m])

    def _chunk(self, column: Any, rest: Any, lines: list[Any], row: int) -> None:
        """Add the products of a vector of columns, of `rest` ones only if it is given."""
        b = self.b
        words: dict[int, Any] = {}
        inputs = [self._inputs(column, m) for m in range(self.tokens)]
        for i in range(self.together):
            end = (row + i + 1) * self.bits  # of the row's bits, in the stream from the first row of sixteen on
            line = (end - 1) // 16
            for needed in (line, line + 1):
                if needed not in words:
                    words[needed] = self._line(b.add(lines[needed], column), rest)
            states = self._states(words[line], words[line + 1], 16 * (line + 1) - end)
            for sums, part in zip(self._byte_sums(states), (0, 1), strict=True):
                for m in range(self.tokens):
                    total = b.add(b.load(self.partial[i][m]), self.pair_sums(sums, inputs[m][part]))
                    b.store(total, self.partial[i][m])

    def _line(self, offset: Any, rest: Any) -> Any:
        if rest is None:
            return self.load(self.words, offset, self.short, CHUNK)
        return self.load_some(self.words, offset, self.short, CHUNK, rest)

    def _inputs(self, column: Any, m: int) -> tuple[Any, Any]:
        """Each even, and each odd, activation twice, as int16."""
        b, both = self.b, self.vector(self.short, CHUNK)
        offset = b.add(b.mul(column, self.i64(self.tokens)), self.i64(m * CHUNK))
        x = b.bitcast(self.load(self.x16, offset, self.short, CHUNK), self.int32)
        half, low = self.constant(self.word, LANES, 16), self.constant(self.word, LANES, 0xFFFF)
        even = b.or_(b.and_(x, low), b.shl(x, half))
        odd = b.or_(b.lshr(x, half), b.and_(x, self.constant(self.word, LANES, -0x10000)))
        return b.bitcast(even, both), b.bitcast(odd, both)

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
