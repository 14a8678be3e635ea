"""Hold the memory that a program of blocks works in, and the tables that say where keys and values lie."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.kernels.cpu.attention_tables import CACHE, STATE

TOKENS, NEW, BATCH, STARTS = range(len(STATE))


class Memory:
    """Tensors and scratch memory at fixed addresses, for `new` tokens of each of `batch` sequences.

    All programs of passes of this shape may share it: one runs at a time.
    """

    def __init__(self, batch: int, new: int, dtype: torch.dtype, layers: int) -> None:
        self.batch, self.new, self.dtype = batch, new, dtype
        self.rows = batch * new
        self.places: list[tuple[int, int]] = []  # that the tables say (caches.py)
        self._tensors: dict[tuple[str, int], Tensor] = {}
        self._slots: list[Tensor] = []  # scratch memory of calls that follow each other
        self._old: list[Tensor] = []  # what was too small for later ones
        self._slot = 0
        self.states = torch.zeros(layers, len(STATE), dtype=torch.int64, device="cpu")
        self.states[:, NEW], self.states[:, BATCH] = new, batch
        self.caches = torch.zeros(layers, len(CACHE), dtype=torch.int64, device="cpu")
        self.starts = torch.zeros(layers, batch, dtype=torch.int64, device="cpu")
        self.space = torch.empty(0, dtype=torch.float32, device="cpu")  # of attention

    def tensor(self, name: str, width: int) -> Tensor:
        """Return the tensor [rows, width] of a name, which blocks share; a row is a new token."""
        if (name, width) not in self._tensors:
            self._tensors[name, width] = torch.zeros(self.rows, width, dtype=self.dtype, device="cpu")
        return self._tensors[name, width]

    def by_sequence(self, rows: Tensor) -> Tensor:
        """Return rows [rows, width] as modules read them, [batch, new, width]."""
        return rows.view(self.batch, self.new, -1)

    def take(self, nbytes: int) -> int:
        """Return the address of scratch memory that is used until `release`."""
        if self._slot == len(self._slots):
            self._slots.append(torch.empty(0, dtype=torch.uint8, device="cpu"))
        if self._slots[self._slot].numel() < nbytes:
            self._old.append(self._slots[self._slot])
            self._slots[self._slot] = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._slot += 1
        return self._slots[self._slot - 1].data_ptr()

    def release(self) -> None:
        """Let calls that come use the scratch memory of those before them."""
        self._slot = 0
