"""Share the cells of a study out among processes, and go on until all are measured.

Each cell is measured by a child process (compress/study/cell.py), so that its peak memory is its own and the end of one
is not the end of the study. A runner starts a cell whose lock is free; the child inherits the lock, which is free again
only when both have ended. Any number of runners may share a directory: several commands, the processes of torchrun, or
machines with a common file system. A runner that has nothing left to start waits for the others, and takes over the
cells of those that end.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

from compress import ranks
from compress.ranks import children
from compress.storage.files import open_new, read_text
from compress.storage.workdir import writing
from compress.study import jobs
from compress.study.folder import LOG, CellFolder, failure

POLL = 0.1  # seconds between two looks at the own processes
LOOK = 1.0  # seconds between two looks at cells that others measure
# The command of a child; the folder of its cell follows.
COMMAND = children.module_command("compress.study.cell")
TAIL = 2000  # characters of a log in which the reason of a failure is looked for

OnResult = Callable[[CellFolder], None]


@dataclass(frozen=True)
class RunLimits:
    """Settings of how cells are measured; none changes a figure."""

    jobs: int = 1  # cells at a time
    devices: int = 0  # GPUs among which cells are shared out; 0: the CPU, or the one that is visible
    seconds: float | None = None  # limit of a cell; one that takes longer has failed


@dataclass
class _Running:
    """A cell that a child of this process measures."""

    cell: CellFolder
    process: Popen[bytes]
    lock: int
    begun: float
    place: int

    def end(self) -> None:
        """End the child, and wait until it has."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.kill()
        self.process.wait()
        os.close(self.lock)


def run(cells: Sequence[CellFolder], effort: RunLimits, on_result: OnResult) -> None:
    """Measure all cells that have no result; `on_result` sees each that this process has measured.

    Returns when all cells have a result, whoever has measured them. An exception ends the children; what they have
    finished stays for the next run.
    """
    waiting, running, looked = list(cells), list[_Running](), 0.0
    try:
        while waiting or running:
            for each in [each for each in running if _has_ended(each, effort.seconds)]:
                running.remove(each)
                on_result(each.cell)
                looked = 0.0
            if len(running) < effort.jobs and time.monotonic() - looked >= LOOK:
                waiting = [each for each in waiting if each.result is None]
                started = _start_next(waiting, running, effort)
                looked = 0.0 if started else time.monotonic()
                if started:
                    continue
            if waiting or running:
                time.sleep(POLL)
    finally:
        for each in running:
            each.end()


def _start_next(waiting: list[CellFolder], running: list[_Running], effort: RunLimits) -> bool:
    """Start the first cell that is free; return whether there was one."""
    for each in waiting:
        if jobs.is_held_up(each) or (lock := each.take()) is None:
            continue
        if each.result is not None:  # finished by another process since
            os.close(lock)
            continue
        place = min(set(range(effort.jobs)) - {other.place for other in running})
        waiting.remove(each)
        running.append(_Running(each, _start(each, lock, place, effort), lock, time.monotonic(), place))
        return True
    return False


def _start(cell: CellFolder, lock: int, place: int, effort: RunLimits) -> Popen[bytes]:
    """Start the process of a cell, which has the lock, too."""
    threads = max(1, (os.cpu_count() or 1) // effort.jobs) if effort.jobs > 1 else None
    environment = ranks.environment_alone(place, effort.devices, threads)
    with writing(cell.path):
        log = open_new(cell.path / LOG)
    with log:
        return children.start((*COMMAND, str(cell.path.absolute())), log.fileno(), environment, lock)


def _has_ended(running: _Running, limit: float | None) -> bool:
    """Return whether a cell is done; one that takes too long is ended. A child that left no result has failed."""
    code = running.process.poll()
    is_late = code is None and limit is not None and time.monotonic() - running.begun > limit
    if code is None and not is_late:
        return False
    if is_late:
        assert limit is not None
        running.process.kill()
        running.process.wait()
        reason = f"took longer than {limit:.0f} s"
    else:
        reason = _reason(code or 0, running.cell.path / LOG)
    if running.cell.result is None:
        running.cell.finish({**running.cell.describe(), **failure(reason)})
    running.end()
    return True


def _reason(code: int, log: Path) -> str:
    """Return why a process has left no result."""
    if code == -signal.SIGKILL:
        return "killed by the system, which was out of memory"
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    said = read_text(log, errors="replace")[-TAIL:].strip().splitlines()
    if said and said[-1].startswith("MemoryError"):
        return "out of memory"
    return said[-1] if said else f"ended with code {code}"
