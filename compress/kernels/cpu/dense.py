"""Multiply a plain weight of float32, bfloat16 or float16 with a few rows of activations, in float32 arithmetic.

The activations become float32 once, in the order in which the weight is read (compress/kernels/cpu/dots.py). The weight
is read once for all rows: a block of sixteen of its rows stays in the processor's cache while all activations meet it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compress.kernels import calls, llvm
from compress.kernels.calls import ActivationRows, CompiledCall, Take
from compress.kernels.contract import Decoder, Joined, Prepared, Shape
from compress.kernels.cpu import emitter
from compress.kernels.cpu.dots import ROWS, STORED, Dots, register_lanes, stored_rows
from compress.kernels.cpu.emitter import LANES, THREAD

# Rows of activations up to which this is faster than F.linear, one thread: 8 where the processor multiplies bfloat16 or
# float16 itself, 64 and more of float32 (16 are a guess for other libraries), and any number of types that are slow.
MOST = 8
MOST_FLOAT32 = 16
SMALL = 1 << 16  # weights up to which the calls around a product cost more than is gained
PIECE = 64  # rows of activations that stay in the processor's caches while a weight meets them


def prepare(tensors: Mapping[str, Tensor], params: Any, shape: Shape) -> Prepared | None:
    """Return the product with a weight that the format `dense` stores as it is."""
    return PlainProduct(tensors, params, shape) if emitter.worthwhile(shape) else None


class PlainProduct(Prepared):
    """A weight of one of the types STORED."""

    types = STORED

    @property
    def weight(self) -> Tensor:
        return self.tensors["values"]

    def __call__(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight)

    def most_rows(self, dtype: torch.dtype) -> int:
        return most_rows(dtype)

    def panel_type(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if emitter.widens(dtype) else dtype

    def decode(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype)

    def decoder(self, dtype: torch.dtype) -> Decoder | None:
        """Return what copies rows of the weight; None: they are multiplied where they are."""
        weight = self.weight
        if weight.dtype == dtype:
            return None

        def copy(out: Tensor, start: int) -> None:
            out.copy_(weight[start : start + len(out)])

        return copy

    def fuse(self, others: Sequence[Prepared]) -> Joined | None:
        weights = _weights((self, *others))
        return None if weights is None else _multiply_all

    def calls(self, rows: ActivationRows, take: Take, others: Sequence[Prepared] = ()) -> list[CompiledCall] | None:
        weights = _weights((self, *others))
        return None if weights is None else product_calls(rows, take, weights, [None] * len(weights))


def _weights(kernels: Sequence[Prepared]) -> list[Tensor] | None:
    """Return the weights of kernels that read activations alike; None if they do not."""
    weights = [kernel.weight for kernel in kernels if isinstance(kernel, PlainProduct)]
    is_alike = len(weights) == len(kernels) and len({weight.dtype for weight in weights}) == 1
    return weights if is_alike else None


def most_rows(dtype: torch.dtype) -> int:
    """Return the number of rows of activations of a type that are multiplied here faster than by F.linear."""
    if dtype == torch.float32:
        return MOST_FLOAT32
    is_slow = emitter.widens(dtype) or emitter.most_rows(dtype) > emitter.MOST
    return emitter.EVERY if is_slow else MOST


def supports(weight: Tensor, x: torch.dtype) -> bool:
    """Return whether such a weight [out, in] is multiplied here with activations of a type."""
    is_plain = weight.dtype in STORED and weight.dim() == 2 and weight.is_contiguous() and weight.is_cpu
    return is_plain and x in STORED and llvm.available()


def takes(x: Tensor, weight: Tensor) -> bool:
    """Return whether x [..., in] is multiplied here with a plain weight [out, in] of its type, without a gradient."""
    inputs = weight.shape[-1]
    if not x.is_cpu or x.dtype != weight.dtype or x.shape[-1] != inputs or not supports(weight, x.dtype):
        return False
    if weight.numel() <= SMALL:
        return False
    rows = x.numel() // inputs
    return 0 < rows <= MOST or MOST < rows <= most_rows(x.dtype)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [..., in] times weight [out, in], plus bias [out]: [..., out] of the type of x."""
    return _multiply_each(x.contiguous(), [weight], [bias])


def _multiply_all(kernels: Sequence[PlainProduct], x: Tensor) -> Tensor:
    return _multiply_each(x, [kernel.weight for kernel in kernels], [None] * len(kernels))


def _multiply_each(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    width = sum(map(len, weights))
    out = x.new_empty(*x.shape[:-1], width)
    count = x.numel() // max(1, x.shape[-1])
    memory: list[Tensor] = []

    def take(nbytes: int) -> int:
        memory.append(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
        return memory[-1].data_ptr()

    if count:
        rows = ActivationRows(count, x.dtype, x.data_ptr(), out.data_ptr(), width)
        calls.run(iter(product_calls(rows, take, weights, biases)))
    return out


def product_calls(
    rows: ActivationRows, take: Take, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> list[CompiledCall]:
    """Return the calls that multiply rows with weights [out, in] of one type, outputs behind each other, plus biases.

    They are valid as long as the tensors stay where they are. Any number of rows is right.
    """
    inputs, made = weights[0].shape[1], list[CompiledCall]()
    place = take(4 * min(rows.count, PIECE) * padded_columns(inputs))
    for first in range(0, rows.count, PIECE):
        piece = rows.part(first, min(first + PIECE, rows.count), inputs)
        made += _piece_calls(piece, place, weights, biases)
    return made


def _piece_calls(
    rows: ActivationRows, place: int, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> Iterator[CompiledCall]:
    """Yield the calls for some rows, which become float32 in memory at `place`."""
    inputs, stored = weights[0].shape[1], weights[0].dtype
    yield CompiledCall(llvm.function(Spread, stored, rows.dtype), (rows.source, place, rows.count, inputs))
    target = rows.target
    for weight, bias in zip(weights, biases, strict=True):
        outputs = len(weight)
        function = llvm.function(Dense, stored, rows.dtype, None if bias is None else bias.dtype)
        added = 0 if bias is None else bias.data_ptr()
        sizes = (rows.count, inputs, outputs, rows.width)
        total = -(-outputs // LANES)
        arguments = (place, weight.data_ptr(), added, target, 0, total, *sizes)
        yield CompiledCall(function, arguments, total, -(-THREAD // (LANES * inputs * rows.count)), first=4)
        target += outputs * rows.dtype.itemsize


def padded_columns(inputs: int) -> int:
    """Return the columns of activations with zeros behind them, whole chunks."""
    return -(-inputs // (2 * register_lanes())) * 2 * register_lanes()


class Spread(Dots):
    """Writes rows of `inputs` values as float32 in the order of stored chunks, 0 behind the last."""

    def __init__(self, stored: torch.dtype, dtype: torch.dtype) -> None:
        super().__init__("spread", "x out", "rows inputs", stored, torch.float32)
        self.x, self.out = self.pointers
        rows, inputs = self.integers
        b = self.b
        size = self.i64(self.chunk)
        columns = b.mul(b.udiv(b.add(inputs, self.i64(self.chunk - 1)), size), size)
        with self.loop(rows) as row:
            source, target = b.mul(row, inputs), b.mul(row, columns)

            def write(first: Any, rest: Any) -> None:
                place, halves = b.add(source, first), []
                for half in range(2):
                    count = None if rest is None else b.sub(rest, self.i64(half * self.lanes))
                    at = b.add(place, self.i64(half * self.lanes))
                    halves.append(self.load_floats(self.x, at, dtype, self.lanes, count))
                for half, values in enumerate(self.arrange(*halves)):
                    self.store(values, self.out, b.add(b.add(target, first), self.i64(half * self.lanes)))

            self.in_chunks(inputs, self.chunk, write)
        b.ret_void()


class Dense(Dots):
    """Writes the products of spread rows [rows, padded inputs] with blocks of sixteen rows of the weight, plus a bias.

    out [rows, outputs] in rows of `width` numbers.
    """

    more_pointers, more_integers = "", ""  # of a weight whose chunks are made of several tensors

    def __init__(self, stored: torch.dtype, dtype: torch.dtype, bias: torch.dtype | None) -> None:
        integers = f"first last rows inputs outputs width {self.more_integers}"
        super().__init__("dense", f"x weight bias out {self.more_pointers}", integers, stored, dtype)
        self.x, self.weight, self.bias, self.out, *_ = self.pointers
        first, last, rows, self.inputs, self.outputs, self.width, *_ = self.integers
        b, self.bias_type = self.b, bias
        size = self.i64(self.chunk)
        self.columns = b.mul(b.udiv(b.add(self.inputs, self.i64(self.chunk - 1)), size), size)
        self.sums = self.array(ROWS * LANES)
        self.last_row = b.sub(self.outputs, self.i64(1))
        whole, rest = b.udiv(rows, self.i64(ROWS)), b.urem(rows, self.i64(ROWS))
        with self.loop(last, first) as block:
            start = b.mul(block, self.i64(LANES))
            with self.loop(whole) as tile:
                self._tile(start, b.mul(tile, self.i64(ROWS)), ROWS)
            for count in range(1, ROWS):
                with b.if_then(b.icmp_signed("==", rest, self.i64(count))):
                    self._tile(start, b.mul(whole, self.i64(ROWS)), count)
        b.ret_void()

    def _tile(self, start: Any, first: Any, rows: int) -> None:
        """Write the outputs of sixteen rows of the weight for some rows of activations."""
        b, together = self.b, stored_rows(rows)
        sums = [[self.variable(self.floating) for _ in range(together)] for _ in range(rows)]
        places = [b.mul(b.add(first, self.i64(r)), self.columns) for r in range(rows)]
        with self.loop(self.i64(LANES // together)) as group:
            inside = b.mul(group, self.i64(together))
            output = b.add(start, inside)
            weights = [
                b.mul(self.smaller(b.add(output, self.i64(j)), self.last_row), self.inputs) for j in range(together)
            ]
            ahead = b.mul(self.i64(together), self.inputs)  # 1.0 to 1.9 times faster than without
            for row in sums:
                for total in row:
                    b.store(self.zeros(), total)

            def add(column: Any, rest: Any) -> None:
                here = [b.add(place, column) for place in weights]
                for place in here:
                    self.prefetch(self.weight, b.add(place, ahead), self.element())
                chunks = [self.read_chunk(self.weight, place, rest) for place in here]
                self.add_products(chunks, self.x, [b.add(place, column) for place in places], sums)

            self.in_chunks(self.inputs, self.chunk, add)
            for r, row in enumerate(sums):
                total = self.totals([b.load(each) for each in row])
                self.store(total, self.sums, b.add(inside, self.i64(r * LANES)))
        left = b.sub(self.outputs, start)
        with b.if_else(b.icmp_signed(">=", left, self.i64(LANES))) as (full, part):
            with full:
                self._write(start, first, rows, None)
            with part:
                self._write(start, first, rows, left)

    def _write(self, start: Any, first: Any, rows: int, count: Any) -> None:
        b = self.b
        for r in range(rows):
            values = self.load(self.sums, self.i64(r * LANES), self.float, LANES)
            if self.bias_type is not None:
                values = b.fadd(values, self.load_floats(self.bias, start, self.bias_type, LANES, count))
            place = b.add(b.mul(b.add(first, self.i64(r)), self.width), start)
            self.store_some(self.rounded(values), self.out, place, count)
