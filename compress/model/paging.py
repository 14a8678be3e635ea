"""Fetch what is needed next while the present is used: weights from disk, hidden states from the host to a GPU.

Host memory is pinned, so that copies run beside the computation: to the GPU on a stream of their own, back on the
stream that computes. A batch that is on its way is thrown away where its place is written to before it is taken.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from compress.storage.checkpoint import Readable


class _Batch(NamedTuple):
    """A copy on the GPU, and when it is complete."""

    tensor: Tensor
    is_there: torch.cuda.Event


class Pager:
    """Copies of slices of one host tensor on a GPU; `host` returns the slice of two places, in pinned memory."""

    def __init__(self, device: torch.device, host: Callable[[int, int], Tensor]) -> None:
        self.device, self.host = device, host
        self.stream = torch.cuda.Stream(device)
        self.coming: dict[tuple[int, int], _Batch] = {}  # start and stop of the slice -> its copy

    def take(self, start: int, stop: int) -> Tensor:
        """Return the slice on the GPU, for work on the current stream."""
        batch = self.coming.pop((start, stop), None)
        if batch is None:
            return self.host(start, stop).to(self.device, non_blocking=True)
        current = torch.cuda.current_stream(self.device)
        current.wait_event(batch.is_there)
        batch.tensor.record_stream(current)  # its memory is not used anew before that stream is done with it
        return batch.tensor

    def send(self, start: int, stop: int) -> None:
        """Begin to copy a slice, behind all that the current stream has been given."""
        if (start, stop) in self.coming:
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            tensor = self.host(start, stop).to(self.device, non_blocking=True)
            self.coming[start, stop] = _Batch(tensor, self.stream.record_event())

    def forget(self, start: int, stop: int) -> None:
        """Let go of copies of places that are about to be written to; wait for those that are being made."""
        for place in [place for place in self.coming if place[0] < stop and start < place[1]]:
            self.coming.pop(place).is_there.synchronize()


def host_memory(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return memory of the host for tensors such as this one: pinned where they come from a GPU, if that is allowed.

    It is pinned in place: what torch pins itself is as large as the next power of two.
    """
    tensor = torch.empty(shape, dtype=like.dtype)
    if like.is_cuda and tensor.nbytes:
        address = tensor.data_ptr()
        if int(torch.cuda.cudart().cudaHostRegister(address, tensor.nbytes, 0)) == 0:
            weakref.finalize(tensor, _unpin, address).atexit = False
    return tensor


def _unpin(address: int) -> None:
    torch.cuda.synchronize()  # a copy may still run
    torch.cuda.cudart().cudaHostUnregister(address)


def send_back(states: Tensor, target: Tensor) -> torch.cuda.Event | None:
    """Copy states to a slice of host memory; return when it will be complete, None: it is."""
    if not states.is_cuda or not target.is_pinned():
        if target.is_pinned():
            torch.cuda.synchronize()  # copies from there may still run
        target.copy_(states)
        return None
    target.copy_(states, non_blocking=True)
    return torch.cuda.current_stream(states.device).record_event()


class ReadAhead:
    """Tensors in pinned memory, read before they are asked for; one set of them at a time."""

    def __init__(self) -> None:
        self.thread: ThreadPoolExecutor | None = None
        self.coming: dict[str, Future[Tensor]] = {}

    def begin(self, wanted: Iterable[Readable]) -> None:
        """Begin to read these tensors; what was read before and not taken is let go."""
        self.forget()
        self.thread = self.thread or ThreadPoolExecutor(1, thread_name_prefix="weights")
        self.coming = {stored.name: self.thread.submit(_read, stored) for stored in wanted}

    def take(self, stored: Readable) -> Tensor:
        """Return a tensor, read now if it was not read ahead. Raises CheckpointError as reading does."""
        coming = self.coming.pop(stored.name, None)
        return stored.read() if coming is None else coming.result()

    def forget(self) -> None:
        """Let go of what has been read, and read no more."""
        for coming in self.coming.values():
            coming.cancel()
        self.coming.clear()


def _read(stored: Readable) -> Tensor:
    tensor = stored.read()
    return tensor.pin_memory() if torch.cuda.is_available() else tensor
