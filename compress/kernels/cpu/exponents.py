"""Multiply with and decode the `exponents` format, bfloat16 weights without loss, on a CPU.

Ranked codes are multiplied as they are: codes and fractions become bfloat16 in registers, as `dense` reads them, and
the products of escapes, which are 0 there, are added behind. What is multiplied is the weight itself, every bit of it;
sums are float32, in another order than that of torch. For more than `MOST` rows of activations, and with Huffman codes
for any number of them, the whole weight is decoded and torch multiplies: bit for bit what the plain weight gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.formats import exponents
from compress.formats.exponents import Params
from compress.kernels import llvm
from compress.kernels.calls import ActivationRows, CompiledCall, Take, run
from compress.kernels.contract import Joined, Prepared, Shape
from compress.kernels.cpu import dense, emitter, huffman
from compress.kernels.cpu.dots import HIGH, register_lanes
from compress.kernels.cpu.emitter import LANES, THREAD, Emitter

MOST = 8  # rows of activations up to which the product beats decoding and F.linear
PAIR = 2 * LANES  # columns of the codes that are loaded together


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> Prepared | None:
    """Return the product with a ranked weight, or the decoder of one with Huffman codes."""
    if not emitter.worthwhile(shape):
        return None
    if params.coding == "ranked":
        kind = _RankedProduct if shape[1] % 2 == 0 else _DecodedWeight
        return kind(tensors, params, shape)
    return _DecodedWeight(tensors, params, shape) if params.stream >= huffman.WORD else None


def look_up(tensors: Mapping[str, Tensor], params: Params, shape: Shape, ids: Tensor, dtype: torch.dtype) -> Any:
    """Return the rows ids [n] of a weight with Huffman codes, [n, in]; None where the format is as fast by itself."""
    if params.coding != "huffman" or params.stream < huffman.WORD or not llvm.available():
        return None
    return _decode_huffman(tensors, params, shape, ids.long()).to(dtype)


def _decode_huffman(tensors: Mapping[str, Tensor], params: Params, shape: Shape, rows: Tensor | None = None) -> Tensor:
    """Return a weight, or some of its rows, bfloat16."""
    sizes, fractions = tensors["sizes"].long(), tensors["fractions"]
    begins = sizes.cumsum(0) - sizes
    if rows is not None:
        begins, fractions = begins[rows], fractions[rows]
    table = huffman.known_table(tensors["lengths"].detach().numpy().tobytes())
    return huffman.decode(tensors["stream"], begins, table, fractions)


def _decode_ranked(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> Tensor:
    """Return a weight bfloat16."""
    rows, columns = shape
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device="cpu")
    function = llvm.function(_DecodeRanked)
    pieces = tensors["fractions"], tensors["codes"], out
    given = {"columns": columns, "base": params.base, "pitch": exponents.code_bytes(columns)}

    def work(first: int, last: int) -> None:
        function(*function.signature.arguments(*pieces, first=first, last=last, **given))

    llvm.parallel(work, rows, max(1, THREAD // columns))
    if params.escapes:
        out.view(torch.int16).view(-1)[tensors["escapes"].long()] = tensors["escaped"]
    return out


class _DecodedWeight(Prepared):
    """A weight that is decoded as a whole, so that torch multiplies it as it does the plain one."""

    types = (torch.bfloat16, torch.float16, torch.float32)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.decode(x.dtype))

    def most_rows(self, dtype: torch.dtype) -> int:
        return 0

    def decode(self, dtype: torch.dtype) -> Tensor:
        decode = _decode_huffman if self.params.coding == "huffman" else _decode_ranked
        return decode(self.tensors, self.params, self.shape).to(dtype)


class _RankedProduct(_DecodedWeight):
    """A weight of ranked codes with an even number of columns, so that each row begins with a whole byte of codes."""

    def __init__(self, tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> None:
        super().__init__(tensors, params, shape)
        self.escapes: tuple[Tensor, ...] | None = None

    def most_rows(self, dtype: torch.dtype) -> int:
        return MOST

    def __call__(self, x: Tensor) -> Tensor:
        return _multiply((self,), x)

    def fuse(self, others: Sequence[Prepared]) -> Joined | None:
        return None if _select_ranked((self, *others)) is None else _multiply

    def calls(self, rows: ActivationRows, take: Take, others: Sequence[Prepared] = ()) -> Iterator[CompiledCall] | None:
        parts = _select_ranked((self, *others))
        return None if parts is None else _calls(parts, rows, take)

    def call(self, rows: ActivationRows, x: int) -> CompiledCall:
        """Return what multiplies with activations float32 at x, as `Spread` writes them."""
        outputs, inputs = self.shape
        escapes = self.escapes = self.escapes or _escapes_by_blocks(self.tensors, self.shape)
        function, total = llvm.function(_Ranked, rows.dtype), -(-outputs // LANES)
        given = dict(zip(("starts", "lanes", "places", "values"), (t.data_ptr() for t in escapes), strict=True))
        given |= {"weight": self.tensors["fractions"].data_ptr(), "codes": self.tensors["codes"].data_ptr()}
        given |= {"x": x, "bias": 0, "out": rows.target, "first": 0, "last": total, "rows": rows.count}
        given |= {"inputs": inputs, "outputs": outputs, "width": rows.width, "base": self.params.base}
        arguments = function.signature.arguments(**given)
        names = (*function.signature.pointers, *function.signature.integers)
        return CompiledCall(
            function, arguments, total, -(-THREAD // (LANES * inputs * rows.count)), names.index("first")
        )


def _select_ranked(kernels: Sequence[Prepared]) -> list[_RankedProduct] | None:
    """Return kernels that read activations alike; None if they do not."""
    ranked = [kernel for kernel in kernels if isinstance(kernel, _RankedProduct)]
    return ranked if len(ranked) == len(kernels) and len({each.shape[1] for each in ranked}) == 1 else None


def _multiply(kernels: Sequence[_RankedProduct], x: Tensor) -> Tensor:
    """Return x [..., in] times all weights, outputs behind each other."""
    width, memory = sum(kernel.shape[0] for kernel in kernels), list[Tensor]()
    out = x.new_empty(*x.shape[:-1], width)

    def take(nbytes: int) -> int:
        memory.append(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
        return memory[-1].data_ptr()

    rows = ActivationRows(x.numel() // x.shape[-1], x.dtype, x.data_ptr(), out.data_ptr(), width)
    run(_calls(kernels, rows, take))
    return out


def _calls(kernels: Sequence[_RankedProduct], rows: ActivationRows, take: Take) -> Iterator[CompiledCall]:
    """Yield what multiplies rows with all weights, outputs behind each other."""
    inputs = kernels[0].shape[1]
    place = take(4 * min(rows.count, dense.PIECE) * dense.padded_columns(inputs))
    spread = llvm.function(dense.Spread, torch.bfloat16, rows.dtype)
    for first in range(0, rows.count, dense.PIECE):
        piece = rows.part(first, min(first + dense.PIECE, rows.count), inputs)
        yield CompiledCall(spread, (piece.source, place, piece.count, inputs))
        for kernel in kernels:
            yield kernel.call(piece, place)
            piece = piece._replace(target=piece.target + kernel.shape[0] * rows.dtype.itemsize)


def _escapes_by_blocks(tensors: Mapping[str, Tensor], shape: Shape) -> tuple[Tensor, ...]:
    """Return where the escapes of each sixteen rows begin, the row of each among them, its activation and value."""
    outputs, inputs = shape
    escapes = tensors["escapes"].long() if "escapes" in tensors else torch.empty(0, dtype=torch.int64)
    starts = torch.searchsorted(escapes, torch.arange(-(-outputs // LANES) + 1) * (LANES * inputs))
    rows, columns = escapes // inputs, escapes % inputs
    half, chunk = register_lanes(), 2 * register_lanes()
    places = columns // chunk * chunk + columns % 2 * half + columns % chunk // 2  # as `Spread` puts them
    values = tensors["escaped"].view(torch.bfloat16).float() if "escaped" in tensors else torch.empty(0)
    return starts, rows % LANES, places, values


class _Ranked(dense.Dense):
    """Writes products with sixteen rows of ranked codes at a time; chunks become words of two bfloat16."""

    more_pointers, more_integers = "codes starts lanes places values", "base"

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(torch.bfloat16, dtype, None)

    def element(self) -> Any:
        """Return the type of fractions, which are asked for ahead."""
        return self.byte

    def read_chunk(self, pointer: Any, offset: Any, count: Any = None) -> tuple[Any, Any]:
        b, lanes = self.b, self.lanes
        halved = b.lshr(offset, self.i64(1))
        own = None if count is None else b.lshr(count, self.i64(1))
        codes = b.zext(
            self.load_some(self.named["codes"], halved, self.byte, lanes, own), self.vector(self.word, lanes)
        )
        spread = b.or_(codes, b.shl(codes, self.constant(self.word, lanes, 12)))
        shorts = self.vector(self.short, self.chunk)
        ranks = b.bitcast(b.and_(spread, self.constant(self.word, lanes, 0x000F000F)), shorts)
        fractions = b.sext(self.load_some(pointer, offset, self.byte, self.chunk, count), shorts)
        words = b.bitcast(self._join(ranks, fractions), self.vector(self.word, lanes))
        even = b.shl(words, self.constant(self.word, lanes, 16))
        odd = b.and_(words, self.constant(self.word, lanes, HIGH))
        return b.bitcast(even, self.floating), b.bitcast(odd, self.floating)

    def _join(self, ranks: Any, fractions: Any) -> Any:
        """Bfloat16 numbers of ranks and of fractions whose sign is in all high bits."""
        b, zeros = self.b, self.constant(self.short, self.chunk, 0)
        base = self.splat(b.trunc(self.named["base"], self.short), self.chunk)
        exponents = b.select(b.icmp_signed("!=", ranks, zeros), b.add(ranks, base), zeros)
        high = b.shl(exponents, self.constant(self.short, self.chunk, 7))
        return b.or_(high, b.and_(fractions, self.constant(self.short, self.chunk, 0x807F)))

    def _write(self, start: Any, first: Any, rows: int, count: Any) -> None:
        """Add the products of escapes to the sums of sixteen rows, and write these."""
        b, named = self.b, self.named
        block = b.lshr(start, self.i64(4))
        ends = [self.load(named["starts"], b.add(block, self.i64(i)), self.index) for i in range(2)]
        with self.loop(ends[1], ends[0]) as i:
            lane, place = (self.load(named[name], i, self.index) for name in ("lanes", "places"))
            value = self.load(named["values"], i, self.float)
            for r in range(rows):
                x = self.load(self.x, b.add(b.mul(b.add(first, self.i64(r)), self.columns), place), self.float)
                cell = b.add(lane, self.i64(r * LANES))
                self.store(b.fadd(self.load(self.sums, cell, self.float), b.fmul(x, value)), self.sums, cell)
        super()._write(start, first, rows, count)


class _DecodeRanked(Emitter):
    """Writes rows as bfloat16, escapes 0: no arithmetic of floating-point numbers touches them."""

    def __init__(self) -> None:
        super().__init__("decode", "fractions codes out", "first last columns base pitch")
        self.fractions, self.codes, self.out = self.pointers
        first, last, columns, base, self.pitch = self.integers
        self.base = self.splat(self.b.trunc(base, self.short), PAIR)
        with self.loop(last, first) as row:
            self.in_chunks(columns, PAIR, partial(self._pair, self.b.mul(row, columns), self.b.mul(row, self.pitch)))
        self.b.ret_void()

    def _pair(self, line: Any, codes: Any, first: Any, rest: Any) -> None:
        b, kind = self.b, self.vector(self.short, PAIR)
        own = None if rest is None else b.lshr(b.add(rest, self.i64(1)), self.i64(1))
        both = self.load_some(self.codes, b.add(codes, b.lshr(first, self.i64(1))), self.byte, LANES, own)
        low, high = b.and_(both, self.constant(self.byte, LANES, 0xF)), b.lshr(both, self.constant(self.byte, LANES, 4))
        ranks = b.zext(self.shuffled(low, high, [i // 2 + i % 2 * LANES for i in range(PAIR)]), kind)
        zeros = self.constant(self.short, PAIR, 0)
        exponents = b.select(b.icmp_signed("!=", ranks, zeros), b.add(ranks, self.base), zeros)
        fractions = b.zext(self.load_some(self.fractions, b.add(line, first), self.byte, PAIR, rest), kind)
        self.store_some(huffman.join_halves(self, exponents, fractions), self.out, b.add(line, first), rest)
