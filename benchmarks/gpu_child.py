"""Run the cases of one section of gpu.py one after the other, and write a row as each begins and as it ends.

    python benchmarks/gpu_child.py SECTION DEVICE ROWS [SHARE SHARES]

ROWS is a file of JSON lines. Cases that it has already are left out, so that a child that died is started again for the
rest: after an error that leaves the device unusable, or when a case takes longer than its limit.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

BENCHMARKS = Path(__file__).resolve().parent
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS.parent), str(BENCHMARKS.parent / "tests")]

AGAIN = 75  # exit code: start another child for the cases that are left
Row = dict[str, Any]


class SkippedError(Exception):
    """A case cannot be run here; the message says why."""


class Case(NamedTuple):
    """One thing to try: figures, or an exception that says what is wrong."""

    name: str
    run: Callable[[], Row]
    limit: float = 60  # seconds


def read(rows: Path) -> list[Row]:
    """Return the rows of a file; the last line may be cut off."""
    lines = rows.read_text().splitlines() if rows.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def write(rows: Path, row: Row) -> None:
    """Append a row that is in the file when this returns."""
    with rows.open("a") as stream:
        stream.write(json.dumps(row) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def run(case: Case, rows: Path) -> Row:
    """Run a case and return its row; the process ends where the case does not."""
    import torch
    from triton.errors import TritonError

    from compress.errors import CompressError

    failures = (
        *(RuntimeError, AssertionError, ValueError, KeyError, TypeError, AttributeError, IndexError, ArithmeticError),
        *(OSError, ImportError, CompressError, TritonError, SystemExit),
    )
    began = time.perf_counter()

    def expired() -> None:
        write(rows, {"case": case.name, "state": "failed", "error": f"had not ended after {case.limit:.0f} s"})
        os._exit(AGAIN)

    watchdog = threading.Timer(case.limit, expired)
    watchdog.daemon = True
    watchdog.start()
    try:
        row: Row = {"state": "passed", **case.run()}
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except SkippedError as why:
        row = {"state": "skipped", "why": str(why)}
    except failures as error:
        row = {"state": "failed", "error": f"{type(error).__name__}: {str(error)[:600]}"}
    watchdog.cancel()
    return {"case": case.name, **row, "seconds": round(time.perf_counter() - began, 3)}


def is_usable() -> bool:
    """Return whether the device still works; after some errors nothing does in the same process."""
    import torch

    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.zeros(1, device="cuda").item()
    except RuntimeError:
        return False
    return True


def main() -> None:
    section, device, rows = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    share, shares = (int(word) for word in sys.argv[4:6]) if len(sys.argv) > 4 else (0, 1)
    if section == "kernels" and device == "cpu":
        from helpers import interpreter  # noqa: F401  (tests/helpers/interpreter.py: before triton is imported)
    import gpu_sections
    import torch

    threads = max(1, len(os.sched_getaffinity(0)) // shares)
    torch.set_num_threads(threads if "OMP_NUM_THREADS" not in os.environ else int(os.environ["OMP_NUM_THREADS"]))
    words = os.environ.get("COMPRESS_GPU_CASES", "").split(",")
    named = [case for case in gpu_sections.SECTIONS[section](device) if any(word in case.name for word in words)]
    cases: list[Case] = named[share::shares]
    known = {row["case"] for row in read(rows) if "case" in row}
    if not known:
        write(rows, {"cases": [case.name for case in cases]})
    for case in cases:
        if case.name in known:
            continue
        write(rows, {"case": case.name, "state": "began"})
        row = run(case, rows)
        print(json.dumps(row)[:300], flush=True)
        write(rows, row)
        if row["state"] == "failed" and not is_usable():
            os._exit(AGAIN)


if __name__ == "__main__":
    import gpu_child

    gpu_child.main()  # the module that sections import, not a second copy of it
