"""Ways in which a run is ended: installed in its process before it starts.

A fault is JSON: {"how": H, "at": PROBE, "call": N}. H is SIGKILL, SIGTERM, SIGINT or an error of the system (ENOSPC).
Probes are functions that put files in place, and "line": any call of any Python function. {"at": "size", "nbytes": N}
limits the size of files, {"at": "time", "seconds": S} is a signal from outside.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

Fault = dict[str, Any]
PROBES: dict[str, tuple[Any, str]] = {
    "replace": (os, "replace"),
    "rename": (os, "rename"),
    "fsync": (os, "fsync"),
    "mkdir": (os, "mkdir"),
    "unlink": (os, "unlink"),
    "rmdir": (os, "rmdir"),
    "rmtree": (shutil, "rmtree"),
    "copyfile": (shutil, "copyfileobj"),
    "open": (os, "open"),
}
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")
ERRORS = ("ENOSPC", "EIO", "EDQUOT")
FAILING = ("replace", "rename", "fsync", "mkdir")  # probes whose failure is injected
counts: Counter[str] = Counter()


def install(fault: Fault | None) -> None:
    """Count the calls of all probes; at the one that the fault names, end the process or fail."""
    counts.clear()
    at = (fault or {}).get("at")
    for name, (module, function) in PROBES.items():
        setattr(module, function, _counted(name, getattr(module, function), fault if at == name else None))
    if at == "size":
        assert fault is not None
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault["nbytes"], fault["nbytes"]))
    if at in ("line", None):
        sys.setprofile(_profile(fault))


def _counted(name: str, real: Callable[..., Any], fault: Fault | None) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        counts[name] += 1
        if fault is not None and counts[name] == fault["call"]:
            _strike(fault["how"])
        return real(*arguments, **named)

    return call


def _profile(fault: Fault | None) -> Callable[..., None]:
    last = fault["call"] if fault else 0

    def called(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            counts["line"] += 1
            if counts["line"] == last:
                sys.setprofile(None)
                _strike(fault["how"] if fault else "")

    return called


def _strike(how: str) -> None:
    if how in SIGNALS:
        os.kill(os.getpid(), getattr(signal, how))
    else:
        raise OSError(getattr(errno, how), os.strerror(getattr(errno, how)))
