"""Deal the work of a run out to its processes; one process, as here, has all of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
Key = TypeVar("Key")


class Portion(NamedTuple):
    """Pieces in a row of a task, for one process."""

    rank: int
    pieces: range


class Ranks:
    """The processes of a run, of which this is number `rank` of `size`; `local` of them are on this machine."""

    def __init__(self, rank: int = 0, size: int = 1, local: int = 1) -> None:
        self.rank, self.size, self.local = rank, size, local

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def part(self, count: int) -> slice:
        """Return which of `count` things in a row are for this process; the main one has the first, if there is one."""
        return slice(-(-count * self.rank // self.size), -(-count * (self.rank + 1) // self.size))

    def parts(self, count: int) -> list[slice]:
        """Return which of `count` things in a row are each process's."""
        return [Ranks(rank, self.size).part(count) for rank in range(self.size)]

    def divide(self, costs: Mapping[Key, float], pieces: Mapping[Key, int]) -> dict[Key, list[Portion]]:
        """Return task -> who does it, so that the costs add up to about the same everywhere; equal on all processes.

        A task of several pieces is divided where that is needed for it. Portions come in the order of the pieces.
        """
        loads, level = [0.0] * self.size, sum(costs.values()) / self.size
        portions = dict[Key, list[Portion]]()
        for task in sorted(costs, key=lambda task: (pieces[task] > 1, -costs[task])):  # stable: ties as they are given
            cost, count, begin, portions[task] = costs[task] / pieces[task], pieces[task], 0, []
            free = set(range(self.size))
            while begin < count:
                rank = min(free, key=lambda rank: (loads[rank], rank))
                free.remove(rank)
                room = (level - loads[rank]) / cost if cost else count
                end = min(count, begin + max(1, round(room))) if free else count
                loads[rank] += (end - begin) * cost
                portions[task].append(Portion(rank, range(begin, end)))
                begin = end
        return portions

    def share(self, value: T) -> T:
        """Return what the main process has given here."""
        return value

    def gather(self, value: T) -> list[T]:
        """Return what each process has given here."""
        return [value]

    def add_up(self, sums: Sequence[Tensor]) -> None:
        """Replace tensors by their sums over all processes, which must be exact, in place."""

    def spread(self, tensor: Tensor, source: int) -> None:
        """Replace a tensor by that of the process `source`, in place."""

    def exchange(self, tensors: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Give each process the tensors that are meant for it; return what each of them has given to this one."""
        return [list(tensors[0])]

    def hand(self, value: T, source: int, target: int) -> T:
        """Return in the process `target` what the process `source` has given; called by these two, value elsewhere."""
        return value

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Run the body in the main process, then in the others, which find what it has written."""
        yield


def given() -> tuple[int, int]:
    """Return the number of this process and of all, as the environment of torchrun says; (0, 1) without it."""
    rank, size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    is_given = rank.isdecimal() and size.isdecimal() and "MASTER_ADDR" in os.environ
    return (int(rank), int(size)) if is_given and int(size) > 1 else (0, 1)
