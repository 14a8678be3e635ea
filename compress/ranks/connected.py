"""Connect the processes of a run by torch.distributed, and notice when one of them has ended."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store

from compress.errors import CompressError, ProcessLostError, first_line, needs
from compress.ranks import wire
from compress.ranks.shares import Ranks, given

T = TypeVar("T")

BEAT = 5.0  # seconds between two signs of life
PATIENCE = 40.0  # seconds without one after which a process is taken for dead
STARTING = 600.0  # seconds until the first one
SILENCE = 12.0  # seconds without a sign of life after SIGTERM; torchrun kills 30 s after it has sent that
UNWINDING = 8.0  # seconds in which a process that has heard SIGTERM may end by itself
HEARING = 0.5  # seconds until a signal that has interrupted the run is known to be SIGTERM
SAYING = 3.0  # seconds that are waited for what a dead process has said
MAX_WAIT = timedelta(days=7)  # a wait for others is cut short by the signs of life
STORE_TIMEOUT = timedelta(seconds=20)
GO_ON = "run the same command again to go on after the last finished block"


class Connected(Ranks):
    """The processes of a run that torch.distributed connects."""

    def __init__(self, device: str) -> None:
        with needs("accelerate", "a run in several processes"):
            from accelerate import PartialState

        rank, size = given()
        super().__init__(rank, size, int(os.environ.get("LOCAL_WORLD_SIZE", str(size))))
        self.device = torch.device(device)
        self.pulse = _Pulse(rank, size)
        os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # accelerate changes it otherwise
        PartialState(cpu=device == "cpu", timeout=MAX_WAIT)
        if device != "cpu":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        self._gloo = dist.new_group(backend="gloo", timeout=MAX_WAIT)

    def share(self, value: T) -> T:
        return self._spread_value(value, 0)

    def gather(self, value: T) -> list[T]:
        return [self._spread_value(value, source) for source in range(self.size)]

    def add_up(self, sums: Sequence[Tensor]) -> None:
        for tensor in sums:
            self._call("all_reduce", tensor, group=self._group(tensor))

    def spread(self, tensor: Tensor, source: int) -> None:
        self._call("broadcast", tensor, src=source, group=self._group(tensor))

    def exchange(self, tensors: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        told: Any = self.gather([[(tuple(t.shape), t.dtype) for t in group] for group in tensors])
        incoming = [facts[self.rank] for facts in told]
        sizes = [[math.prod(shape) * dtype.itemsize for shape, dtype in facts] for facts in incoming]
        device = next((t.device for group in tensors for t in group), self.device)
        sent = [[t.contiguous().view(-1).view(torch.uint8) for t in group] for group in tensors]
        flat = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *(t for group in sent for t in group)])
        received = torch.empty(sum(map(sum, sizes)), dtype=torch.uint8, device=device)
        splits = list(map(sum, sizes)), [sum(map(len, group)) for group in sent]
        self._call("all_to_all_single", received, flat, *splits, group=self._group(flat))
        parts = iter(received.split([size for group in sizes for size in group]))
        return [[next(parts).clone().view(dtype).view(shape) for shape, dtype in facts] for facts in incoming]

    def hand(self, value: T, source: int, target: int) -> T:
        if self.rank == source:
            message = wire.encode(value)
            self._call("send", torch.tensor([len(message)]), dst=target, group=self._gloo)
            self._call("send", message, dst=target, group=self._gloo)
        if self.rank != target:
            return value
        size = torch.zeros(1, dtype=torch.int64)
        self._call("recv", size, src=source, group=self._gloo)
        message = torch.empty(int(size), dtype=torch.uint8)
        self._call("recv", message, src=source, group=self._gloo)
        return self._value(message)

    def _spread_value(self, value: T, source: int) -> T:
        """Return in every process what the process `source` has given; none of it is unpickled."""
        message = wire.encode(value) if self.rank == source else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([len(message)])
        self._call("broadcast", size, src=source, group=self._gloo)
        if self.rank == source:
            self._call("broadcast", message, src=source, group=self._gloo)
            return value
        message = torch.empty(int(size), dtype=torch.uint8)
        self._call("broadcast", message, src=source, group=self._gloo)
        return self._value(message)

    def _value(self, message: Tensor) -> Any:
        try:
            return wire.decode(message, self.device)
        except (ValueError, TypeError, AttributeError, ImportError, RuntimeError, OverflowError) as error:
            raise ProcessLostError(f"another process sent what is no message ({first_line(error)}); {GO_ON}") from error

    @contextmanager
    def main_first(self) -> Iterator[None]:
        if not self.is_main:
            self.share(None)
        yield
        if self.is_main:
            self.share(None)

    def is_said(self, error: BaseException) -> bool:
        """Return whether the main process says the same, or all there is to say is that another one has ended."""
        begun = time.monotonic()
        while time.monotonic() - begun < SAYING:
            if words := self.pulse.words(0):
                return isinstance(error, ProcessLostError) or words == str(error)
            time.sleep(0.1)
        return isinstance(error, ProcessLostError) and self.rank > 1

    def may_say(self) -> bool:
        """Return whether this process has not said why the run ends; it has, from now on."""
        return self.pulse.announcing.acquire(blocking=False)

    def wait_for_line(self, error: BaseException) -> None:
        """Wait for what `_Pulse` says of a process that was killed, if SIGTERM is why this one ends."""
        if self.pulse.terminated.wait(HEARING if isinstance(error, KeyboardInterrupt) else 0):
            self.pulse.answered.wait(SILENCE + HEARING)

    def leave(self, error: BaseException | None = None) -> None:
        """Tell the others that this process ends, and why."""
        if error is not None:
            self.pulse.say(str(error) if isinstance(error, CompressError) else type(error).__name__)
        self.pulse.end()

    def _group(self, tensor: Tensor) -> Any:
        return None if tensor.is_cuda else self._gloo

    def _call(self, operation: str, *given: Any, **options: Any) -> None:
        """Run a collective operation. Raises ProcessLostError if another process has ended."""
        try:
            getattr(dist, operation)(*given, **options)
        except RuntimeError as error:
            said = self.pulse.last_words() or f"another process has ended ({first_line(error)}); {GO_ON}"
            raise ProcessLostError(said) from error


def _store() -> Store:
    """Return a connection to the store that torchrun keeps, for the keys of this attempt of the run."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, is_master=False, timeout=STORE_TIMEOUT)
    return dist.PrefixStore(f"compress/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


class _Pulse:
    """Signs of life, and what processes say before they end, in the store that torchrun keeps."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.others = rank, [other for other in range(size) if other != rank]
        self.store, self.watching = _store(), _store()  # of the thread of the run, and of that below
        self.ended, self.terminated, self.answered = threading.Event(), threading.Event(), threading.Event()
        self.announcing = threading.Lock()  # taken by the thread that says why the run ends
        threading.Thread(target=self._beat, daemon=True).start()
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        with suppress(ValueError):  # not the main thread, which alone hears signals
            signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        threading.Thread(target=self._hear, args=(reading, _store()), daemon=True).start()

    def say(self, text: str) -> None:
        """Tell the others why this process ends."""
        with suppress(RuntimeError):
            self.store.set(f"words/{self.rank}", text)

    def last_words(self) -> str:
        """Return what another process has said before it ended, "" if nothing."""
        begun = time.monotonic()
        while time.monotonic() - begun < SAYING:
            for rank in self.others:
                if text := self.words(rank):
                    return f"process {rank} has ended: {text}"
            time.sleep(0.2)
        return ""

    def words(self, rank: int, store: Store | None = None) -> str:
        """Return what a process has said; store: the connection of the thread that asks."""
        store = store or self.store
        with suppress(RuntimeError):
            if store.check([f"words/{rank}"]):
                return store.get(f"words/{rank}").decode()
        return ""

    def lost(self, store: Store) -> str:
        """Wait for a sign of life of all others; return a line on one that gives none, "" if there is none to say.

        Only the first of the processes that live has it to say.
        """
        begun, first = time.monotonic(), {rank: self._sign(rank, store) for rank in self.others}
        silent = set(self.others)
        while silent and time.monotonic() - begun < SILENCE:
            time.sleep(0.2)
            silent = {rank for rank in silent if self._sign(rank, store) == first[rank] != b"end"}
            silent = {rank for rank in silent if not self.words(rank, store)}
        is_first = min({self.rank, *self.others} - silent) == self.rank
        return f"process {min(silent)} gives no sign of life; {GO_ON}" if silent and is_first else ""

    def _sign(self, rank: int, store: Store) -> bytes:
        """Return the last sign of life of a process."""
        with suppress(RuntimeError):
            if store.check([f"beat/{rank}"]):
                return bytes(store.get(f"beat/{rank}"))
        return b""

    def _hear(self, reading: int, store: Store) -> None:
        """Answer SIGTERM also where the thread of the run cannot, since it waits for a process that is no more."""
        while signal.SIGTERM not in os.read(reading, 64):
            pass
        self.terminated.set()
        line = self.lost(store)
        if line and self.announcing.acquire(blocking=False):
            print(f"compress: {line}", file=sys.__stderr__, flush=True)
        self.answered.set()
        if not self.ended.wait(UNWINDING):
            os._exit(128 + signal.SIGTERM)

    def _beat(self) -> None:
        seen = {rank: (b"", time.monotonic()) for rank in self.others}
        count = 0
        while count == 0 or not self.ended.wait(BEAT):
            count += 1
            try:
                self.watching.set(f"beat/{self.rank}", str(count))
                lost = self._silent(seen)
            except RuntimeError:  # the store is gone, and with it the process or the agent that keeps it
                lost = 0
            if lost is not None and not self.ended.is_set():
                print(f"compress: process {lost} gives no sign of life; {GO_ON}", file=sys.__stderr__, flush=True)
                os._exit(1)

    def _silent(self, seen: dict[int, tuple[bytes, float]]) -> int | None:
        """Return a process that is silent for too long; seen: the last sign of life of each, and when it came."""
        now = time.monotonic()
        for rank in self.others:
            beat = self.watching.get(f"beat/{rank}") if self.watching.check([f"beat/{rank}"]) else b""
            if beat != seen[rank][0]:
                seen[rank] = beat, now
            elif now - seen[rank][1] > (PATIENCE if beat else STARTING) and beat != b"end":
                return rank
        return None

    def end(self) -> None:
        """Stop the signs of life."""
        self.ended.set()
        with suppress(RuntimeError):
            self.store.set(f"beat/{self.rank}", "end")
