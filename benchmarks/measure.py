"""Run children and measure their time and memory; name the machine; share options of command lines.

The measuring process imports neither torch nor compress: a child's peak memory, as the kernel reports it, starts at the
size of the process that started it. Anything that needs them runs by `in_fresh_process`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
SEED = 0  # of the calibration windows


@dataclass(frozen=True)
class Run:
    """The cost of one process. `quantize_*`: without imports, loading and saving; None where the tool does not say."""

    wall_s: float
    cpu_s: float  # user + system, all threads
    peak_rss_bytes: int
    quantize_wall_s: float | None = None
    quantize_cpu_s: float | None = None


def run_child(command: Sequence[str | Path], env: Mapping[str, str], log: Path) -> tuple[str, Run]:
    """Return standard output and cost of a process and its children; stderr goes to `log`. SystemExit on failure."""
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


def run_quantize(
    model: Path, recipe: str | Path, calib: Path, out: Path, env: Mapping[str, str], options: Sequence[str]
) -> tuple[Run, dict[str, Any]]:
    """Return the cost and the report of our own command line; its log lies beside `out`."""
    command = [sys.executable, "-m", "compress", "quantize", model, "--recipe", recipe, "--calib", calib]
    command += ["--seed", str(SEED), "--out", out, "--overwrite", "--restart", *options]
    _, run = run_child(command, env, out.with_suffix(".log"))
    report = json.loads((out / "report.json").read_text())
    cpu_s = report.get("cpu_seconds", {}).get("quantize")
    return replace(run, quantize_wall_s=report["seconds"]["quantize"], quantize_cpu_s=cpu_s), report


def in_fresh_process(function: Callable[..., T], *args: Any) -> T:
    """Call a function in a new process, which starts without torch."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def median(runs: Sequence[Run]) -> Run:
    """Return the median of each field; None where a run lacks it."""

    def middle(values: list[Any]) -> Any:
        return None if None in values else statistics.median(values)

    return Run(**{name: middle([getattr(run, name) for run in runs]) for name in asdict(runs[0])})


def machine() -> dict[str, Any]:
    """Return what the figures depend on; the load average tells whether other work ran beside."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
    }


def device_name(device: str) -> str:
    """Return the name of the GPU ("cuda") or of the processor ("cpu")."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    return str(machine()["cpu"])


def spread_blocks(model: Path, count: int | None) -> tuple[list[int], list[int]]:
    """Return `count` blocks of a model, evenly spread from the first to the last, and the others; None: all blocks."""
    blocks = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    count = count or blocks
    taken = {round(i * (blocks - 1) / max(1, count - 1)) for i in range(count)}
    return sorted(taken), sorted(set(range(blocks)) - taken)


def absolute(text: str) -> Path:
    """Return an absolute path, for children run in the checkout. Links stay: a virtual environment's python is one."""
    return Path(text).absolute()


def key_value(text: str) -> tuple[str, str]:
    """Split NAME=VALUE."""
    key, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return key, value


def add_table_options(parser: argparse.ArgumentParser, name: str, max_tokens: int | None = 32768) -> None:
    """Add the options of a table of rows in results/NAME.json; max_tokens None: no model is scored."""
    parser.add_argument("--again", action="store_true", help="measure rows that are there, too")
    parser.add_argument("--base", type=absolute, default=ROOT / "tests/models/books-8m")
    parser.add_argument("--calib", type=absolute, default=ROOT / "tests/data/books_calib.txt")
    parser.add_argument("--json", type=absolute, default=ROOT / f"benchmarks/results/{name}.json")
    if max_tokens is not None:
        parser.add_argument("--text", type=absolute, default=ROOT / "tests/data/books_heldout.txt")
        parser.add_argument("--num-samples", type=int, default=128)
        parser.add_argument("--seq-len", type=int, default=512)
        parser.add_argument("--max-tokens", type=int, default=max_tokens)
        parser.add_argument("--env", type=key_value, nargs="*", default=[], metavar="NAME=VALUE")
