"""Answer SIGINT, SIGTERM and SIGHUP alike: unwind, end child processes, and let the command say one line."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Final

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE = 10.0  # seconds in which further signals change nothing: the first one is being answered

_answered = {"at": -PATIENCE, "number": 0, "is_reported": False}


def install() -> None:
    """Raise KeyboardInterrupt at these signals from now on, but for those that the parent process has turned off."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup does, and a shell for what runs in the background
            signal.signal(number, _answer)


def finish() -> None:
    """Ignore these signals from now on: all is done."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def mark_reported() -> None:
    """Note that the interruption was reported to the user."""
    _answered["is_reported"] = True


def is_unreported() -> bool:
    """Return whether a signal has come that was not reported to the user, because no command had begun."""
    return exit_code() is not None and not _answered["is_reported"]


def exit_code() -> int | None:
    """Return 128 + the number of the signal that has come (130 for SIGINT, 143 for SIGTERM); None if none has."""
    return 128 + int(_answered["number"]) if _answered["number"] else None


def _answer(number: int, frame: FrameType | None) -> None:
    now = time.monotonic()
    if now - _answered["at"] < PATIENCE:
        return
    _answered.update(at=now, number=number)
    raise KeyboardInterrupt
