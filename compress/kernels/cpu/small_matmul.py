"""Multiply a stored weight with a few rows of activations, prepared once and called many times.

A call is three compiled steps: the activations become int16 (`Quantize`), the kernel of the format sums, and the
sums are scaled and rounded to the type of the activations (`Finish`). What a step needs to know is found once for a
weight: in small layers, each operation of torch and each conversion of an argument costs as much as the product.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.kernels import llvm
from compress.kernels.calls import ActivationRows, CompiledCall, Take, run
from compress.kernels.contract import Decoder, Joined, Prepared, Shape
from compress.kernels.cpu import emitter as rows
from compress.kernels.cpu.activations import Finish, Quantize
from compress.kernels.cpu.emitter import LANES, PRODUCT, TOKENS

ALIGNED = 64  # bytes
OUT = 3  # place of the outputs among the offsets of `_Steps`
CALLED = (*PRODUCT.split(), "first", "last")  # arguments that every call of a kernel gives
WRITTEN = ("out", "first", "last", "start", "stop")  # and those of a decoder
WEIGHTS_PER_THREAD = 1 << 20  # to decode fewer is not worth waking it


@dataclass(frozen=True)
class ProductSizes:
    """Sizes of a stored weight, as its kernel sees them."""

    inputs: int
    outputs: int
    columns: int  # with padding, a multiple of span and lanes
    rows: int  # with padding, a multiple of 16
    span: int  # columns that share the scale of an activation
    lanes: int  # activations of a vector
    space: int  # float32 that a thread works in, for one row of activations

    @property
    def spans(self) -> int:
        return self.columns // self.span


@dataclass(frozen=True)
class Factors:
    """The factors that sums are multiplied with in the end."""

    scale: int = 0  # address of one float32, over `divisor`; 0: there is none
    rows: int = 0  # address of a float16 for each output
    divisor: float = 1.0

    @property
    def kind(self) -> tuple[float, bool, bool]:
        """Return what a function has to know that multiplies with them: divisor, whether there is each factor."""
        return self.divisor, bool(self.scale), bool(self.rows)

    @property
    def by_name(self) -> dict[str, int]:
        """Return the addresses by the names of arguments."""
        return {"scale": self.scale, "row_scales": self.rows}


NO_FACTORS = Factors()


class _Steps(NamedTuple):
    """The functions that run for a number of rows and a type of activations."""

    quantize: llvm.Function
    kernel: llvm.Function
    stored: tuple[int, ...]  # what the kernel takes before and behind CALLED
    sizes: tuple[int, ...]
    finish: llvm.Function
    offsets: list[int]  # of x16, its scales and sums, the outputs, the space of a thread, and gathered activations
    nbytes: int
    least: int  # blocks of sixteen rows for a thread


class Product(Prepared):
    """x times a stored weight by compiled functions, for bfloat16, float16 and float32.

    What `kernel(tokens)` returns takes the arguments CALLED, and before and behind them what its signature names: of
    `stored`, addresses of tensors that have to stay where they are, of `sizes`, and `tokens`, the rows of activations.
    It is called for a range of blocks of sixteen rows of the weight, with
    - x16 int16 [columns / lanes, tokens, lanes]: vectors of the same columns lie beside each other, because a kernel
      reads them together; columns past those of x are 0;
    - x_scales and x_sums float32 [tokens, columns / span]: scales and sums of these integers. A span with a value that
      is not finite has scale NaN;
    - out float32 [tokens, rows].
    """

    most = rows.MOST  # rows of bfloat16 activations
    gathers = False  # activations go through `gather` first

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        params: Any,
        shape: Shape,
        layout: ProductSizes,
        stored: Mapping[str, int],
        sizes: Mapping[str, int],
        factors: Factors = NO_FACTORS,
    ) -> None:
        super().__init__(tensors, params, shape)
        self.layout, self.stored, self.sizes, self.factors = layout, stored, sizes, factors
        self._steps: dict[tuple[int, torch.dtype], _Steps] = {}

    @abstractmethod
    def kernel(self, tokens: int) -> llvm.Function:
        """Return the function that sums for `tokens` rows of activations."""

    @abstractmethod
    def decoder(self, dtype: torch.dtype) -> Decoder:
        """Return what writes rows of the weight as bfloat16, float16 or float32, the format's own to the bit."""

    def most_rows(self, dtype: torch.dtype) -> int:
        """Return the measured number of rows, see `emitter.MOST`."""
        return rows.most_rows(dtype, self.most)

    def together(self, tokens: int) -> int:
        """Return how many rows of activations the kernel takes at once, of so many."""
        return next(count for count in TOKENS if count <= tokens)

    def lanes(self, tokens: int) -> int:
        """Return the columns whose activations lie beside each other, for so many rows at once."""
        return self.layout.lanes

    def panel_type(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if rows.widens(dtype) else dtype

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in], decoded as a whole."""
        out = torch.empty(self.shape, dtype=dtype, device="cpu")
        self.decoder(dtype)(out, 0)
        return out

    def gather(self, rows: ActivationRows) -> Iterator[CompiledCall]:
        """Yield what writes activations in the order of the kernel's columns, [rows, columns]."""
        return iter(())

    def add(self, rows: ActivationRows, sums: int) -> Iterator[CompiledCall]:
        """Yield what adds to the sums, float32 [rows, rows of the weight], for these activations."""
        return iter(())

    def __call__(self, x: Tensor) -> Tensor:
        return multiply(self.layout.outputs, (self,), x)

    def fuse(self, others: Sequence[Prepared]) -> Joined | None:
        """Return one call for weights that read activations alike: these become integers once."""
        parts = self._alike(others)
        return None if parts is None else partial(multiply, sum(part.layout.outputs for part in parts))

    def calls(self, rows: ActivationRows, take: Take, others: Sequence[Prepared] = ()) -> Iterable[CompiledCall] | None:
        """Return what multiplies rows with this weight and others; None if they do not read activations alike."""
        parts = self._alike(others)
        return None if parts is None else product_calls(parts, rows, take)

    def _alike(self, others: Sequence[Prepared]) -> list[Product] | None:
        """Return this weight and others if they read activations alike, None if they do not."""
        parts = [self, *(other for other in others if isinstance(other, Product))]
        if len(parts) <= len(others) or len({part._activations for part in parts}) > 1:
            return None
        return parts

    @property
    def _activations(self) -> tuple[Any, ...]:
        """What the integers and scales of activations depend on; a weight that gathers them has an order of its own."""
        layout = self.layout
        return layout.inputs, layout.columns, layout.span, layout.lanes, id(self) if self.gathers else 0

    def quantize(self, rows: ActivationRows, base: int) -> Iterator[CompiledCall]:
        """Yield what writes integers, scales and sums of as many activations as the kernel takes at once to `base`."""
        layout, tokens, steps = self.layout, rows.count, self.steps(rows.count, rows.dtype)
        x16, scales, sums, _, _, gathered = steps.offsets
        given, columns = rows.source, layout.inputs
        if self.gathers:
            given, columns = base + gathered, layout.columns
            yield from self.gather(ActivationRows(tokens, rows.dtype, rows.source, given, columns))
        sizes = tokens, layout.spans, layout.span, self.lanes(tokens), columns
        yield CompiledCall(steps.quantize, (given, base + x16, base + scales, base + sums, *sizes))

    def multiply(self, rows: ActivationRows, base: int) -> Iterator[CompiledCall]:
        """Yield what writes the products with activations whose integers are at `base`."""
        layout, factors, tokens, steps = self.layout, self.factors, rows.count, self.steps(rows.count, rows.dtype)
        out = base + steps.offsets[OUT]
        yield from self.sum(rows, base, out)
        finish = out, factors.scale, factors.rows, rows.target, tokens, layout.rows, layout.outputs, rows.width
        yield CompiledCall(steps.finish, finish)

    def sum(self, rows: ActivationRows, base: int, out: int) -> Iterator[CompiledCall]:
        """Yield what writes sums, float32 [rows, rows of the weight], of activations whose integers are at `base`."""
        steps, blocks = self.steps(rows.count, rows.dtype), self.layout.rows // LANES
        x16, scales, sums, _, space, _ = [base + offset for offset in steps.offsets]
        arguments, at = (*steps.stored, x16, scales, sums, out, space, 0, blocks, *steps.sizes), len(steps.stored)
        nbytes = 4 * self.layout.space * rows.count
        yield CompiledCall(steps.kernel, arguments, blocks, steps.least, at + 5, at + 4, nbytes)
        yield from self.add(rows, out)

    def steps(self, tokens: int, dtype: torch.dtype) -> _Steps:
        """Return what runs for a number of rows of activations and their type, prepared once."""
        return self._steps.get((tokens, dtype)) or self._prepare(tokens, dtype)

    def _prepare(self, tokens: int, dtype: torch.dtype) -> _Steps:
        layout, factors = self.layout, self.factors
        sizes = (
            2 * layout.columns * tokens,
            4 * layout.spans * tokens,
            4 * layout.spans * tokens,
            4 * layout.rows * tokens,
            4 * layout.space * tokens,
            dtype.itemsize * layout.columns * tokens * self.gathers,
        )
        kernel = self.kernel(tokens)
        ends = list(accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes))
        steps = _Steps(
            llvm.function(Quantize, dtype),
            kernel,
            *kernel.signature.around(CALLED, {**self.stored, **self.sizes, "tokens": tokens}),
            llvm.function(Finish, dtype, factors.kind),
            [0, *ends[:-1]],
            ends[-1],
            -(-rows.THREAD // (LANES * layout.columns * tokens)),
        )
        self._steps[tokens, dtype] = steps
        return steps


def multiply(width: int, parts: Sequence[Product], x: Tensor) -> Tensor:
    """Return x [..., in] times all parts, [..., width], outputs behind each other; they read activations alike."""
    out = x.new_empty((*x.shape[:-1], width))
    rows = ActivationRows(x.numel() // parts[0].layout.inputs, x.dtype, x.data_ptr(), out.data_ptr(), width)
    memory = []  # the calls have run before it is freed

    def take(nbytes: int) -> int:
        memory.append(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))  # the defaults may be others
        return memory[-1].data_ptr()

    if rows.count:
        run(product_calls(parts, rows, take))
    return out


def product_calls(parts: Sequence[Product], rows: ActivationRows, take: Take) -> Iterator[CompiledCall]:
    """Yield what multiplies rows with all parts, outputs behind each other; they read activations alike."""
    first, inputs, size = 0, parts[0].layout.inputs, rows.dtype.itemsize
    together = 1 if rows.count == 1 else parts[0].together(rows.count)  # most calls have one
    base = take(max(part.steps(together, rows.dtype).nbytes for part in parts))
    while first < rows.count:
        left = rows.count - first
        some = rows.part(first, first + (1 if left == 1 else parts[0].together(left)), inputs)
        yield from parts[0].quantize(some, base)
        for part in parts:
            yield from part.multiply(some, base)
            some = some._replace(target=some.target + part.layout.outputs * size)
        first += some.count


def in_rows(write: llvm.Function, values: Mapping[str, int], columns: int, space: int = 0) -> Decoder:
    """Return a decoder that calls a function with the arguments WRITTEN and these values on the threads of torch.

    With `space`, each thread gives so many float32 of its own before them.

    That writes the rows of the weight in blocks of sixteen from first to last, without those from `stop` on; the row
    `start` is at the beginning of out.
    """

    stored, sizes = write.signature.around(("space", *WRITTEN) if space else WRITTEN, values)

    def decode(out: Tensor, start: int) -> None:
        address, stop = out.data_ptr(), start + len(out)
        block = start // LANES  # a whole number

        def work(first: int, last: int) -> None:
            memory = torch.empty(space, dtype=torch.float32, device="cpu")
            own = (memory.data_ptr(),) if space else ()
            write(*stored, *own, address, block + first, block + last, start, stop, *sizes)

        llvm.parallel(work, -(-stop // LANES) - block, -(-WEIGHTS_PER_THREAD // (LANES * columns)))

    return decode
