"""Share the work of a run among processes that torchrun has started; results have the same bytes for any number.

    torchrun --nproc_per_node 4 --no-python compress quantize MODEL --recipe int4

`joined` makes a run one of several, if the environment says that it is; `current` then gives the others. All processes
do the same, but for what is shared out: batches of the calibration text, linears, candidates, windows. They hand each
other the results, and no sum depends on who made its parts. Process 0, the main one, alone writes files. All read the
model's and the output's directory, which lie on a file system that they share.

torch.distributed carries everything: tensors on the CPU by gloo, on a GPU by NCCL, other values as data (wire.py). A
thread of each process tells the others that it lives, so that all end within a minute of the death of one.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from compress.errors import CompressError

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


_joined = [Ranks()]  # the last one is current


def current() -> Ranks:
    """Return the processes that share this run's work; one, unless `joined` says otherwise."""
    return _joined[-1]


def given() -> tuple[int, int]:
    """Return the number of this process and of all, as the environment of torchrun says; (0, 1) without it."""
    rank, size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    is_given = rank.isdecimal() and size.isdecimal() and "MASTER_ADDR" in os.environ
    return (int(rank), int(size)) if is_given and int(size) > 1 else (0, 1)


OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment_alone(place: int = 0, devices: int = 0, threads: int | None = None) -> dict[str, str]:
    """Return the environment for a process that shares its work with no other.

    place: its number among those of this process that run side by side. devices: GPUs of this machine, of which each
    process of torchrun, and each place, gets one in turn; 0: none is chosen. threads: for products on the CPU, unless
    the environment says how many.
    """
    environment = {name: value for name, value in os.environ.items() if name not in OF_TORCHRUN}
    if devices > 1:
        local = int(os.environ.get("LOCAL_RANK", "0") or 0)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        listed = visible if len(visible) == devices else [str(number) for number in range(devices)]
        environment["CUDA_VISIBLE_DEVICES"] = listed[(local + place) % devices]
    if threads is not None:
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    return environment


def by_main(make: Callable[[], T]) -> T:
    """Return what the main process makes; the others wait for it."""
    ranks = current()
    return ranks.share(make() if ranks.is_main else None)  # type: ignore[return-value]


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """Share the work with the other processes that torchrun has started, if any; device: cpu or cuda.

    An error ends all processes. Raises ProcessLostError where another one has ended. The main process raises errors to
    be printed like any other; what another process alone has to say it prints itself.
    """
    if given()[1] == 1 or current().size > 1:
        yield current()
        return
    from compress.ranks.connected import Connected

    ranks = Connected(device)
    _joined.append(ranks)
    try:
        yield ranks
        ranks.gather(None)
    except BaseException as error:
        ranks.leave(error)
        try:
            has_words = not isinstance(error, KeyboardInterrupt) and (ranks.is_main or not ranks.is_said(error))
            if has_words and ranks.may_say() and not ranks.is_main:
                text = str(error) if isinstance(error, CompressError) else traceback.format_exc()
                print(f"compress: process {ranks.rank}: {text}", file=sys.__stderr__, flush=True)
        finally:
            ranks.wait_for_line(error)
        raise
    else:
        ranks.leave()
    finally:
        _joined.pop()
