"""Make everything but a folder read-only for this process, so that no hostile path of a case reaches the machine.

That takes root, who could else write anywhere; somebody else cannot, and is left as he is. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

NEW_MOUNTS = 0x20000  # CLONE_NEWNS
BIND, REMOUNT, READ_ONLY, RECURSIVE, PRIVATE = 0x1000, 0x20, 0x1, 0x4000, 0x40000
OPEN = ("/proc", "/sys", "/dev/shm")  # the last one holds semaphores


def enclose(folder: Path) -> bool:
    """Enter a name space of mounts in which only the folder can be written; return whether that was possible."""
    if os.geteuid() != 0:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_MOUNTS) or _mount(libc, None, "/", RECURSIVE | PRIVATE):
        return False
    here = str(folder.resolve())
    if _mount(libc, here, here, BIND):
        return False
    for line in Path("/proc/self/mounts").read_text().splitlines():
        place = line.split(" ")[1]
        with contextlib.suppress(UnicodeEncodeError):
            if place != here and not any(place == kept or place.startswith(f"{kept}/") for kept in OPEN):
                _mount(libc, None, place, REMOUNT | BIND | READ_ONLY)
    return True


def _mount(libc: ctypes.CDLL, source: str | None, place: str, flags: int) -> int:
    """Call mount(2); return 0 where it was done."""
    found: int = libc.mount(source and source.encode(), place.encode(), None, ctypes.c_ulong(flags), None)
    return found
