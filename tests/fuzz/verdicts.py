"""What became of a case, and the judgement of a command line by its exit code and its words."""

from __future__ import annotations

import io
import os
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from compress.errors import CompressError

PASSED = ("ok", "refused")
FAILURES = ("traceback", "words", "hang", "crash", "memory", "silent", "unstable", "litter")
LONGEST = 620  # characters of an error: the names of all recipes fit, and a word that is none
ROOT = Path(__file__).resolve().parents[2]
PLAN = re.compile(
    r"(\d+ linears (and \d+ outside of the blocks )?to|no linear is packed,) .*|block \d+/\d+: .*|.* \(\d+%\)"
)  # lines that may stand above an error


class Verdict(NamedTuple):
    """The kind, one of PASSED or FAILURES, and for failures what happened and where; seconds of CPU time."""

    kind: str
    detail: str = ""
    seconds: float = 0.0

    @property
    def is_failure(self) -> bool:
        return self.kind not in PASSED


class Ran(NamedTuple):
    """A command line that ran in this process: its exit code, its output, the traceback of an exception."""

    code: int
    out: str
    err: str
    problem: str


def attempt(action: Callable[[], Any], theirs: bool = False) -> tuple[Verdict, Any]:
    """Call; return the verdict on how that ended, and the value.

    theirs: transformers may raise what it likes where none of our frames is within its own.
    """
    try:
        return Verdict("ok"), action()
    except CompressError as error:
        return message(f"compress: {error}"), None
    except Exception as error:  # noqa: BLE001 (any other is what is looked for)
        if theirs and not _is_ours(error):
            return Verdict("refused", summary(error)), None
        return Verdict("memory" if _is_memory(error) else "traceback", summary(error)), None


def message(line: str) -> Verdict:
    """Judge the one line of a refusal."""
    if faults := _faults(line):
        return Verdict("words", f"{faults}: {line[:200]!r}")
    return Verdict("refused", line)


def _faults(line: str) -> str:
    found = []
    if len(line) > LONGEST:
        found.append(f"{len(line)} characters")
    if any(ord(character) < 32 or 127 <= ord(character) < 160 for character in line):
        found.append("control characters or several lines")
    if not line.startswith("compress: ") or not line.removeprefix("compress: ").strip():
        found.append("says nothing")
    return ", ".join(found)


def run(words: list[str]) -> Ran:
    """Run a command line in this process, whose stdout and stderr must be files (`captured`)."""
    from compress.__main__ import main

    for descriptor in (1, 2):
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
    former, problem, code = sys.argv, "", 0
    sys.argv = ["compress", *words]
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException as error:  # noqa: BLE001 (any other is what is looked for)
        problem = ("memory " if _is_memory(error) else "") + summary(error)
    finally:
        sys.argv = former
    for stream in (sys.stdout, sys.stderr):
        with suppress(UnicodeEncodeError, ValueError):
            stream.flush()
    return Ran(code, _written(1), _written(2), problem)


def command(words: list[str]) -> Verdict:
    """Run a command line and judge it: done, refused in one line, wrong usage, or a failure."""
    return command_ran(words)[0]


def command_ran(words: list[str]) -> tuple[Verdict, Ran]:
    """Run a command line; return the judgement and what it printed."""
    ran = run(words)
    return judged(ran), ran


def judged(ran: Ran) -> Verdict:
    """Judge a command line."""
    if ran.problem:
        return Verdict("memory" if ran.problem.startswith("memory ") else "traceback", ran.problem)
    if "Traceback (most recent call last)" in ran.err:
        return Verdict("traceback", ran.err.strip().splitlines()[-1][:300])
    if ran.code == 0:
        return Verdict("ok")
    lines = [line for line in ran.err.split("\n") if line]
    if ran.code == 2 and ("Usage:" in ran.err or "─ Error ─" in ran.err or "Usage:" in ran.out):  # out: help, unasked
        return Verdict("refused", "wrong usage")
    if ran.code not in (1, 2) or not lines:
        return Verdict("words", f"exit code {ran.code}, stderr {ran.err[:300]!r}")
    if strange := [line for line in lines[:-1] if not line.startswith("compress: ") and not PLAN.fullmatch(line)]:
        return Verdict("words", f"beside the error: {strange[0][:200]!r} above {lines[-1][:100]!r}")
    return message(lines[-1])


def summary(error: BaseException) -> str:
    """Return the type and first line of an exception, and the innermost frames of compress and of all."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/compress/" in f.filename or "/calib/" in f.filename]
    shown = [*ours[-1:], *frames[-1:]]
    places = " < ".join(
        dict.fromkeys(f"{Path(f.filename).parent.name}/{Path(f.filename).name}:{f.name}" for f in shown)
    )
    first = str(error).strip().partition("\n")[0][:160]
    return f"{type(error).__name__} in {places}: {first}"


def _is_ours(error: BaseException) -> bool:
    """Return whether one of our frames lies within all those of transformers."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    theirs = max((i for i, name in enumerate(files) if "/transformers/" in name), default=-1)
    return theirs < 0 or any("/compress/" in name for name in files[theirs:])


def group(verdict: Verdict) -> str:
    """Return what failures of one cause have in common: the detail without numbers and quoted words."""
    head = verdict.detail.partition(": ")[0] if verdict.kind == "traceback" else verdict.detail
    return f"{verdict.kind}: " + re.sub(r"\d+", "N", re.sub(r"'[^']*'|\"[^\"]*\"|/[^ ,;:]*", "..", head))[:110]


def captured() -> None:
    """Send stdout and stderr of this process to files in memory, which `run` reads; stdin is at its end."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor in (1, 2):
        os.dup2(os.memfd_create(f"fuzz-{descriptor}"), descriptor)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def _written(descriptor: int) -> str:
    with os.fdopen(os.dup(descriptor), "rb") as stream:
        stream.seek(0)
        return stream.read(1 << 22).decode("utf-8", "backslashreplace")


def _is_memory(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, MemoryError) or "allocate memory" in text or "DefaultCPUAllocator" in text
