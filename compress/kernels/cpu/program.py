"""Run a list of compiled calls with fixed arguments by one compiled loop, on one or several threads.

The calls lie in a table of records, int64: the address of a function, the shares into which its work is divided, where
its arguments want the beginning of a share and memory of a thread, and the arguments. All functions are called with as
many integers as the longest takes: those that a C function does not take lie where it does not look.

With several threads, one runs the whole table, and the others help with the calls whose work is divided: shares are
taken from a counter, and whoever comes late finds none. So no thread is waited for that the system has not woken yet,
but for the end of shares that it has taken. What comes out does not depend on the number of threads where that is true
of the functions.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from concurrent.futures import wait
from functools import cache
from typing import Any

import torch

from compress.kernels import llvm
from compress.kernels.calls import CompiledCall
from compress.kernels.cpu.emitter import Emitter

# A record. `taken` and `done` count shares of this run.
HEAD = "address shares total first space taken done".split()  # noqa: SIM905
# Loops are compiled for these numbers of arguments.
ARGUMENT_COUNTS = (8, 12, 16, 20, 24, 32)
# A thread that is slow holds up the others for a part of the work only.
SHARES_PER_THREAD = 4
# Helpers of a program are awake: less work is worth sharing than where a thread has to be woken.
SHARED_FRACTION = 1 / 8
SPINS = 1000  # reads of a counter before the processor is offered to others
NO_ARGUMENT = -1
ENDED = 1 << 40  # the number of the last record and more


class Program:
    """Calls that run one after the other. Whoever makes it keeps what lies at the addresses, and `functions` alive."""

    def __init__(self, calls: Sequence[CompiledCall], threads: int = 1) -> None:
        longest = max((len(call.arguments) for call in calls), default=0)
        self.threads = threads if _yield() or threads == 1 else 1
        self.functions = [call.function for call in calls]
        self.size = next(count for count in ARGUMENT_COUNTS if count >= longest)
        self._count = len(calls)
        self._loop = self.loop(self.size)
        self._published = torch.zeros(1, dtype=torch.int64, device="cpu")  # records that helpers may take shares of
        records = [self._record(call) for call in calls]
        self.table = torch.tensor(records, dtype=torch.int64, device="cpu").view(-1, len(HEAD) + self.size)
        self._shared = bool((self.table[:, HEAD.index("shares")] > 0).any()) if calls else False
        spaces = max((call.nbytes for call in calls if call.space >= 0), default=0)
        self._spaces = torch.empty(self.threads, max(spaces, 8), dtype=torch.uint8, device="cpu")
        self._runs = [self._arguments(thread) for thread in range(self.threads if self._shared else 1)]

    @staticmethod
    def loop(size: int) -> llvm.Function:
        """Return the loop over a table whose records have so many arguments."""
        return llvm.function(_TableLoop, size)

    def run(self) -> None:
        """Run all calls."""
        if len(self._runs) > 1:
            self.table[:, HEAD.index("taken") :][:, :2].zero_()
            self._published.zero_()
        run_table(self._loop, self._runs, self._published)

    def set_argument(self, record: int, place: int, value: int) -> None:
        """Change one argument of a call; no run may be in progress."""
        self.table[record, len(HEAD) + place] = value

    def _record(self, call: CompiledCall) -> list[int]:
        shares = 0
        if self.threads > 1 and call.total >= 2 * max(1, int(call.least * SHARED_FRACTION)):
            shares = min(self.threads * SHARES_PER_THREAD, call.total // max(1, int(call.least * SHARED_FRACTION)))
        head = {
            "address": address(call.function),
            "shares": shares,
            "total": call.total,
            "first": call.first if call.total else NO_ARGUMENT,
            "space": call.space,
            "taken": 0,
            "done": 0,
        }
        arguments = list(call.arguments) + [0] * (self.size - len(call.arguments))
        return [head[name] for name in HEAD] + arguments

    def _arguments(self, thread: int) -> tuple[int, ...]:
        table, published = self.table.data_ptr(), self._published.data_ptr()
        return loop_arguments(table, published, self._spaces[thread].data_ptr(), self._count, thread)


def loop_arguments(table: int, published: int, space: int, count: int, thread: int) -> tuple[int, ...]:
    """Return what the loop over a table takes in a thread, of which number 0 runs all records."""
    return table, published, space, count, int(thread == 0), _yield()


def run_table(loop: llvm.Function, runs: Sequence[tuple[int, ...]], published: torch.Tensor) -> None:
    """Run a table in as many threads as there are arguments; no share is taken and nothing published yet."""
    if len(runs) == 1:
        loop(*runs[0])
        return
    pool = llvm._pool(len(runs))
    helpers = [pool.submit(loop, *arguments) for arguments in runs[1:]]
    try:
        loop(*runs[0])
    finally:
        published.fill_(ENDED)
        wait([helper for helper in helpers if not helper.cancel()])  # whatever happens: they read the table


def address(function: llvm.Function) -> int:
    """Return where the machine code of a function lies."""
    place = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]  # a function of ctypes
    assert place is not None
    return place


@cache
def _yield() -> int:
    """Return the address of the function that offers the processor to other threads; 0 where it is not known."""
    if sys.platform == "win32":
        return 0
    try:
        function = ctypes.CDLL(None).sched_yield
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


class _Callee:
    """A pointer as llvmlite wants what is called: it asks for the type of the function."""

    def __init__(self, pointer: Any, kind: Any) -> None:
        self.type, self.function_type, self.get_reference = pointer.type, kind, pointer.get_reference


class _TableLoop(Emitter):
    """Runs the records of a table; `leads` is 1 in the thread that runs all of them."""

    def __init__(self, count: int) -> None:
        super().__init__("run", "table published space", "count leads offer")
        self.table, self.published, self.space = self.pointers
        records, leads, self.offer = self.integers
        self.count, self.size = count, len(HEAD) + count
        b = self.b
        is_leader = b.icmp_signed("!=", leads, self.i64(0))
        with self.loop(records) as i:
            record = self.at(self.table, b.mul(i, self.i64(self.size)), self.index)
            head = {name: self.load(record, self.i64(k), self.index) for k, name in enumerate(HEAD[:5])}
            arguments = [self.load(record, self.i64(len(HEAD) + k), self.index) for k in range(count)]
            number = b.add(i, self.i64(1))
            with b.if_else(b.icmp_signed("==", head["shares"], self.i64(0))) as (whole, divided):
                with whole, b.if_then(is_leader):
                    self._call(head["address"], arguments)
                with divided:
                    with b.if_then(is_leader):
                        b.atomic_rmw("xchg", self.published, number, "seq_cst")
                    self._wait(self.published, number)
                    with b.if_then(b.icmp_signed("!=", self._read(self.published), self.i64(ENDED))):
                        self._take_shares(record, head, arguments)
                    with b.if_then(is_leader):
                        self._wait(self._counter(record, "done"), head["shares"])
        b.ret_void()

    def _take_shares(self, record: Any, head: dict[str, Any], arguments: list[Any]) -> None:
        """Run shares of a call until none is left."""
        b = self.b
        again, done = (b.append_basic_block(name) for name in ("again", "done"))
        body = b.append_basic_block("body")
        b.branch(again)
        b.position_at_end(again)
        share = b.atomic_rmw("add", self._counter(record, "taken"), self.i64(1), "seq_cst")
        b.cbranch(b.icmp_signed("<", share, head["shares"]), body, done)
        b.position_at_end(body)
        bounds = [b.sdiv(b.mul(head["total"], each), head["shares"]) for each in (share, b.add(share, self.i64(1)))]
        own = b.ptrtoint(self.space, self.index)
        behind = b.add(head["first"], self.i64(1))
        given = []
        for k, value in enumerate(arguments):
            for place, new in ((head["first"], bounds[0]), (behind, bounds[1]), (head["space"], own)):
                value = b.select(b.icmp_signed("==", place, self.i64(k)), new, value)
            given.append(value)
        self._call(head["address"], given)
        b.atomic_rmw("add", self._counter(record, "done"), self.i64(1), "seq_cst")
        b.branch(again)
        b.position_at_end(done)

    def _call(self, place: Any, arguments: list[Any]) -> None:
        kind = self.ir.FunctionType(self.ir.VoidType(), [self.index] * len(arguments))
        self.b.call(_Callee(self.b.inttoptr(place, self.pointer), kind), arguments)

    def _counter(self, record: Any, name: str) -> Any:
        return self.at(record, self.i64(HEAD.index(name)), self.index)

    def _read(self, pointer: Any) -> Any:
        return self.b.load_atomic(pointer, "seq_cst", 8, typ=self.index)

    def _wait(self, counter: Any, least: Any) -> None:
        """Wait until a counter has reached a number; after some time others are offered the processor."""
        b = self.b
        with b.goto_block(self._entry):
            spun = b.alloca(self.index)
        b.store(self.i64(0), spun)
        look, wait, offer, reached = (b.append_basic_block(name) for name in ("look", "wait", "offer", "reached"))
        b.branch(look)
        b.position_at_end(look)
        b.cbranch(b.icmp_signed(">=", self._read(counter), least), reached, wait)
        b.position_at_end(wait)
        self._pause()
        turn = b.add(b.load(spun, typ=self.index), self.i64(1))
        b.store(turn, spun)
        b.cbranch(b.icmp_signed(">", turn, self.i64(SPINS)), offer, look)
        b.position_at_end(offer)
        b.call(_Callee(b.inttoptr(self.offer, self.pointer), self.ir.FunctionType(self.word, [])), [])
        b.branch(look)
        b.position_at_end(reached)

    def _pause(self) -> None:
        """Tell the processor that a loop waits, where there is an instruction for it."""
        if "sse2" in llvm.features():
            self.intrinsic("llvm.x86.sse2.pause", self.ir.VoidType())
        elif "neon" in llvm.features():
            self.intrinsic("llvm.aarch64.hint", self.ir.VoidType(), self.word(1))
