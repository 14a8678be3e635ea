"""Folders in which lines are run: a copy of the checkout for each page, and what its lines presume, made once."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from docs_lines import checks
from docs_lines.pages import ROOT
from docs_lines.table import Table

MAKING_LIMIT = 600  # seconds
RUNNING: set[int] = set()  # process groups of commands
STOPPED = threading.Event()


@dataclass(frozen=True)
class Result:
    """What became of a command."""

    status: int | None  # None: it was stopped at its limit
    output: str
    seconds: float


@dataclass(frozen=True)
class Scratch:
    """A folder with a copy of the checkout for each page, and one in which things are made."""

    folder: Path
    table: Table
    root: Path = ROOT  # of the checkout
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def base(self) -> Path:
        return self.folder / "things"

    def prepare(self) -> None:
        """Make the folder for things."""
        copy_checkout(self.root, self.base)

    def page(self, name: str) -> Path:
        """Return the folder of a page, a new copy."""
        folder = self.folder / name.replace("/", "-").removesuffix(".md")
        copy_checkout(self.root, folder)
        return folder

    def provide(self, text: str, folder: Path) -> None:
        """Put the things that a command names into a folder, where they are not there; make what was not made."""
        for name in self._named(text):
            with self.lock:
                self._make(name)
            if not (folder / name).exists():
                _copy(self.base / name, folder / name)

    def _named(self, text: str) -> list[str]:
        """Return the things that a command names, but for what it is to write."""
        words = checks.words_of(text)
        things = [self.table.thing(word) for word in words if word not in checks.outputs(text)]
        return [thing for thing in things if thing]

    def _make(self, name: str) -> None:
        if (self.base / name).exists():
            return
        command = self.table.things[name]
        for presumed in self._named(command):
            if presumed != name:
                self._make(presumed)
        result = run(command, self.base, MAKING_LIMIT)
        if result.status or not (self.base / name).exists():
            raise RuntimeError(f"{name} could not be made by: {command}\n{result.output[-2000:]}")


def copy_checkout(root: Path, folder: Path) -> None:
    """Copy the checkout without hidden files and outputs, and give it the environment that runs this."""
    for path in root.iterdir():
        if path.name[0] != "." and path.name != "models_out":
            _copy(path, folder / path.name)
    (folder / "models_out").mkdir()
    (folder / ".venv").mkdir()
    for path in Path(sys.prefix).iterdir():
        (folder / ".venv" / path.name).symlink_to(path)
    (folder / ".venv/.installed").unlink(missing_ok=True)
    (folder / ".venv/.installed").touch()  # newer than pyproject.toml: `make demo` installs nothing


def stop() -> None:
    """End all commands that run, and start no other."""
    STOPPED.set()
    for group in list(RUNNING):
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def run(command: str, folder: Path, limit: float) -> Result:
    """Run a command line by bash in a folder; what it starts ends with it."""
    begun = time.monotonic()
    with subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=_environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        RUNNING.add(process.pid)
        try:
            output, _ = process.communicate(timeout=limit)
            status: int | None = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, status = process.communicate()[0], None
        finally:
            RUNNING.discard(process.pid)
    return Result(status, output, time.monotonic() - begun)


def _environment(folder: Path) -> dict[str, str]:
    """Return the variables of a command: the folder's code, no network, one thread, wide tables."""
    shared = folder.parent
    return {
        **os.environ,
        "PATH": f"{folder}/.venv/bin:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(folder), f"{folder}/tests", os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(shared / "hub"),
        "XDG_CACHE_HOME": str(shared / "cache"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy2(source, target)
