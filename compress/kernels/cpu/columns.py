"""Multiply the format `columns` with few rows of activations, and read only the columns of inputs that are kept.

The kept columns are listed once for a product (compress/kernels/cpu/kept_inputs.py). Eight of them at a time are read
beside each other, each along some thousand outputs whose sums stay in the nearest cache, while the same part of the
next eight is fetched. The sums of a span of columns meet the scales of their group once. 16-bit values, and codes
without AVX-512 VNNI, are multiplied in float32. Otherwise activations are two bytes, x = 256 high + low, with one scale
for a span, as in int_bytes.py: the bytes of four columns are put beside each other, and one instruction adds the
products of four columns for sixteen outputs, exactly.

An output is summed in the order of columns by whichever thread has its tile: results are the same on any number.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from compress.formats.columns import Params
from compress.kernels import llvm
from compress.kernels.calls import ActivationRows, CompiledCall, Take, run
from compress.kernels.contract import Prepared, Shape
from compress.kernels.cpu import emitter
from compress.kernels.cpu.column_sums import ColumnPanel, ColumnSums, tile_outputs
from compress.kernels.cpu.dots import STORED
from compress.kernels.cpu.kept_inputs import AHEAD, QUAD, KeptInputs

TOKENS = 4  # rows of activations of one call at most
MOST = 12  # rows up to which that is faster than to decode, 4096 x 4096, one thread
LISTS = ("columns", "values", "low", "high", "x_scales", "sums", "starts")  # what KeptInputs writes
LINE = 64  # bytes
SPAN = 256  # columns whose sums of integers fit into 32 bits, at most
PANEL_SIZE = 1 << 21  # bytes of the decoded outputs that many rows of activations are multiplied with at a time


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> ColumnProduct | None:
    """Return the product with a weight that lies column by column."""
    return ColumnProduct(tensors, params, shape) if emitter.worthwhile(shape) else None


def has_byte_products(params: Params) -> bool:
    """Return whether codes are multiplied as bytes."""
    return params.bits in (4, 8) and {"avx512vnni", "avx512bw", "avx512vl"} <= llvm.features()


class _ColumnSteps(NamedTuple):
    """The functions that run for a number of rows and a type of activations, and what they are given."""

    list_kept: llvm.Function
    listed: tuple[int, ...]  # what it takes behind what a call passes
    sum_up: llvm.Function
    stored: tuple[int, ...]  # what it takes before and behind that
    sizes: tuple[int, ...]
    offsets: list[int]  # of the memory of a call: LISTS, totals, space
    nbytes: int


class ColumnProduct(Prepared):
    """A weight of the format `columns`."""

    types = STORED

    def __init__(self, tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> None:
        super().__init__(tensors, params, shape)
        self.by_bytes = has_byte_products(params)
        self.group = params.group(shape[1])
        most = SPAN
        if params.bits == 16:  # nothing to scale
            self.group = most = shape[1]
        self.span = -(-self.group // -(-self.group // most))
        groups = -(-shape[1] // self.group)
        self.pieces = -(-self.group // self.span)  # spans of a group
        last = shape[1] - (groups - 1) * self.group
        self.spans = (groups - 1) * self.pieces + -(-last // self.span)
        self.tile = tile_outputs(params.bits, self.by_bytes)
        self.tiles = -(-shape[0] // self.tile)
        self._steps: dict[tuple[int, torch.dtype], _ColumnSteps] = {}
        self.room = (-(-shape[1] // QUAD) + self.spans) * QUAD + AHEAD

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.shape[1])
        if len(rows) > MOST:
            y = self._by_panels(rows)
        else:
            y = torch.cat([self.sparse(some, None) for some in rows.split(TOKENS)])
        return y.view(*x.shape[:-1], self.shape[0])

    def most_rows(self, dtype: torch.dtype) -> int:
        return emitter.EVERY  # more rows than MOST are multiplied with panels here: columns need not be transposed

    def decode(self, dtype: torch.dtype) -> Tensor:
        return self._panel(0, self.shape[0], dtype).T.contiguous()

    def sparse(self, x: Tensor, threshold: Tensor | None) -> Tensor:
        """Return x [1 to 4, in] times the weight, of inputs whose magnitude reaches threshold [1] or [in] float32."""
        count = len(x)
        out = torch.empty(count, self.shape[0], dtype=x.dtype, device="cpu")
        threshold = torch.zeros(1, device="cpu") if threshold is None else threshold
        memory = list[Tensor]()  # the calls have run before it is freed

        def take(nbytes: int) -> int:
            memory.append(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
            return memory[-1].data_ptr()

        run(iter(self.sparse_calls(ActivationRows(count, x.dtype, x.data_ptr(), out.data_ptr(), 0), take, threshold)))
        return out

    def sparse_calls(self, rows: ActivationRows, take: Take, threshold: Tensor) -> list[CompiledCall]:
        """Return the calls of that product for 1 to 4 rows; what it gives is contiguous."""
        count = rows.count
        steps = self._steps.get((count, rows.dtype)) or self._prepare(count, rows.dtype)
        base, each = take(steps.nbytes), int(threshold.numel() > 1)
        places = [base + offset for offset in steps.offsets]
        listing = (rows.source, threshold.data_ptr(), *places[: len(LISTS)], each, *steps.listed)
        arguments = (*steps.stored, *places, rows.target, 0, self.tiles, count, *steps.sizes)
        least = -(-emitter.THREAD // (self.tile * self.shape[1] * count))
        first = len(steps.stored) + len(places) + 1
        return [
            CompiledCall(steps.list_kept, listing),
            CompiledCall(steps.sum_up, arguments, self.tiles, least, first),
        ]

    def _prepare(self, count: int, dtype: torch.dtype) -> _ColumnSteps:
        """Return what runs for a number of rows and a type of activations."""
        params, by_bytes = self.params, self.by_bytes
        tokens, totals = 4 * count * self.room, 4 * count * self.tiles * self.tile
        sizes = {"columns": 4 * self.room, "values": tokens, "low": tokens // 4 * by_bytes}
        sizes |= {"high": sizes["low"], "x_scales": 4 * count * self.spans, "sums": 4 * count * self.spans}
        sizes |= {"starts": 8 * (self.spans + 1), "totals": totals}
        sizes |= {"space": 0 if params.bits == 16 else (1 + by_bytes) * totals}
        ends = list(accumulate(-(-size // LINE) * LINE for size in sizes.values()))
        list_kept = llvm.function(KeptInputs, dtype, count, by_bytes)
        sum_up = llvm.function(ColumnSums, params.bits, params.dtype, params.symmetric, by_bytes, dtype)
        stored = {name: self.tensors[name].data_ptr() if name in self.tensors else 0 for name in ("scales", "zeros")}
        codes = self.tensors["values" if params.bits == 16 else "codes"]
        stored |= {"stored": codes.data_ptr(), "stride": codes.shape[1], "outputs": self.shape[0]}
        layout = {"inputs": self.shape[1], "room": self.room, "group": self.group, "span": self.span}
        layout |= {"spans": self.spans, "pieces": self.pieces, "padded": self.tiles * self.tile}
        _, listed = list_kept.signature.around(("x", "thresholds", *LISTS, "each"), layout)
        passed = (*sizes, "out", "first", "last", "tokens")
        steps = _ColumnSteps(
            list_kept, listed, sum_up, *sum_up.signature.around(passed, {**stored, **layout}), [0, *ends[:-1]], ends[-1]
        )
        self._steps[count, dtype] = steps
        return steps

    def _by_panels(self, x: Tensor) -> Tensor:
        """Return the product with many rows: some outputs are decoded at a time."""
        outputs, inputs = self.shape
        is_slow = emitter.widens(x.dtype) or emitter.most_rows(x.dtype) > emitter.MOST  # torch's product in this type
        kind = torch.float32 if is_slow else x.dtype
        if self.params.bits == 16 and self.tensors["values"].dtype == kind:
            return x @ self.tensors["values"]
        y, rows = x.new_empty(len(x), outputs), x.to(kind)
        step = max(1, PANEL_SIZE // (inputs * kind.itemsize * self.tile)) * self.tile
        for first in range(0, outputs, step):
            last = min(first + step, outputs)
            y[:, first:last] = rows @ self._panel(first, last, kind)
        return y

    def _panel(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Return the weights of some outputs from a whole tile on, [in, last - first] in `dtype`."""
        params, inputs = self.params, self.shape[1]
        if params.bits == 16:
            return self.tensors["values"][:, first:last].to(dtype)
        out = torch.empty(inputs, last - first, dtype=dtype, device="cpu")
        write = llvm.function(ColumnPanel, params.bits, params.dtype, params.symmetric, dtype)
        stored = {each: self.tensors[each].data_ptr() if each in self.tensors else 0 for each in ("scales", "zeros")}

        def work(start: int, stop: int) -> None:
            write(
                *write.signature.arguments(
                    **stored, stored=self.tensors["codes"].data_ptr(), out=out.data_ptr(), start=start, stop=stop,
                    first=first, width=last - first, group=self.group, stride=self.tensors["codes"].shape[1],
                )
            )  # fmt: skip

        llvm.parallel(work, inputs, -(-(1 << 20) // (last - first)))
        return out
