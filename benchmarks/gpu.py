"""Try everything that runs on a GPU on a bare machine, in at most nine minutes, and write down what was found.

    python benchmarks/gpu.py [--device cuda] [--sections kernels tests ...] [--cases WORDS ...] [--json FILE]
    python benchmarks/gpu.py --device cpu       # the same code, kernels in Triton's interpreter, tiny sizes

It needs a source checkout, torch, triton, transformers, safetensors and numpy; nothing has to be installed. Sections,
in this order: kernels (all against decoded weights), tests (those with the mark `gpu`), model (the bundled one, on the
device and on the CPU), blocks (of 1.1B and 8B shape, likewise), speed (products), attention (coded caches). Each runs
in processes of its own, which are killed at its time limit; what a section leaves of its time goes to those after it.
A section that fails or hangs does not stop the others.

After every section all results so far are in benchmarks/results/gpu_<device>.json, and in the folder that the
environment variable OUT names. The exit code is 1 if a case failed or was not reached.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from gpu_child import Row, read, write

HERE = Path(__file__).resolve().parent
CHILD = HERE / "gpu_child.py"
STARTS = 12  # of a share's child
REPORTED = 400  # characters of what a child said last

FACTS = """
import json, platform, sys
from importlib.metadata import version
import torch
device = sys.argv[1]
facts = {name: version(name) for name in ("torch", "triton", "transformers", "safetensors", "numpy")}
facts |= {"python": platform.python_version(), "cuda": torch.version.cuda, "device": "cpu"}
if device == "cuda":
    known = torch.cuda.get_device_properties(0)
    torch.ones(8, device="cuda").sum().item()
    facts |= {"device": known.name, "memory": known.total_memory, "multiprocessors": known.multi_processor_count}
    facts |= {"capability": [known.major, known.minor]}
print(json.dumps(facts))
"""


class Section(NamedTuple):
    """A part of the run: seconds that it may take, and processes among which its cases are divided."""

    name: str
    limit: float
    shares: int = 1


SECTIONS = {
    "cuda": [
        Section("kernels", 130, 14),
        Section("tests", 50),
        Section("model", 110, 5),
        Section("blocks", 100, 4),
        Section("speed", 90),
        Section("attention", 40),
    ],
    "cpu": [
        Section("kernels", 240),
        Section("tests", 60),
        Section("model", 120),
        Section("blocks", 120),
        Section("speed", 60),
        Section("attention", 60),
    ],
}


class Share:
    """The process that runs one share of a section's cases, started again where it dies."""

    def __init__(self, section: Section, index: int, device: str, folder: Path) -> None:
        self.rows, self.log = folder / f"{section.name}{index}.jsonl", folder / f"{section.name}{index}.log"
        self.command = [sys.executable, CHILD, section.name, device, self.rows, str(index), str(section.shares)]
        self.starts, self.is_done = 0, False
        self.start()

    def start(self) -> None:
        """Start a child in a process group of its own."""
        self.starts += 1
        with self.log.open("w") as log:
            self.child = subprocess.Popen(self.command, stdout=log, stderr=log, start_new_session=True, cwd=HERE.parent)

    def look(self) -> None:
        """See whether the child has ended; start another where cases are left."""
        if self.is_done or (code := self.child.poll()) is None:
            return
        if began := self.unended():
            write(self.rows, {"case": began, "state": "failed", "error": f"ended with {code}: {self.said()}"})
        self.is_done = code == 0 or self.starts >= STARTS or not self.left()
        if not self.is_done:
            self.start()

    def kill(self, limit: float) -> None:
        """End the child and all that it has started."""
        if self.child.poll() is None:
            os.killpg(self.child.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a device that hangs may keep it: the others go on
                self.child.wait(10)
            if began := self.unended():
                write(self.rows, {"case": began, "state": "killed", "error": f"the section's {limit:.0f} s were over"})

    def unended(self) -> str:
        """Return the case that the child was at, "" if none."""
        rows = [row for row in read(self.rows) if "case" in row]
        return rows[-1]["case"] if rows and rows[-1]["state"] == "began" else ""

    def left(self) -> list[str]:
        """Return the cases that have not begun."""
        rows = read(self.rows)
        begun = {row["case"] for row in rows if "case" in row}
        return [name for row in rows for name in row.get("cases", []) if name not in begun]

    def said(self) -> str:
        """Return the end of what the child has printed."""
        return self.log.read_text(errors="replace").strip()[-REPORTED:]

    def results(self) -> list[Row]:
        """Return a row for every case of the share, also for those that were not reached."""
        ended = [row for row in read(self.rows) if "case" in row and row["state"] != "began"]
        if not read(self.rows):
            return [{"case": "start", "state": "failed", "error": self.said()}]
        return ended + [{"case": name, "state": "not reached"} for name in self.left()]


def run_section(section: Section, device: str, folder: Path, deadline: float) -> Row:
    """Run a section to its end or to the deadline; return its rows."""
    began = time.monotonic()
    shares = [Share(section, index, device, folder) for index in range(section.shares)]
    try:
        while time.monotonic() < deadline and not all(share.is_done for share in shares):
            time.sleep(0.1)
            for share in shares:
                share.look()
    finally:
        for share in shares:
            share.kill(deadline - began)
    rows = [row for share in shares for row in share.results()]
    return {"seconds": round(time.monotonic() - began, 1), "counts": counts(rows), "rows": rows}


def counts(rows: list[Row]) -> dict[str, int]:
    """Return how many cases ended how."""
    states = [row["state"] for row in rows]
    return {state: states.count(state) for state in dict.fromkeys(states)}


def facts(device: str) -> Row:
    """Return what the figures depend on; SystemExit where the device cannot be used at all."""
    done = subprocess.run(
        [sys.executable, "-c", FACTS, device], capture_output=True, text=True, check=False, timeout=120
    )
    if done.returncode:
        raise SystemExit(f"{device} cannot be used here: {done.stderr.strip()[-REPORTED:]}")
    return {**json.loads(done.stdout.splitlines()[-1]), "cores": len(os.sched_getaffinity(0))}


def save(result: Row, file: Path) -> None:
    """Write the result beside the file and put it in place; a copy goes to the folder OUT, if there is one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    temporary.replace(file)
    if out := os.environ.get("OUT"):
        with suppress(shutil.SameFileError):
            shutil.copy(file, Path(out) / file.name)


def report(name: str, section: Row) -> None:
    """Print what became of a section, and each case that did not pass."""
    words = ", ".join(f"{count} {state}" for state, count in section["counts"].items())
    print(f"{name}: {words} ({section['seconds']} s)", flush=True)
    for row in section["rows"]:
        if row["state"] != "passed":
            print(f"  {row['state']}: {row['case']}: {row.get('error') or row.get('why', '')}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--sections", nargs="+", choices=[section.name for section in SECTIONS["cuda"]])
    parser.add_argument("--cases", nargs="+", default=[""], help="words: only cases with one of them in their name")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/gpu_<device>.json; for cpu: none")
    return parser.parse_args()


def main() -> None:
    args = parse()
    began = time.monotonic()
    result: Row = {"facts": facts(args.device), "sections": {}}
    slug = re.sub(r"\W+", "_", str(result["facts"]["device"])).lower()
    with tempfile.TemporaryDirectory(prefix="compress-gpu-") as folder:
        os.environ["COMPRESS_GPU_FOLDER"] = folder  # where children write models
        os.environ["COMPRESS_GPU_CASES"] = ",".join(args.cases)
        file = args.json or (Path(folder) if args.device == "cpu" else HERE / "results") / f"gpu_{slug}.json"
        deadline = began
        for section in SECTIONS[args.device]:
            if args.sections and section.name not in args.sections:
                continue
            deadline += section.limit
            result["sections"][section.name] = run_section(section, args.device, Path(folder), deadline)
            result["seconds"] = round(time.monotonic() - began, 1)
            save(result, file)
            report(section.name, result["sections"][section.name])
    total = counts([row for section in result["sections"].values() for row in section["rows"]])
    words = ", ".join(f"{count} {state}" for state, count in total.items())
    print(
        f"{result['facts']['device']}: {words}, {result['seconds']} s"
        + (f", written to {file}" if file.exists() else "")
    )
    sys.exit(bool(set(total) - {"passed", "skipped"}))


if __name__ == "__main__":
    main()
