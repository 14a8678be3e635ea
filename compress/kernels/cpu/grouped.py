"""Multiply rows of activations with the stored weights of experts on a CPU, each row with those of its own expert.

All work of a layer is one table of compiled calls (compress/kernels/cpu/program.py), which threads share: for every
expert that has rows, those of the kernel of its format (`Prepared.calls`). What they are is found once for a number of
rows. An argument of such a call is an address of the expert's weight, or a number, or one of three addresses that
differ between calls, plus an offset: `_Form` holds which, and `Fill` makes a table of them, in a microsecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.kernels import dispatch, llvm
from compress.kernels.calls import ActivationRows, CompiledCall
from compress.kernels.contract import Prepared
from compress.kernels.cpu.emitter import Emitter
from compress.kernels.cpu.program import HEAD, Program, loop_arguments, run_table
from compress.kernels.cpu.small_matmul import ALIGNED
from compress.kernels.dispatch import decoded_product
from compress.kernels.grouped import Experts

MOST = 16  # rows of an expert that are one list of calls; more are several
MOVED = ("source", "target", "scratch")  # addresses that differ between calls
LAYOUT_LIMIT = 256  # layouts kept at a time
STEP = 1 << 40  # how far they are moved to find the arguments that move with them
FORM_SIZE = 6  # numbers that tell `Fill` of a form


class _Form(NamedTuple):
    """The calls for a number of rows of an expert, as records of a table of W numbers."""

    common: Tensor  # int64 [1 + MOVED, W]: the numbers of expert 0, and how often each address is added to them
    places: Tensor  # int64 [V]: those of W that differ between experts
    values: Tensor  # int64 [experts, V]: what is added there
    records: int
    scratch: int  # bytes that one thread works in, and each of several
    space: int
    size: int  # arguments of a record
    is_shared: bool  # whether threads share any of the work

    @property
    def fields(self) -> list[int]:
        addresses = (tensor.data_ptr() for tensor in (self.common, self.places, self.values))
        return [self.common.shape[1], self.records, *addresses, self.places.shape[0]]


class _Layout(NamedTuple):
    """What a product of some numbers of rows and pairs works in."""

    most: int  # rows of a list of calls
    threads: int
    space: int  # bytes of each
    places: tuple[int, ...]  # in one piece of memory of `nbytes`
    nbytes: int
    fields: int  # address of the forms' fields
    loop: llvm.Function


class Grouped:
    """The weights of experts that read the same inputs: of each expert one or several, whose outputs lie side by side.

    Valid as long as the tensors of the kernels stay where they are.
    """

    def __init__(self, experts: Sequence[Sequence[Prepared]], dtype: torch.dtype) -> None:
        """experts: kernels that `_is_alike` accepts; dtype: of activations."""
        self.experts, self.dtype = [tuple(kernels) for kernels in experts], dtype
        self.inputs, self.width = experts[0][0].shape[1], sum(kernel.shape[0] for kernel in experts[0])
        self.most = min(kernel.most_rows(dtype) for kernels in experts for kernel in kernels)
        self._layouts: dict[tuple[int, int, int], _Layout] = {}
        self._lock = Lock()  # two threads that made the same forms would leave an address of one that is gone
        self.stacks: list[dict[str, Tensor]] = []
        self._known: dict[int, tuple[dict[int, _Form], Tensor]] = {}  # threads -> forms and their fields

    def route(self, ids: Tensor) -> list[Tensor]:
        """Return nothing: `Fill` looks at the ids."""
        return []

    def product(self, x: Tensor, ids: Tensor, route: list[Tensor]) -> Tensor:
        """See `kernels.grouped.ExpertKernel`."""
        if len(ids) > self.most:
            rows = (ids + 1).clamp_(0, len(self.experts) + 1).bincount(minlength=len(self.experts) + 2)[1:-1]
            if int(rows.max()) > self.most:
                return self._decoded_product(x, ids)
        pairs, count, size = len(ids), len(self.experts), x.element_size()
        layout = self._layout(x.shape[0], pairs)
        memory = torch.empty(layout.nbytes, dtype=torch.uint8, device="cpu")
        base = memory.data_ptr()
        source, target, order, counts, result, scratch, spaces, table = (base + place for place in layout.places)
        out = x.new_zeros(pairs, self.width)
        numbers = pairs, count, pairs // x.shape[0], size * self.inputs, size * self.width, layout.most
        addresses = ids.data_ptr(), x.data_ptr(), order, counts, layout.fields, table, result
        llvm.function(Fill)(*addresses, *numbers, source, target, scratch)
        valid, records = memory[layout.places[4] :][:16].view(torch.int64).tolist()
        published = torch.zeros(1, dtype=torch.int64, device="cpu") if layout.threads > 1 else memory
        runs = [
            loop_arguments(table, published.data_ptr(), spaces + layout.space * thread, records, thread)
            for thread in range(layout.threads)
        ]
        run_table(layout.loop, runs, published)
        llvm.function(Scatter)(target, order, out.data_ptr(), valid, size * self.width)
        return out

    def _layout(self, rows: int, pairs: int) -> _Layout:
        """Return what a product of so many rows and pairs works in, prepared once."""
        threads = torch.get_num_threads()
        if known := self._layouts.get((rows, pairs, threads)):
            return known
        most, size, count = min(rows, MOST), self.dtype.itemsize, len(self.experts)
        with self._lock:
            forms, fields = self._forms(most)
        used = [forms[each] for each in range(1, most + 1)]
        threads_used = threads if any(form.is_shared for form in used) else 1
        space = max(form.space for form in used)
        lists, longest = min(pairs, count + pairs // most), max(form.common.shape[1] for form in used)
        sizes = (
            size * pairs * self.inputs, size * pairs * self.width, 8 * pairs, 16 * count, 16,
            max(form.scratch for form in used), space * threads_used, 8 * lists * longest,
        )  # fmt: skip
        ends = list(accumulate(-(-each // ALIGNED) * ALIGNED for each in sizes))
        loop = Program.loop(used[0].size)
        made = _Layout(most, threads_used, space, (0, *ends[:-1]), ends[-1], fields.data_ptr(), loop)
        if len(self._layouts) >= LAYOUT_LIMIT:
            self._layouts.clear()
        self._layouts[rows, pairs, threads] = made
        return made

    def _decoded_product(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return `product` expert by expert, for many rows: weights are decoded where that is faster."""
        out, per = x.new_zeros(len(ids), self.width), len(ids) // x.shape[0]
        order = ids.argsort(stable=True)
        sorted_ids = ids[order]
        bounds = torch.searchsorted(sorted_ids, torch.arange(len(self.experts) + 1)).tolist()
        for kernels, first, last in zip(self.experts, bounds, bounds[1:], strict=False):
            if first < last:
                pairs = order[first:last]
                rows = x[pairs // per]
                few = [last - first <= kernel.most_rows(x.dtype) for kernel in kernels]
                parts = [
                    kernel(rows) if is_few else decoded_product(kernel, rows)
                    for kernel, is_few in zip(kernels, few, strict=True)
                ]
                out[pairs] = torch.cat(parts, -1)
        return out

    def _forms(self, most: int) -> tuple[dict[int, _Form], Tensor]:
        """Return the forms of up to `most` rows, and their fields [1 + MOST, FORM_SIZE]."""
        threads = torch.get_num_threads()
        forms, fields = self._known.setdefault(
            threads, ({}, torch.zeros(MOST + 1, FORM_SIZE, dtype=torch.int64, device="cpu"))
        )
        for rows in range(1, most + 1):
            if rows not in forms:
                form = self._form(rows, threads)
                fields[rows] = torch.tensor(form.fields)
                forms[rows] = form
        return forms, fields

    def _form(self, rows: int, threads: int) -> _Form:
        every = self._records(rows, threads, {}, slice(None))
        table = every.table.view(len(self.experts), -1)
        origin, count = table[0], every.table.shape[0] // len(self.experts)
        moved = [self._records(rows, threads, {name: STEP}, slice(1)).table.flatten() - origin for name in MOVED]
        changed = table - origin
        places = changed.any(0).nonzero()[:, 0]
        is_shared = bool((every.table[:, HEAD.index("shares")] > 0).any())
        common = torch.stack([origin, *(each // STEP for each in moved)])
        values = changed[:, places].contiguous()
        return _Form(common, places, values, count, every.scratch, every.space, every.size, is_shared)

    def _records(self, rows: int, threads: int, moved: dict[str, int], experts: slice) -> _Records:
        """Return the records of some experts' calls; moved: by how much addresses are moved, which are of nothing."""
        source, target, scratch = (moved.get(name, 0) for name in MOVED)
        calls: list[CompiledCall] = []
        taken = [0]
        for kernels in self.experts[experts]:
            taken.append(0)

            def take(nbytes: int) -> int:
                place = scratch + taken[-1]
                taken[-1] += -(-nbytes // ALIGNED) * ALIGNED
                return place

            calls += expert_calls(kernels, ActivationRows(rows, self.dtype, source, target, self.width), take)
        program = Program(calls, threads)
        space = max((-(-call.nbytes // ALIGNED) * ALIGNED for call in calls if call.space >= 0), default=ALIGNED)
        return _Records(program.table, program.size, max(taken), space)


class _Records(NamedTuple):
    table: Tensor  # int64 [records, ...]
    size: int  # arguments of a record
    scratch: int  # bytes that one thread works in
    space: int  # and each of several


def expert_calls(kernels: Sequence[Prepared], rows: ActivationRows, take: Any) -> list[CompiledCall]:
    """Return the calls that multiply rows with all weights of an expert, outputs side by side."""
    together = kernels[0].calls(rows, take, kernels[1:])
    if together is not None:
        return list(together)
    calls: list[CompiledCall] = []
    for kernel in kernels:
        alone = kernel.calls(rows, take)
        assert alone is not None, "the caller asks _is_alike first"
        calls += alone
        rows = rows._replace(target=rows.target + kernel.shape[0] * rows.dtype.itemsize)
    return calls


def prepare(experts: Experts, dtype: torch.dtype) -> Grouped | None:
    """Return the weights of experts of one shape, if all have kernels, and of one layout of calls."""
    like = torch.empty(0, dtype=dtype, device="cpu")
    kernels = [[dispatch.prepare(like, w.tensors, w.format, w.params, w.shape) for w in each] for each in experts]
    ready = [[kernel for kernel in each if kernel is not None] for each in kernels]
    shapes = {tuple(kernel.shape for kernel in each) for each in ready}
    is_whole = all(len(some) == len(each) for some, each in zip(ready, kernels, strict=True))
    return Grouped(ready, dtype) if is_whole and len(shapes) == 1 and _is_alike(ready, dtype) else None


def _is_alike(experts: Sequence[Sequence[Prepared]], dtype: torch.dtype) -> bool:
    """Return whether all kernels have calls, as many for each expert."""
    counts = set()
    for kernels in experts:
        rows = ActivationRows(1, dtype, 0, 0, 1)
        alone = [kernel.calls(rows, lambda _: 0) if dtype in kernel.types else None for kernel in kernels]
        if any(calls is None for calls in alone):
            return False
        counts.add(tuple(len(list(calls)) for calls in alone if calls is not None))
    return len(counts) == 1


class _Copies(Emitter):
    def copy(self, target: Any, source: Any, nbytes: Any) -> None:
        """Copy memory that does not overlap."""
        self.intrinsic("llvm.memcpy.p0.p0.i64", self.ir.VoidType(), target, source, nbytes, self.ir.IntType(1)(0))


class Fill(_Copies):
    """Sorts pairs by their expert, copies the rows that they read, and writes the records of all experts' calls.

    ids int64 [pairs]; x in rows of `nbytes`, each read by `per` pairs in turn; order int64 [pairs]: the pairs with an
    expert, sorted; counts int64 [2, experts]: memory to work in; forms int64 [1 + most, FORM_SIZE]; result: how many
    pairs have an expert, and the number of records. Rows are copied to `source`; results are to lie at `target`, in
    rows of `out_nbytes`.
    """

    def __init__(self) -> None:
        super().__init__(
            "fill", "ids x order counts forms table result",
            "pairs experts per nbytes out_nbytes most source target scratch",
        )  # fmt: skip
        ids, x, order, counts, forms, table, result = self.pointers
        pairs, experts, per, nbytes, out_nbytes, most, source, target, scratch = self.integers
        b = self.b
        ends = self.at(counts, experts, self.index)
        valid, filled, records = (self.variable(self.index) for _ in range(3))
        for variable in (valid, filled, records):
            b.store(self.i64(0), variable)
        with self.loop(experts) as e:
            self.store(self.i64(0), counts, e)
        with self._pairs(ids, pairs, experts) as (_, e):
            self.store(b.add(self.load(counts, e, self.index), self.i64(1)), counts, e)
        with self.loop(experts) as e:
            start = b.load(valid, typ=self.index)
            self.store(start, ends, e)
            b.store(b.add(start, self.load(counts, e, self.index)), valid)
        with self._pairs(ids, pairs, experts) as (i, e):
            place = self.load(ends, e, self.index)
            self.store(i, order, place)
            self.store(b.add(place, self.i64(1)), ends, e)
            to = b.inttoptr(b.add(source, b.mul(place, nbytes)), self.pointer)
            self.copy(to, self.at(x, b.mul(b.udiv(i, per), nbytes), self.byte), nbytes)
        with self.loop(experts) as e:
            count = self.load(counts, e, self.index)
            start = b.sub(self.load(ends, e, self.index), count)
            with self.loop(b.udiv(b.add(count, b.sub(most, self.i64(1))), most)) as k:
                done = b.mul(k, most)
                rows, first = self.smaller(b.sub(count, done), most), b.add(start, done)
                moved = b.add(source, b.mul(first, nbytes)), b.add(target, b.mul(first, out_nbytes)), scratch
                self._write(table, filled, records, self.at(forms, b.mul(rows, self.i64(FORM_SIZE)), self.index),
                            e, moved)  # fmt: skip
        self.store(b.load(valid, typ=self.index), result, self.i64(0))
        self.store(b.load(records, typ=self.index), result, self.i64(1))
        b.ret_void()

    def _pairs(self, ids: Any, pairs: Any, experts: Any) -> Any:
        """Loop over the pairs that have an expert: (number of the pair, of the expert)."""
        from contextlib import contextmanager

        @contextmanager
        def loop() -> Any:
            with self.loop(pairs) as i:
                e = self.load(ids, i, self.index)
                with self.b.if_then(self.b.icmp_unsigned("<", e, experts)):
                    yield i, e

        return loop()

    def _write(self, table: Any, filled: Any, records: Any, form: Any, e: Any, moved: tuple[Any, ...]) -> None:
        """Append the records of a form, for an expert and these addresses, to the table."""
        b = self.b
        numbers, count, common, places, values, varying = (
            self.load(form, self.i64(k), self.index) for k in range(FORM_SIZE)
        )
        common, places, values = (b.inttoptr(each, self.pointer) for each in (common, places, values))
        here = self.at(table, b.load(filled, typ=self.index), self.index)
        with self.loop(numbers) as i:
            value = self.load(common, i, self.index)
            for k, address in enumerate(moved):
                factor = self.load(common, b.add(b.mul(numbers, self.i64(k + 1)), i), self.index)
                value = b.add(value, b.mul(factor, address))
            self.store(value, here, i)
        with self.loop(varying) as i:
            place = self.load(places, i, self.index)
            added = self.load(values, b.add(b.mul(e, varying), i), self.index)
            self.store(b.add(self.load(here, place, self.index), added), here, place)
        b.store(b.add(b.load(filled, typ=self.index), numbers), filled)
        b.store(b.add(b.load(records, typ=self.index), count), records)


class Scatter(_Copies):
    """Copies rows of `nbytes` to the places in out that `order` gives."""

    def __init__(self) -> None:
        super().__init__("scatter", "rows order out", "count nbytes")
        rows, order, out = self.pointers
        count, nbytes = self.integers
        b = self.b
        with self.loop(count) as i:
            place = b.mul(self.load(order, i, self.index), nbytes)
            self.copy(self.at(out, place, self.byte), self.at(rows, b.mul(i, nbytes), self.byte), nbytes)
        b.ret_void()
