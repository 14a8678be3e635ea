"""Runs of the engine for tests: two recipes, a calibration text, what a directory holds, and real command lines.

    report = api.quantize(job(model, GPTQ, tmp_path / "out"))
    result = cli("quantize", str(model), *GPTQ.options(), "--out", str(out))    # a process of its own
    assert result.code == 1 and one_line(result)

`cli` forks every command line from one process that has imported everything, which saves seconds for each.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open

from compress import recipe
from compress.run import tables
from compress.run.job import Job

TEXT = Path(__file__).parents[1] / "data" / "calibration.txt"  # to calibrate on
REPORTS = {"report.json", "report.html", "compress_manifest.json"}  # hold times: all else is equal in two equal runs


@dataclass(frozen=True)
class Setup:
    """A built-in recipe and what is overridden in it."""

    name: str
    overrides: tuple[str, ...] = ()

    def load(self) -> recipe.Recipe:
        return recipe.load(self.name, self.overrides)

    def options(self) -> list[str]:
        return ["--recipe", self.name, *(word for text in self.overrides for word in ("--set", text))]

    def set(self, *overrides: str) -> Setup:
        return Setup(self.name, (*self.overrides, *overrides))


KEEP_TABLES = ("embeddings={keep: true}", "head={keep: true}")
RTN = Setup("int8", KEEP_TABLES)  # 8 bits, one scale for a row, no data; linears of the blocks alone
SMALL = ("calibration.num_samples=8", "calibration.seq_len=32", "calibration.importance=none")
GPTQ = Setup("int4", (*KEEP_TABLES, *SMALL, "group_size=32", "two_sided=false"))  # no gradients are taken


def job(model: Path, setup: Setup, out: Path) -> Job:
    return Job(str(model), setup.load(), out, calib=str(TEXT))


def command(model: Path, setup: Setup, out: Path) -> list[str]:
    """The same as words of a command line."""
    return ["quantize", str(model), *setup.options(), "--out", str(out), "--calib", str(TEXT)]


def contents(directory: Path) -> dict[str, bytes]:
    """Every file but the reports, by its path below the directory."""
    files = {str(p.relative_to(directory)): p for p in sorted(directory.rglob("*")) if p.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name not in REPORTS}


def stored_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, read by the safetensors library."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                assert name not in tensors, f"{name} is stored twice"
                tensors[name] = file.get_tensor(name)
    return tensors


def report_of(directory: Path) -> dict[str, Any]:
    """report.json as strict JSON: NaN and infinity are errors."""

    def refuse(word: str) -> None:
        raise ValueError(f"report.json holds {word}")

    return json.loads((directory / "report.json").read_text(), parse_constant=refuse)


@contextmanager
def untouched(directory: Path) -> Iterator[None]:
    """Fails if a file of the directory is changed, added or removed."""
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(directory.rglob("*")) if p.is_file()}
    yield
    assert before == {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(directory.rglob("*")) if p.is_file()}


class Result(NamedTuple):
    """What a command line did; a negative code is the signal that killed it."""

    code: int
    out: str
    err: str


def one_line(result: Result) -> str:
    """The single line of an error on stderr, without the "compress: " before it.

    What was going to be done may stand above it, in a line too.
    """
    match = re.fullmatch(r"(\d+ linears .*to .*\n)?compress: (.*)\n", result.err)
    assert match and result.out == "", result
    return match[2]


def interrupt(module: str, name: str, call: int, how: str = "SIGKILL") -> str:
    """Source for `cli(prepare=...)`: the process gets a signal at the call-th call of module.name."""
    return f"""
import os, signal
import {module} as module
real, calls = module.{name}, 0
def hit(*args, **kwargs):
    global calls
    calls += 1
    if calls == {call}:
        os.kill(os.getpid(), signal.{how})
    return real(*args, **kwargs)
module.{name} = hit
"""


def cli(*words: str, prepare: str = "", cwd: Path | None = None) -> Result:
    """Run a command line in a process of its own; `prepare` is Python source that is executed there before."""
    parent = _parent()
    assert parent.stdin is not None and parent.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        asked = {"words": words, "prepare": prepare, "cwd": str(cwd or folder), "out": str(out), "err": str(err)}
        parent.stdin.write(json.dumps(asked) + "\n")
        parent.stdin.flush()
        code = int(parent.stdout.readline())
        return Result(code, out.read_text(), err.read_text())


PARENT = """
import contextlib, gc, io, json, os, signal, sys, tempfile, traceback
from pathlib import Path
import compress.__main__, compress.cli.app, compress.cli.tables, compress.evaluate
import llvmlite.binding, llvmlite.ir, torch
from helpers import pico, runs
from transformers.utils import logging

logging.disable_progress_bar()
with tempfile.TemporaryDirectory() as folder:  # the first run imports and caches much, for all that follow
    model = pico.save_pico("llama", Path(folder, "model"))
    with contextlib.redirect_stdout(io.StringIO()):
        compress.cli.app.app(runs.command(model, runs.GPTQ, Path(folder, "out")), standalone_mode=False)
os.fsync = lambda descriptor: None  # as in conftest.py
gc.freeze()  # collections in a copy neither walk what is imported nor write to its pages

def run(asked):
    for number, path in ((0, os.devnull), (1, asked["out"]), (2, asked["err"])):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    torch.set_num_threads(1)  # makes a thread pool for this process; several threads at once would fail to
    os.chdir(asked["cwd"])
    tempfile.tempdir = os.path.dirname(asked["out"])  # removed by who asked
    signal.alarm(600)  # of a machine that does other work
    signal.signal(signal.SIGINT, signal.default_int_handler)
    exec(asked["prepare"], {})
    sys.argv = ["compress", *asked["words"]]
    try:
        compress.__main__.main()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        run(json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def _parent() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        env={**environment(), "PYTHONPATH": str(Path(__file__).parents[1])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.communicate)  # the end of its input is its end
    return process


def environment() -> dict[str, str]:
    """Of a process of the command line: one thread, as in the test process, and what `main` sets before importing."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}


def noted_statistics(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a list that gets the tokens and the Hessian [in, in] of each table that needs one."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    real = tables.statistics

    def noted(stream: Any, plan: Any) -> Any:
        found = real(stream, plan)
        seen.append((stream.tokens, found.stats.hessian))
        return found

    monkeypatch.setattr(tables, "statistics", noted)
    return seen
