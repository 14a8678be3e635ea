"""Run cases in forked children, some at a time, so that a crash or a hang is that of one case and ends nothing else.

The parent has imported everything. A child runs a batch and reports each case before it begins the next. Where a child
dies, the case that it was at gets the blame, and a new child goes on behind it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import select
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz import enclosure, verdicts
from fuzz.verdicts import Verdict

Case = dict[str, Any]
CPU_SECONDS = 20  # of a case; more is a hang
WALL_SECONDS = 150  # of a case
IDLE_SECONDS = 20  # without any CPU time: it waits for something that never comes
ADDRESS_SPACE = 4 << 30  # bytes beyond what the parent has
RESIDENT = 2 << 30  # bytes beside what it began with; a peak above is a failure of its own
FILE_SIZE = 1 << 30  # bytes
BATCH = 50


@dataclass
class Child:
    """A forked process and the cases that it has not reported yet."""

    process: int
    pipe: int
    folder: Path
    cases: deque[tuple[int, Case]]
    buffer: bytes = b""
    since: float = field(default_factory=time.monotonic)
    used: str = ""  # CPU time when it was last seen to use some
    awake: float = field(default_factory=time.monotonic)

    @property
    def is_stuck(self) -> bool:
        now = time.monotonic()
        state = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()
        if (used := " ".join(state[11:15])) != self.used or state[0] == "R":
            self.used, self.awake = used, now
        return now - self.since > WALL_SECONDS or now - self.awake > IDLE_SECONDS


def run_all(
    cases: Iterator[tuple[int, Case]], judge: Callable[[Case, Path], Verdict], scratch: Path, jobs: int = 1
) -> Iterator[tuple[int, Case, Verdict]]:
    """Judge every case, in `jobs` children at a time; yield (its number, the case, the verdict) as they come."""
    children: list[Child] = []
    waiting: deque[deque[tuple[int, Case]]] = deque()
    try:
        while True:
            while len(children) < jobs and (batch := waiting.popleft() if waiting else _batch(cases)):
                children.append(_fork(batch, judge, scratch))
            if not children:
                return
            for child in _ready(children):
                yield from _attend(child, children, waiting)
    finally:
        for child in children:
            os.kill(child.process, signal.SIGKILL)
            _ended(child, False)


def run_one(case: Case, judge: Callable[[Case, Path], Verdict], scratch: Path) -> Verdict:
    """Judge one case in a child of its own."""
    return next(run_all(iter([(0, case)]), judge, scratch))[2]


def _ready(children: list[Child]) -> list[Child]:
    """Wait a moment; return the children that have something to say, or have not said anything for too long."""
    ready, _, _ = select.select([child.pipe for child in children], [], [], 1.0)
    return [child for child in children if child.pipe in ready or child.is_stuck]


def _attend(
    child: Child, children: list[Child], waiting: deque[deque[tuple[int, Case]]]
) -> Iterator[tuple[int, Case, Verdict]]:
    """Yield what a child reports; at its end, put aside the cases that it has not come to."""
    stuck = child.is_stuck
    if stuck:
        os.kill(child.process, signal.SIGXCPU)  # which says where it is
        time.sleep(1)
        os.kill(child.process, signal.SIGKILL)
    yield from _reports(child, data := os.read(child.pipe, 1 << 16))
    if data and not stuck:
        return
    children.remove(child)
    verdict = _ended(child, stuck)
    if child.cases:
        yield (*child.cases.popleft(), verdict)
    if child.cases:
        waiting.append(child.cases)


def _batch(cases: Iterator[tuple[int, Case]]) -> deque[tuple[int, Case]]:
    found: deque[tuple[int, Case]] = deque()
    for numbered in cases:
        found.append(numbered)
        if len(found) == BATCH:
            break
    return found


def _fork(batch: deque[tuple[int, Case]], judge: Callable[[Case, Path], Verdict], scratch: Path) -> Child:
    folder = Path(tempfile.mkdtemp(dir=scratch))
    readable, writable = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.close(readable)
            _serve(batch, judge, folder, writable)
        finally:
            os._exit(70)
    os.close(writable)
    return Child(process, readable, folder, deque(batch))


def _serve(batch: deque[tuple[int, Case]], judge: Callable[[Case, Path], Verdict], folder: Path, pipe: int) -> None:
    """Judge the cases of a batch and report each as a line of JSON."""
    os.setpgid(0, 0)  # what a terminal sends is for the parent
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    enclosure.enclose(folder.parents[1])
    verdicts.captured()
    stacks = (folder / "stacks").open("w")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGXCPU, stacks, chain=True)
    import torch

    torch.set_num_threads(1)
    limit = _kilobytes("VmSize") * 1024 + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, FILE_SIZE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    inherited = _kilobytes("VmRSS")  # of the process that it was forked from
    for number, case in batch:
        place = folder / str(number)
        place.mkdir()
        os.chdir(place)
        used = time.process_time()
        resource.setrlimit(resource.RLIMIT_CPU, (int(used) + CPU_SECONDS, resource.RLIM_INFINITY))
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        try:
            verdict = judge(case, place)
        except Exception as error:  # noqa: BLE001 (what the judge itself stumbles over)
            verdict = Verdict("crash", f"of the judge: {verdicts.summary(error)}")
        if (_kilobytes("VmHWM") - inherited) * 1024 > RESIDENT and not verdict.is_failure:
            verdict = Verdict("memory", f"peak {_kilobytes('VmHWM') >> 10} MiB, {verdict.kind}")
        verdict = verdict._replace(seconds=time.process_time() - used)
        os.write(pipe, json.dumps(verdict).encode() + b"\n")
        os.chdir(folder)
        shutil.rmtree(place, ignore_errors=True)
    os._exit(0)


def _reports(child: Child, data: bytes) -> Iterator[tuple[int, Case, Verdict]]:
    *lines, child.buffer = (child.buffer + data).split(b"\n")
    for line in lines:
        child.since = time.monotonic()
        yield (*child.cases.popleft(), Verdict(*json.loads(line)))


def _ended(child: Child, stuck: bool) -> Verdict:
    """Collect a dead child; say what killed it."""
    os.close(child.pipe)
    status = os.waitpid(child.process, 0)[1]
    stacks = child.folder / "stacks"
    words = stacks.read_text(errors="replace") if stacks.exists() else ""
    frames = [line.strip() for line in words.splitlines() if line.strip().startswith("File") and "/fuzz/" not in line]
    at = " < ".join(_short(frame) for frame in [*frames[:1], *[f for f in frames[1:] if "/compress/" in f][:2]])
    shutil.rmtree(child.folder, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    if stuck:
        return Verdict("hang", f"waits at {at}")
    if code == -signal.SIGXCPU:
        return Verdict("hang", f"{CPU_SECONDS} s of CPU time at {at}")
    return Verdict("crash", f"{signal.Signals(-code).name if code < 0 else f'exit {code}'} at {at}")


def _short(frame: str) -> str:
    """Return "b/c.py:f" for a line of a stack: File "a/b/c.py", line 3 in f."""
    path, _, where = frame.removeprefix('File "').partition('"')
    return f"{Path(path).parent.name}/{Path(path).name}:{where.rpartition(' ')[2]}"


def _kilobytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return 0
