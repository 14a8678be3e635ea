"""Start processes of a run as copies of this one, which has everything imported, with the environment of torchrun.

with forked.store() as place:
    pids = [forked.start(place, rank, 2, work) for rank in range(2)]
    codes = [forked.code(pid) for pid in pids]
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist


@contextmanager
def store() -> Iterator[dist.TCPStore]:
    """The store that torchrun keeps for its processes."""
    yield dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=600))


def start(place: dist.TCPStore, rank: int, size: int, work: Callable[[], object]) -> int:
    """Start a process that does the work; return its number."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)})
        os.environ.update({"LOCAL_WORLD_SIZE": str(size), "TORCHELASTIC_USE_AGENT_STORE": "True"})
        os.environ.update({"MASTER_ADDR": place.host, "MASTER_PORT": str(place.port)})
        work()
        code = 0
    finally:
        if code:
            traceback.print_exc(file=sys.__stderr__)
        os._exit(code)


def code(pid: int) -> int:
    """Wait for the end of a process; return its exit code, minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def together(size: int, work: Callable[[], object]) -> list[int]:
    """Do the work in so many processes; return their exit codes."""
    with store() as place:
        return [code(pid) for pid in [start(place, rank, size, work) for rank in range(size)]]
