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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from compress.errors import CompressError
from compress.ranks.shares import Portion, Ranks, given

__all__ = ["Portion", "Ranks", "by_main", "current", "environment_alone", "given", "joined"]

T = TypeVar("T")


_joined = [Ranks()]  # the last one is current


def current() -> Ranks:
    """Return the processes that share this run's work; one, unless `joined` says otherwise."""
    return _joined[-1]


TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment_alone(place: int = 0, devices: int = 0, threads: int | None = None) -> dict[str, str]:
    """Return the environment for a process that shares its work with no other.

    place: its number among those of this process that run side by side. devices: GPUs of this machine, of which each
    process of torchrun, and each place, gets one in turn; 0: none is chosen. threads: for products on the CPU, unless
    the environment says how many.
    """
    environment = {name: value for name, value in os.environ.items() if name not in TORCHRUN_VARIABLES}
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
