"""Hold the hidden states of many samples between the blocks of a model, in memory or in a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from compress.model import paging
from compress.storage.files import new_descriptor

QUANTIZED, FULL = 0, 1  # sides of hidden states: of the quantized prefix, of the full-precision model


class HiddenStates:
    """Hidden states [samples, tokens, hidden], for each side, on the CPU: in memory or in slices of a file.

    Memory is pinned where they come from a GPU; copies to and from it then run while it computes (paging.py).
    """

    def __init__(self, samples: int, file: Path | None, sides: int = 1) -> None:
        self.samples, self.file, self.sides = samples, file, sides
        self.tensor: Tensor | None = None
        self.slice_shape: tuple[int, ...] = ()
        self.dtype = torch.float32
        self.descriptor = -1
        self.beside: dict[Any, HiddenStates] = {}  # what else goes from block to block with them
        self.pager: paging.Pager | None = None
        self.written: torch.cuda.Event | None = None  # when the last of them has come from the GPU

    def write(self, start: int, states: Tensor, side: int = QUANTIZED) -> None:
        """Put states [batch, tokens, hidden] at sample `start` of a side."""
        start += side * self.samples
        if not self.slice_shape:
            self.slice_shape, self.dtype = tuple(states.shape[1:]), states.dtype
            if self.file is None:
                self.tensor = paging.host_memory((self.sides * self.samples, *self.slice_shape), states)
            else:
                self.descriptor = new_descriptor(self.file, 0o600)
        if self.pager is not None:
            self.pager.forget(start, start + states.shape[0])
        if self.tensor is not None:
            self.written = paging.send_back(states, self.tensor[start : start + states.shape[0]]) or self.written
            return
        states = states.to("cpu", self.dtype)
        raw = memoryview(cast(Any, states.contiguous().reshape(-1).view(torch.uint8).numpy()))
        offset = start * self._nbytes()
        while raw:
            written = os.pwrite(self.descriptor, raw, offset)
            raw, offset = raw[written:], offset + written

    def read(self, start: int, count: int, side: int = QUANTIZED) -> Tensor:
        """Return states [count, tokens, hidden] from sample `start` of a side; a view when in memory."""
        start += side * self.samples
        if self.tensor is not None:
            if self.written is not None:
                self.written.synchronize()
                self.written = None
            return self.tensor[start : start + count]
        states = torch.empty(count, *self.slice_shape, dtype=self.dtype)
        raw = memoryview(cast(Any, states.reshape(-1).view(torch.uint8).numpy()))
        offset = start * self._nbytes()
        while raw:
            got = os.preadv(self.descriptor, [raw], offset)
            if got == 0:
                raise OSError(f"{self.file} is shorter than the hidden states written to it")
            raw, offset = raw[got:], offset + got
        return states

    def fetch(self, start: int, count: int, device: torch.device, side: int = QUANTIZED) -> Tensor:
        """Return what `read` does, on a device; a GPU then gets the samples behind them, too, while it works on these.

        That is so where the states are in memory: a file is read when they are asked for.
        """
        if device.type != "cuda" or self.tensor is None:
            return self.read(start, count, side).to(device)
        held = self.tensor
        self.pager = self.pager or paging.Pager(device, lambda first, end: held[first:end])
        first = side * self.samples
        states = self.pager.take(first + start, first + start + count)
        behind = min(count, self.samples - start - count)
        if behind > 0:
            self.pager.send(first + start + count, first + start + count + behind)
        return states

    def close(self) -> None:
        """Free the memory or the file."""
        for store in self.beside.values():
            store.close()
        self.tensor = self.pager = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        if self.file is not None:
            self.file.unlink(missing_ok=True)

    def _nbytes(self) -> int:
        return int(torch.Size(self.slice_shape).numel()) * self.dtype.itemsize
