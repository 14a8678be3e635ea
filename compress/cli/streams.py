"""Make the standard streams usable, whatever they are: closed, full, read by nobody, of another encoding."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress

UNREAD = 141  # exit code where nobody reads the output: 128 + SIGPIPE


def open_all() -> None:
    """Open the null device for streams that are closed; print what an encoding does not have as an escape."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (for the whole process)
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def mute() -> None:
    """Write nothing to the standard output and error streams, from a process of several that do the same."""
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (for the whole process)


def flush() -> int:
    """Write what is left of the output; return the exit code for output that cannot be written, else 0.

    What cannot be written is dropped, so that the interpreter does not try again.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        if isinstance(error, BrokenPipeError):
            return UNREAD
        with suppress(OSError):
            print(f"compress: cannot write the output: {error.strerror}", file=sys.stderr, flush=True)
        return 1
    return 0
