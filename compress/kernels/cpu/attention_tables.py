"""The tables and the memory that compiled attention works on (compress/kernels/cpu/attention.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.kernels.cpu.dots import Dots, register_lanes

# The tables. Of the state: keys of a sequence with the new ones, new tokens of each, sequences, the address of an int64
# of each sequence, its first position that is seen (0: there is none).
STATE = ("tokens", "new", "batch", "starts")
# Of a layer's cache: addresses, elements from one to the next, positions that a query sees (0: all), and the address of
# a float32 of each query head, the score of a sink (0: there is none).
CACHE = (
    "keys values key_batch key_head key_token value_batch value_head value_token window sinks".split()  # noqa: SIM905
)
PART = 256  # positions of a record
BLOCK = 64  # positions whose values are summed while they are in the processor's first cache
SHARES = 64  # into which the work is divided: the range of both functions
EXTRA = 16  # float32 of a record behind the sums of values: the largest score, the sum of the powers, a weight


class HeadSizes(NamedTuple):
    """The sizes that a function is compiled for."""

    queries: int
    stored: int  # heads of keys and values, a divisor of that
    width: int
    value_width: int
    scale: float  # of scores
    softcap: float = 0.0  # 0: none

    @property
    def group(self) -> int:
        return self.queries // self.stored

    @property
    def record(self) -> int:
        """Return the float32 of a record."""
        return self.value_width + EXTRA


def table(values: Sequence[int]) -> Tensor:
    """Return a STATE or a CACHE."""
    return torch.tensor(values, dtype=torch.int64, device="cpu")


class Tables(Dots):
    """Reads the tables, which are the first two pointers."""

    def __init__(
        self, name: str, pointers: str, integers: str, heads: HeadSizes, stored: torch.dtype, written: torch.dtype
    ) -> None:
        lanes = min(register_lanes(), 8 if heads.width % 32 or heads.value_width % 32 else 16)
        super().__init__(name, f"state cache {pointers}", f"first last {integers}", stored, written, lanes)
        self.heads = heads
        self.state = {key: self.load(self.pointers[0], self.i64(i), self.index) for i, key in enumerate(STATE)}
        self.cache = {key: self.load(self.pointers[1], self.i64(i), self.index) for i, key in enumerate(CACHE)}
        b, tokens, new = self.b, self.state["tokens"], self.state["new"]
        self.old = b.sub(tokens, new)
        windowed = self.positive(b.add(b.sub(self.old, self.cache["window"]), self.i64(1)))
        self.base = b.select(self.is_set(self.cache["window"]), windowed, self.i64(0))  # what the first query sees
        self.parts = b.udiv(b.add(b.sub(tokens, self.base), self.i64(PART - 1)), self.i64(PART))
        self.rows = b.mul(new, self.i64(heads.group))  # queries of a head of keys

    def is_set(self, value: Any) -> Any:
        return self.b.icmp_signed("!=", value, self.i64(0))

    def positive(self, value: Any) -> Any:
        return self.larger(value, self.i64(0))

    def larger(self, a: Any, b: Any) -> Any:
        return self.b.select(self.b.icmp_signed(">", a, b), a, b)

    def address(self, value: Any) -> Any:
        return self.b.inttoptr(value, self.pointer)

    def share(self, total: Any) -> tuple[Any, Any]:
        """Return the first and the last of `total` units that belong to the range of the call."""
        b = self.b
        first, last = (b.udiv(b.mul(total, bound), self.i64(SHARES)) for bound in self.integers[:2])
        return first, last

    def record_place(self, unit: Any, row: Any) -> Any:
        return self.b.mul(self.b.add(self.b.mul(unit, self.rows), row), self.i64(self.heads.record))
