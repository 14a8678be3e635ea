"""Multiply with a weight of any format that has a `RowReader`: decode some rows to float32, near, for few activations.

`SIDE` rows of the weight at a time are decoded to memory of a thread that stays in its caches, and multiplied from
there with all rows of activations in float32. So each format is one class that writes pieces of functions: what a
decoder writes and what a product multiplies are the same numbers. Nothing is kept of a decoded weight. A row of
activations has the same results whatever other rows there are, and on any number of threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product as pairs
from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.kernels import llvm
from compress.kernels.calls import ActivationRows, CompiledCall, Take, run
from compress.kernels.contract import Decoder, Joined, Prepared, Shape
from compress.kernels.cpu import emitter, small_matmul
from compress.kernels.cpu.emitter import LANES, Emitter, Writer

SIDE = 4  # rows of the weight that are multiplied side by side
TOGETHER = 16  # rows of activations whose float32 values stay in the cache
# Rows of bfloat16 up to which the product beats panels, 4096 x 4096: where panels are bfloat16, and where float32.
MOST, MOST_WHERE_WIDE = 8, 48
ALIGNED = 64  # bytes
SLACK = 1024  # numbers behind a row that a reader may write

# (which of the rows, a number; column; float32 vector; columns of the row from there on, None: enough)
Put = Callable[[int, Any, Any, Any], None]


class RowReader(ABC):
    """Pieces of functions that read rows of a stored weight: made of the emitter, its arguments by name, and settings.

    named["space"] points to as many float32 of a thread as the weight asks for.
    """

    height = 1  # rows that are read together: 1, 2 or 4
    is_direct = True  # `put` is told where a row ends, and `finish` does nothing

    def __init__(self, e: Emitter, named: Mapping[str, Any]) -> None:
        self.e, self.b, self.named, self.space = e, e.b, named, named["space"]

    @staticmethod
    @abstractmethod
    def arguments(*settings: Any) -> tuple[str, str]:
        """Return the names of the pointers and of the integers that are read, for what `__init__` takes behind."""

    def begin(self, start: Any) -> None:
        """Write what sixteen rows from `start` on share; nothing, if there is nothing."""
        return

    @abstractmethod
    def write(self, row: Any, features: Any, put: Put) -> None:
        """Call `put` for all columns of `height` rows, and up to `SLACK` columns behind them where that is easier."""

    def finish(self, row: Any, features: Any, line: Any) -> None:
        """Change a row, float32 at `line`."""
        return


class DecodedProduct(Prepared):
    """x times a weight whose rows a `RowReader` decodes, for bfloat16, float16 and float32.

    `settings` are those of the reader, `sizes` the integers that it asks for beside `features`, and `space` the float32
    that it works in. Tensors have to stay where they are. With `order_bits`, stored column i is column order[i] of the
    weight, of integers of so many bits.
    """

    reader: ClassVar[type[RowReader]]
    order_bits = 0
    arranges = False  # activations are changed for this weight alone before they are multiplied

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        params: Any,
        shape: Shape,
        settings: tuple[Any, ...],
        sizes: Mapping[str, int],
        space: int = 0,
    ) -> None:
        super().__init__(tensors, params, shape)
        pointers, _ = self.reader.arguments(*settings)
        self.settings, self.sizes, self.space = settings, {"features": shape[1], **sizes}, space
        self.stored = {name: tensors[name].data_ptr() if name in tensors else 0 for name in pointers.split()}
        self.columns = -(-shape[1] // LANES) * LANES
        self.read = shape[1]  # columns that meet activations: more where padding is one vector with others

    def most_rows(self, dtype: torch.dtype) -> int:
        return emitter.most_rows(dtype, MOST_WHERE_WIDE if emitter.widens(dtype) else MOST)

    def panel_type(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if emitter.widens(dtype) else dtype

    def decode(self, dtype: torch.dtype) -> Tensor:
        out = torch.empty(self.shape, dtype=dtype, device="cpu")
        self.decoder(dtype)(out, 0)
        return out

    def decoder(self, dtype: torch.dtype) -> Decoder:
        return self.decoder_with({}, dtype)

    def decoder_with(self, made: Mapping[str, Tensor], dtype: torch.dtype) -> Decoder:
        """Return what writes rows of the weight, given tensors in place of stored ones of these names."""
        function = llvm.function(_DecodeRows, self.reader, self.settings, dtype)
        space = SIDE * (self.shape[1] + SLACK) + self.space
        stored = self.stored | {name: tensor.data_ptr() for name, tensor in made.items()}
        decode = small_matmul.in_rows(function, {**stored, **self.sizes}, self.shape[1], space)

        def write(out: Tensor, start: int, _: object = made) -> None:
            decode(out, start)

        return write

    def __call__(self, x: Tensor) -> Tensor:
        return _multiply((self,), x)

    def fuse(self, others: Sequence[Prepared]) -> Joined | None:
        parts = self._alike(others)
        return None if parts is None else _multiply

    def calls(self, rows: ActivationRows, take: Take, others: Sequence[Prepared] = ()) -> Iterator[CompiledCall] | None:
        """Return what multiplies rows with this weight and others; None if they do not read activations alike."""
        parts = self._alike(others)
        return None if parts is None else _calls(parts, rows, take)

    def _alike(self, others: Sequence[Prepared]) -> list[DecodedProduct] | None:
        """Return this weight and others if they read activations alike, None if they do not."""
        parts = [self, *(other for other in others if isinstance(other, DecodedProduct))]
        return None if len(parts) <= len(others) or len({part._activations for part in parts}) > 1 else parts

    @property
    def _activations(self) -> tuple[int, int]:
        return self.shape[1], id(self) if self.arranges else 0

    def change(self, x: int, count: int) -> Iterator[CompiledCall]:
        """Yield what changes activations float32 [count, columns] at x for this weight."""
        return iter(())

    @property
    def order(self) -> int:
        """Return the address of the order of columns, 0 where they have none of their own."""
        return self.tensors["order"].data_ptr() if self.order_bits else 0

    @property
    def near(self) -> int:
        """Return the bytes that a thread works in."""
        return 4 * (SIDE * (self.columns + SLACK) + self.space)

    def product(self, dtype: torch.dtype) -> llvm.Function:
        """Return the function that multiplies."""
        return llvm.function(_Multiply, self.reader, self.settings, dtype)

    def call(self, rows: ActivationRows, x: int, space: int) -> CompiledCall:
        """Return what multiplies with activations float32 [rows, columns] at x."""
        function = self.product(rows.dtype)
        outputs, inputs = self.shape
        blocks = -(-outputs // LANES)
        given = {"x": x, "out": rows.target, "space": space, "first": 0, "last": blocks, "outputs": outputs}
        given |= {"features": self.read, "columns": self.columns, "tokens": rows.count, "width": rows.width}
        arguments = function.signature.arguments(**{**self.stored, **self.sizes, **given})
        names = (*function.signature.pointers, *function.signature.integers)
        least = -(-emitter.THREAD // (LANES * inputs * rows.count))
        return CompiledCall(function, arguments, blocks, least, names.index("first"), names.index("space"), self.near)


def _multiply(parts: Sequence[DecodedProduct], x: Tensor) -> Tensor:
    """Return x [..., in] times all parts, outputs behind each other."""
    width = sum(part.shape[0] for part in parts)
    out = x.new_empty((*x.shape[:-1], width))
    rows = ActivationRows(x.numel() // x.shape[-1], x.dtype, x.data_ptr(), out.data_ptr(), width)
    memory = []  # the calls have run before it is freed

    def take(nbytes: int) -> int:
        memory.append(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))  # the defaults may be others
        return memory[-1].data_ptr()

    run(_calls(parts, rows, take))
    return out


def _calls(parts: Sequence[DecodedProduct], rows: ActivationRows, take: Take) -> Iterator[CompiledCall]:
    """Yield what multiplies rows with all parts, outputs behind each other; they read activations alike."""
    first, inputs = parts[0], parts[0].shape[1]
    x = take(4 * first.columns * min(rows.count, TOGETHER))
    space = take(max(part.near for part in parts))
    widen = llvm.function(_Widen, rows.dtype, first.order_bits)
    for start in range(0, rows.count, TOGETHER):
        some = rows.part(start, min(start + TOGETHER, rows.count), inputs)
        yield CompiledCall(widen, (some.source, first.order, x, some.count, inputs, first.columns))
        yield from first.change(x, some.count)
        for part in parts:
            yield part.call(some, x, space)
            some = some._replace(target=some.target + part.shape[0] * rows.dtype.itemsize)


class _Widen(Emitter):
    """Writes rows of activations as float32, in an order of columns if there is one; 0 past the last."""

    def __init__(self, dtype: torch.dtype, order_bits: int) -> None:
        super().__init__("widen", "x order out", "rows inputs columns")
        self.dtype, self.order_bits = dtype, order_bits
        self.x, self.order, self.out = self.pointers
        count, self.inputs, columns = self.integers
        b = self.b
        with self.loop(count) as row:
            source, target = b.mul(row, self.inputs), b.mul(row, columns)
            if order_bits:
                with self.loop(columns) as column:
                    self._gather(source, target, column)
            else:
                self.in_chunks(self.inputs, LANES, partial(self._chunk, source, target))
                chunks = b.udiv(b.add(self.inputs, self.i64(LANES - 1)), self.i64(LANES))
                with self.loop(b.udiv(columns, self.i64(LANES)), chunks) as i:
                    self.store(self.floats(0.0), self.out, b.add(target, b.mul(i, self.i64(LANES))))
        b.ret_void()

    def _chunk(self, source: Any, target: Any, column: Any, rest: Any) -> None:
        values = self.load_floats(self.x, self.b.add(source, column), self.dtype, LANES, rest)
        self.store(values, self.out, self.b.add(target, column))

    def _gather(self, source: Any, target: Any, column: Any) -> None:
        b = self.b
        order = self.load(self.order, self.clamped(column, self.inputs), self.ir.IntType(self.order_bits))
        value = self.load_floats(self.x, b.add(source, self.clamped(order, self.inputs)), self.dtype)
        value = b.select(b.icmp_signed("<", column, self.inputs), value, self.float(0.0))
        self.store(value, self.out, b.add(target, column))


class _DecodeRows(Writer):
    """Writes rows of the weight."""

    def __init__(self, reader: type[RowReader], settings: tuple[Any, ...], dtype: torch.dtype) -> None:
        pointers, integers = reader.arguments(*settings)
        super().__init__("decode", f"{pointers} space out", f"first last start stop {integers}", dtype)
        named, b = self.named, self.b
        self.near, self.start, self.stop, self.features = (named[n] for n in ("space", "start", "stop", "features"))
        self.pitch = b.add(self.features, self.i64(SLACK))
        named["space"] = self.at(self.near, b.mul(self.pitch, self.i64(SIDE)), self.float)
        reads = reader(self, named, *settings)
        with self.loop(named["last"], named["first"]) as block:
            begin = b.mul(block, self.i64(LANES))
            reads.begin(begin)
            with self.loop(self.i64(LANES // reads.height)) as i:
                row = b.add(begin, b.mul(i, self.i64(reads.height)))
                with b.if_then(b.icmp_signed("<", row, self.stop)):
                    if reads.is_direct:
                        reads.write(row, self.features, partial(self._put, self._line(row)))
                    else:
                        self._write_by_way_of_memory(reads, row)
        b.ret_void()

    def _line(self, row: Any) -> Any:
        return self.b.mul(self.b.sub(row, self.start), self.features)

    def _put(self, line: Any, side: int, column: Any, values: Any, left: Any) -> None:
        self.store_some(self.rounded(values), self.named["out"], self.b.add(line, column), left)

    def _write_by_way_of_memory(self, reads: RowReader, row: Any) -> None:
        b = self.b
        lines = [self.at(self.near, b.mul(self.pitch, self.i64(p)), self.float) for p in range(reads.height)]
        reads.write(row, self.features, lambda side, column, values, left: self.store(values, lines[side], column))
        for p, near in enumerate(lines):
            own = b.add(row, self.i64(p))
            with b.if_then(b.icmp_signed("<", own, self.stop)):
                reads.finish(own, self.features, near)
                self.in_chunks(self.features, 2 * LANES, partial(self._copy, near, self._line(own)))

    def _copy(self, near: Any, line: Any, column: Any, rest: Any) -> None:
        self._put(line, 0, column, self.load_some(near, column, self.float, 2 * LANES, rest), rest)


class _Multiply(Writer):
    """Writes the products of rows of activations, float32 [tokens, columns], with rows of the weight."""

    def __init__(self, reader: type[RowReader], settings: tuple[Any, ...], dtype: torch.dtype) -> None:
        pointers, integers = reader.arguments(*settings)
        sizes = f"first last outputs columns tokens width {integers}"
        super().__init__("product", f"{pointers} x out space", sizes, dtype)
        named, b = self.named, self.b
        self.x, self.out, self.rows_at = named["x"], named["out"], named["space"]
        self.columns, self.outputs, self.width = (named[name] for name in ("columns", "outputs", "width"))
        wide = "avx512f" in llvm.features()
        self.lanes = LANES if wide else LANES // 2
        group = 4 if wide else 2
        kind = self.vector(self.float, self.lanes)
        self.sums = [[self.variable(kind) for _ in range(group)] for _ in range(SIDE)]
        self.pitch = b.add(self.columns, self.i64(SLACK))  # of the decoded rows
        named["space"] = self.at(self.rows_at, b.mul(self.pitch, self.i64(SIDE)), self.float)
        reads = reader(self, named, *settings)
        tokens = named["tokens"]
        groups = b.udiv(tokens, self.i64(group))
        with self.loop(named["last"], named["first"]) as block:
            begin = b.mul(block, self.i64(LANES))
            reads.begin(begin)
            with self.loop(self.i64(LANES // SIDE)) as i:
                start = b.add(begin, b.mul(i, self.i64(SIDE)))
                with b.if_then(b.icmp_signed("<", start, self.outputs)):
                    with self.loop(self.i64(SIDE // reads.height)) as side:
                        self._decode(reads, start, b.mul(side, self.i64(reads.height)))
                    with self.loop(groups) as m:
                        self._tile(start, b.mul(m, self.i64(group)), group)
                    with self.loop(tokens, b.mul(groups, self.i64(group))) as m:
                        self._tile(start, m, 1)
        b.ret_void()

    def _decode(self, reads: RowReader, start: Any, side: Any) -> None:
        """Write rows of the weight to the memory of the thread, with zeros behind them."""
        b, features = self.b, self.named["features"]
        row = b.add(start, side)
        if reads.height == 1:  # else there are whole sixteen rows
            row = self.clamped(row, self.outputs)
        lines = [
            self.at(self.rows_at, b.mul(self.pitch, b.add(side, self.i64(p))), self.float) for p in range(reads.height)
        ]
        reads.write(row, features, lambda p, column, values, left: self.store(values, lines[p], column))
        for p, line in enumerate(lines):
            reads.finish(b.add(row, self.i64(p)), features, line)
            self.store(self.floats(0.0), line, features)

    def _tile(self, start: Any, m: Any, count: int) -> None:
        """The products of the decoded rows with `count` rows of activations from m on."""
        b, places = self.b, list(pairs(range(SIDE), range(count)))
        for r, i in places:
            b.store(self.constant(self.float, self.lanes, 0.0), self.sums[r][i])
        with self.loop(b.udiv(self.columns, self.i64(self.lanes))) as chunk:
            column = b.mul(chunk, self.i64(self.lanes))
            line = b.add(b.mul(m, self.columns), column)
            inputs = [
                self.load(self.x, b.add(line, b.mul(self.columns, self.i64(i))), self.float, self.lanes)
                for i in range(count)
            ]
            for r in range(SIDE):
                here = b.add(b.mul(self.pitch, self.i64(r)), column)
                weights = self.load(self.rows_at, here, self.float, self.lanes)
                for i, x in enumerate(inputs):
                    b.store(self.multiply_add(weights, x, b.load(self.sums[r][i])), self.sums[r][i])
        kind = self.vector(self.float, SIDE)
        for i in range(count):
            totals = kind(self.ir.Undefined)
            for r in range(SIDE):
                totals = b.insert_element(totals, self.total(b.load(self.sums[r][i])), self.word(r))
            place = b.add(b.mul(b.add(m, self.i64(i)), self.width), start)
            self.store_some(self.rounded(totals), self.out, place, b.sub(self.outputs, start))
