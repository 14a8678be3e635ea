"""Children whose time and memory are measured, and what they are measured on.

The measuring process imports neither torch nor compress: a child's peak memory, as the kernel reports it, starts at the
size of the process that started it. Anything that needs them runs by `in_fresh_process`.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Run:
    """One process. `quantize_*`: of that, without imports, loading and saving; None where the tool does not say."""

    wall_s: float
    cpu_s: float  # user + system, all threads
    peak_rss_bytes: int
    quantize_wall_s: float | None = None
    quantize_cpu_s: float | None = None


def run_child(command: Sequence[str | Path], env: Mapping[str, str], log: Path) -> tuple[str, Run]:
    """Standard output and cost of a whole process and its children; stderr goes to `log`. SystemExit on failure."""
    start = time.perf_counter()
    with log.open("w") as errors:
        child = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | env, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert child.stdout is not None
        with child.stdout as stream:
            output = stream.read()
        _, status, used = os.wait4(child.pid, 0)
    wall = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)  # tells Popen that the child is reaped
    if child.returncode:
        tail = "\n".join((log.read_text() + output).splitlines()[-15:])
        raise SystemExit(f"{' '.join(map(str, command))}\nended with {child.returncode}:\n{tail}")
    return output, Run(wall, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)


def in_fresh_process(function: Callable[..., T], *args: Any) -> T:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def median(runs: Sequence[Run]) -> Run:
    """Field by field; None where a run lacks it."""

    def middle(values: list[Any]) -> Any:
        return None if None in values else statistics.median(values)

    return Run(**{name: middle([getattr(run, name) for run in runs]) for name in asdict(runs[0])})


def machine() -> dict[str, Any]:
    """What the figures depend on; the load average tells whether other work ran beside."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
    }
